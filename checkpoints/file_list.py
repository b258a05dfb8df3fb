"""The list of a checkpoint's files with their sizes and digests.

The manifest has the digests of tensors, which are the same however a checkpoint is stored. This list has those of the
files that hold them: of a canonical checkpoint the database of tensors and Orbax's metadata, whose names and bytes are
another conversion's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from checkpoints.errors import CorruptCheckpointError
from checkpoints.manifest import is_inside, seal, unseal
from checkpoints.storage import Storage

FILES_FILE = "diffumesh.files.json"
_FORMAT = "diffumesh checkpoint files"
_VERSION = 1


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and digest of a file."""

    size: int
    digest: str


def list_files(storage: Storage, names: Iterable[str]) -> dict[str, StoredFile]:
    """Sizes and digests of files, by name.

    Raises:
      CheckpointError: one cannot be read.
    """
    return {name: StoredFile(*storage.digest(name)) for name in names}


def dump_files(files: dict[str, StoredFile]) -> str:
    """The list as JSON, with a digest of itself."""
    body = {
        "format": _FORMAT,
        "version": _VERSION,
        "files": {name: [file.size, file.digest] for name, file in sorted(files.items())},
    }
    return seal(body)


def parse_files(text: str, where: str) -> dict[str, StoredFile]:
    """Read such a list.

    Raises:
      CorruptCheckpointError: it is not what :func:`dump_files` wrote.
    """
    body = unseal(text, where)
    try:
        if (body["format"], body["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"format {body['format']!r:.100}, version {body['version']!r:.100}")
        files = {str(name): StoredFile(int(size), str(said)) for name, (size, said) in body["files"].items()}
        if outside := [name for name in files if not is_inside(name)]:
            raise ValueError(f"{outside[0]!r:.200} is not the name of a file in this folder")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where}: the list of files makes no sense ({error!s:.300})") from error
    return files
