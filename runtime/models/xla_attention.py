"""Attention in plain JAX operations: all scores at once if they are few, otherwise one block of queries at a time.

It runs on every platform with every attention mask, for whole rows and for windows with a cache.

Dimension letters: B batch, S query positions, T key positions, K kv heads, G query heads per KV head, H head dim.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from runtime.models.declarations import ModelLayout
from runtime.models.masks import AttentionMask
from sharding.rules import Dimension

Array = jax.Array

# Maximum number of queries per block, for one KV head of one row; and the number from which products are fast.
BLOCK, LEAST_BLOCK = 256, 16
# Scores (float32, per device) are computed all at once up to this many bytes. On CPU, larger arrays no longer fit into
# its caches, so blocks are faster. On other platforms one large product is faster, and memory sets the limit.
SCORES_AT_ONCE = {"cpu": 4 << 20}
SCORES_AT_ONCE_DEFAULT = 256 << 20
# Maximum bytes of a block's scores on CPU.
SCORES_OF_BLOCK = 4 << 20


class AttentionPart(NamedTuple):
    """Softmax attention to a part of the keys, to be merged with that to the others by :func:`merge_parts`.

    Attributes:
      out: ``[B, S, K, G, H]`` in float32.
      largest: float32 ``[B, S, K, G, 1]``, the largest score of each query; the lowest float32 if it sees none of the
        keys, and ``out`` is then meaningless.
      total: float32 ``[B, S, K, G, 1]``, the sum of ``exp(score - largest)``.
    """

    out: Array
    largest: Array
    total: Array

    def divided(self) -> AttentionPart:
        """Return the part with ``out`` divided by ``total``."""
        return AttentionPart(self.out / self.total, self.largest, self.total)


def query_block(platform: str, rows: int, query_heads: int, queries_per_kv: int, queries: int, keys: int) -> int | None:
    """Return how many queries of a row and KV head to compute at a time, or None to compute all scores at once.

    Args:
      platform: platform of the device.
      rows: rows per device.
      query_heads: query heads per device.
      queries_per_kv: query heads per KV head and device.
      queries: query positions per device.
      keys: key positions per device.
    """
    scores = 4 * rows * query_heads * queries * keys
    if scores <= SCORES_AT_ONCE.get(platform, SCORES_AT_ONCE_DEFAULT):
        return None
    largest = BLOCK
    if platform == "cpu":
        largest = min(BLOCK, max(LEAST_BLOCK, SCORES_OF_BLOCK // (4 * queries_per_kv * keys)))
    # Blocks of nearly equal size, so that the last one is not mostly padding.
    return math.ceil(queries / math.ceil(queries / largest))


def _visible(
    mask: AttentionMask,
    starts: Array,
    queries: Array,
    keys: Array,
    lengths: Array,
    hidden: tuple[Array, Array] | None = None,
) -> Array:
    """Compute which keys are attended to: bool ``[..., S or 1, T]`` for ``starts`` and ``lengths`` ``[...]``.

    Args:
      mask: the attention mask of the model.
      starts: position of the first query.
      queries: ``[S]``, query positions relative to ``starts``.
      keys: ``[T]``, key positions.
      lengths: row lengths. Keys at or after them are masked.
      hidden: ``[...]`` each, start and end (exclusive) of a range of keys that is masked too; None for no range.
    """
    visible = (keys < lengths[..., None])[..., None, :]
    if hidden is not None:
        start, stop = hidden
        visible &= ((keys < start[..., None]) | (keys >= stop[..., None]))[..., None, :]
    if mask.depends_on_position:
        visible &= mask.visible((starts[..., None] + queries)[..., None], keys)
    return visible


def _attend(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    key_scales: Array | None,
    value_scales: Array | None,
    dtype: jnp.dtype | None = None,
    *,
    divide: bool,
) -> tuple[Array, Array, Array]:
    """Compute softmax attention of ``q`` ``[..., G, S, H]`` to ``k`` and ``v`` ``[..., T, H]``.

    Args:
      q, k, v: queries, keys and values.
      visible: bool, which keys each query attends to; broadcasts against ``[..., G, S, T]``.
      key_scales, value_scales: ``[..., T]``, the factors of a quantized cache's keys and values; None otherwise.
      dtype: dtype of the output; None for that of ``q``.
      divide: divide the weights by their sum. Otherwise the output, in float32, is to be divided by it, which takes one
        pass over the weights less.

    Returns:
      The output ``[..., G, S, H]``; for each query, the largest score and the sum of ``exp(score - largest)``, both
      ``[..., G, S, 1]`` in float32.
    """
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    scores = jnp.einsum("...gsh,...th->...gst", q, k, precision=precision, preferred_element_type=jnp.float32)
    if key_scales is not None:
        scores = scores * key_scales[..., None, None, :]
    scores = jnp.where(visible, scores / math.sqrt(q.shape[-1]), jnp.finfo(jnp.float32).min)
    largest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if divide:
        weights = weights / total
    if value_scales is not None:
        weights = weights * value_scales[..., None, None, :]
    weighted, dtype = weights.astype(q.dtype), dtype if divide else jnp.float32
    out = jnp.einsum("...gst,...th->...gsh", weighted, v, precision=precision, preferred_element_type=dtype)
    return out, largest, total


def _in_blocks(
    mask: AttentionMask,
    block: int,
    query_axes: tuple[str, ...],
    key_axes: tuple[str, ...],
    q: Array,
    k: Array,
    v: Array,
    starts: Array,
    lengths: Array,
    key_scales: Array | None,
    value_scales: Array | None,
    hidden: tuple[Array, Array] | None = None,
    *,
    part: bool,
    divide: bool,
) -> Array | AttentionPart:
    """Compute :func:`xla_attention` on one device's shards, looping over rows, KV heads and blocks of queries.

    Args:
      mask: the attention mask of the model.
      block: queries per block.
      query_axes, key_axes: mesh axes that shard the queries, and the keys.
      q: ``[B, S, K, G, H]``.
      k, v: ``[B, K, T, H]``.
      starts, lengths: int32 ``[B]``.
      key_scales, value_scales: ``[B, K, T]`` or None.
      hidden, part: compute :func:`attention_part` with this range of hidden keys, if ``part``.
      divide: see :func:`_attend`.
    """
    dtype = jnp.float32 if part else None
    B, S, K, G, H = q.shape
    blocks = math.ceil(S / block)
    starts = starts + _first_of_shard(query_axes, S)
    keys = jnp.arange(k.shape[2]) + _first_of_shard(key_axes, k.shape[2])
    q = jnp.pad(q, ((0, 0), (0, blocks * block - S), (0, 0), (0, 0), (0, 0)))
    q = q.reshape(B, blocks, block, K, G, H).transpose(0, 3, 1, 4, 2, 5)

    def one_row(row: tuple[Any, ...]) -> tuple[Array, ...]:
        start, length, masked, *heads = row

        def one_head(head: tuple[Array, ...]) -> tuple[Array, ...]:
            q, k, v, key_scales, value_scales = head

            def one_block(of: tuple[Array, Array]) -> tuple[Array, ...]:
                visible = _visible(mask, start + of[0] * block, jnp.arange(block), keys, length, masked)
                return _attend(of[1], k, v, visible, key_scales, value_scales, dtype, divide=divide)

            return jax.lax.map(one_block, (jnp.arange(blocks), q))

        return jax.lax.map(one_head, tuple(heads))

    found = AttentionPart(*jax.lax.map(one_row, (starts, lengths, hidden, q, k, v, key_scales, value_scales)))
    if not divide:
        found = found.divided()
    if key_axes:
        found = _merge_shards(key_axes, found)
    in_order = partial(_join_blocks, S)
    return jax.tree.map(in_order, found) if part else in_order(found.out.astype(q.dtype))


def _first_of_shard(axes: tuple[str, ...], positions: int) -> Array | int:
    """Return the first of this shard's positions, int32 ``[]``; 0 if no mesh axes shard them."""
    return jax.lax.axis_index(axes) * positions if axes else 0


