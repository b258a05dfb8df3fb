"""The sharded cache of keys and values, of autoregressive models and of diffusion alike.

Declared like the weights, by logical axes: rows over ``data``, KV heads over ``tensor`` (its ``kv`` part), positions
over ``sequence``. A loop carries it and its writes are in place: nothing here makes a copy of it.

Dimension letters: L layers, B batch, R rows that are written whole, W window, T cache length, K kv heads,
G query heads per KV head, H head dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from runtime.models.arrays import Leaf, abstract, array, declarations
from runtime.models.declarations import ModelLayout
from runtime.models.xla_attention import xla_attention
from sharding.errors import InputError

Array = jax.Array
CACHE_DTYPES = ("model", "bfloat16", "float32", "int8")
_INT8_MAX = 127.0
_FLOAT_BYTES = 4


@flax.struct.dataclass
class KVCache:
    """Keys and values of layers.

    Attributes:
      keys, values: ``[L, B, K, T, H]``.
      key_scales, value_scales: float32 ``[L, B, K, T]`` where the cache is int8, else None.
    """

    keys: Leaf = array("layers", "batch", "kv_heads", "length", "head_dim")
    values: Leaf = array("layers", "batch", "kv_heads", "length", "head_dim")
    key_scales: Leaf = array("layers", "batch", "kv_heads", "length", dtype=jnp.float32, optional=True)
    value_scales: Leaf = array("layers", "batch", "kv_heads", "length", dtype=jnp.float32, optional=True)


# All layers of a model: one cache of them where they are scanned, else a tuple with a cache of one layer for each.
Cache = KVCache | tuple[KVCache, ...]

_SCALES = ("key_scales", "value_scales")


def cache_dtype(name: str, model_dtype: Any) -> Any:
    """The dtype that a cache of this name has beside weights of ``model_dtype``.

    Raises:
      InputError: it is none of :data:`CACHE_DTYPES`.
    """
    if name not in CACHE_DTYPES:
        raise InputError(f"cache dtype {name!r} is not one of {', '.join(CACHE_DTYPES)}")
    return jnp.dtype(model_dtype if name == "model" else name)


def abstract_cache(layout: ModelLayout, batch: int, length: int, dtype: Any) -> Cache:
    """A model's cache as ``ShapeDtypeStruct``, with shardings where the layout has a mesh.

    Args:
      layout: the model on its mesh.
      batch: B, a multiple of the data axis.
      length: T, a multiple of the sequence axis.
      dtype: of keys and values; int8 brings scales.
    """
    layers = layout.config.num_layers
    sizes = layout.config.dimensions | {"batch": batch, "length": length, "layers": layers if layout.scan_layers else 1}
    part = abstract(layout, KVCache, sizes, () if jnp.dtype(dtype) == jnp.int8 else _SCALES, dtype)
    return part if layout.scan_layers else (part,) * layers


def cache_length(cache: Cache) -> int:
    """T of a model's cache."""
    length: int = jax.tree.leaves(cache)[0].shape[3]
    return length


def cache_bytes_per_device(layout: ModelLayout, batch: int, length: int, dtype: Any) -> int:
    """Bytes of a cache on each device, replication over ``group`` included."""
    sizes = layout.mesh_axis_sizes
    shards = math.prod(layout.rules.shards(axis, sizes) for axis in ("batch", "kv_heads", "length"))
    leaves = jax.tree.leaves(abstract_cache(layout, batch, length, dtype))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) // shards


def _quantized(values: Array) -> tuple[Array, Array]:
    """``[..., H]`` -> int8 of the same shape and float32 scales ``[...]``: one for each head of each position."""
    wide = values.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=-1) / _INT8_MAX
    steps = jnp.where(scales == 0.0, 1.0, scales)
    return jnp.round(wide / steps[..., None]).astype(jnp.int8), scales


def _on_shards(layout: ModelLayout, write: Callable[..., Array], where: Array, *new: Array) -> Callable[[Array], Array]:
    """``write(shard of sequence, stack, where, *new)`` on every device's part of a stack ``[L, B, K, T, ...]``.

    ``where`` is ``[B, ...]`` or has an entry for each shard of ``data``; ``new``: ``[B or R, S, K, ...]`` or scalars.
    """

    def run(stack: Array) -> Array:
        if layout.mesh is None or layout.mesh.size == 1:
            return write(0, stack, where, *new)
        rules = layout.rules
        axes = ("layers", "batch", "kv_heads", "length", "head_dim")[: stack.ndim]
        place = rules.spec(*axes)
        heads = rules.spec("batch", None, "kv_heads", "head_dim")
        specs = (place, rules.spec("batch"), *(PartitionSpec(*heads[: array.ndim]) for array in new))
        sequence = rules.mesh_axes("length")

        def local(stack: Array, *arrays: Array) -> Array:
            return write(jax.lax.axis_index(sequence), stack, *arrays)

        call = jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=place, check_vma=False)
        return call(stack, where, *new)

    return run


def _as_it_lies(array: Array) -> Array:
    # Else the compiler may lay all of the cache out anew to suit what is written, and back for its readers.
    return with_layout_constraint(array, Layout(major_to_minor=tuple(range(array.ndim))))


