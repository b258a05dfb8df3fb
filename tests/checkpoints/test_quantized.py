"""Checkpoints stored as int8 or int4: integers and scales equal those of quantizing while loading, on every mesh."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers

from checkpoints import open_folder
from checkpoints.conversion import convert
from checkpoints.errors import CheckpointError, CorruptCheckpointError
from checkpoints.export import export_checkpoint
from checkpoints.output import output_at
from launch.folders.models import open_model
from runtime import Engine, SamplingConfig
from tests import golden_cases


def gpt2(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=517, n_embd=96, n_layer=2, n_head=12, n_positions=64, initializer_range=0.2, eos_token_id=None
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def quantized(source: Path, output: Path, quantize: str = "int8") -> Path:
    folder, layout = open_model(str(source), "source")
    place = output_at(str(output))
    place.prepare(False)
    convert(folder, layout, place, quantize=quantize)
    return output


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["dream", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_stored_is_as_quantized_while_loading(tmp_path: Path, family: str, quantize: str) -> None:
    source = golden_cases.FOLDER if family == "dream" else gpt2(tmp_path / "source")
    stored = quantized(source, tmp_path / "stored", quantize)
    for mesh in ("tensor=1", "tensor=8", "data=2,sequence=2,tensor=2"):
        expected = Engine.load(source, mesh, quantize=quantize)
        found = Engine.load(stored, mesh)
        assert found.layout.quantization == quantize
        jax.tree.map(np.testing.assert_array_equal, found.weights, expected.weights)
    assert found.loaded is not None
    assert found.loaded.bytes_stored < (0.4 if quantize == "int8" else 0.3) * sum(
        file.stat().st_size for file in source.glob("*.safetensors")
    )
    if family == "gpt2":
        made = found.generate_tokens([[1, 2, 3]], None, SamplingConfig(max_new_tokens=4))
        assert made.stats.tokens == 4


@pytest.mark.parametrize(("quantize", "other"), [("int8", "int4"), ("int4", "int8")])
def test_what_is_quantized_cannot_go_back(tmp_path: Path, quantize: str, other: str) -> None:
    stored = quantized(golden_cases.FOLDER, tmp_path / "stored", quantize)
    folder, layout = open_model(str(stored), "source")
    for options in ({"dtype": "bfloat16"}, {"quantize": other}):
        with pytest.raises(CheckpointError, match=f"stored as {quantize}"):
            convert(folder, layout, output_at(str(tmp_path / "again")), **options)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=f"stored as {quantize}"):
        export_checkpoint(folder, output_at(str(tmp_path / "exported")))  # type: ignore[arg-type]
    assert not (tmp_path / "again").exists()
    source, own = open_model(str(golden_cases.FOLDER), "source")
    with pytest.raises(CheckpointError, match="cannot be combined"):
        convert(source, own, output_at(str(tmp_path / "both")), dtype="bfloat16", quantize=quantize)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_damaged_integer_is_found(tmp_path: Path, quantize: str) -> None:
    stored = quantized(golden_cases.FOLDER, tmp_path / "stored", quantize)
    largest = max(stored.rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        Engine.load(open_folder(stored), "tensor=1")
