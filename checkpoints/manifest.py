"""The manifest: digests of every tensor and file of a checkpoint.

Neither safetensors nor Orbax notices a flipped bit in weight data. The manifest holds the shape and dtype of every
tensor, and an XXH3-128 digest of each chunk of it. Chunks are cut so that the shards of a mesh consist of whole chunks:
a host verifies what it reads, and reads little more than it needs. A conversion writes the manifest last, so a
converted checkpoint without one is not finished.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import xxhash

from checkpoints.errors import CorruptCheckpointError, MismatchedCheckpointError
from checkpoints.local_files import parse_json_object
from checkpoints.source import STORED_DTYPES, Index, StoredTensor
from runtime.models.declarations import ModelLayout
from runtime.models.leaves import WeightLeaf

MANIFEST_FILE = "diffumesh.manifest.json"
_FORMAT = "diffumesh checkpoint manifest"
# Version 1 covered only the small files beside the weights, and files that it did not list were allowed.
_VERSION = 2
_OLDER_VERSION = 1

# Chunks are not cut below this size, to keep the manifest small.
_MIN_CHUNK_BYTES = 128 << 10
_MAX_PARTS = 64
# A sharded dimension whose greatest common divisor with _MAX_PARTS is smaller than this is cut unevenly.
_MIN_COMMON_PARTS = 8
_MAX_TENSORS = 1 << 20
_MAX_DIMENSIONS = 8
_MAX_PATH = 1000
_MAX_SIZE = 1 << 48
_HEAD_AXES = ("kv_heads", "queries_per_kv")


def digest(data: bytes | memoryview) -> str:
    """Return the XXH3-128 digest of bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def seal(body: dict[str, Any]) -> str:
    """Return a JSON object as text that includes a digest of the object."""
    text = json.dumps(body, sort_keys=True)
    return json.dumps({"body": json.loads(text), "self": digest(text.encode())}, sort_keys=True) + "\n"


def unseal(text: str, where: str) -> dict[str, Any]:
    """Read the object from a text that :func:`seal` wrote.

    Raises:
      CorruptCheckpointError: the text differs from what was written, even by a space.
    """
    try:
        body = parse_json_object(text.encode())["body"]
        if isinstance(body, dict) and seal(body) == text:
            return body
    except (KeyError, TypeError, ValueError, RecursionError):  # the writer allows less nesting than the reader
        pass
    raise CorruptCheckpointError(f"{where}: damaged: its own digest is wrong")


def is_inside(name: str) -> bool:
    """Whether a relative path with slashes stays within its folder."""
    path = PurePosixPath(name)
    return 0 < len(name) <= _MAX_PATH and str(path) == name and not path.is_absolute() and ".." not in path.parts


