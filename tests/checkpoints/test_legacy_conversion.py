"""A legacy params.pkl is converted without being unpickled, and its missing biases have to be replaced."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import flax.core
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints import open_folder
from checkpoints.opening import open_tensors
from launch import convert
from tests.checkpoints.test_canonical import contents

_MLP = {"gate_proj": "Dense_0", "up_proj": "Dense_1", "down_proj": "Dense_2"}


def legacy_tree(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """The tree that the earlier port pickled: kernels [in, out], no biases."""
    body: dict[str, Any] = {
        "Embed_0": {"embedding": jnp.asarray(tensors["model.embed_tokens.weight"])},
        "DreamRMSNorm_0": {"weight": jnp.asarray(tensors["model.norm.weight"])},
    }
    for layer in range(sum(name.endswith("input_layernorm.weight") for name in tensors)):
        prefix = f"model.layers.{layer}."
        body[f"layers_{layer}"] = {
            "DreamAttention_0": {
                f"{name}_proj": {"kernel": jnp.asarray(tensors[f"{prefix}self_attn.{name}_proj.weight"].T)}
                for name in "qkvo"
            },
            "DreamMLP_0": {
                place: {"kernel": jnp.asarray(tensors[f"{prefix}mlp.{name}.weight"].T)} for name, place in _MLP.items()
            },
            "DreamRMSNorm_0": {"weight": jnp.asarray(tensors[f"{prefix}input_layernorm.weight"])},
            "DreamRMSNorm_1": {"weight": jnp.asarray(tensors[f"{prefix}post_attention_layernorm.weight"])},
        }
    return {"params": {"DreamModel_0": body, "Dense_0": {"kernel": jnp.asarray(tensors["lm_head.weight"].T)}}}


@pytest.fixture
def legacy(micro: Path, tmp_path: Path) -> Path:
    path = tmp_path / "params.pkl"
    tree = flax.core.freeze(legacy_tree(load_file(micro / "model.safetensors")))
    path.write_bytes(pickle.dumps(tree, protocol=4))
    return path


def launch(legacy: Path, micro: Path, output: Path, *flags: str) -> None:
    convert.run(["convert", f"--source={legacy}", f"--config={micro / 'config.json'}", f"--output={output}", *flags])


def test_missing_biases_are_refused(
    legacy: Path, micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        launch(legacy, micro, tmp_path / "out")
    assert stop.value.code == 2
    error = capsys.readouterr().err
    for part in ("biases are missing", "--biases_from", "--zero_biases"):
        assert part in error
    assert not (tmp_path / "out").exists()


def test_grafted_biases_make_the_model_whole(legacy: Path, micro: Path, tmp_path: Path) -> None:
    launch(legacy, micro, tmp_path / "out", f"--biases_from={micro}")
    expected = {name: value.tobytes() for name, value in load_file(micro / "model.safetensors").items()}
    assert contents(tmp_path / "out") == expected


def test_zero_biases_are_said(legacy: Path, micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch(legacy, micro, tmp_path / "out", "--zero_biases")
    assert "warning" in capsys.readouterr().err
    found = open_tensors(open_folder(tmp_path / "out"))
    for name in found.by_name:
        assert ("bias" in name) == (not found[name].whole().astype(np.float32).any())


def test_a_hostile_pickle_is_an_error(micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, (str(tmp_path / "executed"), "w"))

    path = tmp_path / "params.pkl"
    path.write_bytes(pickle.dumps({"params": Hostile()}))
    with pytest.raises(SystemExit) as stop:
        launch(path, micro, tmp_path / "out", "--zero_biases")
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()
