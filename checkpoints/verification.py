"""A whole checkpoint against its digests, and the digests of a Hugging Face folder."""

from __future__ import annotations

from functools import partial

from checkpoints.conversion import side_files
from checkpoints.errors import IncompleteCheckpointError
from checkpoints.folder import CheckpointFolder
from checkpoints.loading import Progress, check_tensors
from checkpoints.manifest import MANIFEST_FILE, Digester, Manifest, TensorEntry, digest, grids
from checkpoints.opening import open_tensors, read_manifest
from checkpoints.source import read_ahead
from checkpoints.storage import Storage
from runtime.models.declarations import ModelLayout

# Blocks that are read and digested at a time: one core's digest is faster than one reader.
_READERS = 3


def write_manifest(folder: CheckpointFolder, layout: ModelLayout, *, progress: Progress | None = None) -> None:
    """Write the manifest of a Hugging Face folder from what it holds now.

    Raises:
      CheckpointError: the folder is not whole, or not the model that its configuration describes.
    """
    found = open_tensors(folder, verify="none")
    check_tensors(folder, layout.leaves, found)
    cuts = grids(layout, 4)
    blocks = [(name, block) for name in found.by_name for block in found[name].blocks()]
    entries: dict[str, TensorEntry] = {}
    done = 0
    reads = (partial(found[name].read, block) for name, block in blocks)
    for (name, block), data in zip(blocks, read_ahead(reads), strict=True):
        shape, row = found[name].shape, block[0]
        if row.start == 0:
            digester = Digester(shape, str(data.dtype), cuts[name])
        digester.update(data)
        if row.stop == shape[0]:
            entries[name] = digester.entry
        done += data.nbytes
        if progress is not None:
            progress(done, found.bytes)
    files = {path.name: digest(path.read_bytes()) for path in side_files(folder)}
    Storage.at(folder.path).write(MANIFEST_FILE, Manifest(entries, files).dump().encode())


def verify(folder: CheckpointFolder, *, progress: Progress | None = None) -> int:
    """Read a whole checkpoint through its digests.

    Returns:
      Bytes of tensors verified.

    Raises:
      IncompleteCheckpointError: there is no manifest to verify against.
      CorruptCheckpointError: names the tensor or the file that is damaged.
    """
    if read_manifest(folder) is None:
        raise IncompleteCheckpointError(
            f"{folder.place}: there is no manifest to verify against; --write_manifest makes it"
        )
    found = open_tensors(folder)
    reads = (partial(found[name].read, block) for name in found.by_name for block in found[name].blocks())
    done = 0
    for data in read_ahead(reads, _READERS):
        done += data.nbytes
        if progress is not None:
            progress(done, found.bytes)
    return done
