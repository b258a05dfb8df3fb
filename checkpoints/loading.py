"""Loads stored tensors onto the devices of a mesh.

Every process reads the slices that its own devices need, one layer at a time: host memory holds a few tensors of a
layer and never the whole model. Transposition, stacking and padding follow from the declarations of the weights.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from checkpoints.errors import MismatchedCheckpointError
from checkpoints.folder import CheckpointFolder
from checkpoints.lora import merged_tensors, open_adapter
from checkpoints.opening import open_tensors
from checkpoints.source import DTYPES, Index, Limit, StoredTensor, StoredTensors, read_ahead
from runtime.models.declarations import ModelLayout
from runtime.models.families import parse_config
from runtime.models.leaves import WeightLeaf
from runtime.models.quantization import QUANTIZATIONS
from sharding.settings import own_settings

# An object store takes a while to answer a read, so a host reads this many tensors from it at a time, as long as they
# take no more than this many bytes.
REMOTE_READERS = 24
_REMOTE_BYTES = 2 << 30
# Tensors up to this size are transposed by the host: a program is compiled for every shape and sharding, and that takes
# longer than the transposition. Of larger ones, the devices are faster, and the host needs no second copy.
SMALL_BYTES = 2 << 20

_HEAD = "lm_head.weight"

# Called with the bytes read so far and the bytes to read.
Progress = Callable[[int, int], None]


def check_tensors(folder: CheckpointFolder, leaves: list[WeightLeaf], found: StoredTensors) -> None:
    """Check that the tensors are exactly those that a model declares.

    A head may be stored although it is tied to the embedding (Qwen3-0.6B has one); see :func:`check_tied_head`.

    Raises:
      MismatchedCheckpointError: lists all missing, unknown, duplicate and mis-shaped tensors.
    """
    expected = {source: leaf.source_shape for leaf in leaves for source in leaf.sources}
    integers = {source: leaf.integers for leaf in leaves if leaf.quantized for source in leaf.sources}
    problems = [f"missing: {name} {list(expected[name])}" for name in expected if name not in found.by_name]
    unused = {_HEAD} if parse_config(folder.config).tied_embeddings else set()
    problems += [
        f"shape: {name} is {list(found[name].shape)}, which has no elements or no dimension"
        for name in found.by_name.keys() & unused
        if not all(found[name].shape or [0])
    ]
    unknown = found.by_name.keys() - expected.keys() - unused
    problems += [f"unknown: {name:.200} {list(found[name].shape)}" for name in found.by_name if name in unknown]
    for name, copies in found.by_name.items():
        if len(copies) > 1:
            problems.append(f"duplicate: {name:.200} is in {len(copies)} files")
        if name in expected and copies[0].shape != expected[name]:
            problems.append(f"shape: {name} is {list(copies[0].shape)}; config.json says {list(expected[name])}")
        supported = (integers[name],) if name in integers else DTYPES
        if copies[0].dtype not in supported:
            problems.append(f"dtype: {name:.200} is {copies[0].dtype}; supported: {', '.join(supported)}")
    absent = sorted(found.claims - found.by_name.keys() - expected.keys())
    problems += [f"index: {name:.200} is in no file" for name in absent]
    if problems:
        raise MismatchedCheckpointError(
            f"{folder.place}: the weights do not match the model of config.json:\n  " + "\n  ".join(problems)
        )


def check_tied_head(folder: CheckpointFolder, layout: ModelLayout, found: StoredTensors) -> None:
    """Check that a head that is stored although it is tied to the embedding equals it, so that it need not be loaded.

    Raises:
      MismatchedCheckpointError: it differs, so the model was trained with both. transformers uses both then.
    """
    if not layout.config.tied_embeddings or _HEAD not in found.by_name:
        return
    head, embedding = found[_HEAD], found[layout.embedding.sources[0]]
    if head.shape == embedding.shape:
        parts = head.parts(embedding.rows)
        if all(np.array_equal(head.read(part), embedding.read(part), equal_nan=True) for part in parts):
            return
    raise MismatchedCheckpointError(
        f"{folder.place}: {_HEAD} differs from {embedding.name}, but config.json ties the head to the embedding; if "
        'the head was trained, set "tie_word_embeddings" to false in config.json'
    )


def stored_leaves(folder: CheckpointFolder, layout: ModelLayout) -> list[WeightLeaf]:
    """Return the leaves that a checkpoint must have, quantized as its configuration says.

    Raises:
      MismatchedCheckpointError: the quantization is not supported.
    """
    if folder.quantization not in QUANTIZATIONS:
        raise MismatchedCheckpointError(
            f"{folder.place}: quantization {folder.quantization!r:.40} is not one of {', '.join(QUANTIZATIONS)}"
        )
    return replace(layout, quantization=folder.quantization).stored_leaves


def kept_quantization(folder: CheckpointFolder, asked: str) -> str:
    """Return how devices keep the weights: as the checkpoint stores them if that is quantized, otherwise as asked."""
    return folder.quantization if folder.quantization != "none" else asked


def check_weights(folder: CheckpointFolder, layout: ModelLayout, verify: str = "full") -> str | None:
    """Check, without reading data, that a checkpoint has exactly the declared weights, and that its adapter fits them.

    Args:
      folder: the checkpoint.
      layout: its model; no mesh is needed.
      verify: how the weights will be loaded, see :func:`load_weights`. Only ``none`` leaves out the manifest here.

    Returns:
      The dtype in which they are stored; None if there are several.

    Raises:
      CheckpointError: lists all missing, unknown, duplicate and mis-shaped tensors, or says what is damaged.
    """
    found = open_tensors(folder, verify="none" if verify == "none" else "sizes")
    check_tensors(folder, stored_leaves(folder, layout), found)
    open_adapter(folder, layout)
    return _stored_dtype(folder, layout, found)


def _stored_dtype(folder: CheckpointFolder, layout: ModelLayout, found: StoredTensors) -> str | None:
    # The dtype of a quantized checkpoint is that of the tensors that are not quantized.
    plain = {leaf.sources[0] for leaf in layout.leaves if not leaf.contracted or folder.quantization == "none"}
    leaves = stored_leaves(folder, layout)
    dtypes = {found[source].dtype for leaf in leaves for source in leaf.sources if leaf.sources[0] in plain}
    return dtypes.pop() if len(dtypes) == 1 else None


def _runs(leaf: WeightLeaf, sizes: dict[str, int], kept: Mapping[str, tuple[int, int]]) -> list[list[slice]]:
    """Return, for each dimension of a source tensor, the slices that together select ``kept``.

    ``kept`` maps logical axes to ranges. A dimension that merges several logical axes may need several slices.
    """
    found = []
    for merge in leaf.source_axes:
        # Axes after the last one that is cut are kept whole, so each range of that axis is contiguous in the dimension.
        cut = [place for place, axis in enumerate(merge) if kept[axis] != (0, sizes[axis])]
        last = max(cut, default=0)
        stride = math.prod(sizes[axis] for axis in merge[last + 1 :])
        low, high = kept[merge[last]]
        starts = [0]
        for axis in merge[:last]:
            starts = [start * sizes[axis] + number for start in starts for number in range(*kept[axis])]
        firsts = [start * sizes[merge[last]] for start in starts]
        found.append([slice((first + low) * stride, (first + high) * stride) for first in firsts])
    return found


def _read_part(leaf: WeightLeaf, tensor: StoredTensor, index: Index) -> np.ndarray:
    """Read a part of a source tensor; unmerge its dimensions and fill padding with zeros.

    Args:
      leaf: the weight that the tensor belongs to.
      tensor: the source tensor.
      index: the part, over the axes of :func:`_source_order`.
    """
    sizes, axes = leaf.sizes, _source_order(leaf)
    ranges = {
        axis: part.indices(size)[:2] for axis, part, size in zip(axes, index, _padded_sizes(leaf, axes), strict=True)
    }
    kept = {axis: (min(low, sizes[axis]), min(high, sizes[axis])) for axis, (low, high) in ranges.items()}
    wanted = [high - low for low, high in ranges.values()]
    if any(low == high for low, high in kept.values()):  # only padding
        return np.zeros(wanted, tensor.dtype)
    runs = _runs(leaf, sizes, kept)
    if all(len(pieces) == 1 for pieces in runs):
        data = tensor.read(tuple(pieces[0] for pieces in runs))
    else:
        data = np.empty([sum(piece.stop - piece.start for piece in pieces) for pieces in runs], tensor.dtype)
        ends = [list(itertools.accumulate(piece.stop - piece.start for piece in pieces)) for pieces in runs]
        for place in itertools.product(*(range(len(pieces)) for pieces in runs)):
            source = tuple(pieces[at] for pieces, at in zip(runs, place, strict=True))
            target = tuple(
                slice(end[at] - piece.stop + piece.start, end[at])
                for end, at, piece in zip(ends, place, source, strict=True)
            )
            data[target] = tensor.read(source)
    data = data.reshape([high - low for low, high in kept.values()])
    padding = [(0, size - have) for size, have in zip(wanted, data.shape, strict=True)]
    return np.pad(data, padding) if any(after for _, after in padding) else np.ascontiguousarray(data)


def _source_order(leaf: WeightLeaf) -> list[str]:
    """Return a leaf's logical axes, without that of layers, in the order of its source tensor's dimensions."""
    return [axis for merge in leaf.source_axes for axis in merge]


def _padded_sizes(leaf: WeightLeaf, axes: list[str]) -> list[int]:
    sizes = dict(zip(leaf.axes, leaf.padded_shape, strict=True))
    return [sizes[axis] for axis in axes]


@partial(jax.jit, donate_argnums=0)
def _set_layer(stack: Any, layer: Any, number: jax.Array) -> Any:
    return jax.tree.map(lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, number, 0), stack, layer)


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return _zeros_program(leaf.shape, leaf.dtype, leaf.sharding)()


@functools.lru_cache(256)
def _zeros_program(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Callable[[], jax.Array]:
    """Return a program that is compiled once for all weights of a shape, dtype and sharding."""
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)


# Parts of a tensor by the index of a device's shard.
_Parts = dict[tuple[tuple[int, int], ...], np.ndarray]


def _key(index: Any, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _read_parts(layout: ModelLayout, leaf: WeightLeaf, tensor: StoredTensor, dtype: Any) -> _Parts:
    """Read the parts of a source tensor for this host's devices. Devices with the same part share one read."""
    axes = _source_order(leaf)
    shape = tuple(_padded_sizes(leaf, axes))
    parts: _Parts = {}
    for index in layout.sharding(*axes).addressable_devices_indices_map(shape).values():
        assert index is not None, "a device of this host holds a part of every weight"
        key = _key(index, shape)
        if key not in parts:
            parts[key] = _read_part(leaf, tensor, index).astype(dtype, copy=False)
    return parts