def _join_blocks(queries: int, values: Array) -> Array:
    """Put blocks of queries ``[B, K, N, G, S / N, X]`` in order: ``[B, S, K, G, X]``, without padding of S."""
    ordered = values.transpose(0, 2, 4, 1, 3, 5)
    return ordered.reshape(len(values), -1, *ordered.shape[3:])[:, :queries]


def _merge_shards(axes: tuple[str, ...], own: AttentionPart) -> AttentionPart:
    """Return attention to the keys of all shards along these mesh axes, from a shard's attention to its own keys."""
    # The result is the mean of the shards' means, weighted by their sums of exponentials.
    largest = jax.lax.pmax(own.largest, axes)
    share = own.total * jnp.exp(own.largest - largest)
    out, total = jax.lax.psum(own.out * share, axes), jax.lax.psum(share, axes)
    return AttentionPart(out / total, largest, total)


def xla_attention(
    layout: ModelLayout,
    q: Array,
    k: Array,
    v: Array,
    starts: Array,
    lengths: Array,
    key_scales: Array | None = None,
    value_scales: Array | None = None,
    *,
    queries: Dimension,
    keys: Dimension,
) -> Array:
    """Compute softmax attention of consecutive positions to the first ``lengths`` keys of their rows.

    The model's attention mask applies. Every query must see at least one key.

    Args:
      layout: the model, its mesh and its partition rules.
      q: queries ``[B, S, K, G, H]``.
      k: keys ``[B, K, T, H]``, at positions from 0.
      v: values, like ``k``.
      starts: int32 ``[B]``, position of each row's first query.
      lengths: int32 ``[B]``, row lengths. Keys at or after them are masked.
      key_scales: float32 ``[B, K, T]``, scales of int8 keys; None for other dtypes.
      value_scales: like ``key_scales``.
      queries: logical axis of S; None if S is not sharded.
      keys: logical axis of T; None if T is not sharded.

    Returns:
      ``[B, S, K, G, H]`` in the dtype of ``q``. The softmax is computed in float32.
    """
    arrays = (q, k, v, starts, lengths, key_scales, value_scales, None)
    found = _on_layout(layout, arrays, queries, keys, part=False)
    assert not isinstance(found, AttentionPart)
    return found


