"""Folders on a disk or in an object store, through TensorStore's key-value stores.

A file appears under its name in one step, with all its bytes, and is durable from then on. This holds on a disk and in
an object store. An object store has no folders and cannot rename. TensorStore finds the credentials (for Google Cloud
Storage the application default ones); ``TENSORSTORE_GCS_HTTP_URL`` names another server.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorstore
import xxhash

from checkpoints.errors import CheckpointError

# Schemes of URLs that TensorStore reads and writes.
STORAGE_SCHEMES = ("gs", "s3", "file")

_BUFFER_BYTES = 4 << 20
# Bytes that are read from a remote file at a time.
FETCHED_BYTES = 16 << 20

# Requests to a server that does not answer fail after about half a minute.
_RETRIES = {"max_retries": 6, "initial_delay": "1s", "max_delay": "8s"}
# Characters of each end of a long error message that are kept.
_LINE_END = 200


def first_line(error: Exception) -> str:
    """Return the first line of a library's error message: the lines after it show source code.

    A long line loses its middle, because paths are at its beginning and causes at its end.
    """
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line if len(line) <= 2 * _LINE_END else f"{line[:_LINE_END]} ... {line[-_LINE_END:]}"


@functools.cache
def storage_context() -> Any:
    """Return the TensorStore context of this process. Nothing is cached, because nothing is read twice."""
    return tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "gcs_request_retries": _RETRIES,
            "s3_request_retries": _RETRIES,
        }
    )


@dataclass(frozen=True)
class Storage:
    """A folder of files, on a disk or in an object store.

    Attributes:
      place: its path or URL, for messages.
      spec: TensorStore's JSON specification of it; the path in it ends with a slash.
    """

    place: str
    spec: dict[str, Any]

    @classmethod
    def at(cls, place: Path | str) -> Storage:
        """Return the folder of a path or a URL (``gs://bucket/folder``). It need not exist.

        Raises:
          CheckpointError: TensorStore cannot read and write a folder at this URL.
        """
        if isinstance(place, Path):
            return cls(str(place), {"driver": "file", "path": f"{place.resolve()}/"})
        scheme = place.partition("://")[0]
        if scheme not in STORAGE_SCHEMES:
            raise CheckpointError(f"{place}: {scheme}:// is not one of {', '.join(STORAGE_SCHEMES)}")
        try:
            spec = tensorstore.KvStore.Spec(place.rstrip("/") + "/").to_json()
        except ValueError as error:
            raise CheckpointError(f"{place}: not a URL of a folder ({first_line(error)})") from error
        if spec.get("path", "/") == "/":
            raise CheckpointError(f"{place}: the URL has no folder; expected for example gs://bucket/folder")
        return cls(place.rstrip("/"), spec)

    def child(self, name: str) -> Storage:
        """Return a folder within this one, or this one if the name is empty."""
        if not name:
            return self
        return Storage(f"{self.place}/{name}", self.spec | {"path": f"{self.spec['path']}{name}/"})

    def _open(self) -> Any:
        return tensorstore.KvStore.open(self.spec, context=storage_context()).result()

    def read(self, name: str, most: int | None = None) -> bytes | None:
        """Read a file's bytes; None if there is no such file.

        Args:
          name: relative path of the file.
          most: a file with more bytes is not read; None for no limit.

        Raises:
          CheckpointError: it cannot be read, or has more than ``most`` bytes.
        """
        if most is not None:
            self.check_size(name, most)
        try:
            found = self._open().read(name).result()
        except Exception as error:  # the library raises many exception types
            raise CheckpointError(f"{self.place}/{name}: cannot be read ({first_line(error)})") from error
        return bytes(found.value) if found.state == "value" else None

    def check_size(self, name: str, most: int) -> None:
        """Check that a file has no more than ``most`` bytes, without reading it. There need not be such a file.

        Raises:
          CheckpointError: it has more bytes, or cannot be read.
        """
        try:
            # TensorStore does not report sizes, but reading the byte after the last allowed one fails if there is none.
            found = self._read_range(name, most, most + 1)
        except FileNotFoundError:
            return
        if found is not None:
            file = name.rpartition("/")[2]
            raise CheckpointError(f"{self.place}/{name}: larger than {most} bytes, the limit for a {file}")

    def digest(self, name: str) -> tuple[int, str]:
        """Return a file's size in bytes and its XXH3-128 digest in hexadecimal.

        Raises:
          CheckpointError: the file cannot be read or does not exist.
        """
        state, size = xxhash.xxh3_128(), 0
        try:
            for buffer in self._buffers(name):
                state.update(buffer)
                size += len(buffer)
        except OSError as error:
            raise CheckpointError(f"{self.place}/{name}: cannot be read ({error.strerror or error})") from error
        return size, state.hexdigest()

    def _buffers(self, name: str) -> Iterator[bytes]:
        """Read a file piece by piece: it may be larger than the memory."""
        if self.spec["driver"] != "file":
            yield from self._pieces(name)
            return
        with open(f"{self.spec['path']}{name}", "rb") as file:
            while buffer := file.read(_BUFFER_BYTES):
                yield buffer

    def _pieces(self, name: str) -> Iterator[bytes]:
        start = 0
        while (piece := self._read_range(name, start, start + FETCHED_BYTES)) is not None:
            yield piece
            start += len(piece)
        # TensorStore does not report sizes, and refuses a range that reaches beyond the end. What is left is short.
        rest = self._read_range(name, start, None)
        if rest is None and start == 0:
            # An empty file has no ranges.
            rest = self.read(name)
        yield rest or b""

    def _read_range(self, name: str, start: int, end: int | None) -> bytes | None:
        """Read the bytes of a file from ``start`` up to ``end``, or up to the end of the file if ``end`` is None.

        Returns:
          The bytes. None if the file is shorter than ``end``, or shorter than ``start`` if ``end`` is None.

        Raises:
          CheckpointError: it cannot be read.
          FileNotFoundError: there is no such file.
        """
        try:
            found = self._open().read(name, byte_range=slice(start, end)).result()
        except Exception as error:  # the library raises many exception types
            if str(error).startswith("OUT_OF_RANGE"):
                return None
            raise CheckpointError(f"{self.place}/{name}: cannot be read ({first_line(error)})") from error
        if found.state != "value":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return bytes(found.value)

    def write(self, name: str, data: bytes) -> None:
        """Write a file. It is complete and durable when this returns.

        Raises:
          CheckpointError: it cannot be written.
        """
        try:
            self._open().write(name, data).result()
        except Exception as error:  # the library raises many exception types
            raise CheckpointError(f"{self.place}/{name}: cannot be written ({first_line(error)})") from error

    def names(self) -> list[str]:
        """List all files, also those in subfolders, by sorted relative path.

        Raises:
          CheckpointError: the folder cannot be listed.
        """
        try:
            return sorted(name.decode() for name in self._open().list().result())
        except Exception as error:  # the library raises many exception types
            raise CheckpointError(f"{self.place}: cannot be listed ({first_line(error)})") from error

    def delete(self, names: list[str]) -> None:
        """Delete files. Names without a file are ignored.

        Raises:
          CheckpointError: a file cannot be deleted.
        """
        try:
            store = self._open()
            for pending in [store.write(name, None) for name in names]:
                pending.result()
        except Exception as error:  # the library raises many exception types
            raise CheckpointError(f"{self.place}: its files cannot be deleted ({first_line(error)})") from error
