"""Opening a checkpoint of either kind, with its digests."""

from __future__ import annotations

from checkpoints.errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError
from checkpoints.folder import MAX_JSON_BYTES, STAGING_SUFFIX, CheckpointFolder
from checkpoints.huggingface import open_safetensors
from checkpoints.manifest import MANIFEST_FILE, Manifest, digest, verified
from checkpoints.orbax import open_canonical
from checkpoints.source import StoredTensors

VERIFY = ("full", "sizes", "none")


def read_manifest(folder: CheckpointFolder) -> Manifest | None:
    """A folder's manifest; None where a Hugging Face folder has none.

    Raises:
      IncompleteCheckpointError: a canonical checkpoint without one: its writing was not finished.
      CorruptCheckpointError, MismatchedCheckpointError: it cannot be used.
    """
    if folder.path.name.endswith(STAGING_SUFFIX):
        raise IncompleteCheckpointError(f"{folder.place}: what a conversion was interrupted in; convert again")
    try:
        raw = folder.read_json(MANIFEST_FILE)
    except CheckpointError as error:
        raise CorruptCheckpointError(str(error)) from error
    if raw is not None:
        return Manifest.parse(raw, f"{folder.place}/{MANIFEST_FILE}")
    if folder.is_canonical:
        raise IncompleteCheckpointError(
            f"{folder.place}: there is no {MANIFEST_FILE}, so this checkpoint was not finished; convert it again"
        )
    return None


def open_tensors(folder: CheckpointFolder, verify: str = "full") -> StoredTensors:
    """Open a checkpoint's tensors, canonical or Hugging Face, without reading their data.

    Args:
      folder: the checkpoint.
      verify: ``full`` checks the digest of every chunk that is read, ``sizes`` shapes and dtypes, ``none`` nothing.
        A Hugging Face folder without a manifest has nothing to be checked against.

    Raises:
      CheckpointError: what is missing or damaged; reading may raise too.
    """
    manifest = read_manifest(folder)
    if manifest is not None and verify != "none":
        # First of all: what a changed configuration says must not be acted on.
        check_files(folder, manifest)
    if folder.is_canonical:
        assert manifest is not None
        found = open_canonical(folder, manifest)
    else:
        found = open_safetensors(folder)
    if manifest is None or verify == "none":
        return found
    for name, entry in manifest.tensors.items():
        if name not in found.by_name:
            raise CorruptCheckpointError(
                f"{folder.place}: tensor {name:.200} is in the manifest and not in the checkpoint"
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


def check_files(folder: CheckpointFolder, manifest: Manifest) -> None:
    """Check the small files beside the weights against their digests.

    Raises:
      CorruptCheckpointError: names a file that is absent or changed.
    """
    for name, wanted in manifest.files.items():
        path = folder.path / name
        if not path.is_file():
            raise CorruptCheckpointError(f"{path}: the manifest lists this file, and it is not there")
        if path.stat().st_size > MAX_JSON_BYTES or digest(path.read_bytes()) != wanted:
            raise CorruptCheckpointError(f"{path}: not what was written: its digest is wrong")
