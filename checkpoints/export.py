"""Exports a checkpoint as a Hugging Face folder of safetensors, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from checkpoints.conversion import copy_side_files
from checkpoints.errors import CheckpointError
from checkpoints.folder import MARK_FILE, CheckpointFolder
from checkpoints.huggingface import INDEX_FILE, SINGLE_FILE
from checkpoints.loading import Progress, check_tensors, stored_leaves
from checkpoints.lora import merged_tensors
from checkpoints.opening import open_tensors
from checkpoints.output import FolderOutput
from checkpoints.source import StoredTensors
from runtime.models.families import model_layout, parse_config

_SHARD_BYTES = 1 << 30


def export_checkpoint(source: CheckpointFolder, output: FolderOutput, *, progress: Progress | None = None) -> None:
    """Write a checkpoint as a Hugging Face folder. Call ``output.prepare`` first.

    Args:
      source: a checkpoint of any format. Its LoRA adapter, if it has one, is merged, in the stored dtype.
      output: the folder to write.
      progress: called with (bytes read, bytes to read).

    Raises:
      CheckpointError: the source is incomplete or quantized, or the output cannot be written.
    """
    if source.quantization != "none":
        raise CheckpointError(
            f"{source.place}: stored as {source.quantization}; the original weights cannot be recovered from it"
        )
    layout, found = model_layout(parse_config(source.config)), open_tensors(source)
    check_tensors(source, stored_leaves(source, layout), found)
    found = merged_tensors(source, layout, found)
    shards = _plan_shards(found)
    done, claims = 0, {}
    try:
        with closing(output):
            output.check_inputs(filter(None, (source, source.lora)))
            output.begin("")
            for number, names in enumerate(shards, 1):
                file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                tensors = {name: np.ascontiguousarray(found[name].whole()) for name in names}
                save_file(tensors, output.staging / file, {"format": "pt"})
                # safetensors makes a file that its user alone can read.
                shutil.copymode(output.staging / MARK_FILE, output.staging / file)
                _sync(output.staging / file)
                claims.update(dict.fromkeys(names, file))
                done += sum(found[name].bytes for name in names)
                if progress is not None:
                    progress(done, found.bytes)
            if len(shards) > 1:
                write_index(output.staging, claims, found.bytes)
            copy_side_files(source, output.storage, {})
            output.finish()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{output.place}: cannot be written ({error})") from error


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_index(folder: Path, claims: dict[str, str], total_size: int) -> None:
    """Write the index of a Hugging Face folder. ``claims`` maps tensor names to file names."""
    index = {"metadata": {"total_size": total_size}, "weight_map": claims}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _plan_shards(found: StoredTensors) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name in found.by_name:
        if shards[-1] and size + found[name].bytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += found[name].bytes
    return shards
