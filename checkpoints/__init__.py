"""Checkpoints in and out: files to sharded arrays and back. No pickle is loaded, no code of a model folder is run.

Public names are imported on first use: importing this package imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints.conversion import convert
    from checkpoints.errors import CheckpointError, OtherProcessError
    from checkpoints.export import export_checkpoint
    from checkpoints.fingerprint import file_fingerprint, folder_fingerprint
    from checkpoints.folder import DEMO, CheckpointFolder, open_folder
    from checkpoints.legacy import LegacyPickle, open_legacy
    from checkpoints.loading import LoadedBytes, check_tensors, load_weights, stored_leaves
    from checkpoints.opening import VERIFY, open_tensors, read_manifest
    from checkpoints.output import FolderOutput, Output, output_at
    from checkpoints.processes import Processes
    from checkpoints.verification import uncovered_files, verify, write_manifest

__all__ = [
    "DEMO",
    "VERIFY",
    "CheckpointError",
    "CheckpointFolder",
    "FolderOutput",
    "LegacyPickle",
    "LoadedBytes",
    "OtherProcessError",
    "Output",
    "Processes",
    "check_tensors",
    "convert",
    "export_checkpoint",
    "file_fingerprint",
    "folder_fingerprint",
    "load_weights",
    "open_folder",
    "open_legacy",
    "open_tensors",
    "output_at",
    "read_manifest",
    "stored_leaves",
    "uncovered_files",
    "verify",
    "write_manifest",
]

_HOMES = {
    "CheckpointError": "checkpoints.errors",
    "CheckpointFolder": "checkpoints.folder",
    "DEMO": "checkpoints.folder",
    "FolderOutput": "checkpoints.output",
    "LegacyPickle": "checkpoints.legacy",
    "LoadedBytes": "checkpoints.loading",
    "OtherProcessError": "checkpoints.errors",
    "Output": "checkpoints.output",
    "Processes": "checkpoints.processes",
    "VERIFY": "checkpoints.opening",
    "check_tensors": "checkpoints.loading",
    "convert": "checkpoints.conversion",
    "export_checkpoint": "checkpoints.export",
    "file_fingerprint": "checkpoints.fingerprint",
    "folder_fingerprint": "checkpoints.fingerprint",
    "load_weights": "checkpoints.loading",
    "open_folder": "checkpoints.folder",
    "open_legacy": "checkpoints.legacy",
    "open_tensors": "checkpoints.opening",
    "output_at": "checkpoints.output",
    "read_manifest": "checkpoints.opening",
    "stored_leaves": "checkpoints.loading",
    "uncovered_files": "checkpoints.verification",
    "verify": "checkpoints.verification",
    "write_manifest": "checkpoints.verification",
}

if not TYPE_CHECKING:  # so that a type checker knows every name, and no other

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)
