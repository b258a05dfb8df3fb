"""The sharded KV cache of autoregressive and diffusion models.

The cache is declared like the weights, by logical axes: rows are sharded over ``data``, KV heads over the ``kv`` part
of ``tensor``, positions over ``sequence``. A decoding loop carries the cache, and writes update it in place.

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

from runtime.models.arrays import Leaf, abstract, array
from runtime.models.declarations import ModelLayout
from runtime.models.quantization import int8_scales, int8_values
from runtime.models.splash_blocks import LANES
from runtime.models.xla_attention import xla_attention
from sharding.errors import InputError

Array = jax.Array
CACHE_DTYPES = ("model", "bfloat16", "float32", "int8")


@flax.struct.dataclass
class KVCache:
    """Keys and values of one or more layers.

    Attributes:
      keys, values: ``[L, B, K, T, H]``; H is the head dim or, on TPU, :func:`stored_head_dim`.
      key_scales, value_scales: float32 ``[L, B, K, T]`` for an int8 cache, otherwise None.
    """

    keys: Leaf = array("layers", "batch", "kv_heads", "length", "head_dim")
    values: Leaf = array("layers", "batch", "kv_heads", "length", "head_dim")
    key_scales: Leaf = array("layers", "batch", "kv_heads", "length", dtype=jnp.float32, feature="int8")
    value_scales: Leaf = array("layers", "batch", "kv_heads", "length", dtype=jnp.float32, feature="int8")


# The cache of a model: one KVCache for all layers if the layers are scanned, otherwise a tuple with one per layer.
Cache = KVCache | tuple[KVCache, ...]


def cache_dtype(name: str, model_dtype: Any) -> Any:
    """Return the dtype for a name in :data:`CACHE_DTYPES`; ``model`` stands for ``model_dtype``, the weights' dtype.

    Raises:
      InputError: the name is unknown.
    """
    if name not in CACHE_DTYPES:
        raise InputError(f"cache dtype {name!r} is not one of {', '.join(CACHE_DTYPES)}")
    return jnp.dtype(model_dtype if name == "model" else name)


def abstract_cache(layout: ModelLayout, batch: int, length: int, dtype: Any, platform: str | None = None) -> Cache:
    """Return a model's cache as ``ShapeDtypeStruct``, with shardings if the layout has a mesh.

    Args:
      layout: the model on its mesh.
      batch: B, a multiple of the data axis.
      length: T, a multiple of the sequence axis.
      dtype: dtype of keys and values. An int8 cache has scales as well.
      platform: platform of the devices if the layout has no mesh, see :func:`stored_head_dim`.
    """
    layers = layout.config.num_layers
    sizes = layout.config.dimensions | {"batch": batch, "length": length, "layers": layers if layout.scan_layers else 1}
    sizes["head_dim"] = stored_head_dim(layout, platform)
    features = ("int8",) if jnp.dtype(dtype) == jnp.int8 else ()
    part = abstract(layout, KVCache, sizes, features, dtype=dtype)
    return part if layout.scan_layers else (part,) * layers


def stored_head_dim(layout: ModelLayout, platform: str | None = None) -> int:
    """Return the size of a head in the cache. On TPU, heads are padded with zeros to whole registers.

    The TPU compiler would store narrower heads with positions in the minor dimension, and copy the whole cache into
    another memory layout, and back, in every program that writes windows.

    Args:
      layout: the model, with or without a mesh.
      platform: platform of the devices if the layout has no mesh; None pads no heads.
    """
    size = layout.config.head_dim
    platform = platform if layout.mesh is None else layout.mesh.devices.flat[0].platform
    return math.ceil(size / LANES) * LANES if platform == "tpu" else size


def cache_length(cache: Cache) -> int:
    """Return T, the number of positions per row in a model's cache."""
    length: int = jax.tree.leaves(cache)[0].shape[3]
    return length


