"""Products of activations with weights, which may be quantized.

A product with int8 weights is computed with the integers, and scaled afterwards, so a shard needs only its own scales.
With int4 weights, scales differ along the sum. There are two forms, equal up to rounding:

* The sum over each group is computed with the integers, and the sums are scaled and added. No scaled weight is stored,
  but the sums are an array of their own: a number for each row, group and channel.
* The weights are scaled in the activations' dtype, and then multiplied. This pays off for many rows.

Groups do not cross shards, so a shard scales its own sums. Partial sums over shards are reduced in the activations'
dtype, as with unquantized weights; those of int8 weights, which are not scaled yet, in that of :func:`unscaled_dtype`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from runtime.models.quantization import Matrix, Quantized

Array = jax.Array

# Maximum number of weights in a block: 512 KB of float32, which fits into a CPU core's cache.
BLOCK_WEIGHTS = 1 << 17
# On TPU, rows times groups up to which sums of groups take less time than scaled weights, by compiled v5e programs.
_TPU_GROUP_ROWS = 320


def einsum(
    expression: str,
    left: Array,
    right: Matrix,
    *,
    as_matrix: bool = False,
    few: bool = False,
    rows: int | None = None,
    shards: int = 1,
    on_tpu: bool = False,
) -> Array:
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
      rows: rows of ``left`` on each device, which decide on the form of a product with int4; by default all.
      shards: shards of the contracted dimension, if it is the first of the weight.
      on_tpu: write a product with int4 for the TPU compiler, see :func:`_with_groups`.
    """
    if (as_matrix or few) and len(channels := _channels(right)) > 1:
        letters = expression.split(",")[0]
        flat = einsum(f"{letters},C{letters[-1]}->{letters[:-1]}C", left, _flatten(right), few=few)
        return flat.reshape(*left.shape[:-1], *channels)
    if not isinstance(right, Quantized):
        many = math.prod(left.shape[:-1]) > 1
        if few and many and left.dtype == right.dtype == jnp.float32 and _sums_last(expression):
            return _weight_first(left, right)
        return jnp.einsum(expression, left, right, precision=_precision(left))
    if few:
        product = _in_blocks(expression, left, right)
    elif right.has_groups:
        rows = math.prod(left.shape[:-1]) if rows is None else rows
        return _with_groups(expression, left, right, rows, shards, on_tpu)
    else:
        # Partial sums over shards are reduced before scaling.
        product = _at_once(expression, left, right.values, unscaled_dtype(left.dtype))
    return (product if right.has_groups else product * right.scales).astype(left.dtype)


def _channels(matrix: Matrix) -> tuple[int, ...]:
    return (matrix.values if isinstance(matrix, Quantized) else matrix).shape[:-1]


def _flatten(matrix: Matrix) -> Matrix:
    """Merge all dimensions but the last: ``[*channels, D]`` -> ``[C, D]``."""
    if isinstance(matrix, Quantized):
        scales = matrix.scales.reshape(*matrix.scales.shape[: matrix.has_groups], -1)
        return Quantized(matrix.values.reshape(-1, matrix.values.shape[-1]), scales)
    return matrix.reshape(-1, matrix.shape[-1])


def _precision(left: Array) -> jax.lax.Precision | None:
    # By default, accelerators multiply float32 in bfloat16 or TF32 precision.
    return jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None


def _at_once(expression: str, left: Array, values: Array, dtype: Any = jnp.float32) -> Array:
    return jnp.einsum(
        expression, left, values.astype(left.dtype), precision=_precision(left), preferred_element_type=dtype
    )


def unscaled_dtype(dtype: Any) -> np.dtype:
    """Return the dtype of sums of activations times integers: that of the activations, but float32 for float16.

    float16 ends at 65,504, which sums that are not scaled yet may exceed.
    """
    return jnp.dtype(jnp.float32 if dtype == jnp.float16 else dtype)


def scales_sums(rows: int, groups: int, group: int, on_tpu: bool) -> bool:
    """Return whether a product with int4 weights scales the sums of groups, and not the weights.

    On TPU, it does if that takes less time; elsewhere, if the sums take no more bytes than scaled weights.

    Args:
      rows: rows of activations on a device.
      groups: groups along the contracted dimension of a device's weights.
      group: number of weights in each.
      on_tpu: whether the program is for TPU.
    """
    return rows * groups <= _TPU_GROUP_ROWS if on_tpu else rows <= group


