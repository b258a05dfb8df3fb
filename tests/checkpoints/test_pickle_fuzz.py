"""Mutated pickles and a large one, indexed in a limited and watched process: nothing runs and little memory is used."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict

from tests.checkpoints.hostile_pickles import HOSTILE
from tests.checkpoints.pickles import PROTOCOLS, operations


def unframed(data: bytes) -> bytes:
    """The same pickle without frames, so that a change of length is not found by them alone."""
    return b"".join(raw for opcode, _, raw in operations(data) if opcode.name != "FRAME")


def write_seeds(folder: Path) -> None:
    small = {"s": np.array(1.5, np.float32), "f": np.asfortranarray(np.arange(6.0).reshape(2, 3))}
    turned = {"k": np.arange(8, dtype=np.int16).reshape(2, 2, 2).transpose(1, 2, 0), "e": np.zeros((0, 2), np.uint8)}
    device = {"w": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.zeros(2, jnp.float16), "x": {"y": jnp.float32(1)}}
    for number, tree in enumerate([small, turned, device, FrozenDict({"params": device}), {"a": turned, "b": small}]):
        for protocol in PROTOCOLS:
            data = pickle.dumps(tree, protocol)
            for name, variant in {"": data, "o": pickletools.optimize(data), "u": unframed(data)}.items():
                (folder / f"{number}-{protocol}{name}.pkl").write_bytes(variant)


def in_limited_process(folder: Path, *arguments: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoints.pickle_worker", str(folder), *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def run_fuzz(tmp_path: Path, seed: int, count: int) -> None:
    (tmp_path / "seeds").mkdir()
    write_seeds(tmp_path / "seeds")
    record = in_limited_process(tmp_path, seed, count)
    seeds = len(list((tmp_path / "seeds").iterdir()))
    assert record["seen"] == []
    assert record["indexed"] == seeds + len(HOSTILE) + count
    assert seeds + count * 0.02 < record["accepted"] < seeds + count * 0.5
    assert len(record["messages"]) > 20
    assert sorted(os.listdir(tmp_path)) == ["mutated.pkl", "seeds"]


linux = pytest.mark.skipif(sys.platform != "linux", reason="measures and limits memory through /proc")


@linux
def test_mutated_pickles(tmp_path: Path) -> None:
    run_fuzz(tmp_path, 0, 2000)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_tens_of_thousands_of_mutated_pickles(tmp_path: Path, seed: int) -> None:
    run_fuzz(tmp_path, seed, 10_000)


@linux
def test_a_large_file_is_indexed_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "params.pkl"
    size, count = 10 << 20, 20
    with path.open("wb") as file:
        pickle.dump({f"layer_{number}": np.zeros(size // 4, np.float32) for number in range(count)}, file, 4)
    assert path.stat().st_size > size * count
    record = in_limited_process(path)
    path.unlink()
    assert record["tensors"] == count
    assert record["seconds"] < 1
    assert record["allocated"] < 1 << 20
    assert record["resident"] < 4 << 20
    assert record["resident_of_reading"] < 4 * size