def attention_part(
    layout: ModelLayout,
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    key_scales: Array | None = None,
    value_scales: Array | None = None,
    *,
    hidden: tuple[Array, Array] | None = None,
    queries: Dimension,
    keys: Dimension,
) -> AttentionPart:
    """Compute softmax attention to a part of the keys. The attention mask must be bidirectional.

    Args:
      layout, q, k, v, lengths, key_scales, value_scales, queries, keys: see :func:`xla_attention`. A query need not see
        a key.
      hidden: int32 ``[B]`` each, start and end (exclusive) of a range of keys that no query sees; None for no range.
    """
    assert not layout.config.attention_mask.depends_on_position, "all queries of a row see the same keys"
    arrays = (q, k, v, jnp.zeros_like(lengths), lengths, key_scales, value_scales, hidden)
    found = _on_layout(layout, arrays, queries, keys, part=True)
    assert isinstance(found, AttentionPart)
    return found


def merge_parts(one: AttentionPart, other: AttentionPart) -> Array:
    """Return softmax attention to the keys of both parts, float32 ``[B, S, K, G, H]``.

    Every query must see at least one key of either part.
    """
    largest = jnp.maximum(one.largest, other.largest)
    shares = [part.total * jnp.exp(part.largest - largest) for part in (one, other)]
    return (one.out * shares[0] + other.out * shares[1]) / (shares[0] + shares[1])


def _on_layout(
    layout: ModelLayout, arrays: tuple[Any, ...], queries: Dimension, keys: Dimension, *, part: bool
) -> Array | AttentionPart:
    """Compute attention with all scores at once, or in blocks on each device.

    Args:
      layout: the model on its mesh.
      arrays: ``q``, ``k``, ``v``, ``starts``, ``lengths``, ``key_scales``, ``value_scales`` and ``hidden``.
      queries: see :func:`xla_attention`.
      keys: likewise.
      part: compute :func:`attention_part` rather than :func:`xla_attention`.
    """
    q, k, v, starts, lengths, key_scales, value_scales, hidden = arrays
    mask, rules, sizes = layout.config.attention_mask, layout.rules, layout.mesh_axis_sizes
    B, S, K, G, _ = q.shape
    T = k.shape[2]
    heads = K * G // rules.shards(("kv_heads", "queries_per_kv"), sizes)
    shape = [size // rules.shards(axis, sizes) for size, axis in ((B, "batch"), (S, queries), (T, keys))]
    platform = layout.mesh.devices.flat[0].platform if layout.mesh is not None else jax.default_backend()
    # On CPU, dividing the weights takes a pass over them of its own. On accelerators, the softmax's kernel does it.
    divide = platform != "cpu"
    block = query_block(platform, shape[0], heads, G // rules.shards("queries_per_kv", sizes), shape[1], shape[2])
    if block is None:
        # With the head axes first, each head is a plain matrix product. XLA on CPU runs this four times faster than the
        # original order of axes, with the same bits.
        visible = _visible(mask, starts, jnp.arange(S), jnp.arange(T), lengths, hidden)[:, None, None]
        dtype = jnp.float32 if part else None
        q = q.transpose(0, 2, 3, 1, 4)
        found = AttentionPart(*_attend(q, k, v, visible, key_scales, value_scales, dtype, divide=divide))
        if not divide:
            found = found.divided()
        ordered = AttentionPart(*(values.transpose(0, 3, 1, 2, 4) for values in found))
        return ordered if part else ordered.out.astype(q.dtype)
    if layout.mesh is None or layout.mesh.size == 1:
        return _in_blocks(mask, block, (), (), *arrays, part=part, divide=divide)
    # The compiler would gather arrays that a loop over rows and heads slices, so each device loops over its own shard.
    rows, kept = rules.spec("batch"), rules.spec("batch", "kv_heads", keys, "head_dim")
    asked = rules.spec("batch", queries, "kv_heads", "queries_per_kv", "head_dim")
    scales = rules.spec("batch", "kv_heads", keys)
    asked_over, kept_over = (tuple(axis for axis in rules.mesh_axes(one) if sizes[axis] > 1) for one in (queries, keys))
    return jax.shard_map(
        partial(_in_blocks, mask, block, asked_over, kept_over, part=part, divide=divide),
        mesh=layout.mesh,
        in_specs=(asked, kept, kept, rows, rows, scales, scales, rows),
        out_specs=asked,
        check_vma=False,
    )(*arrays)
