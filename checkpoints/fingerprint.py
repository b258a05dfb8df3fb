"""Fingerprints, which tell checkpoints apart without reading all of their data."""

from __future__ import annotations

import hashlib
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.folder import TREE_FILE, CheckpointFolder, is_safetensors
from checkpoints.manifest import MANIFEST_FILE
from checkpoints.storage import Storage

_SAMPLES = 64
_SAMPLE_BYTES = 4096
# Small files of Orbax: the tree of arrays, when a checkpoint was written, and which files have its data.
_ORBAX_FILES = (TREE_FILE, "_CHECKPOINT_METADATA", "manifest.ocdbt")


def folder_fingerprint(folder: CheckpointFolder) -> str:
    """Compute a digest by which hosts can tell whether they have the same checkpoint.

    With a manifest the digest covers every byte, if the checkpoint is intact. Without one it covers the small files,
    and the sizes and samples of the files of weights; in an object store, their names and what Orbax writes about them.
    The digest of a folder with a LoRA adapter covers both folders.

    Raises:
      CheckpointError: a file cannot be read.
    """
    state = hashlib.sha256()
    if folder.lora is not None:
        state.update(folder_fingerprint(folder.lora).encode())
    has_manifest = (folder.path / MANIFEST_FILE).is_file()
    try:
        for name in folder.side_files():
            if not has_manifest or name in (MANIFEST_FILE, "config.json"):
                state.update(name.encode() + b"\0" + hashlib.sha256(folder.read_bytes(name)).digest())
        if not has_manifest and folder.remote is not None:
            _sample_remote(folder.arrays, state)
        elif not has_manifest:
            for name in folder.names():
                is_weights = is_safetensors(name) or folder.is_weight_file(name)
                if is_weights and (folder.path / name).is_file():
                    _sample(folder.path / name, state, name)
    except OSError as error:
        raise CheckpointError(f"{folder.place}: cannot be read ({error})") from error
    return state.hexdigest()[:16]


def file_fingerprint(path: Path) -> str:
    """Compute the fingerprint of one weight file, from its size and samples.

    Raises:
      CheckpointError: the file cannot be read.
    """
    state = hashlib.sha256()
    try:
        _sample(path, state, "")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    return state.hexdigest()[:16]


def _sample_remote(storage: Storage, state: hashlib._Hash) -> None:
    """Add what changes whenever Orbax writes arrays: the names of their files, and lists of what is in these."""
    for name in storage.names():
        state.update(name.encode() + b"\0")
        if name.rpartition("/")[2] in _ORBAX_FILES:
            state.update(hashlib.sha256(storage.read(name) or b"").digest())


def _sample(path: Path, state: hashlib._Hash, name: str) -> None:
    size = path.stat().st_size
    state.update(f"{name} {size}\0".encode())
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            state.update(file.read(_SAMPLE_BYTES))
