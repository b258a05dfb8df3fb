"""Tensors of a conversion, written and digested on the way: by Orbax in groups, or by TensorStore in blocks.

Both writers store the tensors under their names in an Orbax checkpoint, in chunks that the chunks of the digests
consist of, and return the digests of what this process wrote. :func:`orbax_cuts` says whether Orbax can do so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints import orbax
from checkpoints.arrays import ArrayWriter, storage_chunk
from checkpoints.loading import Progress
from checkpoints.manifest import Digester, TensorEntry, digest_chunks
from checkpoints.non_finite import NonFinite
from checkpoints.processes import Processes
from checkpoints.source import Index, StoredTensors, read_ahead
from checkpoints.storage import Storage

# Tensors that Orbax saves together. A larger one is a group of its own.
_GROUP_BYTES = 512 << 20

# By name of a tensor and number of a chunk.
Digests = dict[str, dict[int, str]]


@dataclass(frozen=True)
class Sources:
    """The tensors to write.

    Attributes:
      found: the tensors as they are stored now.
      entries: shape, dtype to write and grid of digests of each, by name; the digests are still empty.
      place: the checkpoint that they come from, for messages.
    """

    found: StoredTensors
    entries: Mapping[str, TensorEntry]
    place: str

    def sizes(self) -> dict[str, int]:
        """Bytes to write of each tensor."""
        return {name: math.prod(one.shape) * np.dtype(one.dtype).itemsize for name, one in self.entries.items()}

    def read(self, name: str, index: Index, wrong: NonFinite) -> np.ndarray:
        """Read a part of a tensor in the dtype to write; count what is not a finite number."""
        data = self.found[name].read(index)
        with np.errstate(over="ignore"):  # infinities are counted below
            data = np.ascontiguousarray(data.astype(self.entries[name].dtype, copy=False))
        wrong.count(name, data)
        return data


@dataclass(frozen=True)
class Cut:
    """How a tensor is sharded for Orbax, so that its chunks are those of the digests.

    Attributes:
      axis: the dimension that is sharded.
      shards: into how many parts; 1 if the tensor is one chunk.
      chunk_bytes: size of a chunk; None if a chunk is a whole shard.
    """

    axis: int = 0
    shards: int = 1
    chunk_bytes: int | None = None


def orbax_cuts(entries: Mapping[str, TensorEntry], devices: int) -> dict[str, Cut] | None:
    """Find out how to shard tensors over devices so that Orbax stores them in chunks of the digests.

    Orbax cuts a sharded array along the sharded dimension, into the largest equal parts below a size in bytes.

    Returns:
      A cut of each tensor by name; None if there is none for some tensor: a dimension does not divide into the chunks
      of its digests, or no number of devices divides them.
    """
    cuts = {}
    for name, entry in entries.items():
        axes = [axis for axis, parts in enumerate(entry.grid) if parts > 1]
        if not axes:
            cuts[name] = Cut()
            continue
        axis, parts = axes[0], entry.grid[axes[0]]
        shards = math.gcd(parts, devices)
        if len(axes) > 1 or entry.shape[axis] % parts or shards == 1:
            return None
        itemsize = np.dtype(entry.dtype).itemsize
        smaller = storage_chunk(entry.chunk_shape, itemsize)
        chunk = smaller if axis == 0 and entry.chunk_shape[0] % smaller[0] == 0 else entry.chunk_shape
        cuts[name] = Cut(axis, shards, math.prod(chunk) * itemsize)
    return cuts


def write_groups(
    sources: Sources, cuts: Mapping[str, Cut], place: Path, processes: Processes, progress: Progress | None
) -> Digests:
    """Save tensors with Orbax, a group at a time, without completing the checkpoint. All processes call it alike.

    Each process reads what its devices hold, and digests the shards of which it has the first copy.

    Args:
      sources: the tensors.
      cuts: how each is sharded, from :func:`orbax_cuts`.
      place: the checkpoint that Orbax writes; there is nothing yet.
      processes: this one among those of JAX's own.
      progress: called with (bytes done, bytes to do) of all processes together.

    Raises:
      CheckpointError: a tensor cannot be read, the checkpoint cannot be written, or another process failed.
    """
    wrong, digests = NonFinite(), Digests()
    sizes = sources.sizes()
    owners = processes.owners(sizes)
    # A tensor is read while the ones before it are saved.
    parts = read_ahead(partial(_read_part, sources, name, cuts[name], owners[name], wrong) for name in sizes)
    done = 0
    for group in _groups(sizes):
        arrays: dict[str, jax.Array] = {}

        def read(group: list[str] = group, arrays: dict[str, jax.Array] = arrays) -> str:
            nonlocal done
            for name, part in zip(group, parts, strict=False):
                arrays[name] = part.array()
                digests[name] = part.digests(sources.entries[name])
                done += sizes[name]
                if progress is not None:
                    progress(done, sum(sizes.values()))
            return ""

        # A process that cannot read its part says so here: saving waits for all of them.
        processes.agree(read)
        chunk_bytes = {name: size for name in group if (size := cuts[name].chunk_bytes) is not None}
        orbax.save_group(place, arrays, chunk_bytes)

    def check() -> str:
        wrong.check(sources.place)
        return ""

    processes.agree(check)
    return digests


def _groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    group: list[str] = []
    for name, size in sizes.items():
        if group and sum(sizes[one] for one in group) + size > _GROUP_BYTES:
            yield group
            group = []
        group.append(name)
    yield group


@dataclass(frozen=True)
class _Part:
    """What this process's devices hold of a tensor.

    Attributes:
      shape: of the whole tensor.
      sharding: of the whole tensor, over the devices of all processes.
      low: where the part begins, in each dimension.
      data: the part.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding
    low: tuple[int, ...]
    data: np.ndarray

    def _slice(self, index: Index | None) -> np.ndarray:
        assert index is not None, "a device of this process holds a part"
        ranges = [part.indices(size) for part, size in zip(index, self.shape, strict=True)]
        return self.data[
            tuple(slice(start - low, stop - low) for (start, stop, _), low in zip(ranges, self.low, strict=True))
        ]

    def array(self) -> jax.Array:
        """The tensor as an array over the devices of all processes."""
        return jax.make_array_from_callback(self.shape, self.sharding, self._slice, dtype=self.data.dtype)

    def digests(self, entry: TensorEntry) -> dict[int, str]:
        """Digests of the chunks in shards of which this process holds the first copy."""
        places = self.sharding.devices_indices_map(self.shape)
        found: dict[int, str] = {}
        for device in self.sharding.mesh.devices[:, 0]:
            if device.process_index == jax.process_index():
                whole = tuple(
                    slice(*part.indices(size)[:2]) for part, size in zip(places[device], self.shape, strict=True)
                )
                found |= digest_chunks(entry, whole, self._slice(whole))
        return found


