"""Tensors of a Hugging Face folder: one safetensors file, or several with an index."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints.errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError
from checkpoints.folder import CheckpointFolder
from checkpoints.source import BytesRead, Index, StoredTensor, StoredTensors
from checkpoints.storage import first_line
from runtime.models.config import Family
from runtime.models.families import find_family

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_NAME = 200
# About so many bytes of a tensor are read at a time.
PIECE_BYTES = 256 << 20
_MOST_ITEM_BYTES = 4
_DTYPES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}


def _file_names(folder: CheckpointFolder, family: Family) -> tuple[list[str], frozenset[str]]:
    """Return the names of the files that contain weights, and the names of the weights that the index lists."""
    index, single = folder.read_json(INDEX_FILE), (folder.path / SINGLE_FILE).is_file()
    if index is None:
        if not single:
            raise IncompleteCheckpointError(
                f"{folder.path}: no weights found: there is neither {INDEX_FILE} nor {SINGLE_FILE}"
            )
        return [SINGLE_FILE], frozenset()
    claims = index.get("weight_map")
    if not isinstance(claims, dict) or not all(isinstance(name, str) for name in claims.values()):
        raise CheckpointError(f'{folder.path / INDEX_FILE}: "weight_map" does not map tensor names to file names')
    for name in claims.values():
        if name != Path(name).name or not name.endswith(".safetensors") or len(name) > _MAX_NAME:
            raise CheckpointError(f'{folder.path / INDEX_FILE}: "{name[:200]}" is not the name of a safetensors file')
    if single and claims and SINGLE_FILE not in claims.values():
        # Two versions of the weights; transformers reads the single file.
        raise CheckpointError(
            f"{folder.path}: there are both {SINGLE_FILE} and {INDEX_FILE}, which names other files; "
            "remove those of the older version"
        )
    return sorted(set(claims.values())), frozenset(filter(None, map(family.tensor_name, claims)))


def open_safetensors(folder: CheckpointFolder) -> StoredTensors:
    """Open all tensors in the folder's files. Only headers are read.

    Raises:
      CheckpointError: there are no weights, the index is invalid, or a file is damaged or a link out of the folder.
      ConfigError: the folder's model is not supported.
    """
    family = find_family(folder.config)
    names, claims = _file_names(folder, family)
    absent = [name for name in names if not (folder.path / name).is_file()]
    if absent:
        raise IncompleteCheckpointError(f"{folder.path}: the index names files that are not there: {', '.join(absent)}")
    found: dict[str, list[StoredTensor]] = {}
    count = BytesRead()
    for name in names:
        folder.check_file(name)
        for tensor in open_file(folder.path / name, count):
            called = family.tensor_name(tensor.name)
            if called is not None:
                found.setdefault(called, []).append(replace(tensor, name=called))
    return StoredTensors(found, claims, count)


def open_file(path: Path, count: BytesRead) -> list[StoredTensor]:
    """Open the tensors of one safetensors file, under the names that they have in it. Only the header is read.

    Args:
      path: the file.
      count: counts the bytes that are read from the tensors.

    Raises:
      CorruptCheckpointError: the file is damaged.
    """
    found = []
    try:
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping: it cannot be iterated)
                view = file.get_slice(name)
                dtype = _DTYPES.get(view.get_dtype(), view.get_dtype())
                found.append(StoredTensor(name, tuple(view.get_shape()), dtype, partial(_read, path, name, count)))
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptCheckpointError(f"{path}: truncated or invalid safetensors file ({first_line(error)})") from error
    return found


def _in_pieces(view: Any, index: Index) -> np.ndarray:
    """Read a part of a tensor, a limited number of its rows at a time.

    The library holds the interpreter's lock while it reads. On slow storage, a gigabyte at once would keep all other
    threads, among them the one that tells the other hosts that this one is alive, from running for minutes.
    """
    shape = [part.stop - part.start for part in index]
    step = PIECE_BYTES // max(1, _MOST_ITEM_BYTES * math.prod(shape[1:])) or 1
    if not shape or step >= shape[0]:
        return np.asarray(view[index])
    whole: np.ndarray | None = None
    for done in range(0, shape[0], step):
        start = index[0].start + done
        piece = view[(slice(start, min(start + step, index[0].stop)), *index[1:])]
        whole = np.empty(shape, piece.dtype) if whole is None else whole
        whole[done : done + len(piece)] = piece
    assert whole is not None
    return whole


def _read(path: Path, name: str, count: BytesRead, index: Index) -> np.ndarray:
    # The library maps the file, and pages stay resident while it is open. So it is opened for each read.
    try:
        with safe_open(path, "numpy") as file:
            data = _in_pieces(file.get_slice(name), index)
    except (SafetensorError, OSError) as error:
        raise CorruptCheckpointError(f"{path}: tensor {name:.200} cannot be read ({first_line(error)})") from error
    count.add(data.nbytes)
    return data
