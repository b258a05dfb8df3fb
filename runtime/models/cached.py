"""The transformer with a cache: rows that fill it, and windows that are computed against it.

Dimension letters: B batch, R rows that are filled, S sequence, W window, T cache length, D embed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from runtime.models.families import Weights
from runtime.models.forward import KV_HEADS, Forward
from runtime.models.kv_cache import Cache, KVCache, attend, cache_length, write_rows, write_window
from runtime.models.transformer import block, run_layers

Array = jax.Array


def fill_rows(
    forward: Forward,
    weights: Weights,
    cache: Cache,
    tokens: Array,
    lengths: Array,
    first: Array,
    copies: int = 1,
) -> tuple[Array, Cache]:
    """Run whole rows and keep their keys and values: a prefill, or a refresh.

    Args:
      forward: layout and attention implementation.
      weights: the model.
      cache: where the rows live; its T is at least S.
      tokens: int32 ``[R, S]``, start-aligned, as many rows for each shard of ``data``.
      lengths: int32 ``[R]``, at least 1.
      first: int32 ``[data]``, the row of each data shard that its first of R is; -1 where none is to be kept.
      copies: rows of the cache that each of R fills, next to one another: several samples of one prompt.

    Returns:
      Final-norm activations ``[R, S, D]`` and the cache.
    """
    forward = forward.for_rows(*tokens.shape)
    positions = jnp.arange(tokens.shape[1])
    with jax.named_scope("embed"):
        x = weights.embed(forward, tokens, positions)
    tables = weights.position_tables(forward, positions, x.dtype)

    def step(x: Array, layer: Any, cache: KVCache, number: Any) -> tuple[Array, KVCache]:
        x, k, v = block(forward, layer, x, lengths, tables)
        k, v = (jnp.repeat(part, copies, axis=0) if copies > 1 else part for part in (k, v))
        return x, write_rows(forward.layout, cache, number, k, v, first)

    x, cache = run_layers(forward, weights, x, step, cache)
    with jax.named_scope("final_norm"):
        return forward.constrain(weights.normalize(forward, x), "batch", "canvas", "embed"), cache


def run_window(
    forward: Forward,
    weights: Weights,
    cache: Cache,
    tokens: Array,
    starts: Array,
    lengths: Array,
    stops: Array | None = None,
) -> tuple[Array, Cache]:
    """Run a window of every row against the cache, replacing the window's own keys and values first.

    Args:
      forward: layout; a window is computed whole on every shard of ``sequence``.
      weights: the model.
      cache: keys and values of everything else.
      tokens: int32 ``[B, W]``.
      starts: int32 ``[B]``, position of each window's first token.
      lengths: int32 ``[B]``: positions at or after them are not attended to, nor what the attention mask of
        the model hides from a position.
      stops: int32 ``[B]``, positions at or after them are not written to the cache, and what they return means
        nothing; None where all of it does.

    Returns:
      Final-norm activations ``[B, W, D]`` and the cache.
    """
    layout, forward = forward.layout, forward.window
    positions = starts[:, None] + jnp.arange(tokens.shape[1])
    stops = jnp.full_like(starts, cache_length(cache)) if stops is None else stops
    with jax.named_scope("embed"):
        x = weights.embed(forward, tokens, positions)
    tables = weights.position_tables(forward, positions, x.dtype)

    def step(x: Array, layer: Any, cache: KVCache, number: Any) -> tuple[Array, KVCache]:
        with jax.named_scope("attention"):
            q, k, v = layer.project_qkv(forward, x, tables)
            k = forward.constrain(k, "batch", None, *KV_HEADS)
            v = forward.constrain(v, "batch", None, *KV_HEADS)
            cache = write_window(layout, cache, number, k, v, starts, stops)
            attended = attend(layout, cache, number, q, starts, lengths)
        return layer.finish(forward, x, attended), cache

    x, cache = run_layers(forward, weights, x, step, cache)
    with jax.named_scope("final_norm"):
        return weights.normalize(forward, x), cache