def _read_part(sources: Sources, name: str, cut: Cut, owner: int, wrong: NonFinite) -> _Part:
    """Read what this process's devices hold of a tensor. The first copy of a tensor that is not cut is its owner's."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if cut.shards == 1:
        first = next(number for number, device in enumerate(devices) if device.process_index == owner)
        devices = devices[first:] + devices[:first]
    mesh = Mesh(np.array(devices).reshape(cut.shards, -1), ("shard", "copy"))
    spec = PartitionSpec(*[None] * cut.axis, "shard") if cut.shards > 1 else PartitionSpec()
    sharding, shape = NamedSharding(mesh, spec), sources.entries[name].shape
    own = sharding.addressable_devices_indices_map(shape).values()
    ranges = [part[cut.axis].indices(shape[cut.axis]) for part in own if part is not None]
    low, high = min(start for start, _, _ in ranges), max(stop for _, stop, _ in ranges)
    index = tuple(slice(low, high) if axis == cut.axis else slice(0, size) for axis, size in enumerate(shape))
    data = np.empty([part.stop - part.start for part in index], sources.entries[name].dtype)
    for block in sources.found[name].blocks():
        rows = slice(max(block[0].start, index[0].start), min(block[0].stop, index[0].stop))
        if rows.start < rows.stop:
            data[rows.start - index[0].start : rows.stop - index[0].start] = sources.read(
                name, (rows, *index[1:]), wrong
            )
    return _Part(shape, sharding, tuple(part.start for part in index), data)


def write_blocks(sources: Sources, arrays: Storage, processes: Processes, progress: Progress | None) -> Digests:
    """Write this process's share of the tensors with TensorStore, a block at a time.

    Reading, digesting and writing overlap.

    Args:
      sources: the tensors.
      arrays: the folder of the arrays.
      processes: this one among those that write.
      progress: called with (bytes digested, bytes to digest) of this process.

    Raises:
      CheckpointError: a tensor cannot be read or written.
    """
    wrong, digests = NonFinite(), Digests()
    sizes = sources.sizes()
    names = processes.share(sizes)
    described, blocks = {}, []
    for name in names:
        entry = sources.entries[name]
        chunk = storage_chunk(entry.chunk_shape, np.dtype(entry.dtype).itemsize)
        described[name] = (entry.shape, entry.dtype, chunk)
        blocks += [(name, block) for block in sources.found[name].blocks(chunk[0])]
    done, total = 0, sum(sizes[name] for name in names)
    with ArrayWriter(arrays, processes.index) as writer:
        targets = writer.create(described)
        reads = (partial(sources.read, name, block, wrong) for name, block in blocks)
        for (name, block), data in zip(blocks, read_ahead(reads), strict=True):
            entry, row = sources.entries[name], block[0]
            if row.start == 0:
                digester = Digester(entry.shape, entry.dtype, entry.grid)
            writer.write(targets[name], block, data)
            digester.update(data)
            if row.stop == entry.shape[0]:
                digests[name] = dict(enumerate(digester.entry.digests))
            done += data.nbytes
            del data
            if progress is not None:
                progress(done, total)
        wrong.check(sources.place)
    return digests