def cache_bytes_per_device(
    layout: ModelLayout, batch: int, length: int, dtype: Any, platform: str | None = None
) -> int:
    """Return the bytes that a cache takes on each device, replication over ``group`` included.

    The arguments are those of :func:`abstract_cache`.
    """
    sizes = layout.mesh_axis_sizes
    shards = math.prod(layout.rules.shards(axis, sizes) for axis in ("batch", "kv_heads", "length"))
    leaves = jax.tree.leaves(abstract_cache(layout, batch, length, dtype, platform))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) // shards


def _quantized(values: Array) -> tuple[Array, Array]:
    """Quantize ``[..., H]`` to int8, with one float32 scale ``[...]`` per head and position."""
    wide = values.astype(jnp.float32)
    scales = int8_scales(jnp.max(jnp.abs(wide), axis=-1, keepdims=True))
    return int8_values(wide, scales), scales[..., 0]


def _on_shards(layout: ModelLayout, write: Callable[..., Array], where: Array, *new: Array) -> Callable[[Array], Array]:
    """Return a function that runs ``write`` on each device's shard of a stack ``[L, B, K, T, ...]``.

    Args:
      layout: the model on its mesh.
      write: called as ``write(shard, stack, where, *new)``; ``shard`` is the device's index on the ``sequence`` axis.
      where: rows or positions to write to: ``[B, ...]``, or one entry per ``data`` shard.
      new: arrays to write, ``[B or R, S, K, ...]``, or scalars.
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


def with_default_layout(array: Array) -> Array:
    """Keep the dimensions of an array in their order in memory."""
    # Without this constraint, the compiler may change the memory layout of the whole cache to suit the written array,
    # and change it back for the readers.
    return with_layout_constraint(array, Layout(major_to_minor=tuple(range(array.ndim))))


def _write_rows(shard: Any, stack: Array, first: Array, new: Array, layer: Array) -> Array:
    """Write whole rows ``new`` ``[R, S, K, ...]`` from position 0 into the shard's rows from ``first[0]`` on."""
    new, length = jnp.moveaxis(new, 1, 2), stack.shape[3]
    if new.shape[2] > length or not isinstance(shard, int):
        places = shard * length + jnp.arange(length)
        inside = (places < new.shape[2]).reshape(-1, *(1,) * (new.ndim - 3))
        new = jnp.where(inside, jnp.take(new, jnp.minimum(places, new.shape[2] - 1), axis=2), 0)
    place: list[Any] = [layer, jnp.maximum(first[0], 0), *[0] * (stack.ndim - 2)]
    old = jax.lax.dynamic_slice(stack, place, (1, *new.shape))
    piece = jnp.where(first[0] >= 0, new[None], old)
    return jax.lax.dynamic_update_slice(stack, with_default_layout(piece), place)


def _write_window(shard: Any, stack: Array, spans: Array, new: Array, layer: Array) -> Array:
    """Write the windows of R rows into one layer of a cache, and return the changed shard.

    Args:
      shard: this device's index on the ``sequence`` axis, which divides T.
      stack: this device's shard of the cache, ``[L, B, K, T, ...]``.
      spans: ``[R, 2]`` or ``[R, 3]``, the start and the end (exclusive) of each window, and the row that it belongs
        to. Without a third column, there is one window for every row.
      new: ``[R, W, K, ...]``, values of the windows; those after a window's end are not written.
      layer: index of the layer.
    """
    length = stack.shape[3]
    places = spans[:, :1] + jnp.arange(new.shape[1])
    inside = places < spans[:, 1:2]
    places = places - shard * length
    places = jnp.where(inside & (places >= 0) & (places < length), places, length)
    # The scatter is indexed by head too. For a scatter of slices [K, H] the compiler would change the memory layout of
    # the cache to keep each position's heads together.
    rows = jnp.arange(new.shape[0]) if spans.shape[1] == 2 else spans[:, 2]
    rows, heads = rows[:, None, None], jnp.arange(new.shape[2])
    if stack.ndim == 5:
        return with_default_layout(stack.at[layer, rows, heads, places[..., None]].set(new, mode="drop"))
    # Scales: a scatter of single numbers would make the compiler copy the scales of all layers. One layer's scales are
    # small, so they are read, changed and written back.
    own = jax.lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False)
    own = own.at[rows, heads, places[..., None]].set(new, mode="drop")
    return jax.lax.dynamic_update_index_in_dim(stack, with_default_layout(own), layer, 0)


