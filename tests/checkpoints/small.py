"""Small random checkpoints, and helpers for tests of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from checkpoints import open_folder
from checkpoints.conversion import convert
from checkpoints.export import export_checkpoint
from checkpoints.opening import open_tensors
from checkpoints.output import FolderOutput
from runtime.models.declarations import ModelLayout
from runtime.models.families import model_layout, parse_config

MICRO = {
    "model_type": "Dream",
    "vocab_size": 96,
    "hidden_size": 56,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "mask_token_id": 95,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
# Its matrices have several chunks of digests, in rows and in columns.
CUT = MICRO | {"vocab_size": 2048, "hidden_size": 448, "intermediate_size": 1024, "mask_token_id": 2047}


def layout_of(path: Path | str) -> ModelLayout:
    return model_layout(parse_config(open_folder(path).config))


def write_source(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write a Hugging Face folder of random bfloat16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(seed)
    tensors = {
        source: generator.normal(size=leaf.source_shape).astype(ml_dtypes.bfloat16)
        for leaf in layout_of(folder).leaves
        for source in leaf.sources
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def to_canonical(source: Path | str, output: Path, dtype: str | None = None) -> Path:
    place = FolderOutput(output)
    place.prepare(overwrite=True)
    convert(open_folder(source), layout_of(source), place, dtype=dtype)
    return output


def to_huggingface(source: Path | str, output: Path) -> Path:
    place = FolderOutput(output)
    place.prepare(overwrite=False)
    export_checkpoint(open_folder(source), place)
    return output


def contents(path: Path | str) -> dict[str, bytes]:
    """Read all tensors of a checkpoint as bytes, checking digests."""
    found = open_tensors(open_folder(path))
    return {name: found[name].whole().tobytes() for name in found.by_name}
