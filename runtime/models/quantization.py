"""Int8 weights with one scale per output channel (weight-only, symmetric, round to nearest).

A matrix ``[out, in]`` becomes int8 values of the same shape and float32 scales ``[out]``. Activations are not
quantized: the product is computed in their dtype and scaled afterwards, so a shard of the product needs only its own
scales.
"""

from __future__ import annotations

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

QUANTIZATIONS = ("none", "int8")
# Scales are multiplied by this constant. Compilers may turn a division by 127 into a multiplication, which rounds
# differently, so a division would not give the same scales everywhere.
INVERSE_INT8_MAX = np.float32(1.0 / 127.0)
# Maximum number of weights in a block: 512 KB of float32, which fits into a CPU core's cache.
BLOCK_WEIGHTS = 1 << 17
# Minimum number of rows in a lookup from a quantized table.
_FEWEST_ROWS = 8


@flax.struct.dataclass
class Quantized:
    """A quantized matrix.

    Attributes:
      values: int8, the shape of the matrix.
      scales: float32, the shape of the matrix without the contracted axes.
    """

    values: Any
    scales: Any


# A matrix, quantized or not.
Matrix = Array | Quantized


def quantize(matrix: Array, contracted: tuple[int, ...]) -> Quantized:
    """Quantize a matrix to int8 with one scale per output channel.

    Args:
      matrix: the weights.
      contracted: the dimensions that a matrix product sums over; all other dimensions are output channels.
    """
    wide = matrix.astype(jnp.float32)
    scales = int8_scales(jnp.max(jnp.abs(wide), axis=contracted, keepdims=True))
    return Quantized(int8_values(wide, scales), jnp.squeeze(scales, contracted))


def int8_scales(largest: Any) -> Any:
    """Compute float32 scales from the largest magnitudes (a NumPy or JAX array) of the numbers that share a scale."""
    return largest * INVERSE_INT8_MAX


def int8_values(wide: Any, scales: Any) -> Any:
    """Round float32 numbers to int8 multiples of broadcastable ``scales``. Both are NumPy arrays or both JAX arrays."""
    numbers = wide.__array_namespace__()
    inverse = np.float32(1.0) / numbers.where(scales == 0.0, np.float32(1.0), scales)
    return numbers.round(wide * inverse).astype(np.int8)


def einsum(expression: str, left: Array, right: Matrix, *, as_matrix: bool = False, few: bool = False) -> Array:
    """Multiply activations by a weight, in the activations' dtype.

    The last dimensions of the result are those dimensions of the weight that are not contracted, in the weight's order.

    Args:
      expression: the expression for :func:`jax.numpy.einsum`.
      left: activations; their last dimension is contracted.
      right: the weight. Its first or last dimension is contracted; the last if it has more than two dimensions.
      as_matrix: flatten the weight's output dimensions into one, for compilers that would otherwise transpose the
        weight. This is not possible for sharded weights, because several sharded dimensions cannot be merged.
      few: the product is one of a few positions on a single CPU, where the compiler would spend most of the time on
        rearranging the weight: a quantized weight is converted block by block instead of as a whole, and a float32
        weight ``[out, in]`` is the product's left operand. This also flattens the output dimensions.
    """
    if (as_matrix or few) and len(channels := _channels(right)) > 1:
        flat = einsum("...d,md->...m", left, _flatten(right), few=few)
        return flat.reshape(*left.shape[:-1], *channels)
    if not isinstance(right, Quantized):
        rows = math.prod(left.shape[:-1])
        if few and rows > 1 and left.dtype == right.dtype == jnp.float32 and _sums_last(expression):
            return _weight_first(left, right)
        return jnp.einsum(expression, left, right, precision=_precision(left))
    if few:
        product = _in_blocks(expression, left, right.values)
    else:
        # Partial sums over shards are reduced in the activations' dtype, before scaling, as with unquantized weights.
        product = _at_once(expression, left, right.values, left.dtype)
    return (product * right.scales).astype(left.dtype)


def _channels(matrix: Matrix) -> tuple[int, ...]:
    return (matrix.values if isinstance(matrix, Quantized) else matrix).shape[:-1]


def _flatten(matrix: Matrix) -> Matrix:
    """Merge all dimensions but the last: ``[*channels, D]`` -> ``[C, D]``."""
    if isinstance(matrix, Quantized):
        return Quantized(matrix.values.reshape(-1, matrix.values.shape[-1]), matrix.scales.reshape(-1))
    return matrix.reshape(-1, matrix.shape[-1])


def _precision(left: Array) -> jax.lax.Precision | None:
    # By default, accelerators multiply float32 in bfloat16 or TF32 precision.
    return jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None


def _at_once(expression: str, left: Array, values: Array, dtype: Any = jnp.float32) -> Array:
    return jnp.einsum(
        expression, left, values.astype(left.dtype), precision=_precision(left), preferred_element_type=dtype
    )


def _sums_last(expression: str) -> bool:
    """Return whether a product sums over the last dimension of its weight."""
    inputs, out = expression.split("->")
    return inputs[-1] not in out


def _weight_first(left: Array, weight: Array) -> Array:
    """Multiply ``[..., D]`` by ``[C, D]`` -> ``[..., C]``, with the weight as the left operand of the matrix product.

    Eigen, which XLA on CPU calls, packs the right operand anew for each product. For a few rows, this takes as long as
    the product, so the activations are on the right. The barrier keeps XLA from exchanging the operands again.
    """
    product = jnp.einsum("md,nd->mn", weight, left.reshape(-1, left.shape[-1]), precision=_precision(left))
    return jax.lax.optimization_barrier(product).T.reshape(*left.shape[:-1], len(weight))


def _in_blocks(expression: str, left: Array, values: Array) -> Array:
    if _sums_last(expression):
        return _blocks_of_channels(left, values)
    return _blocks_of_sum(left, values)


def _blocks_of_channels(left: Array, values: Array) -> Array:
    """Multiply ``[..., D]`` by int8 ``[C, D]``, one block of channels at a time -> float32 ``[..., C]``."""
    rows = _block_rows(values)
    count = len(values) // rows

    def block(number: Array) -> Array:
        return _at_once("...d,md->...m", left, jax.lax.dynamic_slice_in_dim(values, number * rows, rows))

    product = jnp.moveaxis(jax.lax.map(block, jnp.arange(count)), 0, -2).reshape(*left.shape[:-1], count * rows)
    if count * rows < len(values):
        rest = _at_once("...d,md->...m", left, values[count * rows :])
        product = jnp.concatenate([product, rest], axis=-1)
    return product


def _blocks_of_sum(left: Array, values: Array) -> Array:
    """Multiply ``[..., F]`` by int8 ``[F, D]``, one block of F at a time -> float32 ``[..., D]``."""
    rows = _block_rows(values)
    count = len(values) // rows

    def add(number: Array, total: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(left, number * rows, rows, axis=-1)
        return total + _at_once("...f,fd->...d", own, jax.lax.dynamic_slice_in_dim(values, number * rows, rows))

    if count * rows < len(values):
        total = _at_once("...f,fd->...d", left[..., count * rows :], values[count * rows :])
    else:
        total = jnp.zeros((*left.shape[:-1], values.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, count, add, total)


def _block_rows(matrix: Array) -> int:
    # A power of two, because the sizes of most matrices are multiples of it.
    rows = 1 << max(1, BLOCK_WEIGHTS // matrix.shape[1]).bit_length() - 1
    return min(len(matrix), rows)


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
        return Quantized(merge_contracted(matrix.values, first), matrix.scales)
    return matrix.reshape(*matrix.shape[:first], -1, matrix.shape[-1])