def stored(name: str, new: Array, dtype: Any) -> dict[str, Array]:
    """Convert keys (``name="key"``) or values (``"value"``) ``[..., H]`` to what a cache of this dtype stores.

    Returns:
      By field of :class:`KVCache`: the converted array, and the scales ``[...]`` if the dtype is int8.
    """
    if dtype == jnp.int8:
        return dict(zip((f"{name}s", f"{name}_scales"), _quantized(new), strict=True))
    return {f"{name}s": new.astype(dtype)}


def _padded(new: Array, stack: Array) -> Array:
    """Pad the heads of new values to those of a cache; scales have no heads."""
    if stack.ndim < 5 or new.shape[-1] == stack.shape[-1]:
        return new
    return jnp.pad(new, [(0, 0)] * (new.ndim - 1) + [(0, stack.shape[-1] - new.shape[-1])])


def _write(
    layout: ModelLayout, cache: KVCache, how: Any, k: Array, v: Array, where: Array, layer: Array | int
) -> KVCache:
    written = {}
    for name, new in (("key", k), ("value", v)):
        for field, part in stored(name, new, getattr(cache, f"{name}s").dtype).items():
            stack = getattr(cache, field)
            written[field] = _on_shards(layout, how, where, _padded(part, stack), jnp.asarray(layer))(stack)
    return dataclasses.replace(cache, **written)


def write_stored(
    layout: ModelLayout, cache: KVCache, layer: Array | int, new: KVCache, starts: Array, stops: Array
) -> KVCache:
    """Write a window of every row, like :func:`write_window`, from arrays ``[B, K, W, ...]`` of :func:`stored`."""
    spans = jnp.stack([starts, stops], axis=1)

    def write(stack: Array, part: Array) -> Array:
        part = _padded(part, stack)
        return _on_shards(layout, _write_window, spans, jnp.moveaxis(part, 1, 2), jnp.asarray(layer))(stack)

    with jax.named_scope("cache_window"):
        written: KVCache = jax.tree.map(write, cache, new)
        return written


def layer_of(cache: KVCache, layer: Array | int, head_dim: int) -> KVCache:
    """Return one layer of a cache, with the first ``head_dim`` numbers of each head: arrays ``[B, K, T, ...]``."""

    def take(stack: Array) -> Array:
        sizes = (1, *stack.shape[1:4], head_dim)[: stack.ndim]
        return jax.lax.dynamic_slice(stack, (layer, *[0] * (stack.ndim - 1)), sizes)[0]

    found: KVCache = jax.tree.map(take, cache)
    return found


def write_rows(layout: ModelLayout, cache: KVCache, layer: Array | int, k: Array, v: Array, first: Array) -> KVCache:
    """Write whole rows of one layer, starting at position 0.

    Args:
      layout: the model on its mesh.
      cache: the cache to update.
      layer: index of the layer in the cache.
      k: keys ``[R, S, K, H]``, with the same number of rows on every ``data`` shard and all positions on every
        ``sequence`` shard.
      v: values, like ``k``.
      first: int32 ``[data]``, for each ``data`` shard, the index within the shard of the row that its first new row
        replaces; -1 writes nothing.
    """
    with jax.named_scope("cache_rows"):
        return _write(layout, cache, _write_rows, k, v, first, layer)


