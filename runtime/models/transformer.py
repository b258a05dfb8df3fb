"""The transformer that every family here is: blocks over a whole canvas, and the head on chosen positions.

Dimension letters: B batch, S sequence, P positions of one head chunk, D embed, V vocab.

Rows are start-aligned: a row's tokens stand at positions ``0 .. length - 1`` and filler follows, so that positions
are ``arange`` and padding is one ``lengths`` vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from runtime.models.attention import dot_product_attention
from runtime.models.families import Weights
from runtime.models.forward import KV_HEADS, Forward

Array = jax.Array


def block(forward: Forward, layer: Any, x: Array, lengths: Array, tables: Any) -> tuple[Array, Array, Array]:
    """One residual block over whole rows, under the attention mask of the model.

    Args:
      forward: layout and attention implementation.
      layer: weights of one layer.
      x: ``[B, S, D]``.
      lengths: int32 ``[B]``; keys at or after them are masked.
      tables: what the layer knows of positions.

    Returns:
      The block's output ``[B, S, D]``, keys and values ``[B, S, K, H]``.
    """
    with jax.named_scope("attention"):
        q, k, v = layer.project_qkv(forward, x, tables)
        # Every position attends to all keys: on a sequence axis this is the all-gather of K and V, the only one.
        k = forward.constrain(k, "batch", None, *KV_HEADS)
        v = forward.constrain(v, "batch", None, *KV_HEADS)
        attended = dot_product_attention(forward.attention, forward.layout, q, k, v, lengths)
    return layer.finish(forward, x, attended), k, v


def run_layers(
    forward: Forward, weights: Weights, x: Array, step: Callable[..., tuple[Array, Any]], cache: Any = None
) -> tuple[Array, Any]:
    """Run every layer, in the form in which the layout has them.

    Args:
      forward: the layout.
      weights: the model.
      x: ``[B, S, D]``, what goes into the first layer.
      step: ``step(x, layer, cache, number)``: a layer's weights, the cache that it is part of and its number there, to
        the layer's output and that cache.
      cache: a cache of this layout, or None, which every layer then gets and gives.

    Returns:
      What comes out of the last layer, and the cache.
    """

    def named(x: Array, layer: Any, cache: Any, number: Any) -> tuple[Array, Any]:
        with jax.named_scope("layer"):
            return step(x, layer, cache, number)

    if forward.layout.scan_layers:
        numbers = jnp.arange(forward.config.num_layers)
        return jax.lax.scan(
            lambda carry, own: (named(carry[0], own[1], carry[1], own[0]), None), (x, cache), (numbers, weights.layers)
        )[0]
    caches = []
    for layer, own in zip(weights.layers, cache or [None] * len(weights.layers), strict=True):
        # Else compilers leave the writes to the cache to the end, and hold every layer's keys and values till then.
        x, own = jax.lax.optimization_barrier(named(x, layer, own, 0))
        caches.append(own)
    return x, cache and tuple(caches)


def hidden_states(forward: Forward, weights: Weights, tokens: Array, lengths: Array) -> Array:
    """The transformer without its head.

    Args:
      forward: layout and attention implementation.
      weights: the model.
      tokens: int32 ``[B, S]``, start-aligned rows, anything after ``lengths``.
      lengths: int32 ``[B]``, tokens of each row, at least 1.

    Returns:
      Final-norm activations ``[B, S, D]`` in the weights' dtype; those after ``lengths`` mean nothing.
    """
    forward = forward.for_rows(*tokens.shape)
    positions = jnp.arange(tokens.shape[1])
    with jax.named_scope("embed"):
        x = weights.embed(forward, tokens, positions)
    tables = weights.position_tables(forward, positions, x.dtype)

    def step(x: Array, layer: Any, cache: None, number: Any) -> tuple[Array, None]:
        return block(forward, layer, x, lengths, tables)[0], None

    x, _ = run_layers(forward, weights, x, step)
    with jax.named_scope("final_norm"):
        return forward.constrain(weights.normalize(forward, x), "batch", "canvas", "embed")


def pick_positions(forward: Forward, hidden: Array, positions: Array, *, whole: bool = False) -> Array:
    """Activations of chosen positions: ``[B, S, D]``, int32 ``[B, P]`` -> ``[B, P, D]``, positions sharded like S.

    On a sequence axis every shard gives the rows it has, and one reduce-scatter of ``[B, P, D]`` brings them together;
    or, for a few positions, an all-reduce that leaves the ``whole`` of them on every shard.
    """
    layout = forward.layout
    axes = layout.rules.mesh_axes("canvas")
    if layout.spec.sequence == 1 or not axes:
        return jnp.take_along_axis(hidden, positions[..., None], axis=1, mode="clip")

    def local(hidden: Array, positions: Array) -> Array:
        places = positions - jax.lax.axis_index(axes) * hidden.shape[1]
        here = (places >= 0) & (places < hidden.shape[1])
        picked = jnp.take_along_axis(hidden, places[..., None], axis=1, mode="clip")
        picked = jnp.where(here[..., None], picked, 0)
        if whole:
            return jax.lax.psum(picked, axes)
        return jax.lax.psum_scatter(picked, axes, scatter_dimension=1, tiled=True)

    canvas, rows = layout.rules.spec("batch", "canvas", "embed"), layout.rules.spec("batch")
    specs, out = (canvas, rows), rows if whole else canvas
    assert layout.mesh is not None
    with jax.named_scope("pick_positions"):
        return jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)(hidden, positions)


def project_logits(forward: Forward, weights: Weights, hidden: Array) -> Array:
    """Head on chosen positions: ``[B, P, D]`` -> float32 logits ``[B, P, V]``, padding of the vocabulary at -inf.

    Positions are sharded over ``sequence``, the vocabulary over ``tensor``.
    """
    with jax.named_scope("lm_head"):
        hidden = forward.constrain(hidden, "batch", "canvas", "embed")
        # Logits are rounded to the weights' dtype first, as the original's are, then widened.
        logits = weights.head(forward, hidden).astype(jnp.float32)
        logits = forward.constrain(logits, "batch", "canvas", "vocab")
        if logits.shape[-1] > forward.config.vocab_size:
            valid = jnp.arange(logits.shape[-1]) < forward.config.vocab_size
            logits = jnp.where(valid, logits, -jnp.inf)
        return logits
