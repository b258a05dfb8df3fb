"""The values that a legacy pickle may build, as symbols, and the names and dtypes that it may use.

An array is "these bytes, this shape, this dtype"; a global is a name on a list. Symbols are compared by identity, never
by their content: shared tuples can make that content exponentially large.

Arrays: ``ndarray.__reduce_ex__`` and ``dtype.__reduce__`` of numpy, ``jax._src.array._reconstruct_array``,
``flax.core.FrozenDict.__reduce__``.
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

# Module and name -> its meaning here. numpy 2 moved numpy.core to numpy._core.
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
    """A pickle that is damaged, or holds anything but nested dicts of arrays."""


@dataclass(frozen=True)
class LegacyTensor:
    """The place of one array in the file.

    Attributes:
      path: keys of the dicts, joined by ``/``.
      shape: its sizes.
      dtype: name of its little-endian numpy or ml_dtypes dtype: ``bfloat16``.
      offset: of its first byte in the file.
      nbytes: its length.
      order: of its elements: ``C`` last dimension fastest, ``F`` first dimension fastest, ``K`` as ``axes`` say.
      axes: for ``K``: dimension ``i`` of the array is dimension ``axes[i]`` of the C-ordered array in the file.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    order: str
    axes: tuple[int, ...] | None = None


# The stack also holds None, bool, int and str as they are.


@dataclass(frozen=True, eq=False, slots=True)
class Global:
    """A name on the list of globals, and what it means here."""

    name: str
    meaning: str


@dataclass(frozen=True, eq=False, slots=True)
class Bytes:
    """A range of the file's bytes."""

    offset: int
    length: int


@dataclass(eq=False, slots=True)
class DType:
    """A dtype by its name; usable once its state is set."""

    name: str
    has_state: bool = False


@dataclass(eq=False, slots=True)
class Array:
    """An array; usable once its state is set."""

    tensor: LegacyTensor | None = None  # without its path, which only the root dict tells


@dataclass(eq=False, slots=True)
class Tuple:
    """A tuple of symbols, and how deep containers are nested in it."""

    values: tuple[object, ...]
    depth: int


@dataclass(eq=False, slots=True)
class Dict:
    """A dict of symbols, which accepts items until something uses it."""

    items: dict[str, tuple[object, int]] = field(default_factory=dict)  # with the offset at which each is set
    depth: int = 0
    is_used: bool = False


def is_dtype_layout(name: str, size: int, alignment: int, flags: int) -> bool:
    """Whether numpy writes this size, alignment and flags in the state of a dtype."""
    if name not in EXTENSION_DTYPES:
        return (size, alignment, flags) == (-1, -1, 0)
    # NEEDS_PYAPI, USE_GETITEM, USE_SETITEM: versions of ml_dtypes differ in them. No flag of an object.
    return size == alignment == DTYPES[name].itemsize and flags | 0x70 == 0x70
