"""The checkpoint formats: how each is recognized, and what it supports. Documents are generated from this."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoints.folder import ARRAY_FOLDERS, TREE_FILE
from checkpoints.huggingface import INDEX_FILE, SINGLE_FILE
from checkpoints.legacy import ENDINGS
from checkpoints.source import DTYPES, STORED_DTYPES


@dataclass(frozen=True)
class Format:
    """A checkpoint format.

    Attributes:
      name: its name in documents.
      files: names of the files or folders by which it is recognized; any of them is enough.
      dtypes: dtypes of the tensors that can be read.
      digests: whether a manifest is ``always`` there, ``on request`` (``verify --write_manifest``) or ``never``.
      loads: whether the engine loads it directly. Every format can be converted.
      written_by: the command that writes it; empty if none does.
    """

    name: str
    files: tuple[str, ...]
    dtypes: tuple[str, ...]
    digests: str
    loads: bool
    written_by: str = ""


FORMATS = (
    Format("Hugging Face folder", (SINGLE_FILE, INDEX_FILE), DTYPES, "on request", True, "export"),
    Format("canonical checkpoint", (f"{ARRAY_FOLDERS[0]}/{TREE_FILE}",), STORED_DTYPES, "always", True, "convert"),
    Format(
        "checkpoint saved by Orbax",
        tuple(f"{folder}/{TREE_FILE}".lstrip("/") for folder in ARRAY_FOLDERS),
        DTYPES,
        "on request",
        True,
    ),
    Format("legacy pickle", tuple(f"*{ending}" for ending in ENDINGS), DTYPES, "never", False),
)
