"""Hugging Face folders that cannot be loaded: the error names everything that is wrong."""

from __future__ import annotations

import math
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from checkpoints import CheckpointError, huggingface, open_folder
from runtime.models.config import ConfigError
from runtime.models.families import parse_config
from tests.checkpoints.golden_folder import GOLDEN, HEAD, INDEX, change_config, fails, load, split, write_index

# ---- damaged weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, -1])
def test_truncated_files(folder: Path, keep: float) -> None:
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(int(keep * size) if isinstance(keep, float) else keep if keep >= 0 else size + int(keep))
    fails(folder, "model.safetensors", "truncated or invalid safetensors file")


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"\xff\xfe{}",
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 99999999]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [4611686018427387904, 8], "data_offsets": [0, 0]}}',
        b"[" * 100_000,
        b'{"a": 1}',
    ],
)
def test_headers_that_are_no_headers(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    fails(folder, "model.safetensors")


def test_a_header_longer_than_anything(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", (1 << 64) - 1) + b"{}")
    fails(folder, "model.safetensors", "truncated or invalid safetensors file")


def test_one_tensor_twice_in_a_file(folder: Path) -> None:
    entry = '"x": {"dtype": "F32", "shape": [1], "data_offsets": [%d, %d]}'
    header = ("{" + entry % (0, 4) + "," + entry % (4, 8) + "}").encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    fails(folder, "model.safetensors")


def test_everything_wrong_is_listed_at_once(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """One error lists tensors that are missing, unknown, duplicate, mis-shaped, in no file, or of another dtype."""
    changed = dict(tensors)
    del changed[HEAD], changed["model.layers.1.self_attn.q_proj.bias"]
    changed["model.norm.weight"] = changed["model.norm.weight"][:-1]
    changed["model.layers.0.mlp.up_proj.weight"] = np.ascontiguousarray(changed["model.layers.0.mlp.up_proj.weight"].T)
    changed["model.layers.3.input_layernorm.weight"] = changed["model.layers.2.input_layernorm.weight"]
    changed["model.layers.2.self_attn.k_proj.bias"] = changed["model.layers.2.self_attn.k_proj.bias"].astype(np.float64)
    changed["surprise"] = np.zeros((2, 3), np.float32)
    claims = split(folder, changed)
    twice = "model.embed_tokens.weight"
    for file in sorted(set(claims.values())):
        if file != claims[twice]:
            save_file(load_file(folder / file) | {twice: changed[twice]}, folder / file)
            break
    write_index(folder, claims | {"phantom": claims[twice]})
    message = fails(
        folder,
        f"missing: {HEAD} [320, 224]",
        "missing: model.layers.1.self_attn.q_proj.bias [224]",
        "unknown: surprise [2, 3]",
        "unknown: model.layers.3.input_layernorm.weight [224]",
        "shape: model.norm.weight is [223]; config.json says [224]",
        "shape: model.layers.0.mlp.up_proj.weight is [224, 512]; config.json says [512, 224]",
        "dtype: model.layers.2.self_attn.k_proj.bias is F64",
        f"duplicate: {twice} is in 2 files",
        "index: phantom is in no file",
    )
    assert str(folder) in message
    assert len(message.splitlines()) == 10
    assert message.count(HEAD) == 1, "a missing head is not filled in from the embedding"


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    fails(folder, INDEX, "model.safetensors")


# ---- the index --------------------------------------------------------------------------------------------------


def test_an_index_that_names_an_absent_file(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    claims = split(folder, tensors)
    gone = sorted(set(claims.values()))[1]
    (folder / gone).unlink()
    fails(folder, gone)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "inside/../../outside.safetensors",
        "/outside.safetensors",
        "..",
        ".",
        "",
        "pytorch_model.bin",
        "model.safetensors/",
        "x" * 5000 + ".safetensors",
    ],
    ids=range(9),
)
def test_an_index_that_points_elsewhere(
    folder: Path, tensors: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The file outside exists and is intact, but is not read."""
    opened: list[Path] = []

    def noted(path: Path, *arguments: Any) -> Any:
        opened.append(path)
        return safe_open(path, *arguments)

    claims = split(folder, tensors)
    shutil.copy(GOLDEN / "model.safetensors", folder.parent / "outside.safetensors")
    (folder / "inside").mkdir()
    if name.startswith("/"):
        name = str(folder.parent) + name
    monkeypatch.setattr(huggingface, "safe_open", noted)
    load(folder)
    assert {path.name for path in opened} == set(claims.values())
    opened.clear()
    write_index(folder, claims | {HEAD: name})
    message = fails(folder, f'{folder / INDEX}: "{name[:200]}" is not the name of a safetensors file')
    assert len(message) < 10_000
    assert not opened


@pytest.mark.parametrize(
    "name", ["\0.safetensors", "inside\\..\\outside.safetensors", "\udc80.safetensors"], ids=range(3)
)
def test_an_index_with_an_odd_name(folder: Path, tensors: dict[str, np.ndarray], name: str) -> None:
    """On Linux, a backslash is a character like any other."""
    write_index(folder, split(folder, tensors) | {HEAD: name})
    (folder / "inside").mkdir()
    shutil.copy(GOLDEN / "model.safetensors", folder / "outside.safetensors")
    fails(folder, f"{folder}: the index names files that are not there: {name}")


@pytest.mark.parametrize(
    "index",
    [
        "{}",
        "[]",
        "3",
        "not json",
        '{"weight_map": []}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": null}}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": "model.safetensors"}, "weight_map": {}}',
        '{"weight_map": {"lm_head.weight": "model.safetensors", "lm_head.weight": "model.safetensors"}}',
        "[" * 100_000,
    ],
)
def test_an_index_that_is_none(folder: Path, index: str) -> None:
    (folder / INDEX).write_text(index)
    fails(folder)


# ---- config.json ------------------------------------------------------------------------------------------------


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    fails(folder, "there is no config.json")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"\x80\x81\x82",
        b"\x00" * 100,
        b"[]",
        b"null",
        b'"Dream"',
        b'{"model_type": "Dream"',
        b'{"model_type": "Dream", "model_type": "Dream"}',
        b'{"a": {"b": 1, "b": 2}}',
        b'{"a":' * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"vocab_size": ' + b"9" * 100_000 + b"}",
    ],
    ids=range(13),
)
def test_a_config_that_cannot_be_read(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    message = fails(folder, "config.json")
    assert len(message) < 2000


def test_a_config_too_large_to_be_one(folder: Path) -> None:
    with (folder / "config.json").open("r+b") as file:
        file.truncate(1 << 30)  # a sparse file
    fails(folder, "config.json", "the limit is")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"vocab_size": 1 << 62}, ["vocab_size", str(1 << 62)]),
        ({"vocab_size": 10**400}, ["vocab_size"]),
        ({"hidden_size": -224}, ["hidden_size", "-224"]),
        ({"hidden_size": 0}, ["hidden_size"]),
        ({"hidden_size": 224.0}, ["hidden_size", "224.0"]),
        ({"hidden_size": "224"}, ["hidden_size", "'224'"]),
        ({"hidden_size": True}, ["hidden_size"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"hidden_size": ...}, ["hidden_size", "missing"]),
        ({"hidden_size": 225}, ["hidden_size 225", "14"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers"]),
        ({"num_attention_heads": 15}, ["15", "2"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"head_dim": math.nan}, ["head_dim", "nan"]),
        ({"rope_theta": math.nan}, ["rope_theta", "nan"]),
        ({"rope_theta": math.inf}, ["rope_theta", "inf"]),
        ({"rope_theta": -1.0}, ["rope_theta"]),
        ({"rope_theta": 10**400}, ["rope_theta"]),
        ({"rope_theta": [1]}, ["rope_theta"]),
        ({"rms_norm_eps": math.nan}, ["rms_norm_eps", "nan"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"mask_token_id": 320}, ["mask_token_id", "320"]),
        ({"mask_token_id": -1}, ["mask_token_id"]),
        ({"mask_token_id": None}, ["mask_token_id", "missing"]),
        ({"mask_token_id": [300]}, ["mask_token_id"]),
        ({"pad_token_id": 1.5}, ["pad_token_id"]),
        ({"eos_token_id": [301, 999]}, ["eos_token_id", "999"]),
        ({"eos_token_id": {"a": 1}}, ["eos_token_id"]),
        ({"torch_dtype": "int8"}, ["int8", "bfloat16"]),
        ({"torch_dtype": ["float32"]}, ["dtype"]),
        # Architectures and features that the forward pass does not have.
        ({"model_type": "llama"}, ["llama", "Dream"]),
        ({"model_type": ...}, ["model_type", "Dream"]),
        ({"model_type": ["Dream"]}, ["model_type"]),
        ({"model_type": {"Dream": 1}}, ["model_type"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}, "rope_theta": ...}, ["yarn"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}, "rope_theta": ...}, ["full_attention"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e4}, ["10000", "1000000"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, ["yarn"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings"]),
    ],
)
def test_a_config_that_cannot_be_meant(folder: Path, changes: dict[str, Any], parts: list[str]) -> None:
    change_config(folder, **changes)
    message = fails(folder, "config.json", *parts, error=ConfigError)
    assert len(message) < 2000


@pytest.mark.parametrize("parameters", [None, {}, {"rope_type": "default"}, {"rope_theta": 77.0}])
def test_where_the_rope_theta_may_be(folder: Path, parameters: dict[str, Any] | None) -> None:
    change_config(folder, rope_theta=77.0, rope_parameters=parameters)
    assert parse_config(open_folder(folder).config).rope_theta == 77.0


def test_a_config_of_another_size_than_the_weights(folder: Path) -> None:
    change_config(folder, num_hidden_layers=4, intermediate_size=1024)
    fails(
        folder,
        "missing: model.layers.3.mlp.up_proj.weight [1024, 224]",
        "shape: model.layers.0.mlp.up_proj.weight is [512, 224]; config.json says [1024, 224]",
    )


def test_what_is_no_folder(folder: Path) -> None:
    fails(folder / "config.json", "is a file", "folder")
    fails(folder / "absent" / "deeper" / "model", "no such folder")


@pytest.mark.parametrize(
    "path", ["x" * 5000, "~no_such_user_here/model", "a\0b", "nowhere://bucket/model"], ids=range(4)
)
def test_paths_that_cannot_be_one(path: str) -> None:
    with pytest.raises(CheckpointError):
        open_folder(path, offline=True)
