"""Which folders a conversion may replace: checkpoints that contain no files of their user."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Set
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.file_list import FILES_FILE, parse_files
from checkpoints.folder import (
    ARRAY_FOLDERS,
    MARK_FILE,
    CheckpointFolder,
    find_arrays,
    is_left_by_system,
    is_safetensors,
    is_side_file,
)
from checkpoints.manifest import MANIFEST_FILE
from checkpoints.orbax import is_orbax_file, is_unfinished

# Files that a conversion writes beside those of a model folder.
_OWN_FILES = {MANIFEST_FILE, FILES_FILE, MARK_FILE}
# Files of a download from the Hub that are not part of the model.
_HUB_FILES = {"README.md", ".gitattributes"}
_HUB_FOLDER = ".cache/huggingface/"


def change_of(folder: Path, place: str) -> CheckpointError | None:
    """Return the error that a folder is not replaced, None if it is still one that is; see :func:`check_replaced`."""
    opened = CheckpointFolder(folder, place)
    try:
        check_replaced(place, opened.names(), opened.read_bytes)
    except CheckpointError as error:
        return error
    return None


def check_replaced(place: str, names: list[str], read: Callable[[str], bytes]) -> None:
    """Check that a folder is empty, a checkpoint, or what a conversion left of one, and no more.

    Replacing a folder deletes all of its files, so it must not contain any that a checkpoint does not have.

    Args:
      place: its path or URL, for messages.
      names: its files.
      read: reads one of them.

    Raises:
      CheckpointError: it is not a checkpoint, or has other files, which the message names.
    """
    arrays = find_arrays(set(names).__contains__)
    has_weights = arrays is not None or any(map(is_safetensors, names))
    if names and not (has_weights and "config.json" in names) and {MANIFEST_FILE, MARK_FILE}.isdisjoint(names):
        raise CheckpointError(
            f"{place} is not a checkpoint (it has no {'config.json' if has_weights else 'weights'}), so it is not "
            f"replaced; it contains {_some(names)}; name another output"
        )
    weights = _weight_files(set(names), arrays, read)
    if others := [
        name
        for name in names
        if name not in _OWN_FILES | _HUB_FILES | weights
        and not (is_side_file(name) or is_safetensors(name) or is_left_by_system(name) or name.startswith(_HUB_FOLDER))
    ]:
        raise CheckpointError(
            f"{place} contains files that are not part of a checkpoint and would be deleted with the old one: "
            f"{_some(others)}; move them, or name another output"
        )


def _weight_files(names: Set[str], arrays: str | None, read: Callable[[str], bytes]) -> Set[str]:
    """Return the files in which Orbax stored the weights, given all files and the folder of the arrays."""
    if arrays is None:
        # What is left of a conversion that was not finished, or of a damaged checkpoint, has no description of arrays.
        if names.isdisjoint((MARK_FILE, FILES_FILE)):
            return set()
        arrays = ARRAY_FOLDERS[0]
    found = {name for name in names if is_orbax_file(name, names, arrays)}
    top = arrays.partition("/")[0]
    below = {name for name in names if top and name.startswith(f"{top}/")}
    if FILES_FILE in names:
        text = read(FILES_FILE)
        with contextlib.suppress(CheckpointError, UnicodeDecodeError):  # the checkpoint may be damaged
            listed = parse_files(text.decode(), FILES_FILE).keys()
            found = {name for name in found if name in listed or (top and name not in below)}
    return found | set(filter(is_unfinished, below))


def _some(names: list[str]) -> str:
    return f"{', '.join(sorted(names)[:10])!s:.200}{', ...' if len(names) > 10 else ''}"