@dataclass(frozen=True)
class TensorEntry:
    """The manifest's entry of one tensor.

    Attributes:
      shape, dtype: shape and dtype of the tensor.
      grid: number of parts into which each dimension is cut. Parts are equal, except that the last one is shorter if
        the size does not divide.
      digests: one per chunk, in C order of the grid. Each covers the chunk's elements in C order, little-endian.
    """

    shape: tuple[int, ...]
    dtype: str
    grid: tuple[int, ...]
    digests: tuple[str, ...]

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of a chunk that is not the last one of a dimension."""
        return chunk_shape(self.shape, self.grid)

    def chunks(self, index: Index) -> Iterator[tuple[int, Index]]:
        """Yield (number, index) of every chunk that overlaps a part of the tensor.

        A chunk is one cell of the grid. Its number is its position in ``digests``.

        Args:
          index: the part, as one slice of elements per dimension; the yielded indices have this form too.
        """
        steps = self.chunk_shape
        ranges = [range(part.start // step, -(-part.stop // step)) for part, step in zip(index, steps, strict=True)]
        for place in itertools.product(*ranges):
            number = 0
            for coordinate, parts in zip(place, self.grid, strict=True):
                number = number * parts + coordinate
            yield (
                number,
                tuple(
                    slice(at * step, min((at + 1) * step, size))
                    for at, step, size in zip(place, steps, self.shape, strict=True)
                ),
            )


def chunk_shape(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of chunks for a grid; the last chunk of a dimension may be smaller."""
    return tuple(-(-size // parts) for size, parts in zip(shape, grid, strict=True))


def chunk_grid(leaf: WeightLeaf, itemsize: int) -> tuple[int, ...]:
    """Choose the grid of a source tensor: one part per head, and powers of two for other sharded dimensions.

    A dimension that powers of two hardly divide, such as a vocabulary of 50257, is cut into 64 parts, of which the last
    one is shorter. Shards of the padded dimension then do not consist of whole chunks, and reading a shard also reads a
    little of its neighbours.

    Args:
      leaf: the weight that the tensor belongs to.
      itemsize: bytes per element.
    """
    total = math.prod(leaf.source_shape) * itemsize
    room = max(1, total // _MIN_CHUNK_BYTES)
    grid = []
    for merge, size in zip(leaf.source_axes, leaf.source_shape, strict=True):
        if any(axis in _HEAD_AXES for axis in merge):
            wanted = math.prod(leaf.sizes[axis] for axis in merge if axis != "head_dim")
        elif merge[0] in ("mlp", "vocab"):
            common = math.gcd(size, _MAX_PARTS)
            wanted = _MAX_PARTS if common < _MIN_COMMON_PARTS <= _MAX_PARTS <= size else common
        else:
            wanted = 1
        while wanted > room and wanted % 2 == 0:
            wanted //= 2
        parts = wanted if wanted <= room else 1
        parts = -(-size // -(-size // parts))  # no chunk is empty
        grid.append(parts)
        room //= parts
    return tuple(grid)


class Digester:
    """Computes the entry of a tensor from its rows, given in order."""

    def __init__(self, shape: tuple[int, ...], dtype: str, grid: tuple[int, ...]) -> None:
        self._shape, self._dtype, self._grid = shape, dtype, grid
        self._step = chunk_shape(shape, grid)
        beside = TensorEntry(shape[1:], dtype, grid[1:], ("",) * math.prod(grid[1:]))
        # Where the chunks that contain the same rows lie in the other dimensions.
        self._columns = [place for _, place in beside.chunks(tuple(slice(0, size) for size in shape[1:]))]
        self._states: list[Any] = []
        self._digests: list[str] = []
        self._row = 0

    def update(self, rows: np.ndarray) -> None:
        """Add the next rows."""
        first = self._row
        while self._row < first + len(rows):
            if not self._states:
                self._states = [xxhash.xxh3_128() for _ in self._columns]
            chunk_end = min((self._row // self._step[0] + 1) * self._step[0], self._shape[0])
            end = min(chunk_end, first + len(rows))
            part = rows[self._row - first : end - first]
            for state, place in zip(self._states, self._columns, strict=True):
                state.update(_bytes_of(part[(slice(None), *place)]))
            self._row = end
            if end == chunk_end:
                self._digests += [state.hexdigest() for state in self._states]
                self._states = []

    @property
    def entry(self) -> TensorEntry:
        """The entry, once all rows have been added."""
        assert self._row == self._shape[0], "rows are missing"
        return TensorEntry(self._shape, self._dtype, self._grid, tuple(self._digests))


def digest_chunks(entry: TensorEntry, index: Index, data: np.ndarray) -> dict[int, str]:
    """Digest a part of a tensor that consists of whole chunks.

    Args:
      entry: shape and grid of the tensor.
      index: the part.
      data: its elements.

    Returns:
      Digests by number of chunk.
    """
    found = {}
    for number, place in entry.chunks(index):
        piece = tuple(
            slice(own.start - part.start, own.stop - part.start) for own, part in zip(place, index, strict=True)
        )
        found[number] = digest(_bytes_of(data[piece]))
    return found


def _bytes_of(data: np.ndarray) -> memoryview:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


def verified(tensor: StoredTensor, entry: TensorEntry, where: str) -> StoredTensor:
    """Return a tensor whose every read checks the digests of all chunks that the part overlaps.

    Args:
      tensor: the tensor as it is stored.
      entry: its entry in the manifest.
      where: the checkpoint, for messages.

    Raises (when read):
      CorruptCheckpointError: a chunk is damaged; the message names the tensor and the chunk.
    """

    def read(index: Index) -> np.ndarray:
        chunks = list(entry.chunks(index))
        # All chunks are read at once, and digested one by one.
        low = [min(part[axis].start for _, part in chunks) for axis in range(len(index))]
        high = [max(part[axis].stop for _, part in chunks) for axis in range(len(index))]
        data = tensor.read(tuple(slice(*ends) for ends in zip(low, high, strict=True)))
        for number, part in chunks:
            piece = tuple(slice(own.start - start, own.stop - start) for own, start in zip(part, low, strict=True))
            if digest(_bytes_of(data[piece])) != entry.digests[number]:
                place = ", ".join(f"{own.start}:{own.stop}" for own in part)
                raise CorruptCheckpointError(f"{where}: tensor {tensor.name}[{place}] is damaged: its digest is wrong")
        return data[tuple(slice(own.start - start, own.stop - start) for own, start in zip(index, low, strict=True))]

    rows = entry.chunk_shape[0]
    return StoredTensor(tensor.name, tensor.shape, tensor.dtype, read, rows)


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's manifest.

    Attributes:
      tensors: entries of the tensors, by name.
      files: digests of the files beside Orbax's weights (configuration, tokenizer, licence), or of all files of a
        Hugging Face folder, by name.
      covers_folder: whether all files are listed, so that any other file was added later; false for version 1.
    """

    tensors: dict[str, TensorEntry]
    files: dict[str, str]
    covers_folder: bool = True

    def dump(self) -> str:
        """Return the manifest as JSON text, which includes a digest of its contents."""
        body = {
            "format": _FORMAT,
            "version": _VERSION if self.covers_folder else _OLDER_VERSION,
            "digest": "xxh3-128",
            "files": self.files,
            "tensors": {
                name: {"shape": entry.shape, "dtype": entry.dtype, "grid": entry.grid, "digests": entry.digests}
                for name, entry in self.tensors.items()
            },
        }
        return seal(body)

    @classmethod
    def parse(cls, text: str, where: str) -> Manifest:
        """Read a manifest.

        Raises:
          CorruptCheckpointError: the text is not what :meth:`dump` wrote.
          MismatchedCheckpointError: this version of diffumesh does not read the manifest's version.
        """
        body = unseal(text, where)
        version = body.get("version")
        if body.get("format") != _FORMAT or version not in (_OLDER_VERSION, _VERSION):
            raise MismatchedCheckpointError(
                f"{where}: manifest of format {body.get('format')!r:.200}, version {version!r:.200}; this version of "
                f"diffumesh reads {_FORMAT!r}, versions {_OLDER_VERSION} and {_VERSION}"
            )
        try:
            tensors = {name: _parse_entry(entry) for name, entry in body["tensors"].items()}
            files = {str(name): str(value) for name, value in body["files"].items()}
            if len(tensors) > _MAX_TENSORS:
                raise ValueError(f"{len(tensors)} tensors")
            outside = [name for name in files if not is_inside(name)]
            if outside:
                raise ValueError(f"{outside[0]!r:.200} is not the name of a file in this folder")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{where}: the manifest is invalid ({error!s:.300})") from error
        return cls(tensors, files, version == _VERSION)


def _parse_entry(raw: dict[str, Any]) -> TensorEntry:
    entry = TensorEntry(tuple(raw["shape"]), raw["dtype"], tuple(raw["grid"]), tuple(raw["digests"]))
    if entry.dtype not in STORED_DTYPES or not 1 <= len(entry.shape) == len(entry.grid) <= _MAX_DIMENSIONS:
        raise ValueError(
            f"shape of {len(entry.shape)} dimensions, grid of {len(entry.grid)}, dtype {entry.dtype!r:.40}"
        )
    for size, parts in zip(entry.shape, entry.grid, strict=True):
        if type(size) is not int or type(parts) is not int or not 1 <= parts <= size <= _MAX_SIZE:
            raise ValueError(f"a dimension of {size!r:.40} in {parts!r:.40} parts")
        if (parts - 1) * -(-size // parts) >= size:
            raise ValueError(f"a dimension of {size} in {parts} parts, of which some are empty")
    if math.prod(entry.grid) != len(entry.digests) or not all(isinstance(one, str) for one in entry.digests):
        raise ValueError(f"{len(entry.digests)} digests for a grid of {entry.grid}")
    return entry


def grids(layout: ModelLayout, itemsize: int) -> dict[str, tuple[int, ...]]:
    """Choose the grids of all tensors of a model, by source name."""
    return {source: chunk_grid(leaf, itemsize) for leaf in layout.stored_leaves for source in leaf.sources}
