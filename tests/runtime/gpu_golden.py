"""Compares tokens on the first device, such as a GPU, with those of the original code; run as its own process.

python -m tests.runtime.gpu_golden [SECONDS]    begin no case after so many seconds
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from pathlib import Path

import jax

from runtime import Engine
from tests.golden_cases import golden_folders
from tests.runtime.test_golden import check_tokens, names


@functools.cache
def engine(folder: Path) -> Engine:
    return Engine.load(folder, "data=1", dtype="float32", devices=jax.devices()[:1])


def main(seconds: float = float("inf")) -> int:
    """Run a case of each folder in turn. Print every case that differs, and return the number of these."""
    start, folders = time.monotonic(), golden_folders({})
    rounds = itertools.zip_longest(*([(golden, name) for name in names(golden)] for golden in folders))
    cases = [case for turn in rounds for case in turn if case is not None]
    done = different = 0
    for golden, name in cases:
        if time.monotonic() - start > seconds:
            break
        done += 1
        try:
            check_tokens(golden, name, golden.config(name), engine(golden.folder))
        except AssertionError as error:
            different += 1
            print(f"{golden.folder.name} {name}: {error}", flush=True)
    print(f"{done - different} of {done} cases have the tokens of the original code, {len(cases) - done} not run")
    return different


if __name__ == "__main__":
    sys.exit(bool(main(*map(float, sys.argv[1:]))))
