"""The child process that runs the timed generations of one checkout.

It runs as a script with the checkout's root on ``PYTHONPATH``, and uses only the public API of the project, so that the
same file works with an older and a newer checkout. Each line of standard input is the name of a generation, which is
run once; the answer is a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from runtime import DiffusionConfig, Engine, SamplingConfig

PROMPT = 64
# Fewer new tokens for the larger model, so that a round does not take minutes.
NEW_TOKENS = {"demo": 64, "mid-size": 16}


def generations(demo: str, causal_demo: str, diffusion: str, autoregressive: str) -> dict[str, tuple[Engine, Any, int]]:
    """Return engine, decoding parameters and rows of every generation by name.

    Args:
      demo: folder of the demo checkpoint.
      causal_demo: folder of the demo's weights as an autoregressive model.
      diffusion: folder of a larger diffusion model.
      autoregressive: folder of an autoregressive model of the same size.
    """
    found: dict[str, tuple[Engine, Any, int]] = {}
    for name, folder in (("demo", demo), ("mid-size", diffusion)):
        engine = Engine.load(folder, mesh="tensor=1", dtype="float32")
        exact = DiffusionConfig.published(NEW_TOKENS[name])
        block = exact.replace(cache="dual", block_length=8, parallel="threshold", threshold=0.9)
        found |= {f"{name} exact": (engine, exact, 1), f"{name} block": (engine, block, 1)}
        found |= {f"{name} exact, 4 rows": (engine, exact, 4), f"{name} block, 4 rows": (engine, block, 4)}
    for name, folder in (("demo", causal_demo), ("mid-size", autoregressive)):
        engine = Engine.load(folder, mesh="tensor=1", dtype="float32")
        decode = SamplingConfig(max_new_tokens=NEW_TOKENS[name], temperature=0.7, top_p=0.9)
        found |= {f"{name} decode": (engine, decode, 1), f"{name} decode, 4 rows": (engine, decode, 4)}
    return found


def main(*folders: str) -> None:
    """Answer commands until standard input ends. ``folders`` are the arguments of :func:`generations`."""
    known = generations(*(str(Path(folder)) for folder in folders))
    print(json.dumps({"generations": list(known)}), flush=True)
    for line in sys.stdin:
        engine, config, rows = known[line.strip()]
        ids = np.random.default_rng(0).integers(1, 256, (rows, PROMPT)).astype(np.int32)
        start = time.perf_counter()
        result = engine.generate_tokens(ids, config=config)
        seconds = time.perf_counter() - start
        answer = {
            "seconds": seconds,
            "forwards": result.stats.forwards,
            "tokens": hashlib.sha256(np.ascontiguousarray(result.sequences).tobytes()).hexdigest(),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
