"""The baseline of the serving benchmark: a script that calls ``engine.generate`` for one request after another.

It reads commands from standard input, one JSON object per line, and answers each with a line of JSON.
``{"prompt": ..., "max_tokens": ..., "seed": ...}`` completes a prompt, without padding to a common length.
``{"rows": ..., "canvas": ...}`` measures how many positions per second a batch of that shape denoises.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from runtime import Engine

# Steps of a generation that measures a rate (few, so that the widest shape does not take long), and the least seconds
# that such generations are repeated for.
_STEPS = 8
_SECONDS = 2.0


def timed_warm(engine: Engine, call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds and the result of a call. A call that compiles a program is repeated."""
    while True:
        compiled, start = engine.compiled_programs, time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        if engine.compiled_programs == compiled:
            return seconds, result


def generate(engine: Engine, prompt: str, max_tokens: int, seed: int) -> dict[str, Any]:
    """Complete one prompt with the server's default settings. Rows do not stop early."""
    config = engine.published(max_new_tokens=max_tokens, steps=max_tokens, seed=seed, early_stop=False)
    seconds, [completion] = timed_warm(engine, lambda: engine.generate([prompt], config))
    return {
        "seconds": seconds,
        "text": completion.text,
        "prompt_tokens": len(engine.tokenizer.encode(prompt)),
    }


def rate(engine: Engine, rows: int, canvas: int) -> dict[str, Any]:
    """Measure positions per second of a batch whose rows are half prompt and half masks."""
    new = canvas // 2
    ids = np.random.default_rng(0).integers(5, engine.config.vocab_size, (rows, canvas - new)).astype(np.int32)
    config = engine.published(max_new_tokens=new, steps=_STEPS, early_stop=False)
    forwards, seconds = 0, 0.0
    while seconds < _SECONDS:
        took, result = timed_warm(engine, lambda: engine.generate_tokens(ids, config=config))
        forwards, seconds = forwards + result.stats.forwards, seconds + took
    return {"positions_per_second": rows * canvas * forwards / seconds}


def main(checkpoint: str) -> None:
    """Answer commands until standard input ends."""
    engine = Engine.load(checkpoint)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = generate(engine, **command) if "prompt" in command else rate(engine, **command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
