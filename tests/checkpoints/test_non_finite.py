"""NaN and infinity in weights are reported by everything that reads all weights."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import CheckpointError, open_folder
from checkpoints.conversion import convert
from checkpoints.output import FolderOutput, ObjectOutput
from checkpoints.storage import Storage
from checkpoints.verification import verify, write_manifest
from tests.checkpoints.small import MICRO, layout_of, to_canonical, write_source

NORM, HEAD = "model.layers.1.input_layernorm.weight", "lm_head.weight"


def damaged(folder: Path, values: dict[str, list[float]], dtype: str = "bfloat16") -> Path:
    """Write a folder in which the last elements of some tensors have given values."""
    write_source(folder, MICRO | {"torch_dtype": dtype})
    tensors = {name: data.astype(dtype) for name, data in load_file(folder / "model.safetensors").items()}
    for name, wanted in values.items():
        tensors[name].reshape(-1)[-len(wanted) :] = np.asarray(wanted, dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_tensors_are_named(dtype: str, tmp_path: Path) -> None:
    folder = damaged(tmp_path / "source", {NORM: [np.nan], HEAD: [np.inf, -np.inf, 1.0]}, dtype)
    said = re.escape(f"NaN or infinity in {HEAD} (2 infinite of 5,376 values), {NORM} (1 NaN of 56 values)")
    with pytest.raises(CheckpointError, match=said):
        to_canonical(folder, tmp_path / "output")
    assert not (tmp_path / "output").exists()
    write_manifest(open_folder(folder), layout_of(folder))
    with pytest.raises(CheckpointError, match=said):
        verify(open_folder(folder))


def test_the_largest_numbers_are_numbers(tmp_path: Path) -> None:
    largest = float(ml_dtypes.finfo("bfloat16").max)
    folder = damaged(tmp_path / "source", {HEAD: [largest, -largest, 0.0, -0.0]})
    to_canonical(folder, tmp_path / "output")
    # After the conversion to the other dtype, they are finite.
    with pytest.raises(CheckpointError, match=re.escape(f"{HEAD} (2 infinite of 5,376 values)")):
        to_canonical(folder, tmp_path / "narrow", dtype="float16")


@pytest.mark.parametrize("kind", ["disk", "object store"])
def test_quantizing_names_the_matrix(kind: str, tmp_path: Path) -> None:
    """Not its scales, in which the same values arrive."""
    matrix = "model.layers.0.mlp.up_proj.weight"
    folder = damaged(tmp_path / "source", {matrix: [np.nan, np.inf, np.nan, 1.0, np.nan], NORM: [np.inf]})
    storage = Storage.at(tmp_path / "output")
    output = ObjectOutput(storage) if kind == "object store" else FolderOutput(tmp_path / "output")
    output.prepare(False)
    said = f"in {matrix} (3 NaN and 1 infinite of 3,584 values), {NORM} (1 infinite of 56 values); a model"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        convert(open_folder(folder), layout_of(folder), output, quantize="int8")
