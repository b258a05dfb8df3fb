"""Opens a checkpoint of any format, and checks it against its manifest."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

from checkpoints.arrays import open_arrays
from checkpoints.errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError
from checkpoints.file_list import FILES_FILE, StoredFile, parse_files
from checkpoints.folder import (
    ARRAY_FOLDERS,
    MARK_FILE,
    MAX_SIDE_FILE_BYTES,
    STAGING_SUFFIX,
    CheckpointFolder,
    is_left_by_system,
    is_side_file,
)
from checkpoints.huggingface import open_safetensors
from checkpoints.manifest import MANIFEST_FILE, Manifest, digest, verified
from checkpoints.orbax import check_weight_files, stored_keys
from checkpoints.source import StoredTensors
from runtime.models.families import find_family

logger = logging.getLogger("diffumesh")

# Documents for people, which no program reads.
_DOCUMENTS = (".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf")

# Folders in which arrays may be.
_WEIGHT_FOLDERS = {name.partition("/")[0] for name in ARRAY_FOLDERS}

VERIFY = ("full", "sizes", "none")


def read_manifest(folder: CheckpointFolder) -> Manifest | None:
    """Read a folder's manifest; None if it has none.

    Raises:
      IncompleteCheckpointError: a conversion to this folder was not finished.
      CorruptCheckpointError, MismatchedCheckpointError: the manifest cannot be used.
    """
    if folder.path.name.endswith(STAGING_SUFFIX):
        raise IncompleteCheckpointError(f"{folder.place}: an interrupted conversion left this folder; convert again")
    text = _own_file(folder, MANIFEST_FILE)
    if text is not None:
        return Manifest.parse(text, f"{folder.place}/{MANIFEST_FILE}")
    if folder.is_orbax and _is_a_conversion(folder):
        raise IncompleteCheckpointError(
            f"{folder.place}: there is no {MANIFEST_FILE}, so this checkpoint was not finished; convert it again, or, "
            f"if plain Orbax saved it, delete {FILES_FILE} and write the manifest again"
        )
    return None


def _is_a_conversion(folder: CheckpointFolder) -> bool:
    """Whether a conversion wrote, or began to write, an Orbax checkpoint."""
    names = (FILES_FILE, MARK_FILE)
    for name in names:
        if folder.remote is None and (folder.path / name).exists():
            folder.check_file(name)
    return any(folder.storage.read(name, MAX_SIDE_FILE_BYTES) is not None for name in names)


def open_tensors(folder: CheckpointFolder, verify: str = "full") -> StoredTensors:
    """Open a checkpoint's tensors without reading their data.

    Args:
      folder: the checkpoint.
      verify: ``full`` and ``sizes`` check the files beside the weights, and the shape and dtype of every tensor;
        ``full`` also checks the digest of every chunk when it is read; ``none`` checks nothing. Without a manifest,
        there is nothing to check against.

    Raises:
      CheckpointError: something is missing or damaged. Reading a tensor may raise it too.
    """
    manifest = read_manifest(folder)
    if manifest is not None and verify != "none":
        # Before anything else, so that a changed configuration is not used.
        check_files(folder, manifest)
    if folder.is_orbax:
        found = _open_orbax(folder, manifest)
        if manifest is None and verify == "full":
            advice = "" if folder.remote else "; diffumesh verify --write_manifest adds them"
            logger.warning(
                "%s: an Orbax checkpoint without digests, so damaged weights are not noticed%s", folder.place, advice
            )
    else:
        found = open_safetensors(folder)
    if manifest is None or verify == "none":
        return found
    for name, entry in manifest.tensors.items():
        if name not in found.by_name:
            raise CorruptCheckpointError(
                f"{folder.place}: tensor {name:.200} is listed in the manifest but missing from the checkpoint"
            )
        have = found[name]
        if (have.shape, have.dtype) != (entry.shape, entry.dtype):
            raise CorruptCheckpointError(
                f"{folder.place}: tensor {name:.200} is {have.dtype} {list(have.shape)}; the manifest has "
                f"{entry.dtype} {list(entry.shape)}"
            )
    unlisted = found.by_name.keys() - manifest.tensors.keys()
    if unlisted:
        raise CorruptCheckpointError(
            f"{folder.place}: tensors that the manifest does not list: {sorted(unlisted)!s:.2000}"
        )
    if verify == "sizes":
        return found
    where = folder.place
    return StoredTensors(
        {
            name: [verified(copy, manifest.tensors[name], where) for copy in copies]
            for name, copies in found.by_name.items()
        },
        found.claims,
        found.bytes_read,
    )


def _open_orbax(folder: CheckpointFolder, manifest: Manifest | None) -> StoredTensors:
    """Open the arrays that the manifest lists or, without a manifest, those that Orbax describes."""
    check_weight_files(folder)
    tensor_name = find_family(folder.config).tensor_name
    if manifest is None:
        return open_arrays(folder, stored_keys(folder, tensor_name))
    try:
        return open_arrays(folder, {name: name for name in manifest.tensors})
    except CorruptCheckpointError:
        if tensor_name is str:
            raise
        # Plain Orbax may have saved them under another spelling of their names.
        with contextlib.suppress(CheckpointError):
            keys = stored_keys(folder, tensor_name)
            if keys.keys() == manifest.tensors.keys() and any(name != key for name, key in keys.items()):
                return open_arrays(folder, keys)
        raise


def check_files(folder: CheckpointFolder, manifest: Manifest) -> None:
    """Check the files beside the weights against their digests, and that there are no other files.

    For weight files, only the names and, on a disk, the sizes are checked, because tensors have their own digests.

    Raises:
      CorruptCheckpointError: a file is missing, changed or added; the message names it.
    """
    for name, wanted in manifest.files.items():
        path = folder.path / name
        if not path.is_file():
            if not folder.must_have(name):
                continue
            raise CorruptCheckpointError(f"{path}: the manifest lists this file, but it does not exist")
        if is_side_file(name) and digest(_side_file(folder, name)) != wanted:
            raise CorruptCheckpointError(f"{path}: changed since it was written: its digest is wrong")
    if not manifest.covers_folder:
        return
    weights = weight_files(folder)
    names = folder.names()
    if absent := sorted(weights.keys() - set(names)):
        raise CorruptCheckpointError(f"{folder.place}/{absent[0]}: this file of the checkpoint is missing")
    if added := sorted(set(_covered(folder, names)) - weights.keys() - manifest.files.keys()):
        raise CorruptCheckpointError(f"{folder.place}: files were added to this checkpoint: {', '.join(added)!s:.1000}")
    if folder.remote is None:
        for name, file in weights.items():
            if (size := (folder.path / name).stat().st_size) != file.size:
                raise CorruptCheckpointError(f"{folder.path / name}: has {size} bytes, but {file.size} were written")


def _side_file(folder: CheckpointFolder, name: str) -> bytes:
    try:
        return folder.read_bytes(name)
    except CheckpointError as error:
        raise CorruptCheckpointError(str(error)) from error


def weight_files(folder: CheckpointFolder) -> dict[str, StoredFile]:
    """Return the list of the files that Orbax wrote for a checkpoint's weights; empty for other formats.

    Raises:
      CorruptCheckpointError: the list is missing or damaged.
    """
    if not folder.is_orbax:
        return {}
    text = _own_file(folder, FILES_FILE)
    if text is None:
        raise CorruptCheckpointError(f"{folder.place}: the list of its files, {FILES_FILE}, is missing")
    return parse_files(text, f"{folder.place}/{FILES_FILE}")


def _own_file(folder: CheckpointFolder, name: str) -> str | None:
    """Read a manifest or a list of files; None if it does not exist."""
    try:
        return _side_file(folder, name).decode("utf-8") if (folder.path / name).is_file() else None
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"{folder.place}/{name}: damaged: not UTF-8") from error


def covered_files(folder: CheckpointFolder) -> list[str]:
    """List the files that a manifest covers, by name: all files that a program may read as a part of the model.

    Other documents and hidden files are left out, and so are the manifest and the list of files, which contain their
    own digests. Of the hidden files in a folder of weights, only those of an operating system are left out.
    """
    return _covered(folder, folder.names())


def _covered(folder: CheckpointFolder, names: Iterable[str]) -> list[str]:
    return [
        name
        for name in names
        if name not in (MANIFEST_FILE, FILES_FILE, MARK_FILE)
        and not is_left_by_system(name)
        and (
            folder.is_weight_file(name)
            or is_side_file(name)  # a licence may be a document
            or not (_is_hidden(name) or name.lower().endswith(_DOCUMENTS))
        )
    ]


def _is_hidden(name: str) -> bool:
    """Whether no reader of models uses a file because of its name. Those of arrays use .zarray, and list folders."""
    top = name.partition("/")[0]
    return top.startswith(".") or (top not in _WEIGHT_FOLDERS and "/." in name)
