"""Measure one start of a process: seconds to devices, weights and the first canvas. The suite runs it as a child.

Prints a JSON object; ``python -m benchmarks.suite`` explains its numbers.
"""

from __future__ import annotations

import json
import time

import jax
import numpy as np
from absl import flags

from benchmarks.suite.subject import (
    attached_devices,
    check_subject,
    define_subject_flags,
    open_engine,
    prompt_ids,
    request_of,
)
from launch.process.startup import run_launcher, start_devices

NEW_TOKENS, STEPS, PROMPT = 50, 25, 14


def main(values: flags.FlagValues) -> None:
    """Start, generate, and print how long each part took."""
    check_subject(values)
    start_devices(values)
    start = time.perf_counter()
    devices = attached_devices(values)
    with_devices = time.perf_counter()
    engine = open_engine(values, devices)
    jax.block_until_ready(engine.weights)
    with_weights = time.perf_counter()
    first: list[float] = []

    def watch(step: int, canvas: np.ndarray) -> None:
        if step and not first:
            first.append(time.perf_counter())

    ids = prompt_ids(engine.config, 1, PROMPT)
    result = engine.generate_tokens(ids, config=request_of(engine.config, NEW_TOKENS, STEPS), watch=watch)
    found = {
        "devices_seconds": with_devices - start,
        "weights_seconds": with_weights - with_devices,
        "weight_bytes": engine.layout.bytes_per_device(engine.dtype),
        "compile_seconds": result.stats.compile_seconds,
        "programs": result.stats.compiled_programs,
        "first_token_seconds": first[0] - with_weights,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    run_launcher(main, define_subject_flags, __doc__ or "")
