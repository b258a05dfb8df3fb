"""The transformer that all families share: layers over a whole canvas, and the output head on selected positions.

Dimension letters: B batch, S sequence, P positions of one chunk of the output head, D embed, K kv heads, H head dim,
V vocab.

Rows are padded on the right: a row's tokens are at positions ``0 .. length - 1``. So positions are ``arange(S)`` for
every row, and ``lengths`` tells tokens from padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from runtime.models.attention import dot_product_attention
from runtime.models.declarations import ModelLayout
from runtime.models.families import Weights
from runtime.models.forward import KV_HEADS, Forward
from runtime.models.leaves import WeightLeaf
from runtime.models.quantization import merge_contracted
from runtime.models.xla_attention import xla_attention

Array = jax.Array


def run_layer(forward: Forward, layer: Any, x: Array, lengths: Array, tables: Any) -> tuple[Array, Array, Array]:
    """Run one transformer layer over whole rows, with the model's attention mask.

    Args:
      forward: layout and attention implementation.
      layer: weights of the layer.
      x: residual ``[B, S, D]``.
      lengths: int32 ``[B]``, row lengths. Keys at or after them are masked.
      tables: position tables from :meth:`runtime.models.families.Weights.position_tables`.

    Returns:
      The layer's output ``[B, S, D]``, keys and values ``[B, S, K, H]``.
    """
    with jax.named_scope("attention"):
        q, k, v = layer.project_qkv(forward, x, tables)
        # Every position may attend to all keys. With a sequence axis, this is the only all-gather, of K and V.
        k = forward.constrain(k, "batch", None, *KV_HEADS)
        v = forward.constrain(v, "batch", None, *KV_HEADS)
        attended = dot_product_attention(forward.attention, forward.layout, q, k, v, lengths)
    return layer.finish(forward, x, attended), k, v


def run_layer_at(
    forward: Forward, layer: Any, x: Array, lengths: Array, tables: Any, starts: Array, width: int
) -> tuple[Array, Array, Array]:
    """Run one layer like :func:`run_layer`, but compute its output at a few positions only.

    For a single device. The compiler drops what the other positions do not need.

    Args:
      forward, layer, x, lengths, tables: see :func:`run_layer`; tables have one entry per position ``[S, ...]``.
      starts: int32 ``[B]``, the first of these positions in each row.
      width: W, their number. Those after the S-th have no meaning.

    Returns:
      The layer's output ``[B, W, D]``, keys and values ``[B, S, K, H]``.
    """
    places = jnp.minimum(starts[:, None] + jnp.arange(width), x.shape[1] - 1)
    with jax.named_scope("attention"):
        _, k, v = layer.project_qkv(forward, x, tables)
        own = jnp.take_along_axis(x, places[..., None], axis=1)
        q, _, _ = layer.project_qkv(forward, own, jax.tree.map(lambda table: jnp.take(table, places, axis=0), tables))
        keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        attended = xla_attention(forward.layout, q, keys, values, starts, lengths, queries=None, keys=None)
    return layer.finish(forward, own, attended), k, v


def window_tables(forward: Forward, weights: Weights, positions: Array, length: int, dtype: Any) -> Any:
    """Compute position tables, such as rotary cosines and sines, for windows of a few positions.

    Args:
      forward: layout of the model.
      weights: the model's weights.
      positions: int32 ``[B, W]``, below ``length``. Where one is not, the table has no meaning.
      length: number of positions of the cache.
      dtype: dtype of the tables.
    """
    if not forward.is_single_cpu or positions.shape[1] == 1:
        return weights.position_tables(forward, positions, dtype)
    # XLA on CPU would compute cosines and sines again in every layer and for every head, because it fuses them with the
    # operations that read them. It does not fuse a gather with them.
    whole = weights.position_tables(forward, jnp.arange(length, dtype=jnp.int32), dtype)
    return jax.tree.map(lambda table: jnp.take(table, positions, axis=0, mode="clip"), whole)


def run_layers(
    forward: Forward,
    weights: Weights,
    x: Array,
    step: Callable[..., tuple[Array, Any]],
    cache: Any = None,
    last: Callable[..., tuple[Array, Any]] | None = None,
) -> tuple[Array, Any]:
    """Run all layers: by a scan if the layout stacks them, otherwise by a Python loop.

    Args:
      forward: layout of the model.
      weights: the model's weights.
      x: ``[B, S, D]``, input of the first layer.
      step: called as ``step(x, layer, cache, number)`` with the weights of a layer, the :class:`KVCache` that contains
        the layer's entries, and the layer's index in it. Returns the layer's output and the updated cache.
      cache: a cache of this layout, or None; with None, ``step`` gets and returns None.
      last: the step of the last layer, if it is another one; not for stacked layers.

    Returns:
      The output of the last layer, and the updated cache.
    """

    def named(x: Array, layer: Any, cache: Any, number: Any) -> tuple[Array, Any]:
        with jax.named_scope("layer"):
            return step(x, layer, cache, number)

    if forward.layout.scan_layers:
        assert last is None, "a scan runs the same step in all layers"
        numbers, stacks = jnp.arange(forward.config.num_layers), _stacks_for_scan(forward.layout, weights)
        return jax.lax.scan(
            lambda carry, own: (named(carry[0], own[1], carry[1], own[0]), None), (x, cache), (numbers, stacks)
        )[0]
    caches: list[Any] = []
    for layer, own in zip(weights.layers, cache or [None] * len(weights.layers), strict=True):
        if last is not None and len(caches) + 1 == len(weights.layers):
            step = last
        # Without the barrier, compilers postpone the cache writes to the end, and keep the keys and values of every
        # layer in memory until then.
        x, own = jax.lax.optimization_barrier(named(x, layer, own, 0))
        caches.append(own)
    return x, cache and tuple(caches)


def _stacks_for_scan(layout: ModelLayout, weights: Weights) -> Any:
    """Return the stacked layers, with the contracted dimensions of each matrix merged into one.

    The TPU compiler reads a layer's matrix directly from the stack unless it has to merge dimensions of the slice: then
    it copies the slice first, an int8 one as bfloat16.
    """
    stacks = layout.named(weights)

    def merged(leaf: WeightLeaf) -> Any:
        stack = stacks[leaf.name]
        return merge_contracted(stack, 1) if leaf.layers and len(leaf.contracted) > 1 else stack

    return layout.build(merged).layers


def hidden_states(forward: Forward, weights: Weights, tokens: Array, lengths: Array) -> Array:
    """Run the transformer without its output head.

    Args:
      forward: layout and attention implementation.
      weights: the model's weights.
      tokens: int32 ``[B, S]``, start-aligned rows. Tokens after ``lengths`` are ignored.
      lengths: int32 ``[B]``, number of tokens in each row, at least 1.

    Returns:
      Activations after the final norm, ``[B, S, D]``, in the weights' dtype. Those after ``lengths`` are meaningless.
    """
    forward = forward.for_rows(*tokens.shape)
    positions = jnp.arange(tokens.shape[1])
    with jax.named_scope("embed"):
        x = weights.embed(forward, tokens, positions)
    tables = weights.position_tables(forward, positions, x.dtype)

    def step(x: Array, layer: Any, cache: None, number: Any) -> tuple[Array, None]:
        return run_layer(forward, layer, x, lengths, tables)[0], None

    x, _ = run_layers(forward, weights, x, step)
    with jax.named_scope("final_norm"):
        return forward.constrain(weights.normalize(forward, x), "batch", "canvas", "embed")


def pick_positions(
    forward: Forward, hidden: Array, positions: Array, rows: Array | None = None, *, whole: bool = False
) -> Array:
    """Select activations at given positions: ``[B, S, D]``, int32 ``[B, P]`` -> ``[B, P, D]``.

    With a sequence axis, each shard contributes the positions it holds, and one reduce-scatter combines them, so that P
    is sharded like S. With ``whole=True``, meant for a few positions, an all-reduce replicates all P positions instead.

    Args:
      forward: layout of the model.
      hidden: the activations.
      positions: canvas positions.
      rows: int32 ``[B, P]``, index within the ``data`` shard of the row that each position belongs to; None if each row
        has its own positions.
      whole: see above.
    """
    layout = forward.layout
    axes = layout.rules.mesh_axes("canvas")

    def picked(hidden: Array, positions: Array, rows: Array | None, shards: int) -> Array:
        if rows is None:
            return jnp.take_along_axis(hidden, positions[..., None], axis=1, mode="clip")
        merged = hidden.reshape(shards, -1, hidden.shape[-1])
        places = (rows * hidden.shape[1] + positions).reshape(shards, -1, 1)
        return jnp.take_along_axis(merged, places, axis=1, mode="clip").reshape(*positions.shape, -1)

    if layout.spec.sequence == 1 or not axes:
        return picked(hidden, positions, rows, layout.rules.shards("batch", layout.mesh_axis_sizes))

    def local(hidden: Array, positions: Array, rows: Array | None) -> Array:
        places = positions - jax.lax.axis_index(axes) * hidden.shape[1]
        here = (places >= 0) & (places < hidden.shape[1])
        found = jnp.where(here[..., None], picked(hidden, jnp.where(here, places, 0), rows, 1), 0)
        if whole:
            return jax.lax.psum(found, axes)
        return jax.lax.psum_scatter(found, axes, scatter_dimension=1, tiled=True)

    canvas, by_row = layout.rules.spec("batch", "canvas", "embed"), layout.rules.spec("batch")
    specs, out = (canvas, by_row, by_row), by_row if whole else canvas
    assert layout.mesh is not None
    with jax.named_scope("pick_positions"):
        call = jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)
        return call(hidden, positions, rows)


def project_logits(forward: Forward, weights: Weights, hidden: Array) -> Array:
    """Run the output head: ``[B, P, D]`` -> float32 logits ``[B, P, V]``, with -inf at padding of the vocabulary.

    Positions are sharded over ``sequence``, the vocabulary over ``tensor``.
    """
    with jax.named_scope("lm_head"):
        hidden = forward.constrain(hidden, "batch", "canvas", "embed")
        # As in the original code, logits are rounded to the weights' dtype before they are converted to float32.
        logits = weights.head(forward, hidden).astype(jnp.float32)
        logits = forward.constrain(logits, "batch", "canvas", "vocab")
        if logits.shape[-1] > forward.config.vocab_size:
            valid = jnp.arange(logits.shape[-1]) < forward.config.vocab_size
            logits = jnp.where(valid, logits, -jnp.inf)
        return logits