def _copy_row(shard: Any, stack: Array, rows: Array) -> Array:
    """Copy row ``rows[0, 0]`` of this shard over row ``rows[0, 1]``; nothing if one of them is -1."""
    del shard
    source, target = jnp.maximum(rows[0, 0], 0), jnp.maximum(rows[0, 1], 0)
    piece = jax.lax.dynamic_slice_in_dim(stack, jnp.where(rows[0].min() < 0, target, source), 1, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(stack, with_default_layout(piece), target, axis=1)


def copy_row(layout: ModelLayout, cache: Cache, source: Array, target: Array) -> Cache:
    """Copy one row of the cache over another one, in every layer.

    Args:
      layout: the model on its mesh.
      cache: the cache to update.
      source: int32 ``[data]``, index within each ``data`` shard of the row to copy; -1 copies nothing.
      target: int32 ``[data]``, index within each ``data`` shard of the row to replace; -1 copies nothing.
    """
    with jax.named_scope("cache_copy"):
        copied: Cache = jax.tree.map(
            lambda stack: _on_shards(layout, _copy_row, jnp.stack([source, target], axis=1))(stack), cache
        )
        return copied


def on_mesh(layout: ModelLayout, function: Callable[..., Any], specs: Any, out: Any, *arguments: Any) -> Any:
    """Call ``function`` on each device with the device's shards of the arguments."""
    if layout.mesh is None or layout.mesh.size == 1:
        return function(*arguments)
    return jax.shard_map(function, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)(*arguments)


def write_window(
    layout: ModelLayout,
    cache: KVCache,
    layer: Array | int,
    k: Array,
    v: Array,
    starts: Array,
    stops: Array,
    row: Array | None = None,
) -> KVCache:
    """Write a window of every row of one layer, or of one row of each ``data`` shard.

    Args:
      layout: the model on its mesh.
      cache: the cache to update.
      layer: index of the layer in the cache.
      k: keys ``[B, W, K, H]``, or ``[data, W, K, H]`` with ``row``, with all positions of the window on every
        ``sequence`` shard.
      v: values, like ``k``.
      starts: int32 ``[B]`` or ``[data]``, position of each row's window. Positions outside the cache are not written.
      stops: int32, like ``starts``. Positions at or after them are not written.
      row: int32 ``[data]``, index of the row within each ``data`` shard; None for every row.
    """
    spans = jnp.stack([starts, stops] if row is None else [starts, stops, row], axis=1)
    with jax.named_scope("cache_window"):
        return _write(layout, cache, _write_window, k, v, spans, layer)


def _one_row(layout: ModelLayout, layer: KVCache, row: Array) -> KVCache:
    """Return one row of each ``data`` shard ``[data, K, T, ...]`` of a layer ``[B, K, T, ...]``."""

    def take(row: Array, layer: KVCache) -> KVCache:
        found: KVCache = jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, row[0], 1, axis=0), layer)
        return found

    place = layout.rules.spec("batch", "kv_heads", "length", "head_dim")
    specs = jax.tree.map(lambda part: PartitionSpec(*place[: part.ndim]), layer)
    found: KVCache = on_mesh(layout, take, (layout.rules.spec("batch"), specs), specs, row, layer)
    return found


def attend(
    layout: ModelLayout,
    cache: KVCache,
    layer: Array | int,
    q: Array,
    starts: Array,
    lengths: Array,
    row: Array | None = None,
) -> Array:
    """Compute attention of a window of every row to one layer of the cache, with the model's attention mask.

    Args:
      layout: the model on its mesh.
      cache: the cache, which already contains the window's own keys and values.
      layer: int32, index of the layer in the cache.
      q: queries ``[B, W, K, G, H]``, with all positions of the window on every ``sequence`` shard. With ``row``, B is
        the number of ``data`` shards.
      starts: int32 ``[B]``, position of each row's window.
      lengths: int32 ``[B]``, row lengths. Positions at or after them are not attended to.
      row: int32 ``[data]``, index of the row within each ``data`` shard; None for every row.

    Returns:
      ``[B, W, K, G, H]``.
    """
    own = layer_of(cache, layer, q.shape[-1])
    if row is not None:
        own = _one_row(layout, own, row)
    arrays = (q, own.keys, own.values, starts, lengths, own.key_scales, own.value_scales)
    return xla_attention(layout, *arrays, queries=None, keys="length")