# Cached, so that equal leaves and models share one program.
@functools.lru_cache(256)
def _transpose(order: tuple[int, ...], sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: jnp.copy(jnp.transpose(array, order)), out_shardings=sharding)


def _to_devices(layout: ModelLayout, leaf: WeightLeaf, dtype: Any) -> Callable[[_Parts], jax.Array]:
    """Return a function that puts a layer of a leaf on the mesh, and transposes it: on the mesh unless it is small."""
    axes = _source_order(leaf)
    shape = tuple(_padded_sizes(leaf, axes))
    wanted = leaf.axes[1:] if leaf.is_stacked else leaf.axes
    order = tuple(axes.index(axis) for axis in wanted)
    sharding, wanted_sharding = layout.sharding(*axes), layout.sharding(*wanted)
    if math.prod(shape) * jnp.dtype(dtype).itemsize <= SMALL_BYTES:
        return partial(_put_small, tuple(shape[axis] for axis in order), wanted_sharding, order, dtype)
    transpose = _transpose(order, wanted_sharding)

    def put(parts: _Parts) -> jax.Array:
        # A CPU device may use the host's buffer, so a copy is kept.
        array = jax.make_array_from_callback(shape, sharding, lambda index: parts[_key(index, shape)], dtype=dtype)
        kept = transpose(array).block_until_ready()
        # The host's buffers are released before the next tensor is read. JAX only lists the buffers of a deleted array,
        # and drops the listed ones whenever Python collects garbage; collecting generation 0 takes microseconds.
        array.delete()
        parts.clear()
        gc.collect(0)
        return kept

    return put


