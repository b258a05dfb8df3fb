"""Legacy pickles for tests: trees of arrays, the bytes of single operations, and reading a file back bit for bit."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.core import FrozenDict

from checkpoints.legacy import LegacyPickle, LegacyTensor

PROTOCOLS = [3, 4, 5]


def numpy_arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    cube = generator.integers(0, 1 << 16, (2, 3, 4), np.uint16)
    return {
        "scalar": np.array(1.5, np.float32),
        "empty": np.zeros((3, 0, 2), np.float16),
        "one": np.array([98], np.uint8),
        "fortran": np.asfortranarray(cube),
        "transposed": cube.transpose(1, 2, 0),
        "strided": cube[:, ::2, 1:],
        "reversed": cube[::-1],
        "broadcast": np.broadcast_to(np.float64(2), (2, 5)),
        "read_only": np.frombuffer(b"12345678", np.float32),
        "every_bfloat16": np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16),  # NaNs with every payload
        "every_float16": np.arange(1 << 16, dtype=np.uint16).view(np.float16),
        "large": generator.random((300, 500)),
        "bool": np.array([True, False]),
        "float8": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
        **{code: np.ones((2, 2), code) for code in ("i1", "i2", "i4", "i8", "u4", "u8")},
    }


def jax_arrays() -> dict[str, jax.Array]:
    key = jax.random.key(0)
    return {
        "bfloat16": jax.random.normal(key, (5, 7), jnp.bfloat16),
        "float32": jax.random.normal(key, (2, 3, 4)),
        "float16": jnp.arange(6, dtype=jnp.float16).reshape(3, 2).T,
        "scalar": jnp.bfloat16(2),
        "weak": jnp.asarray(2.0),
        "empty": jnp.zeros((0, 4), jnp.bfloat16),
        "large": jax.random.normal(key, (256, 512), jnp.bfloat16),
    }


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict | FrozenDict):
            yield from flatten(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value


def assert_reads(path: Path, tree: Any) -> dict[str, LegacyTensor]:
    """Assert that the file has exactly the tree's arrays, bit for bit and in order (a pickled FrozenDict is sorted)."""
    expected = dict(flatten(tree))
    with LegacyPickle(path) as weights:
        assert list(weights.tensors) == (sorted(expected) if isinstance(tree, FrozenDict) else list(expected))
        for name, array in expected.items():
            tensor, value = weights.tensors[name], np.asarray(array)
            assert (tensor.path, tensor.shape, tensor.dtype) == (name, value.shape, value.dtype.name)
            assert tensor.nbytes == value.nbytes
            read = weights.read(name)
            assert (read.shape, read.dtype) == (value.shape, value.dtype)
            assert read.tobytes() == value.tobytes()
        return weights.tensors


class AsWrittenByOthers:
    """A value that pickles as ``function(*arguments)``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduction = function, arguments

    def __reduce__(self) -> Any:
        return self.reduction


def operations(data: bytes) -> list[tuple[Any, Any, bytes]]:
    """Opcode, argument and bytes of each operation of a pickle that we wrote ourselves."""
    found = list(pickletools.genops(data))
    ends = [place for _, _, place in found[1:]] + [len(data)]
    return [(opcode, argument, data[place:end]) for (opcode, argument, place), end in zip(found, ends, strict=True)]


def body(value: Any, protocol: int = 3) -> bytes:
    """The operations that push a value, without header, frame and end."""
    data = pickletools.optimize(pickle.dumps(value, protocol))  # without unused memo entries
    return b"".join(raw for opcode, _, raw in operations(data) if opcode.name not in ("PROTO", "FRAME", "STOP"))


def key(name: str) -> bytes:
    return b"\x8c" + bytes([len(name.encode())]) + name.encode()


ARRAY = np.arange(4, dtype=np.float32)
