"""Rows that move from one KV cache to another, with all their layers, on the same mesh.

Dimension letters: L layers, B batch, K kv heads, T cache length, H head dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from runtime.models.arrays import declarations
from runtime.models.declarations import ModelLayout
from runtime.models.kv_cache import Cache, KVCache, cache_length, on_mesh, with_default_layout

Array = jax.Array
_FLOAT_BYTES = 4


def _axis(layout: ModelLayout, name: str) -> tuple[tuple[str, ...], Any]:
    """Return the mesh axes (of more than one device) that shard a logical axis, and this device's index on them."""
    axes = tuple(axis for axis in layout.rules.mesh_axes(name) if layout.mesh_axis_sizes[axis] > 1)
    return axes, jax.lax.axis_index(axes) if axes else 0


def _parts(cache: Cache) -> tuple[KVCache, ...]:
    return cache if isinstance(cache, tuple) else (cache,)


def _packed(cache: Cache) -> Array:
    """Concatenate all arrays of a cache into one, ``[L, B, K, T, ...]``: keys, values, then the bits of the scales."""
    layers = []
    for part in _parts(cache):
        stacks: list[Array] = [part.keys, part.values]
        for scales in (part.key_scales, part.value_scales):
            if scales is not None:
                stacks.append(jax.lax.bitcast_convert_type(scales, part.keys.dtype))
        layers.append(jnp.concatenate(stacks, axis=-1))
    return jnp.concatenate(layers)


def _unpacked(packed: Array, like: Cache) -> Cache:
    """Invert :func:`_packed`, with the layer structure of the cache ``like``."""
    found, first, size = [], 0, _parts(like)[0].keys.shape[-1]
    for part in _parts(like):
        own = packed[first : first + part.keys.shape[0]]
        first += part.keys.shape[0]
        scales = [
            jax.lax.bitcast_convert_type(own[..., start : start + _FLOAT_BYTES], jnp.float32)
            for start in range(2 * size, own.shape[-1], _FLOAT_BYTES)
        ]
        found.append(KVCache(own[..., :size], own[..., size : 2 * size], *scales))
    return tuple(found) if isinstance(like, tuple) else found[0]


def _specs(layout: ModelLayout, cache: Cache) -> Cache:
    if isinstance(cache, tuple):
        return tuple(_specs(layout, part) for part in cache)  # type: ignore[misc]
    there = {name: one for name, one in declarations(KVCache).items() if getattr(cache, name) is not None}
    return KVCache(**{name: layout.rules.spec(*one.axes) for name, one in there.items()})


def take_row(layout: ModelLayout, cache: Cache, row: Array, length: int) -> Array:
    """Copy one row of every layer out of a cache, in a form that :func:`put_row` can write into another cache.

    The copy is replicated over ``data`` and ``sequence``. If the rows or positions are sharded, this takes one
    all-reduce.

    Args:
      layout: the model on its mesh.
      cache: the cache to read.
      row: int32, index of the row among all rows.
      length: number of positions of the copy, at least as many as in the cache. Additional positions are zero.

    Returns:
      All arrays of the row, concatenated: ``[L, 1, K, length, ...]``.
    """

    def take(row: Array, cache: Cache) -> Array:
        own, positions = _parts(cache)[0].keys.shape[1], cache_length(cache)
        batch, shard = _axis(layout, "batch")
        sequence, part = _axis(layout, "length")
        piece = _packed(jax.tree.map(lambda stack: jax.lax.dynamic_slice_in_dim(stack, row % own, 1, axis=1), cache))
        piece = jnp.where(row // own == shard, piece, jnp.zeros((), piece.dtype))
        whole = jnp.zeros((*piece.shape[:3], length, piece.shape[4]), piece.dtype)
        whole = jax.lax.dynamic_update_slice_in_dim(whole, piece, part * positions, axis=3)
        return jax.lax.psum(whole, (*batch, *sequence)) if batch or sequence else whole

    with jax.named_scope("cache_take"):
        taken: Array = on_mesh(layout, take, (PartitionSpec(), _specs(layout, cache)), row_spec(layout), row, cache)
        return taken


def put_row(layout: ModelLayout, cache: Cache, row: Array, taken: Array) -> Cache:
    """Replace a row of a cache by a row from :func:`take_row`, without communication.

    Args:
      layout: the model on its mesh.
      cache: the cache to update.
      row: int32, index of the row to replace among all rows.
      taken: the copied row, with at least as many positions as the cache.
    """

    def put(row: Array, taken: Array, cache: Cache) -> Cache:
        own, positions = _parts(cache)[0].keys.shape[1], cache_length(cache)
        _, shard = _axis(layout, "batch")
        _, part = _axis(layout, "length")
        piece = _unpacked(jax.lax.dynamic_slice_in_dim(taken, part * positions, positions, axis=3), cache)

        def write(stack: Array, new: Array) -> Array:
            old = jax.lax.dynamic_slice_in_dim(stack, row % own, 1, axis=1)
            new = jnp.where(row // own == shard, new, old)
            return jax.lax.dynamic_update_slice_in_dim(stack, with_default_layout(new), row % own, axis=1)

        written: Cache = jax.tree.map(write, cache, piece)
        return written

    specs = _specs(layout, cache)
    with jax.named_scope("cache_put"):
        written: Cache = on_mesh(layout, put, (PartitionSpec(), row_spec(layout), specs), specs, row, taken, cache)
        return written


def row_spec(layout: ModelLayout) -> PartitionSpec:
    """Return the partition spec of a row that :func:`take_row` returns."""
    return layout.rules.spec("layers", None, "kv_heads", None, "head_dim")
