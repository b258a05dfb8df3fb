"""Writes and digests the tensors of a conversion, with Orbax in groups or with TensorStore in parts.

Both store the tensors by name in an Orbax checkpoint, and return the digests of the chunks that this process read. The
stored chunks are parts of the chunks that have digests; :func:`orbax_cuts` tells whether Orbax can store them so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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

# Limit on the bytes of the tensors that Orbax saves together. A larger tensor is a group by itself.
GROUP_BYTES = 512 << 20

# Digests by name of the tensor and number of the chunk.
Digests = dict[str, dict[int, str]]


@dataclass(frozen=True)
class Sources:
    """The tensors to write.

    Attributes:
      found: the tensors to read.
      entries: shape, dtype to write and grid of each tensor by name, without digests.
      place: the checkpoint that is read, for messages.
      wrong: counts NaN and infinity in what is read.
      scales: names of the scales that are computed while matrices are quantized. NaN and infinity are not counted in
        the scales, because they are counted in the matrices.
    """

    found: StoredTensors
    entries: Mapping[str, TensorEntry]
    place: str
    wrong: NonFinite = field(default_factory=NonFinite)
    scales: frozenset[str] = frozenset()

    def sizes(self) -> dict[str, int]:
        """Return the bytes to write of each tensor, by name."""
        return {name: math.prod(one.shape) * np.dtype(one.dtype).itemsize for name, one in self.entries.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        """Read a part of a tensor in the dtype to write, and count NaN and infinity in it."""
        data = self.found[name].read(index)
        with np.errstate(over="ignore"):  # infinities are counted below
            data = np.ascontiguousarray(data.astype(self.entries[name].dtype, copy=False))
        if name not in self.scales:
            self.wrong.count(name, data)
        return data


@dataclass(frozen=True)
class Cut:
    """The sharding of a tensor with which Orbax stores it in the right chunks.

    Attributes:
      axis: the sharded dimension.
      shards: number of shards; 1 if the tensor is one chunk.
      chunk_bytes: size of a chunk; None if each shard is one chunk.
    """

    axis: int = 0
    shards: int = 1
    chunk_bytes: int | None = None


def orbax_cuts(entries: Mapping[str, TensorEntry], devices: int) -> dict[str, Cut] | None:
    """Choose how to shard each tensor so that each chunk that Orbax stores lies within one chunk that has a digest.

    Orbax cuts a sharded array along the sharded dimension, into the largest equal parts below a size in bytes.

    Args:
      entries: shape, dtype and grid of digest chunks of each tensor, by name.
      devices: number of devices.

    Returns:
      The cut of each tensor by name. None if a tensor with several digest chunks cannot be sharded so: they divide
      several dimensions or are of unequal size, or their number has no common factor with ``devices``.
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
    """Save tensors with Orbax, a group at a time, without completing the checkpoint. All processes make the same call.

    Each process reads the shards of its devices, and digests those of which it has the first replica.

    Args:
      sources: the tensors.
      cuts: the result of :func:`orbax_cuts`.
      place: absolute path of the checkpoint; it does not exist yet.
      processes: JAX's processes, and which of them this is.
      progress: called with (bytes done, bytes to do) of all processes together.

    Raises:
      CheckpointError: a tensor cannot be read, the checkpoint cannot be written, or another process failed.
    """
    digests = Digests()
    sizes = sources.sizes()
    owners = processes.owners(sizes)
    # The next tensor is read while a group is saved.
    parts = read_ahead(partial(_read_part, sources, name, cuts[name], owners[name]) for name in sizes)
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

        # Errors of reading are exchanged here, because saving waits for all processes.
        processes.agree(read)
        chunk_bytes = {name: size for name in group if (size := cuts[name].chunk_bytes) is not None}
        orbax.save_group(place, arrays, chunk_bytes)

    def check() -> str:
        sources.wrong.check(sources.place)
        return ""

    processes.agree(check)
    return digests


def _groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    group: list[str] = []
    for name, size in sizes.items():
        if group and sum(sizes[one] for one in group) + size > GROUP_BYTES:
            yield group
            group = []
        group.append(name)
    yield group


@dataclass(frozen=True)
class _Part:
    """The part of a tensor on this process's devices.

    Attributes:
      shape: shape of the whole tensor.
      sharding: its sharding over the devices of all processes.
      low: start of the part in each dimension.
      data: the elements of the part.
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
        """Make the array over the devices of all processes."""
        return jax.make_array_from_callback(self.shape, self.sharding, self._slice, dtype=self.data.dtype)

    def digests(self, entry: TensorEntry) -> dict[int, str]:
        """Digest the chunks in those shards of which this process has the first replica."""
        places = self.sharding.devices_indices_map(self.shape)
        found: dict[int, str] = {}
        for device in self.sharding.mesh.devices[:, 0]:
            if device.process_index == jax.process_index():
                whole = tuple(
                    slice(*part.indices(size)[:2]) for part, size in zip(places[device], self.shape, strict=True)
                )
                found |= digest_chunks(entry, whole, self._slice(whole))
        return found


def _read_part(sources: Sources, name: str, cut: Cut, owner: int) -> _Part:
    """Read this process's part of a tensor.

    Of an unsharded tensor, every process reads all, and process ``owner`` writes it: its device is first in the mesh.
    """
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
    for part in sources.found[name].parts():
        rows = slice(max(part[0].start, index[0].start), min(part[0].stop, index[0].stop))
        if rows.start < rows.stop:
            data[rows.start - index[0].start : rows.stop - index[0].start] = sources.read(name, (rows, *index[1:]))
    return _Part(shape, sharding, tuple(part.start for part in index), data)


def write_parts(sources: Sources, arrays: Storage, processes: Processes, progress: Progress | None) -> Digests:
    """Write this process's share of the tensors with TensorStore, a part at a time.

    Reading, digesting and writing overlap.

    Args:
      sources: the tensors.
      arrays: the folder of the arrays.
      processes: the processes that write, and which of them this is.
      progress: called with (bytes done, bytes to do) of this process.

    Raises:
      CheckpointError: a tensor cannot be read or written.
    """
    digests = Digests()
    sizes = sources.sizes()
    names = processes.share(sizes)
    described, parts = {}, []
    for name in names:
        entry = sources.entries[name]
        chunk = storage_chunk(entry.chunk_shape, np.dtype(entry.dtype).itemsize)
        described[name] = (entry.shape, entry.dtype, chunk)
        parts += [(name, part) for part in sources.found[name].parts(chunk[0])]
    done, total = 0, sum(sizes[name] for name in names)
    with ArrayWriter(arrays, processes.index) as writer:
        targets = writer.create(described)
        reads = (partial(sources.read, name, part) for name, part in parts)
        for (name, part), data in zip(parts, read_ahead(reads), strict=True):
            entry, row = sources.entries[name], part[0]
            if row.start == 0:
                digester = Digester(entry.shape, entry.dtype, entry.grid)
            writer.write(targets[name], part, data)
            digester.update(data)
            if row.stop == entry.shape[0]:
                digests[name] = dict(enumerate(digester.entry.digests))
            done += data.nbytes
            del data
            if progress is not None:
                progress(done, total)
        sources.wrong.check(sources.place)
    return digests