def _write_rows(shard: Any, stack: Array, first: Array, new: Array, layer: Array) -> Array:
    """Whole rows from position 0: ``new`` ``[R, S, K, ...]`` to rows ``first[0] ..`` of this shard."""
    new, length = jnp.moveaxis(new, 1, 2), stack.shape[3]
    if new.shape[2] > length or not isinstance(shard, int):
        places = shard * length + jnp.arange(length)
        inside = (places < new.shape[2]).reshape(-1, *(1,) * (new.ndim - 3))
        new = jnp.where(inside, jnp.take(new, jnp.minimum(places, new.shape[2] - 1), axis=2), 0)
    place: list[Any] = [layer, jnp.maximum(first[0], 0), *[0] * (stack.ndim - 2)]
    old = jax.lax.dynamic_slice(stack, place, (1, *new.shape))
    piece = jnp.where(first[0] >= 0, new[None], old)
    return jax.lax.dynamic_update_slice(stack, _as_it_lies(piece), place)


def _write_window(shard: Any, stack: Array, spans: Array, new: Array, layer: Array) -> Array:
    """A window of every row: ``new`` ``[B, W, K, ...]`` to positions from ``spans[:, 0]`` to before ``spans[:, 1]``."""
    length = stack.shape[3]
    places = spans[:, :1] + jnp.arange(new.shape[1])
    inside = places < spans[:, 1:]
    places = places - shard * length
    places = jnp.where(inside & (places >= 0) & (places < length), places, length)
    # Indexed by head too: a scatter of [K, H] would have the compiler lay the cache out anew, position by position.
    rows, heads = jnp.arange(new.shape[0])[:, None, None], jnp.arange(new.shape[2])
    if stack.ndim == 5:
        return _as_it_lies(stack.at[layer, rows, heads, places[..., None]].set(new, mode="drop"))
    # Scales: for a scatter of single numbers the compiler would copy those of all layers, and these are small.
    own = jax.lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False)
    own = own.at[rows, heads, places[..., None]].set(new, mode="drop")
    return jax.lax.dynamic_update_index_in_dim(stack, _as_it_lies(own), layer, 0)


def _write(
    layout: ModelLayout, cache: KVCache, how: Any, k: Array, v: Array, where: Array, layer: Array | int
) -> KVCache:
    written = {}
    for name, new in (("key", k), ("value", v)):
        stack = getattr(cache, f"{name}s")
        parts = {f"{name}s": new.astype(stack.dtype)}
        if stack.dtype == jnp.int8:
            parts = dict(zip((f"{name}s", f"{name}_scales"), _quantized(new), strict=True))
        for field, part in parts.items():
            written[field] = _on_shards(layout, how, where, part, jnp.asarray(layer))(getattr(cache, field))
    return dataclasses.replace(cache, **written)


def write_rows(layout: ModelLayout, cache: KVCache, layer: Array | int, k: Array, v: Array, first: Array) -> KVCache:
    """Replace whole rows of one layer, from position 0.

    Args:
      layout: the model on its mesh.
      cache: what to write into.
      layer: which of its layers.
      k: ``[R, S, K, H]``, as many rows for each shard of ``data``, whole on every shard of ``sequence``.
      v: like ``k``.
      first: int32 ``[data]``, the row of each data shard's own rows that its first new row replaces; -1 for none.
    """
    with jax.named_scope("cache_rows"):
        return _write(layout, cache, _write_rows, k, v, first, layer)


