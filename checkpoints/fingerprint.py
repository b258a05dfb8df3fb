"""Telling two checkpoints apart without reading them whole."""

from __future__ import annotations

import hashlib

from checkpoints.folder import SIDE_FILES, CheckpointFolder
from checkpoints.manifest import MANIFEST_FILE

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def fingerprint(folder: CheckpointFolder) -> str:
    """A digest by which hosts can see whether they have the same checkpoint.

    With a manifest it covers every byte, as far as the checkpoint is what its manifest says. Without one it covers the
    small files, and of each file of weights its size and samples spread over it.

    Raises:
      OSError: a file cannot be read.
    """
    state = hashlib.sha256()
    patterns = (MANIFEST_FILE, "config.json") if (folder.path / MANIFEST_FILE).is_file() else SIDE_FILES
    for path in sorted({path for pattern in patterns for path in folder.path.glob(pattern)}):
        state.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    if MANIFEST_FILE not in patterns:
        for path in sorted(folder.path.glob("*.safetensors")):
            size = path.stat().st_size
            state.update(f"{path.name} {size}\0".encode())
            with path.open("rb") as file:
                for sample in range(_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                    state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()[:16]
