"""The transformer with a KV cache: whole rows that fill the cache, and windows that attend to it.

Dimension letters: B batch, R rows that fill the cache, S sequence, W window, T cache length, D embed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from runtime.models.families import Weights
from runtime.models.forward import KV_HEADS, Forward
from runtime.models.kv_cache import Cache, KVCache, attend, cache_length, write_rows, write_window
from runtime.models.transformer import run_layer, run_layer_at, run_layers, window_tables

Array = jax.Array


def fill_rows(
    forward: Forward,
    weights: Weights,
    cache: Cache,
    tokens: Array,
    lengths: Array,
    first: Array,
    copies: int = 1,
    positions: Array | None = None,
    outputs: tuple[Array, int] | None = None,
) -> tuple[Array, Cache]:
    """Run whole rows and write their keys and values into the cache: a prefill, or a refresh.

    Args:
      forward: layout and attention implementation.
      weights: the model's weights.
      cache: the KV cache; its length T is at least S.
      tokens: int32 ``[R, S]``, start-aligned. Every ``data`` shard has the same number of rows.
      lengths: int32 ``[R]``, tokens of each row, at least 1.
      first: int32 ``[data]``, for each ``data`` shard, the index within the shard of the cache row that its first new
        row replaces; -1 if nothing is to be written.
      copies: number of adjacent cache rows that each of the R rows fills. It is above 1 for samples of one prompt.
      positions: int32 ``[R, S]``, position of each token in its text; None for its index. The attention mask must be
        bidirectional.
      outputs: the positions whose activations are needed: of each row the first, int32 ``[R]``, and their number W. The
        last layer computes only keys and values of the others. For a single device, layers that are not stacked, and
        ``positions=None``. None for all positions.

    Returns:
      Activations after the final norm, ``[R, S, D]``, or ``[R, W, D]`` of the positions ``outputs``, and the updated
      cache. Activations of positions after the S-th have no meaning.
    """
    forward = forward.for_rows(*tokens.shape)
    positions = jnp.arange(tokens.shape[1]) if positions is None else positions
    with jax.named_scope("embed"):
        x = weights.embed(forward, tokens, positions)
    tables = weights.position_tables(forward, positions, x.dtype)

    def step(x: Array, layer: Any, cache: KVCache, number: Any) -> tuple[Array, KVCache]:
        x, k, v = run_layer(forward, layer, x, lengths, tables)
        k, v = (jnp.repeat(part, copies, axis=0) if copies > 1 else part for part in (k, v))
        return x, write_rows(forward.layout, cache, number, k, v, first)

    def last(x: Array, layer: Any, cache: KVCache, number: Any) -> tuple[Array, KVCache]:
        assert outputs is not None
        x, k, v = run_layer_at(forward, layer, x, lengths, tables, *outputs)
        return x, write_rows(forward.layout, cache, number, k, v, first)

    x, cache = run_layers(forward, weights, x, step, cache, None if outputs is None else last)
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
    row: Array | None = None,
    positions: Array | None = None,
) -> tuple[Array, Cache]:
    """Run a window of every row with the cache, or of one row of each ``data`` shard.

    In each layer, the window's keys and values are first written into the cache; then the window attends to the cache.

    Args:
      forward: layout of the model. Every ``sequence`` shard computes the whole window.
      weights: the model's weights.
      cache: the KV cache.
      tokens: int32 ``[B, W]``, tokens of the windows.
      starts: int32 ``[B]``, position of each window's first token.
      lengths: int32 ``[B]``, row lengths. Positions at or after them are not attended to. The model's attention mask
        applies as well.
      stops: int32 ``[B]``. Positions at or after them are not written to the cache, and their activations are
        meaningless. None writes the whole window.
      row: int32 ``[data]``, index within each ``data`` shard of the only row that has a window; B is then the number of
        shards. None for a window of every row.
      positions: int32 ``[B, W]``, position of each token in its text; None for its index in the cache. The attention
        mask must be bidirectional.

    Returns:
      Activations after the final norm, ``[B, W, D]``, and the updated cache.
    """
    layout, forward = forward.layout, forward.window
    positions = starts[:, None] + jnp.arange(tokens.shape[1]) if positions is None else positions
    stops = jnp.full_like(starts, cache_length(cache)) if stops is None else stops
    with jax.named_scope("embed"):
        x = weights.embed(forward, tokens, positions)
    tables = window_tables(forward, weights, positions, cache_length(cache), x.dtype)

    def step(x: Array, layer: Any, cache: KVCache, number: Any) -> tuple[Array, KVCache]:
        with jax.named_scope("attention"):
            q, k, v = layer.project_qkv(forward, x, tables)
            k = forward.constrain(k, "batch", None, *KV_HEADS)
            v = forward.constrain(v, "batch", None, *KV_HEADS)
            cache = write_window(layout, cache, number, k, v, starts, stops, row)
            attended = attend(layout, cache, number, q, starts, lengths, row)
        return layer.finish(forward, x, attended), cache

    x, cache = run_layers(forward, weights, x, step, cache)
    with jax.named_scope("final_norm"):
        return weights.normalize(forward, x), cache
