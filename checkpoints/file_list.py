"""The list of the files that Orbax wrote for a checkpoint's weights, with sizes and digests.

The manifest has digests of tensors, which do not depend on how a checkpoint is stored. The files are the database of
arrays and Orbax's descriptions; their names and bytes differ from one conversion to the next.
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
    """Compute sizes and digests of files, by name.

    Raises:
      CheckpointError: a file cannot be read.
    """
    return {name: StoredFile(*storage.digest(name)) for name in names}


def dump_files(files: dict[str, StoredFile]) -> str:
    """Return the list as JSON text that includes a digest of its contents."""
    body = {
        "format": _FORMAT,
        "version": _VERSION,
        "files": {name: [file.size, file.digest] for name, file in sorted(files.items())},
    }
    return seal(body)


def parse_files(text: str, where: str) -> dict[str, StoredFile]:
    """Parse the list of files that :func:`dump_files` wrote: size and digest by path.

    Raises:
      CorruptCheckpointError: the text is not what :func:`dump_files` wrote.
    """
    body = unseal(text, where)
    try:
        if (body["format"], body["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"format {body['format']!r:.100}, version {body['version']!r:.100}")
        files = {str(name): StoredFile(int(size), str(said)) for name, (size, said) in body["files"].items()}
        if outside := [name for name in files if not is_inside(name)]:
            raise ValueError(f"{outside[0]!r:.200} is not the name of a file in this folder")
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where}: the list of files is invalid ({error!s:.300})") from error
    return files