def _put_small(
    shape: tuple[int, ...], sharding: NamedSharding, order: tuple[int, ...], dtype: Any, parts: _Parts
) -> jax.Array:
    """Transpose parts on the host, and put them on the mesh as an array of this shape and sharding."""
    # Copies, because a CPU device may use the host's buffer, and a part may be a view of a file.
    own = {
        tuple(key[axis] for axis in order): np.array(part.transpose(order), order="C") for key, part in parts.items()
    }
    parts.clear()
    return jax.make_array_from_callback(shape, sharding, lambda index: own[_key(index, shape)], dtype=dtype)


def _layers(
    layout: ModelLayout, leaf: WeightLeaf, parts: list[tuple[WeightLeaf, Any]], reading: Iterator[_Parts]
) -> Iterator[Any]:
    """Yield the layers of a leaf on the mesh: as they are stored, or quantized on the devices."""
    puts = [_to_devices(layout, part, dtype) for part, dtype in parts]
    finish = layout.quantizer(leaf, layered=False) if len(parts) == 1 else layout.unpacker(leaf)
    while True:
        yield finish(*[put(next(reading)) for put in puts])


def _parts(leaf: WeightLeaf, stored: str, dtype: Any) -> list[tuple[WeightLeaf, Any]]:
    """Return the leaves that a layer of a leaf is read from, with their dtypes on the devices.

    They are the leaf itself or, if the checkpoint is quantized (``stored``), its integers and its scales.
    """
    if stored != "none" and leaf.quantized:
        return [(part, jnp.dtype(part.integers or jnp.float32)) for part in leaf.stored]
    return [(leaf, dtype)]


