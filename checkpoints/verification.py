"""Verifies a checkpoint against its manifest, and writes manifests of checkpoints that have none."""

from __future__ import annotations

from functools import partial

import numpy as np

from checkpoints.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoints.file_list import FILES_FILE, dump_files, list_files
from checkpoints.folder import CheckpointFolder, is_side_file
from checkpoints.loading import Progress, check_tensors, stored_leaves
from checkpoints.manifest import MANIFEST_FILE, Digester, Manifest, TensorEntry, grids
from checkpoints.non_finite import NonFinite
from checkpoints.opening import covered_files, open_tensors, read_manifest, weight_files
from checkpoints.source import Index, StoredTensors, read_ahead
from checkpoints.storage import Storage
from runtime.models.declarations import ModelLayout

# Threads that read: one core digests faster than one thread reads.
_READERS = 3


def write_manifest(
    folder: CheckpointFolder, layout: ModelLayout, *, covers_folder: bool = True, progress: Progress | None = None
) -> None:
    """Write the manifest of a folder on a disk from its present content.

    A folder that has a manifest is verified against it first, so that damage never gets new digests; after an intended
    change, delete the manifest of a Hugging Face folder. If an older version of diffumesh wrote the manifest, the new
    one also covers the files that the old one left out.

    Args:
      folder: the folder.
      layout: its model.
      covers_folder: whether the manifest covers all files, so that any other file is an error; otherwise only the
        weights and the small files that belong to a checkpoint.
      progress: called after every part of a tensor.

    Raises:
      CheckpointError: the folder is incomplete, differs from its manifest, or does not match its configuration.
    """
    storage = Storage.at(folder.path)
    manifest = read_manifest(folder)
    covered = covered_files(folder)
    for name in covered:
        folder.check_file(name)
    folder.side_files()  # raises an error if one is too large
    if manifest is not None:
        _verify_before(folder, progress)
        entries = manifest.tensors
    else:
        found = open_tensors(folder, verify="none")
        check_tensors(folder, stored_leaves(folder, layout), found)
        entries = _digest_tensors(found, grids(layout, 4), progress)
    weights = [name for name in covered if folder.is_weight_file(name)]
    stored = list_files(storage, weights) if folder.is_orbax else None
    names = [name for name in covered if not folder.is_weight_file(name) and (covers_folder or is_side_file(name))]
    files = {name: file.digest for name, file in list_files(storage, names).items()}
    # All files have been read: the list of files without the manifest would be taken for an unfinished conversion.
    if stored is not None:
        storage.write(FILES_FILE, dump_files(stored).encode())
    storage.write(MANIFEST_FILE, Manifest(entries, files, covers_folder).dump().encode())


def _verify_before(folder: CheckpointFolder, progress: Progress | None) -> None:
    """Verify a folder before its manifest is written again."""
    try:
        verify(folder, progress=progress)
    except CorruptCheckpointError as error:
        if folder.is_orbax:
            raise
        raise CorruptCheckpointError(
            f"{error}; if the change is intended, delete {MANIFEST_FILE}, then write it again"
        ) from error


def _digest_tensors(
    found: StoredTensors, cuts: dict[str, tuple[int, ...]], progress: Progress | None
) -> dict[str, TensorEntry]:
    parts = [(name, part) for name in found.by_name for part in found[name].parts()]
    entries: dict[str, TensorEntry] = {}
    done = 0
    reads = (partial(found[name].read, part) for name, part in parts)
    for (name, part), data in zip(parts, read_ahead(reads), strict=True):
        shape, row = found[name].shape, part[0]
        if row.start == 0:
            # A head that a tied model stores, and does not use, has no leaf.
            digester = Digester(shape, str(data.dtype), cuts.get(name, (1,) * len(shape)))
        digester.update(data)
        if row.stop == shape[0]:
            entries[name] = digester.entry
        done += data.nbytes
        if progress is not None:
            progress(done, found.bytes)
    return entries


def verify(folder: CheckpointFolder, *, progress: Progress | None = None) -> int:
    """Read every tensor and every file of a checkpoint, and check the digests.

    Returns:
      Number of bytes of tensors.

    Raises:
      IncompleteCheckpointError: there is no manifest.
      CorruptCheckpointError: a tensor or a file is damaged, missing or added; the message names it.
      CheckpointError: the checkpoint is intact, but tensors contain NaN or infinity.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        advice = "" if folder.fetched or folder.remote else "; --write_manifest writes it"
        raise IncompleteCheckpointError(f"{folder.place}: there is no manifest to verify against{advice}")
    found = open_tensors(folder)
    parts = [(name, part) for name in found.by_name for part in found[name].parts()]
    wrong = NonFinite()
    done = 0
    for data in read_ahead((partial(_read, found, name, part, wrong) for name, part in parts), _READERS):
        done += data.nbytes
        if progress is not None:
            progress(done, found.bytes)
    # After the tensors, because their errors are more specific. Headers and databases may be damaged too.
    _verify_files(folder, manifest)
    wrong.check(folder.place)
    return done


def _read(found: StoredTensors, name: str, part: Index, wrong: NonFinite) -> np.ndarray:
    data = found[name].read(part)
    wrong.count(name, data)
    return data


def _verify_files(folder: CheckpointFolder, manifest: Manifest) -> None:
    storage = folder.storage
    # A download lacks files that no reader uses. Opening the tensors has checked that all others exist.
    there = set(folder.names())
    wanted = {name: said for name, said in manifest.files.items() if folder.must_have(name) or name in there}
    if manifest.covers_folder:
        wanted |= {name: file.digest for name, file in weight_files(folder).items()}
    if folder.remote is None:
        for name in wanted:
            folder.check_file(name)
    reads = (partial(list_files, storage, [name]) for name in wanted)
    for files in read_ahead(reads, _READERS):
        for name, file in files.items():
            if file.digest != wanted[name]:
                raise CorruptCheckpointError(
                    f"{folder.place}/{name}: changed since it was written: its digest is wrong"
                )


def uncovered_files(folder: CheckpointFolder) -> list[str]:
    """List the files that a manifest of version 1 does not cover; none if the manifest is newer or missing."""
    manifest = read_manifest(folder)
    if manifest is None or manifest.covers_folder:
        return []
    return [name for name in covered_files(folder) if name not in manifest.files]