def _with_groups(expression: str, left: Array, right: Quantized, rows: int, shards: int, on_tpu: bool) -> Array:
    """Multiply by int4 weights; see :func:`einsum`.

    The TPU compiler would copy integers whose contracted dimension is split into groups, those of all stacked layers at
    once. So the activations of each group become a row of their own, with zeros for the other groups, and scales are
    spread over their groups by a product.

    Letters of expressions besides those of ``expression``: T shards of the contracted dimension, N groups.
    """
    operands, _ = expression.split("->")
    rows_and_sum, weight = operands.split(",")
    batch, summed = rows_and_sum[:-1], rows_and_sum[-1]
    channels = weight.replace(summed, "")
    first = weight[0] == summed
    if first and not on_tpu and math.prod(left.shape[:-1]) == 1:
        # For a single row, XLA on GPU would write every product of the sum to memory.
        two = jnp.pad(left, [(0, 0)] * (left.ndim - 2) + [(0, 1), (0, 0)])
        return _with_groups(expression, two, right, rows, shards, on_tpu)[..., :1, :]
    values, scales, split = right.values, right.scales, ""
    if not on_tpu:
        # Without the barrier, XLA on GPU transposes the weights of all layers before a loop over steps.
        left, values, scales = jax.lax.optimization_barrier((left, values, scales))
    if first and shards > 1:
        left = left.reshape(*left.shape[:-1], shards, -1)
        values, scales = (array.reshape(shards, -1, array.shape[-1]) for array in (values, scales))
        split, weight = "T", f"T{weight}"
    count = scales.shape[len(split)]
    group = left.shape[-1] // count
    own = jnp.repeat(jnp.eye(count, dtype=left.dtype), group, axis=1)
    place = weight.index(summed)
    if not scales_sums(rows, count, group, on_tpu):
        scales = scales.astype(left.dtype)
        if on_tpu:
            own = jnp.broadcast_to(own, (*scales.shape[: len(split)], *own.shape))
            spread = _at_once(f"{split}N{summed},{split}N{channels}->{weight}", own, scales, left.dtype)
        else:
            spread = jnp.moveaxis(jnp.repeat(scales, group, axis=len(split)), len(split), place)
        scaled = values.astype(left.dtype) * spread
        if first and not on_tpu:
            # Without the barrier, XLA on GPU transposes the integers of all layers before a loop over steps.
            left, scaled = jax.lax.optimization_barrier((left, scaled))
        return _at_once(f"{batch}{split}{summed},{weight}->{batch}{channels}", left, scaled, left.dtype)
    if on_tpu:
        left = jnp.where(own != 0, left[..., None, :], 0)
    else:
        left = left.reshape(*left.shape[:-1], count, group)
        values = values.reshape(*values.shape[:place], count, group, *values.shape[place + 1 :])
        weight = weight.replace(summed, f"N{summed}")
    dtype = unscaled_dtype(left.dtype)
    sums = _at_once(f"{batch}{split}N{summed},{weight}->N{split}{batch}{channels}", left, values, dtype)
    before = 1 + len(split)
    scales = jnp.moveaxis(scales, len(split), 0)
    scales = jnp.expand_dims(scales, tuple(range(before, before + len(batch))))
    total = jnp.sum(sums.astype(jnp.float32) * scales, axis=0).astype(left.dtype)
    return jax.lax.reduce(total, jnp.zeros((), left.dtype), jax.lax.add, tuple(range(len(split))))


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


def _in_blocks(expression: str, left: Array, right: Quantized) -> Array:
    if _sums_last(expression):
        return _blocks_of_channels(left, right)
    return _blocks_of_sum(left, right)


def _blocks_of_channels(left: Array, right: Quantized) -> Array:
    """Multiply ``[..., D]`` by integers ``[C, D]``, one block of channels at a time -> float32 ``[..., C]``.

    The result is scaled for int4, and not for int8.
    """
    values = right.values
    rows = _block_rows(values)
    count = len(values) // rows

    def product(first: Any, rows: int) -> Array:
        block = jax.lax.dynamic_slice_in_dim(values, first, rows)
        if right.has_groups:
            scales = jax.lax.dynamic_slice_in_dim(right.scales, first, rows, axis=1)
            block = block.astype(left.dtype) * _spread(scales, values.shape[1], left.dtype).T
        return _at_once("...d,md->...m", left, block)

    blocks = jax.lax.map(lambda number: product(number * rows, rows), jnp.arange(count))
    found = jnp.moveaxis(blocks, 0, -2).reshape(*left.shape[:-1], count * rows)
    if count * rows < len(values):
        found = jnp.concatenate([found, product(count * rows, len(values) - count * rows)], axis=-1)
    return found


def _blocks_of_sum(left: Array, right: Quantized) -> Array:
    """Multiply ``[..., F]`` by integers ``[F, D]``, one block of F at a time -> float32 ``[..., D]``.

    The result is scaled for int4, and not for int8.
    """
    values = right.values
    group = len(values) // len(right.scales) if right.has_groups else 1
    rows = max(group, _block_rows(values))
    count = len(values) // rows

    def product(first: Any, rows: int) -> Array:
        own = jax.lax.dynamic_slice_in_dim(left, first, rows, axis=-1)
        block = jax.lax.dynamic_slice_in_dim(values, first, rows)
        if right.has_groups:
            scales = jax.lax.dynamic_slice_in_dim(right.scales, first // group, rows // group)
            block = block.astype(left.dtype) * _spread(scales, rows, left.dtype)
        return _at_once("...f,fd->...d", own, block)

    if count * rows < len(values):
        total = product(count * rows, len(values) - count * rows)
    else:
        total = jnp.zeros((*left.shape[:-1], values.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, count, lambda number, total: total + product(number * rows, rows), total)


def _spread(scales: Array, size: int, dtype: Any) -> Array:
    """Repeat the scales of groups ``[N, C]`` for each of ``size`` weights along the sum: ``[size, C]``."""
    return jnp.repeat(scales.astype(dtype), size // len(scales), axis=0)


def _block_rows(matrix: Array) -> int:
    # A power of two, because the sizes of most matrices are multiples of it.
    rows = 1 << max(1, BLOCK_WEIGHTS // matrix.shape[1]).bit_length() - 1
    return min(len(matrix), rows)
