"""A folder by its place, on disk or in an object store, through TensorStore's key-value stores.

On disk a file appears whole, under its name, after its bytes are on the disk. An object store gives the same for every
object, but has no folders and no renaming. Credentials are found as TensorStore finds them (for Google Cloud Storage
the application default ones); ``TENSORSTORE_GCS_HTTP_URL`` names another server.
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

# Of URLs that TensorStore reads and writes.
STORAGE_SCHEMES = ("gs", "s3", "file")

_BLOCK_BYTES = 4 << 20

# A server that does not answer is given up after some half a minute.
_RETRIES = {"max_retries": 6, "initial_delay": "1s", "max_delay": "8s"}


def first_line(error: Exception) -> str:
    """What the library says, without the source lines that it adds."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


@functools.cache
def storage_context() -> Any:
    """What all stores of this process share. Nothing is cached: what is read is read once."""
    return tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "gcs_request_retries": _RETRIES,
            "s3_request_retries": _RETRIES,
        }
    )


@dataclass(frozen=True)
class Storage:
    """A folder of files.

    Attributes:
      place: its path or URL, for messages.
      spec: TensorStore's JSON of it; its path ends with a slash.
    """

    place: str
    spec: dict[str, Any]

    @classmethod
    def at(cls, place: Path | str) -> Storage:
        """A folder on disk by its path, or any by its URL (``gs://bucket/folder``); it need not exist.

        Raises:
          CheckpointError: no URL of a folder that TensorStore reads and writes.
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
            raise CheckpointError(f"{place}: names no folder")
        return cls(place.rstrip("/"), spec)

    def child(self, name: str) -> Storage:
        """A folder within this one; this one itself where the name is empty."""
        if not name:
            return self
        return Storage(f"{self.place}/{name}", self.spec | {"path": f"{self.spec['path']}{name}/"})

    def _open(self) -> Any:
        return tensorstore.KvStore.open(self.spec, context=storage_context()).result()

    def read(self, name: str) -> bytes | None:
        """A file's bytes, None where there is no such file.

        Raises:
          CheckpointError: it cannot be read.
        """
        try:
            found = self._open().read(name).result()
        except Exception as error:  # the library raises many kinds
            raise CheckpointError(f"{self.place}/{name}: cannot be read ({first_line(error)})") from error
        return bytes(found.value) if found.state == "value" else None

    def digest(self, name: str) -> tuple[int, str]:
        """Size of a file, and XXH3-128 of its bytes in hexadecimal.

        Raises:
          CheckpointError: it cannot be read, or is not there.
        """
        state, size = xxhash.xxh3_128(), 0
        try:
            for block in self._blocks(name):
                state.update(block)
                size += len(block)
        except OSError as error:
            raise CheckpointError(f"{self.place}/{name}: cannot be read ({error.strerror or error})") from error
        return size, state.hexdigest()

    def _blocks(self, name: str) -> Iterator[bytes]:
        if self.spec["driver"] != "file":
            data = self.read(name)
            if data is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            yield data
            return
        with open(f"{self.spec['path']}{name}", "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block

    def write(self, name: str, data: bytes) -> None:
        """Write a file; it is there, whole and durable, when this returns.

        Raises:
          CheckpointError: it cannot be written.
        """
        try:
            self._open().write(name, data).result()
        except Exception as error:  # the library raises many kinds
            raise CheckpointError(f"{self.place}/{name}: cannot be written ({first_line(error)})") from error

    def names(self) -> list[str]:
        """Every file in it, those of folders within included, sorted.

        Raises:
          CheckpointError: it cannot be listed.
        """
        try:
            return sorted(name.decode() for name in self._open().list().result())
        except Exception as error:  # the library raises many kinds
            raise CheckpointError(f"{self.place}: cannot be listed ({first_line(error)})") from error

    def delete(self, names: list[str]) -> None:
        """Delete files; those that are not there are none.

        Raises:
          CheckpointError: one cannot be deleted.
        """
        try:
            store = self._open()
            for pending in [store.write(name, None) for name in names]:
                pending.result()
        except Exception as error:  # the library raises many kinds
            raise CheckpointError(f"{self.place}: cannot be cleared ({first_line(error)})") from error
