"""Files at URLs that fsspec reads: what identifies their contents, and reading them piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.source import read_ahead
from checkpoints.storage import FETCHED_BYTES

# Pieces of a file in an object store that are read at the same time.
READERS = 16


def file_versions(system: Any, files: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return what changes with the names or the contents of files."""
    return [f"{name} {_file_version(system, info)}" for name, info in files.items()]


def _file_version(system: Any, info: dict[str, Any]) -> str:
    key = str(system.ukey(info["name"]))
    if "http" not in system.protocol:
        return key
    # There, fsspec's key depends on the URL alone.
    said = system.info(info["name"])
    return " ".join([key, *(str(said.get(name)) for name in ("ETag", "Last-Modified", "size"))])


def read_file(system: Any, info: dict[str, Any], most: int | None) -> Iterator[bytes]:
    """Read a file piece by piece, given fsspec's information about it.

    Pieces of a file in an object store are read at the same time, because one connection is slow.

    Raises:
      CheckpointError: it has more than ``most`` bytes, or ends before its size.
    """
    size, done = info.get("size") or 0, 0  # not every server tells the size

    def check_size() -> None:
        if most is not None and max(size, done) > most:
            raise CheckpointError(f"{info['name']} has at least {max(size, done)} bytes; the limit is {most}")

    check_size()
    ranges = size and _is_object_store(system)
    for piece in _ranges(system, info["name"], size) if ranges else _stream(system, info["name"]):
        done += len(piece)
        check_size()
        yield piece
    if size and done != size:
        raise CheckpointError(f"{info['name']} has {size} bytes, but only {done} could be read")


def _is_object_store(system: Any) -> bool:
    """Whether a file system reads ranges of bytes, several at a time."""
    from fsspec.asyn import AsyncFileSystem

    # Not every web server knows ranges.
    return isinstance(system, AsyncFileSystem) and "http" not in system.protocol


def _ranges(system: Any, name: str, size: int) -> Iterator[bytes]:
    starts = range(0, size, FETCHED_BYTES)
    reads = (partial(system.cat_file, name, start=start, end=min(start + FETCHED_BYTES, size)) for start in starts)
    return read_ahead(reads, min(READERS, len(starts)))


def _stream(system: Any, name: str) -> Iterator[bytes]:
    with system.open(name, "rb") as file:
        while piece := file.read(FETCHED_BYTES):
            yield piece
