"""Symbols for the values that a legacy pickle may build, and the names and dtypes that it may use.

An array is a range of the file's bytes with a shape and a dtype; a global is one of the names in :data:`GLOBALS`.
Symbols are compared by identity, never by content: shared tuples can make the content exponentially large.

Sources for the contents of pickles: ``ndarray.__reduce_ex__`` and ``dtype.__reduce__`` of numpy,
``jax._src.array._reconstruct_array``, ``flax.core.FrozenDict.__reduce__``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError

DTYPE_CODES = {
    code: np.dtype(code).name for code in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
}
EXTENSION_DTYPES: dict[str, np.dtype] = {
    scalar.__name__: np.dtype(scalar)
    for scalar in (
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3b11fnuz),
        *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz),
        ml_dtypes.float8_e8m0fnu,
    )
}
DTYPES = {name: np.dtype(name) for name in DTYPE_CODES.values()} | EXTENSION_DTYPES

# The globals that a pickle may use, by module and name, with their meaning. numpy 2 moved numpy.core to numpy._core.
GLOBALS = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("numpy.core.multiarray", "_reconstruct"): "empty array",
    ("numpy._core.multiarray", "_reconstruct"): "empty array",
    ("numpy.core.numeric", "_frombuffer"): "array of buffer",
    ("numpy._core.numeric", "_frombuffer"): "array of buffer",
    ("jax._src.array", "_reconstruct_array"): "JAX array",
    ("flax.core.frozen_dict", "FrozenDict"): "FrozenDict",
    **{("ml_dtypes", name): name for name in EXTENSION_DTYPES},
}

REMEDY = "expected a dict or FrozenDict of JAX or numpy arrays, as written by pickle.dump(params, file, protocol=4)"


class LegacyPickleError(CheckpointError):
    """A pickle is damaged, or contains something other than nested dicts of arrays."""


@dataclass(frozen=True)
class LegacyTensor:
    """The location of an array in the file.

    Attributes:
      path: keys of the dicts, joined by ``/``.
      shape: its sizes.
      dtype: name of its little-endian numpy or ml_dtypes dtype: ``bfloat16``.
      offset: position of its first byte in the file.
      nbytes: its size in bytes.
      order: order of its elements: ``C`` last dimension fastest, ``F`` first dimension fastest, ``K`` as in ``axes``.
      axes: for ``K``: dimension ``i`` of the array is dimension ``axes[i]`` of the C-ordered array in the file.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    order: str
    axes: tuple[int, ...] | None = None


# None, bool, int and str need no symbols: the stack contains the values themselves.


@dataclass(frozen=True, eq=False, slots=True)
class Global:
    """One of the names in :data:`GLOBALS`, with its meaning."""

    name: str
    meaning: str


@dataclass(frozen=True, eq=False, slots=True)
class Bytes:
    """A range of the file's bytes."""

    offset: int
    length: int


@dataclass(eq=False, slots=True)
class DType:
    """A dtype. No other value may contain it before its state is set."""

    name: str
    has_state: bool = False


@dataclass(eq=False, slots=True)
class Array:
    """An array. No other value may contain it before its state is set, because the state says where its bytes are."""

    tensor: LegacyTensor | None = None  # without its path, which follows from the root dict


@dataclass(eq=False, slots=True)
class Tuple:
    """A tuple of symbols, with the depth of containers nested in it."""

    values: tuple[object, ...]
    depth: int


@dataclass(eq=False, slots=True)
class Dict:
    """A dict of symbols. It accepts items until another value contains it."""

    items: dict[str, tuple[object, int]] = field(
        default_factory=dict
    )  # each with the offset of the operation that set it
    depth: int = 0
    is_used: bool = False


def is_dtype_layout(name: str, size: int, alignment: int, flags: int) -> bool:
    """Whether these are the size, the alignment and the flags that NumPy writes into the state of a dtype."""
    if name not in EXTENSION_DTYPES:
        return (size, alignment, flags) == (-1, -1, 0)
    # Versions of ml_dtypes differ in NEEDS_PYAPI, USE_GETITEM and USE_SETITEM. Flags of objects are not allowed.
    return size == alignment == DTYPES[name].itemsize and flags | 0x70 == 0x70
