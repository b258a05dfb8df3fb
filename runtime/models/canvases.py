"""Windows of several canvases of every row that read one KV cache: a row's canvas, and guesses of its later canvases.

All canvases of a row have the same window. Each attends to the cache outside the window, which they share, and inside
it to its own keys and values. These are kept beside the cache, converted to its dtype; afterwards, those of one canvas
are written into the cache. So a canvas is computed as if it alone had been written there.

Dimension letters: B batch, N canvases of a row, W window, T cache length, L layers, D embed, K kv heads, G query heads
per KV head, H head dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from runtime.models.families import Weights
from runtime.models.forward import KV_HEADS, Forward
from runtime.models.kv_cache import Cache, KVCache, abstract_cache, cache_length, layer_of, stored, write_stored
from runtime.models.transformer import run_layers, window_tables
from runtime.models.xla_attention import attention_part, merge_parts

Array = jax.Array


def empty_windows(forward: Forward, cache: Cache, rows: int, width: int) -> Cache:
    """Return keys and values of windows, all zero, with the layers and the dtype of a cache.

    Args:
      forward: layout of the model.
      cache: the cache.
      rows: B * N, windows.
      width: W.

    Returns:
      A cache ``[L, B * N, K, W, ...]``, with all positions on every ``sequence`` shard.
    """
    first = cache[0] if isinstance(cache, tuple) else cache
    shapes = abstract_cache(replace(forward.window.layout, mesh=None), rows, width, first.keys.dtype)
    empty: Cache = jax.tree.map(lambda leaf: _placed(forward, jnp.zeros(leaf.shape, leaf.dtype)), shapes)
    return empty


def _placed(forward: Forward, stack: Array) -> Array:
    return forward.constrain(stack, *("layers", "batch", "kv_heads", None, "head_dim")[: stack.ndim])


def run_canvases(
    forward: Forward,
    weights: Weights,
    cache: Cache,
    tokens: Array,
    starts: Array,
    lengths: Array,
    stops: Array,
    positions: Array | None = None,
) -> tuple[Array, Cache]:
    """Run the windows of several canvases of every row, without changing the cache.

    The model's attention mask must be bidirectional.

    Args:
      forward: layout of the model. Every ``sequence`` shard computes all windows.
      weights: the model's weights.
      cache: the KV cache.
      tokens: int32 ``[B, N, W]``, tokens of the windows.
      starts: int32 ``[B]``, position of the first token of each row's windows.
      lengths: int32 ``[B]``, row lengths. Positions at or after them are not attended to.
      stops: int32 ``[B]``. Positions at or after them are outside the window, and their activations are meaningless.
      positions: int32 ``[B, W]``, position of each token in its text; None for its index in the cache.

    Returns:
      Activations after the final norm, ``[B, N, W, D]``; and the windows' keys and values, see :func:`empty_windows`.
    """
    forward, (rows, number, width) = forward.window, tokens.shape
    positions = starts[:, None] + jnp.arange(width) if positions is None else positions
    positions, tokens = jnp.tile(positions, (1, number)), tokens.reshape(rows, -1)
    with jax.named_scope("embed"):
        x = weights.embed(forward, tokens, positions)
    tables = window_tables(forward, weights, positions, cache_length(cache), x.dtype)

    def step(x: Array, layer: Any, caches: tuple[KVCache, KVCache], of: Any) -> tuple[Array, tuple[KVCache, KVCache]]:
        cache, windows = caches
        with jax.named_scope("attention"):
            q, k, v = layer.project_qkv(forward, x, tables)
            new: dict[str, Array] = {}
            for name, values in (("key", k), ("value", v)):
                values = forward.constrain(values.reshape(rows * number, width, *k.shape[2:]), "batch", None, *KV_HEADS)
                new |= stored(name, jnp.moveaxis(values, 1, 2), cache.keys.dtype)
            attended = _attend(forward, layer_of(cache, of, q.shape[-1]), KVCache(**new), q, starts, lengths, stops)
            windows = jax.tree.map(
                lambda stack, part: _placed(forward, jax.lax.dynamic_update_index_in_dim(stack, part, of, 0)),
                windows,
                KVCache(**new),
            )
        return layer.finish(forward, x, attended), (cache, windows)

    windows: Any = empty_windows(forward, cache, rows * number, width)
    # A layout with a cache per layer has a pair per layer.
    pairs: Any = tuple(zip(cache, windows, strict=True)) if isinstance(cache, tuple) else (cache, windows)
    x, pairs = run_layers(forward, weights, x, step, pairs)
    windows = tuple(pair[1] for pair in pairs) if isinstance(cache, tuple) else pairs[1]
    with jax.named_scope("final_norm"):
        return weights.normalize(forward, x).reshape(rows, number, width, -1), windows


def _attend(
    forward: Forward, cache: KVCache, windows: KVCache, q: Array, starts: Array, lengths: Array, stops: Array
) -> Array:
    """Compute attention of all canvases to one layer of the cache outside their window, and to themselves inside it.

    Args:
      forward: layout of the model, see :attr:`Forward.window`.
      cache: the layer, ``[B, K, T, ...]``.
      windows: keys and values of the windows, ``[B * N, K, W, ...]``.
      q: queries ``[B, N * W, K, G, H]``.
      starts, lengths, stops: see :func:`run_canvases`.
    """
    layout, (total, width) = forward.layout, (windows.keys.shape[0], windows.keys.shape[2])
    scales = cache.key_scales, cache.value_scales
    hidden = starts, stops
    outside = attention_part(
        layout, q, cache.keys, cache.values, lengths, *scales, hidden=hidden, queries=None, keys="length"
    )
    sizes = jnp.minimum(stops, lengths) - starts
    sizes = jnp.broadcast_to(sizes[:, None], (len(sizes), total // len(sizes))).reshape(-1)
    own = q.reshape(total, width, *q.shape[2:])
    scales = windows.key_scales, windows.value_scales
    inside = attention_part(layout, own, windows.keys, windows.values, sizes, *scales, queries=None, keys=None)
    inside = jax.tree.map(lambda values: values.reshape(*q.shape[:4], -1), inside)
    return merge_parts(outside, inside).astype(q.dtype)


def write_canvas(forward: Forward, cache: Cache, windows: Cache, chosen: Array, starts: Array, stops: Array) -> Cache:
    """Write the window of one canvas of each row into every layer of the cache.

    Args:
      forward: layout of the model.
      cache: the cache to update.
      windows: keys and values of all windows, see :func:`run_canvases`.
      chosen: int32 ``[B]``, index of the canvas among the N of each row.
      starts: int32 ``[B]``, position of each row's window.
      stops: int32 ``[B]``. Positions at or after them are not written.
    """

    def select(stack: Array) -> Array:
        # A gather by row would be divided across devices less well than this sum, whose other terms are zero.
        by_row = stack.reshape(stack.shape[0], len(chosen), -1, *stack.shape[2:])
        here = jnp.arange(by_row.shape[2]) == chosen[:, None]
        here = here.reshape(1, *here.shape, *(1,) * (by_row.ndim - 3))
        return _placed(forward, jnp.where(here, by_row, jnp.zeros((), stack.dtype)).sum(axis=2, dtype=stack.dtype))

    own: Any = jax.tree.map(select, windows)
    layout, size = forward.layout, forward.config.head_dim
    if isinstance(cache, tuple):
        return tuple(
            write_stored(layout, one, 0, layer_of(new, 0, size), starts, stops)
            for one, new in zip(cache, own, strict=True)
        )

    def write(layer: Array, cache: KVCache) -> KVCache:
        return write_stored(layout, cache, layer, layer_of(own, layer, size), starts, stops)

    written: KVCache = jax.lax.fori_loop(0, layout.config.num_layers, write, cache)
    return written
