"""The child process that runs the timed generations of one checkout.

It runs as a script with the checkout's root on ``PYTHONPATH``, and uses only the public API of the project, so that the
same file works with an older and a newer checkout. Commands come line by line on standard input: the name of a
generation runs it once and answers with a line of JSON.
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


def generations(demo: str, diffusion: str, autoregressive: str) -> dict[str, tuple[Engine, Any, int]]:
    """Return engine, decoding parameters and rows of every generation by name.

    Args:
      demo: folder of the demo checkpoint.
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
    engine = Engine.load(autoregressive, mesh="tensor=1", dtype="float32")
    decode = SamplingConfig(max_new_tokens=NEW_TOKENS["mid-size"], temperature=0.7, top_p=0.9)
    return found | {"mid-size decode": (engine, decode, 1), "mid-size decode, 4 rows": (engine, decode, 4)}


def main(demo: str, diffusion: str, autoregressive: str) -> None:
    """Answer commands until standard input ends."""
    known = generations(*(str(Path(folder)) for folder in (demo, diffusion, autoregressive)))
    print(json.dumps(list(known)), flush=True)
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
