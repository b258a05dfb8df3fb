"""Round trips of every family: transformers writes a Hugging Face folder, which is converted, restored and exported,
and transformers loads the export.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from checkpoints import CheckpointError, load_weights, open_folder
from checkpoints.opening import open_tensors
from checkpoints.verification import verify, write_manifest
from runtime import Engine
from runtime.models.families import model_layout, parse_config
from sharding.mesh import MeshSpec
from tests.checkpoints.small import layout_of, to_canonical, to_huggingface

QWEN2 = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 131, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
GPT2 |= {"bos_token_id": 130, "eos_token_id": 130}
MESHES = ("tensor=1", "tensor=2", "data=16", "sequence=8", "data=2,sequence=2,tensor=4")
KINDS = ("qwen2", "qwen2 tied", "qwen3", "qwen3 tied", "gpt2", "gpt2 without prefix")


def random_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind.startswith("gpt2"):
        return GPT2LMHeadModel(GPT2Config(**GPT2)).eval()
    tied = kind.endswith("tied")
    if kind.startswith("qwen3"):
        return Qwen3ForCausalLM(Qwen3Config(**QWEN2, head_dim=16, tie_word_embeddings=tied)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**QWEN2, tie_word_embeddings=tied)).eval()


@pytest.fixture(scope="module", params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = request.param
    dtype = "float32" if kind == "gpt2 without prefix" else "bfloat16"
    folder = tmp_path_factory.mktemp("source")
    random_model(kind).to(getattr(torch, dtype)).save_pretrained(folder)
    if kind == "gpt2 without prefix":
        # The format of OpenAI's first release: names without prefix, and causal masks among the tensors.
        tensors = {name.removeprefix("transformer."): value for name, value in named(folder).items()}
        tensors["h.0.attn.bias"] = np.tril(np.ones((1, 1, 32, 32), np.float32))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_canonical(source, tmp_path_factory.mktemp("canonical") / "checkpoint")


def named(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def logits(folder: Path) -> np.ndarray:
    """Return the float32 logits that transformers computes from a folder."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    ids = torch.arange(24).reshape(2, 12) * 5 % 131
    with torch.no_grad():
        return np.asarray(model.eval()(ids).logits)


def test_there_and_back_to_the_bit(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    back = to_huggingface(checkpoint, tmp_path / "back")
    expected, found = named(source), named(back)
    if "wte.weight" in expected:
        expected = {f"transformer.{name}": value for name, value in expected.items() if not name.endswith(".attn.bias")}
    assert found.keys() == expected.keys()
    assert not any(name.startswith("lm_head") for name in found) or "qwen" in json.dumps(open_folder(back).config)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert found[name].tobytes() == value.tobytes(), name
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert verify(open_folder(checkpoint)) == sum(value.nbytes for value in expected.values())


@pytest.mark.parametrize("kind", ["qwen2 tied", "qwen3 tied"])
def test_a_stored_head_of_a_tied_model_is_not_used(kind: str, tmp_path: Path) -> None:
    """As in Qwen3-0.6B."""
    random_model(kind).save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "source")
    tensors = named(tmp_path / "source")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, tmp_path / "source/model.safetensors")
    plain, stored = (Engine.load(tmp_path / name, "data=1", "float32") for name in ("plain", "source"))
    ids = np.arange(12)[None]
    np.testing.assert_array_equal(stored.logits(ids), plain.logits(ids))
    converted = to_canonical(tmp_path / "source", tmp_path / "canonical")
    assert "lm_head.weight" not in open_tensors(open_folder(converted)).by_name
    # A manifest covers it, so that the folder is verified in full.
    folder = open_folder(tmp_path / "source")
    write_manifest(folder, layout_of(tmp_path / "source"))
    assert verify(folder) == sum(one.nbytes for one in named(tmp_path / "source").values())


@pytest.mark.parametrize("change", ["one number", "fewer rows"])
def test_a_stored_head_that_differs_from_the_embedding(change: str, tmp_path: Path) -> None:
    """transformers would use both."""
    random_model("qwen2 tied").save_pretrained(tmp_path / "source")
    tensors = named(tmp_path / "source")
    head = tensors["model.embed_tokens.weight"].copy()
    head[-1, -1] += 0.5
    head = head if change == "one number" else head[:-1]
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "source" / "model.safetensors")
    message = r'lm_head\.weight differs from model\.embed_tokens\.weight, but .* set "tie_word_embeddings" to false'
    with pytest.raises(CheckpointError, match=message):
        Engine.load(tmp_path / "source", "data=1")
    with pytest.raises(CheckpointError, match=message):
        to_canonical(tmp_path / "source", tmp_path / "canonical")
    assert not (tmp_path / "canonical").exists()
    if change == "one number":
        file = tmp_path / "source" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": False}))
        Engine.load(tmp_path / "source", "data=1")


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), ()])
def test_an_unused_head_of_no_size_is_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    random_model("qwen2 tied").save_pretrained(tmp_path)
    tensors = named(tmp_path) | {"lm_head.weight": np.zeros(shape, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"shape: lm_head\.weight is .*, which has no elements"):
        write_manifest(open_folder(tmp_path), layout_of(tmp_path))


def test_an_incomplete_folder_is_not_exported(tmp_path: Path) -> None:
    random_model("qwen2").save_pretrained(tmp_path / "source")
    tensors = named(tmp_path / "source")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight"):
        to_huggingface(tmp_path / "source", tmp_path / "exported")


def test_transformers_computes_the_same(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    back = to_huggingface(checkpoint, tmp_path / "back")
    np.testing.assert_array_equal(logits(back), logits(source))


@pytest.mark.parametrize("mesh", ["tensor=4", *(pytest.param(one, marks=pytest.mark.slow) for one in MESHES)])
def test_restored_on_any_mesh_as_from_the_source(mesh: str, source: Path, checkpoint: Path) -> None:
    config, spec = parse_config(open_folder(source).config), MeshSpec.parse(mesh)
    layout = model_layout(config, spec, jax.devices()[: spec.size])
    (expected, _), (found, _) = (load_weights(open_folder(path), layout, config.dtype) for path in (source, checkpoint))
    tensors = named(source)
    embedding = tensors.get(
        "model.embed_tokens.weight", tensors.get("transformer.wte.weight", tensors.get("wte.weight"))
    )
    assert embedding is not None
    assert np.asarray(found.embedding)[: config.vocab_size].tobytes() == embedding.tobytes()
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert one.sharding == other.sharding
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