def _copy_row(shard: Any, stack: Array, rows: Array) -> Array:
    """Row ``rows[0, 0]`` of this shard over row ``rows[0, 1]``."""
    del shard
    source, target = jnp.maximum(rows[0, 0], 0), jnp.maximum(rows[0, 1], 0)
    piece = jax.lax.dynamic_slice_in_dim(stack, jnp.where(rows[0].min() < 0, target, source), 1, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(stack, _as_it_lies(piece), target, axis=1)


def copy_row(layout: ModelLayout, cache: Cache, source: Array, target: Array) -> Cache:
    """Copy a row of every layer over another one.

    Args:
      layout: the model on its mesh.
      cache: where both are.
      source: int32 ``[data]``, the row among each data shard's own; -1 for none.
      target: like ``source``.
    """
    with jax.named_scope("cache_copy"):
        copied: Cache = jax.tree.map(
            lambda stack: _on_shards(layout, _copy_row, jnp.stack([source, target], axis=1))(stack), cache
        )
        return copied


def _axis(layout: ModelLayout, name: str) -> tuple[tuple[str, ...], Any]:
    """Mesh axes of more than one device that a logical axis is cut over, and this device's shard of it."""
    axes = tuple(axis for axis in layout.rules.mesh_axes(name) if layout.mesh_axis_sizes[axis] > 1)
    return axes, jax.lax.axis_index(axes) if axes else 0


def _parts(cache: Cache) -> tuple[KVCache, ...]:
    return cache if isinstance(cache, tuple) else (cache,)


def _packed(cache: Cache) -> Array:
    """All arrays of a cache as one, ``[L, B, K, T, ...]``; numbers beside a head's lie after them, bit by bit."""
    layers = []
    for part in _parts(cache):
        stacks: list[Array] = [part.keys, part.values]
        for scales in (part.key_scales, part.value_scales):
            if scales is not None:
                stacks.append(jax.lax.bitcast_convert_type(scales, part.keys.dtype))
        layers.append(jnp.concatenate(stacks, axis=-1))
    return jnp.concatenate(layers)


def _unpacked(packed: Array, like: Cache) -> Cache:
    """The inverse of :func:`_packed`, in the layers of another cache."""
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


def _on_mesh(layout: ModelLayout, function: Callable[..., Any], specs: Any, out: Any, *arguments: Any) -> Any:
    """``function`` on every device's part of its arguments."""
    if layout.mesh is None or layout.mesh.size == 1:
        return function(*arguments)
    return jax.shard_map(function, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)(*arguments)


def _specs(layout: ModelLayout, cache: Cache) -> Cache:
    if isinstance(cache, tuple):
        return tuple(_specs(layout, part) for part in cache)  # type: ignore[misc]
    there = {name: one for name, one in declarations(KVCache).items() if getattr(cache, name) is not None}
    return KVCache(**{name: layout.rules.spec(*one.axes) for name, one in there.items()})


def take_row(layout: ModelLayout, cache: Cache, row: Array, length: int) -> Array:
    """One row of every layer, on every shard of ``data`` and ``sequence``: a copy that other caches can take in.

    It crosses the mesh in one collective, where more than one shard of rows or positions has a part of it.

    Args:
      layout: the model on its mesh.
      cache: where it is.
      row: int32, its number among all rows.
      length: positions of the copy, at least as many as the cache has; zero where it has none.

    Returns:
      All arrays of the row side by side, ``[L, 1, K, length, ...]``.
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
        taken: Array = _on_mesh(layout, take, (PartitionSpec(), _specs(layout, cache)), row_spec(layout), row, cache)
        return taken


def put_row(layout: ModelLayout, cache: Cache, row: Array, taken: Array) -> Cache:
    """Write a row that :func:`take_row` has taken over a row of a cache; no device needs anything of another.

    Args:
      layout: the model on its mesh.
      cache: where to.
      row: int32, its number among all rows.
      taken: of at least as many positions as the cache has.
    """

    def put(row: Array, taken: Array, cache: Cache) -> Cache:
        own, positions = _parts(cache)[0].keys.shape[1], cache_length(cache)
        _, shard = _axis(layout, "batch")
        _, part = _axis(layout, "length")
        piece = _unpacked(jax.lax.dynamic_slice_in_dim(taken, part * positions, positions, axis=3), cache)

        def write(stack: Array, new: Array) -> Array:
            old = jax.lax.dynamic_slice_in_dim(stack, row % own, 1, axis=1)
            new = jnp.where(row // own == shard, new, old)
            return jax.lax.dynamic_update_slice_in_dim(stack, _as_it_lies(new), row % own, axis=1)

        written: Cache = jax.tree.map(write, cache, piece)
        return written

    specs = _specs(layout, cache)
    with jax.named_scope("cache_put"):
        written: Cache = _on_mesh(layout, put, (PartitionSpec(), row_spec(layout), specs), specs, row, taken, cache)
        return written


def row_spec(layout: ModelLayout) -> PartitionSpec:
    """How a row on its way from one cache to another lies on the mesh."""
    return layout.rules.spec("layers", None, "kv_heads", None, "head_dim")


def write_window(
    layout: ModelLayout, cache: KVCache, layer: Array | int, k: Array, v: Array, starts: Array, stops: Array
) -> KVCache:
    """Replace a window of every row of one layer.

    Args:
      layout: the model on its mesh.
      cache: what to write into.
      layer: which of its layers.
      k: ``[B, W, K, H]``, whole on every shard of ``sequence``.
      v: like ``k``.
      starts: int32 ``[B]``, position of each row's window; what lies outside the cache is not written.
      stops: int32 ``[B]``, positions at or after them are not written.
    """
    with jax.named_scope("cache_window"):
        return _write(layout, cache, _write_window, k, v, jnp.stack([starts, stops], axis=1), layer)


def attend(layout: ModelLayout, cache: KVCache, layer: Array | int, q: Array, starts: Array, lengths: Array) -> Array:
    """Attention of a window of every row to one layer of a cache, under the attention mask of the model.

    Args:
      layout: the model on its mesh.
      cache: with the window's own keys and values in it.
      layer: int32, which layer.
      q: ``[B, W, K, G, H]``, whole on every shard of ``sequence``.
      starts: int32 ``[B]``, position of each row's window.
      lengths: int32 ``[B]``, positions at or after them are not attended to.
    """
    own: KVCache = jax.tree.map(lambda stack: jax.lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False), cache)
    arrays = (q, own.keys, own.values, starts, lengths, own.key_scales, own.value_scales)
    return xla_attention(layout, *arrays, queries=None, keys="length")
