"""Files at URLs that fsspec reads: what identifies their contents, and reading them piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.storage import FETCHED_BYTES


def file_version(system: Any, info: dict[str, Any]) -> str:
    """Return what changes with the contents of a file."""
    key = str(system.ukey(info["name"]))
    if "http" not in system.protocol:
        return key
    # There, fsspec's key depends on the URL alone.
    said = system.info(info["name"])
    return " ".join([key, *(str(said.get(name)) for name in ("ETag", "Last-Modified", "size"))])


def read_file(system: Any, info: dict[str, Any], most: int | None) -> Iterator[bytes]:
    """Read a file piece by piece, given fsspec's information about it.

    Raises:
      CheckpointError: it has more than ``most`` bytes.
    """
    size, done = info.get("size") or 0, 0  # not every server tells the size
    with system.open(info["name"], "rb") as file:
        while True:
            if most is not None and max(size, done) > most:
                raise CheckpointError(f"{info['name']} has at least {max(size, done)} bytes; the limit is {most}")
            if not (piece := file.read(FETCHED_BYTES)):
                return
            done += len(piece)
            yield piece
