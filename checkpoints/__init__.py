"""Checkpoints: files to sharded arrays and back. No pickle is loaded, and no code of a model folder is run.

Public names are imported on first use, so importing this package imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints.conversion import convert
    from checkpoints.downloads import open_folder
    from checkpoints.errors import CheckpointError, OtherProcessError
    from checkpoints.export import export_checkpoint
    from checkpoints.fingerprint import folder_fingerprint
    from checkpoints.folder import DEMO, CheckpointFolder
    from checkpoints.formats import FORMATS, Format
    from checkpoints.legacy import LegacyPickle, LegacySource, config_folder, find_legacy, legacy_path, open_legacy
    from checkpoints.loading import LoadedBytes, check_tensors, check_weights, load_weights, stored_leaves
    from checkpoints.local_files import lock, parse_json_object, parse_json_objects, replace_file
    from checkpoints.opening import VERIFY, open_tensors, read_manifest
    from checkpoints.output import FolderOutput, Output, output_at
    from checkpoints.processes import Processes
    from checkpoints.verification import uncovered_files, verify, write_manifest

__all__ = [
    "DEMO",
    "FORMATS",
    "VERIFY",
    "CheckpointError",
    "CheckpointFolder",
    "FolderOutput",
    "Format",
    "LegacyPickle",
    "LegacySource",
    "LoadedBytes",
    "OtherProcessError",
    "Output",
    "Processes",
    "check_tensors",
    "check_weights",
    "config_folder",
    "convert",
    "export_checkpoint",
    "find_legacy",
    "folder_fingerprint",
    "legacy_path",
    "load_weights",
    "lock",
    "open_folder",
    "open_legacy",
    "open_tensors",
    "output_at",
    "parse_json_object",
    "parse_json_objects",
    "read_manifest",
    "replace_file",
    "stored_leaves",
    "uncovered_files",
    "verify",
    "write_manifest",
]

_HOMES = {
    "CheckpointError": "checkpoints.errors",
    "CheckpointFolder": "checkpoints.folder",
    "DEMO": "checkpoints.folder",
    "FORMATS": "checkpoints.formats",
    "FolderOutput": "checkpoints.output",
    "Format": "checkpoints.formats",
    "LegacyPickle": "checkpoints.legacy",
    "LegacySource": "checkpoints.legacy",
    "LoadedBytes": "checkpoints.loading",
    "OtherProcessError": "checkpoints.errors",
    "Output": "checkpoints.output",
    "Processes": "checkpoints.processes",
    "VERIFY": "checkpoints.opening",
    "check_tensors": "checkpoints.loading",
    "check_weights": "checkpoints.loading",
    "config_folder": "checkpoints.legacy",
    "convert": "checkpoints.conversion",
    "export_checkpoint": "checkpoints.export",
    "find_legacy": "checkpoints.legacy",
    "folder_fingerprint": "checkpoints.fingerprint",
    "legacy_path": "checkpoints.legacy",
    "load_weights": "checkpoints.loading",
    "lock": "checkpoints.local_files",
    "open_folder": "checkpoints.downloads",
    "open_legacy": "checkpoints.legacy",
    "open_tensors": "checkpoints.opening",
    "output_at": "checkpoints.output",
    "parse_json_object": "checkpoints.local_files",
    "parse_json_objects": "checkpoints.local_files",
    "read_manifest": "checkpoints.opening",
    "replace_file": "checkpoints.local_files",
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
