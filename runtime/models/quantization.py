"""Quantized weights: int8 with a scale per output channel, or int4 with a scale per group (symmetric, weight-only).

A matrix ``[out, in]`` becomes int8 values of the same shape and float32 scales ``[out]``, or int4 values and float32
scales ``[groups of in, out]``. Values are rounded to nearest. Activations are not quantized, and products are computed
in their dtype (:mod:`runtime.models.products`).
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

QUANTIZATIONS = ("none", "int8", "int4")
# Scales are multiplied by these constants. Compilers may turn a division by 127 into a multiplication, which rounds
# differently, so a division would not give the same scales everywhere.
INVERSE_INT8_MAX, INVERSE_INT4_MAX = np.float32(1.0 / 127.0), np.float32(1.0 / 7.0)
# int4 values in a byte of a checkpoint.
VALUES_PER_BYTE = 2
# Minimum number of rows in a lookup from a quantized table.
_FEWEST_ROWS = 8


@flax.struct.dataclass
class Quantized:
    """A quantized matrix.

    Attributes:
      values: int8 or int4, the shape of the matrix. On CPU, int4 values are held as int8.
      scales: float32. For int8, the shape of the matrix without the contracted axes. For int4, the contracted axes come
        before the others (but after an axis of stacked layers), and the last of them counts groups.
    """

    values: Any
    scales: Any

    @property
    def has_groups(self) -> bool:
        """Whether scales are of groups, as for int4, not of output channels."""
        return bool(self.scales.ndim == self.values.ndim)


# A matrix, quantized or not.
Matrix = Array | Quantized


def quantize(
    matrix: Array,
    contracted: tuple[int, ...],
    group: int | None = None,
    is_stacked: bool = False,
    dtype: Any = jnp.int8,
) -> Quantized:
    """Quantize a matrix to int8 with one scale per output channel, or to int4 with one per group of each channel.

    Args:
      matrix: the weights.
      contracted: the dimensions that a matrix product sums over; all other dimensions are output channels.
      group: number of int4 weights along the last contracted dimension that share a scale; None for int8.
      is_stacked: whether the first dimension counts layers.
      dtype: dtype of the integers, for int4 ``int4`` or ``int8``.
    """
    wide = matrix.astype(jnp.float32)
    if group is None:
        scales = int8_scales(jnp.max(jnp.abs(wide), axis=contracted, keepdims=True))
        return Quantized(int8_values(wide, scales), jnp.squeeze(scales, contracted))
    last = contracted[-1]
    groups = wide.reshape(*wide.shape[:last], -1, group, *wide.shape[last + 1 :])
    scales = int4_scales(jnp.max(jnp.abs(groups), axis=last + 1, keepdims=True))
    values = int8_values(groups, scales).reshape(wide.shape).astype(dtype)
    first = range(is_stacked, is_stacked + len(contracted))
    return Quantized(values, jnp.moveaxis(jnp.squeeze(scales, last + 1), contracted, tuple(first)))


def int8_scales(largest: Any) -> Any:
    """Compute float32 scales from the largest magnitudes (a NumPy or JAX array) of the numbers that share a scale."""
    return largest * INVERSE_INT8_MAX


def int4_scales(largest: Any) -> Any:
    """Compute float32 scales from the largest magnitudes (a NumPy or JAX array) of the numbers that share a scale."""
    return largest * INVERSE_INT4_MAX


def int8_values(wide: Any, scales: Any) -> Any:
    """Round float32 numbers to int8 multiples of broadcastable ``scales``. Both are NumPy arrays or both JAX arrays."""
    numbers = wide.__array_namespace__()
    inverse = np.float32(1.0) / numbers.where(scales == 0.0, np.float32(1.0), scales)
    return numbers.round(wide * inverse).astype(np.int8)


def pack_int4(values: np.ndarray, axis: int) -> np.ndarray:
    """Pack int4 values, held as int8, in pairs along an axis into uint8: the first of a pair in the lower four bits."""
    bits = np.moveaxis(values, axis, -1).view(np.uint8)
    return np.moveaxis(bits[..., ::2] & 15 | bits[..., 1::2] << 4, -1, axis)


def unpack_int4(packed: Array, axis: int) -> Array:
    """Return the int4 values that :func:`pack_int4` packed along an axis, as int8."""
    low = jax.lax.shift_right_arithmetic((packed << 4).astype(jnp.int8), jnp.int8(4))
    high = jax.lax.shift_right_arithmetic(packed.astype(jnp.int8), jnp.int8(4))
    pairs = jnp.stack([low, high], axis=axis + 1)
    shape = (*packed.shape[:axis], VALUES_PER_BYTE * packed.shape[axis], *packed.shape[axis + 1 :])
    return pairs.reshape(shape)


def take_rows(table: Matrix, index: Array, dtype: Any) -> Array:
    """Look up rows of an embedding ``[V, D]``: int32 ``[...]`` -> ``[..., D]``, in ``dtype`` if it is quantized."""
    if isinstance(table, Quantized):
        if index.size == 1:
            # For a lookup of a single int8 row, the TPU compiler copies the whole table.
            padded = jnp.pad(index.reshape(1), (0, _FEWEST_ROWS - 1))
            return take_rows(table, padded, dtype)[:1].reshape(*index.shape, -1)
        rows = table.values.at[index].get(mode="clip").astype(jnp.float32)
        return (rows * table.scales.at[index].get(mode="clip")[..., None]).astype(dtype)
    return table.at[index].get(mode="clip")


def merge_contracted(matrix: Matrix, first: int = 0) -> Matrix:
    """Merge the dimensions that a product sums over, from ``first`` to the last but one, into a single dimension.

    A stack of layers has ``first=1``. A matrix whose dimensions are merged already stays as it is.
    """
    if isinstance(matrix, Quantized):
        scales = merge_contracted(matrix.scales, first) if matrix.has_groups else matrix.scales
        return Quantized(merge_contracted(matrix.values, first), scales)
    return matrix.reshape(*matrix.shape[:first], -1, matrix.shape[-1])