def _read_ahead(
    layout: ModelLayout,
    leaves: Sequence[tuple[WeightLeaf, list[tuple[WeightLeaf, Any]]]],
    tensors: StoredTensors,
    readers: int,
) -> Iterator[_Parts]:
    """Read the tensors of all leaves in order; the next ones are read while one is transferred to the devices.

    Args:
      layout: the model on its mesh.
      leaves: each leaf with its parts and their dtypes, see :func:`_parts`.
      tensors: the checkpoint's tensors.
      readers: maximum number of tensors that are read at the same time.
    """
    order = [
        (part, part.sources[number], dtype)
        for leaf, parts in leaves
        for number in range(len(leaf.sources))
        for part, dtype in parts
    ]
    sizes = (math.prod(tensors[source].shape) * jnp.dtype(dtype).itemsize for _, source, dtype in order)
    reads = (partial(_read_parts, layout, part, tensors[source], dtype) for part, source, dtype in order)
    return read_ahead(reads, readers, Limit(_REMOTE_BYTES, sizes))


@dataclass(frozen=True)
class LoadedBytes:
    """Bytes of weights that a host loaded.

    Attributes:
      bytes_read: bytes that this host read from the checkpoint.
      bytes_held: bytes on this host's devices, with padding and replicas.
      bytes_stored: bytes of all weights in the checkpoint.
      stored_dtype: their dtype, of a quantized checkpoint that of the other weights; None if there are several.
    """

    bytes_read: int
    bytes_held: int
    bytes_stored: int
    stored_dtype: str | None


@own_settings()
def load_weights(
    folder: CheckpointFolder,
    layout: ModelLayout,
    dtype: Any,
    progress: Progress | None = None,
    verify: str = "full",
) -> tuple[Any, LoadedBytes]:
    """Load a checkpoint's weights onto a mesh.

    Args:
      folder: the checkpoint, of any format. Its LoRA adapter, if it has one, is merged before weights are quantized.
      layout: the model on its mesh.
      dtype: dtype on the devices.
      progress: called after every tensor.
      verify: ``full``, ``sizes`` or ``none``; see :func:`checkpoints.opening.open_tensors`.

    Returns:
      The tree of weights, sharded, padded and with stacked layers; and the bytes that were loaded.

    Raises:
      CheckpointError: lists all missing, unknown, duplicate and mis-shaped tensors, or names what is damaged.
    """
    found = open_tensors(folder, verify)
    check_tensors(folder, stored_leaves(folder, layout), found)
    check_tied_head(folder, layout, found)
    stored = folder.quantization
    if stored not in ("none", layout.quantization):
        raise MismatchedCheckpointError(
            f"{folder.place}: stored as {stored}, so it cannot be loaded with another quantization"
        )
    kept, tensors = jnp.dtype(dtype), merged_tensors(folder, layout, found, jnp.dtype(dtype).name)
    # Large tensors first, because they need temporary memory on the devices, which are still empty then.
    leaves = sorted(layout.leaves, key=lambda leaf: -math.prod(leaf.source_shape))
    parts = {leaf.name: _parts(leaf, stored, kept) for leaf in leaves}
    readers = 1 if folder.remote is None else REMOTE_READERS
    reading = _read_ahead(layout, [(leaf, parts[leaf.name]) for leaf in leaves], tensors, readers)
    done = 0

    def advance(source: str) -> None:
        nonlocal done
        done += found[source].bytes
        if progress is not None:
            progress(done, found.bytes)

    made = {}
    described = layout.named(layout.abstract_weights(kept))
    for leaf in leaves:
        layers = _layers(layout, leaf, parts[leaf.name], reading)
        whole = jax.tree.map(_zeros, described[leaf.name]) if leaf.is_stacked else None
        for number, (source, layer) in enumerate(zip(leaf.sources, layers, strict=False)):
            whole = _set_layer(whole, layer, jnp.int32(number)) if leaf.is_stacked else layer
            advance(source)
        made[leaf.name] = whole
    weights = layout.build(lambda leaf: made[leaf.name])
    held = sum(shard.data.nbytes for array in jax.tree.leaves(weights) for shard in array.addressable_shards)
    return weights, LoadedBytes(found.bytes_read.total, held, found.bytes, _stored_dtype(folder, layout, found))
