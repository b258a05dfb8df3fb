"""Files at URLs that fsspec reads: what identifies their contents, and reading them piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.storage import FETCHED_BYTES


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

    Raises:
      CheckpointError: it has more than ``most`` bytes, or ends before its size.
    """
    size, done = info.get("size") or 0, 0  # not every server tells the size
    with system.open(info["name"], "rb") as file:
        while True:
            if most is not None and max(size, done) > most:
                raise CheckpointError(f"{info['name']} has at least {max(size, done)} bytes; the limit is {most}")
            if not (piece := file.read(FETCHED_BYTES)):
                break
            done += len(piece)
            yield piece
    if size and done != size:
        raise CheckpointError(f"{info['name']} has {size} bytes, but only {done} could be read")
