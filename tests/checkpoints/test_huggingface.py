"""Hugging Face folders: what is loaded equals the file to the bit, and what cannot be loaded is said by name.

Every folder here is the golden model's, damaged or laid out otherwise.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import CheckpointError, load_weights, open_folder
from runtime import DiffusionConfig, Engine
from runtime.models.config import ConfigError
from runtime.models.families import model_layout, parse_config
from sharding.errors import InputError, MeshError
from sharding.mesh import MeshSpec
from tests import golden_cases

GOLDEN = golden_cases.FOLDER
HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the golden checkpoint."""
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, path)
    return path


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; ``...`` removes one."""
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def split(folder: Path, tensors: dict[str, np.ndarray], files: int = 3) -> dict[str, str]:
    """Rewrite a folder as several files and an index; returns the index's map."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    claims = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[number::files]}
        save_file(part, folder / file)
        claims |= dict.fromkeys(part, file)
    write_index(folder, claims)
    return claims


def write_index(folder: Path, claims: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": claims}))


def load(folder: Any, **options: Any) -> Engine:
    return Engine.load(folder, **({"mesh": "data=1"} | options))


def same_weights(one: Engine, other: Engine) -> None:
    leaves = zip(jax.tree.leaves(one.weights), jax.tree.leaves(other.weights), strict=True)
    for first, second in leaves:
        assert first.dtype == second.dtype
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


def fails(folder: Any, *parts: str, error: type[Exception] = CheckpointError, **options: Any) -> str:
    """Loading fails with one error whose message has all these parts."""
    with pytest.raises(error) as caught:
        load(folder, **options)
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    assert isinstance(caught.value, InputError)
    return message


# ---- damaged weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, -1])
def test_truncated_files(folder: Path, keep: float) -> None:
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(int(keep * size) if isinstance(keep, float) else keep if keep >= 0 else size + int(keep))
    fails(folder, "model.safetensors", "not a whole safetensors file")


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
    fails(folder, "model.safetensors", "not a whole safetensors file")


def test_one_tensor_twice_in_a_file(folder: Path) -> None:
    entry = '"x": {"dtype": "F32", "shape": [1], "data_offsets": [%d, %d]}'
    header = ("{" + entry % (0, 4) + "," + entry % (4, 8) + "}").encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    fails(folder, "model.safetensors")


def test_everything_wrong_is_listed_at_once(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Missing, unknown, mis-shaped, of a strange dtype, in two files, in none: one error with all of them."""
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
        "shape: model.norm.weight is [223], and config.json makes it [224]",
        "shape: model.layers.0.mlp.up_proj.weight is [224, 512], and config.json makes it [512, 224]",
        "dtype: model.layers.2.self_attn.k_proj.bias is F64",
        f"duplicate: {twice} stands in 2 files",
        "index: phantom is in no file",
    )
    assert str(folder) in message
    assert len(message.splitlines()) == 10
    assert message.count(HEAD) == 1, "a missing head is not filled in from the embedding"


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    fails(folder, INDEX, "model.safetensors")


# ---- the index --------------------------------------------------------------------------------------------------


def test_several_files_equal_one_to_the_bit(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    split(folder, tensors)
    same_weights(load(folder), golden_cases.engine())
    same_weights(load(folder, mesh="tensor=4"), golden_cases.engine("tensor=4"))


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
        "\0.safetensors",
        "inside\\..\\outside.safetensors",
        "\udc80.safetensors",
    ],
    ids=range(12),
)
def test_an_index_that_points_elsewhere(folder: Path, tensors: dict[str, np.ndarray], name: str) -> None:
    """The file outside is there and whole, and is not read."""
    claims = split(folder, tensors)
    shutil.copy(GOLDEN / "model.safetensors", folder.parent / "outside.safetensors")
    if name.startswith("/"):
        name = str(folder.parent) + name
    write_index(folder, claims | {HEAD: name})
    message = fails(folder)
    assert len(message) < 10_000 + len(name)


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
        file.truncate(1 << 30)  # sparse
    fails(folder, "config.json", "too many")


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
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, ["yarn"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings"]),
    ],
)
def test_a_config_that_cannot_be_meant(folder: Path, changes: dict[str, Any], parts: list[str]) -> None:
    change_config(folder, **changes)
    message = fails(folder, "config.json", *parts, error=ConfigError)
    assert len(message) < 2000


def test_a_config_of_another_size_than_the_weights(folder: Path) -> None:
    change_config(folder, num_hidden_layers=4, intermediate_size=1024)
    fails(
        folder,
        "missing: model.layers.3.mlp.up_proj.weight [1024, 224]",
        "shape: model.layers.0.mlp.up_proj.weight is [512, 224], and config.json makes it [1024, 224]",
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


# ---- dtypes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def sixteen_bit(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    save_file(
        {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    change_config(folder, torch_dtype="bfloat16")
    return folder


def test_stored_bfloat16_is_kept_when_asked(sixteen_bit: Path, tensors: dict[str, np.ndarray]) -> None:
    engine = load(sixteen_bit, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(engine.weights)} == {np.dtype(ml_dtypes.bfloat16)}
    assert engine.dtype == ml_dtypes.bfloat16
    assert not any("float32" in note for note in engine.notes)
    found = np.asarray(engine.weights.embedding)[:320]
    expected = tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def test_bfloat16_runs_as_float32_on_cpu_and_says_so(sixteen_bit: Path, tensors: dict[str, np.ndarray]) -> None:
    engine = load(sixteen_bit)
    assert {leaf.dtype for leaf in jax.tree.leaves(engine.weights)} == {np.dtype(np.float32)}
    (note,) = [note for note in engine.notes if "float32" in note]
    assert "bfloat16" in note
    assert "CPU" in note
    rounded = tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(engine.weights.embedding)[:320], rounded)


def test_float32_needs_no_note_and_what_the_files_hold_wins(folder: Path) -> None:
    assert load(folder).notes == []
    change_config(folder, torch_dtype="bfloat16")
    assert load(folder).notes == [], "config.json says bfloat16, and the files hold float32"
    with pytest.raises(InputError, match="int8"):
        load(folder, dtype="int8")


def test_the_mesh_chosen_is_said(folder: Path) -> None:
    engine = load(folder, mesh=None, devices=jax.devices()[:2])
    assert any("mesh" in note and "2 cpu" in note for note in engine.notes)


# ---- padding and layouts ----------------------------------------------------------------------------------------


def expected_leaf(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """A leaf as it ought to be, unpadded, from the file's tensors and what is known of the model: no declarations."""
    D, K, G, H = 224, 2, 7, 16
    if name in ("embedding", "final_norm", "lm_head"):
        source = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": HEAD}[name]
        return tensors[source]
    kind = name.removeprefix("layers.")
    source, shape, transposed = {
        "input_norm": ("input_layernorm.weight", (D,), False),
        "post_attention_norm": ("post_attention_layernorm.weight", (D,), False),
        "q_proj": ("self_attn.q_proj.weight", (K, G, H, D), False),
        "q_bias": ("self_attn.q_proj.bias", (K, G, H), False),
        "k_proj": ("self_attn.k_proj.weight", (K, H, D), False),
        "k_bias": ("self_attn.k_proj.bias", (K, H), False),
        "v_proj": ("self_attn.v_proj.weight", (K, H, D), False),
        "v_bias": ("self_attn.v_proj.bias", (K, H), False),
        "o_proj": ("self_attn.o_proj.weight", (K, G, H, D), True),
        "gate_proj": ("mlp.gate_proj.weight", (512, D), False),
        "up_proj": ("mlp.up_proj.weight", (512, D), False),
        "down_proj": ("mlp.down_proj.weight", (512, D), True),
    }[kind]
    layers = [tensors[f"model.layers.{layer}.{source}"] for layer in range(3)]
    return np.stack([(layer.T if transposed else layer).reshape(shape) for layer in layers])


@pytest.mark.parametrize("mesh", ["data=1", "tensor=2", "tensor=4", "tensor=16", "data=2,sequence=2,tensor=4"])
def test_weights_on_a_mesh_are_those_of_the_file(mesh: str, tensors: dict[str, np.ndarray]) -> None:
    """Un-padded they are the file's tensors to the bit; the rest is zero; every shard has its own part."""
    engine = golden_cases.engine(mesh)
    leaves = engine.layout.leaves
    arrays = dict(zip([leaf.name for leaf in leaves], jax.tree.leaves(engine.weights), strict=True))
    used = 0
    for leaf in leaves:
        found, expected = np.asarray(arrays[leaf.name]), expected_leaf(tensors, leaf.name)
        assert found.shape == leaf.padded_shape
        inside = tuple(slice(0, size) for size in expected.shape)
        np.testing.assert_array_equal(found[inside].view(np.int32), expected.view(np.int32), err_msg=leaf.name)
        outside = np.ones(found.shape, bool)
        outside[inside] = False
        assert not found[outside].any(), leaf.name
        used += expected.size
        for shard in arrays[leaf.name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), found[shard.index], err_msg=leaf.name)
    assert used == sum(tensor.size for tensor in tensors.values()) == engine.layout.parameter_count
    if mesh == "tensor=16":
        q_proj, head = arrays["layers.q_proj"], arrays["lm_head"]
        assert q_proj.shape[2] == 8, "seven query heads of a KV head, padded over eight shards"
        assert q_proj.addressable_shards[0].data.shape == (3, 1, 1, 16, 224)
        assert head.shape[0] == 384
        assert head.addressable_shards[0].data.shape == (24, 224)


# ---- nothing in a folder is run ---------------------------------------------------------------------------------

EVIL = """
from pathlib import Path
Path({marker!r}).write_text("I was imported")
class EvilModel: pass
class EvilConfig: pass
class EvilTokenizer: pass
"""


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (self.marker,)


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<|endoftext|>": 0, "def": 1, "main": 2, "<|mask|>": 300}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


opened: list[str] = []


def record_opening(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.open") and isinstance(arguments[0], (str, bytes)):
        opened.append(os.fsdecode(arguments[0]))


def test_code_and_pickles_in_the_folder_are_never_touched(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    code = EVIL.format(marker=str(marker))
    for name in (
        "modeling_evil.py",
        "configuration_evil.py",
        "tokenization_evil.py",
        "__init__.py",
        "sitecustomize.py",
    ):
        (folder / name).write_text(code)
    change_config(
        folder,
        architectures=["EvilModel"],
        auto_map={"AutoModel": "modeling_evil.EvilModel", "AutoConfig": "configuration_evil.EvilConfig"},
        trust_remote_code=True,
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "EvilTokenizer",
                "auto_map": {"AutoTokenizer": ["tokenization_evil.EvilTokenizer", "tokenization_evil.EvilTokenizer"]},
                "trust_remote_code": True,
                "eos_token": "<|endoftext|>",
            }
        )
    )
    save_tokenizer(folder)
    pickles = ("pytorch_model.bin", "params.pkl", "training_args.bin", "optimizer.pt")
    for name in pickles:
        (folder / name).write_bytes(pickle.dumps(Bomb(marker)))

    sys.addaudithook(record_opening)
    opened.clear()
    engine = load(folder)
    assert engine.encode(["def main"])[0].tolist() == [[1, 2]]
    engine.generate(["def main"], DiffusionConfig(max_new_tokens=4, steps=2))
    assert not marker.exists()
    assert any(path.endswith("config.json") for path in opened), "the hook sees what is opened"
    assert not [path for path in opened if path.endswith((*pickles, "evil.py", "sitecustomize.py"))]
    assert not [name for name in sys.modules if "evil" in name]
    same_weights(engine, golden_cases.engine())


def test_the_bomb_goes_off(tmp_path: Path) -> None:
    """So that its silence above means something."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


def test_a_pickle_alone_is_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "marker")))
    fails(folder, "safetensors")
    assert not (tmp_path / "marker").exists()


# ---- URLs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """fsspec's file system in memory, and a cache folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    root = f"/{tmp_path.name}/model"
    system.makedirs(root)
    yield system, root, f"memory:/{root}"
    system.rm(root, recursive=True)


def upload(system: Any, root: str, folder: Path) -> None:
    for path in folder.iterdir():
        system.pipe_file(f"{root}/{path.name}", path.read_bytes())


def test_a_url_equals_the_folder(remote: Any, folder: Path, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    system, root, url = remote
    split(folder, tensors)
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "marker")))
    upload(system, root, folder)
    same_weights(load(url), golden_cases.engine())
    fetched = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert fetched == {path.name for path in folder.iterdir()} - {"modeling_evil.py", "pytorch_model.bin"}
    assert not (tmp_path / "marker").exists()


def test_urls_without_a_checkpoint(remote: Any) -> None:
    system, root, url = remote
    fails(url + "/deeper", "no such folder")
    fails(url, "config.json")
    system.pipe_file(f"{root}/config.json", (GOLDEN / "config.json").read_bytes())
    fails(url, "weights")


def test_a_url_whose_weights_have_changed(remote: Any, folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Trained on and saved again under the same name, of the very same size: what is there now is loaded."""
    system, root, url = remote
    save_file(tensors, folder / "model.safetensors")
    size = (folder / "model.safetensors").stat().st_size
    upload(system, root, folder)
    same_weights(load(url), golden_cases.engine())
    save_file({name: -tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert (folder / "model.safetensors").stat().st_size == size
    upload(system, root, folder)
    same_weights(load(url), load(folder))


def test_a_url_whose_files_were_replaced(remote: Any, folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Several files with an index, then one without: the index of before is not followed."""
    system, root, url = remote
    split(folder, tensors)
    upload(system, root, folder)
    load(url)
    for path in folder.glob("model*"):
        path.unlink()
        system.rm(f"{root}/{path.name}")
    save_file({name: -tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    upload(system, root, folder)
    same_weights(load(url), load(folder))


# ---- meshes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        ("tensor=3", ["tensor=3", "512", "A mesh that works"]),
        ("tensor=5", ["tensor=5"]),
        ("tensor=32", ["32 devices", "16"]),
        ("data=17", ["17 devices", "16"]),
        ("data=4,sequence=4,tensor=2", ["32 devices"]),
        ("tensor=1024", ["tensor=1024"]),
        ("tensor=0", ["tensor=0"]),
        ("data=-1,tensor=3", ["tensor=3"]),
        ("data=-1,tensor=-1", ["-1"]),
        ("model=4", ["model", "data, sequence, tensor"]),
        ("tensor", ["tensor"]),
        ("tensor=2,tensor=4", ["twice"]),
    ],
)
def test_meshes_that_do_not_work(mesh: str, parts: list[str]) -> None:
    """They are refused before any weight is read."""
    read: list[tuple[int, int]] = []
    fails(GOLDEN, *parts, error=MeshError, mesh=mesh, progress=lambda *count: read.append(count))
    assert not read


def test_progress_ends_with_all_bytes(tensors: dict[str, np.ndarray]) -> None:
    read: list[tuple[int, int]] = []
    load(GOLDEN, progress=lambda *count: read.append(count))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert read[-1] == (total, total)
    assert [done for done, _ in read] == sorted(done for done, _ in read)
    assert len(read) == len(tensors)


# ---- memory -----------------------------------------------------------------------------------------------------


def test_loading_never_holds_the_model(tmp_path: Path) -> None:
    """200 MB onto eight devices: the host holds a few tensors at a time, never the model."""
    raw = json.loads((GOLDEN / "config.json").read_text()) | {
        "vocab_size": 4096,
        "hidden_size": 768,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = parse_config(raw)
    leaves = model_layout(config).leaves
    shapes = {source: leaf.source_shape for leaf in leaves for source in leaf.sources}
    save_file(
        {name: np.full(shape, 0.01, np.float32) for name, shape in shapes.items()}, tmp_path / "model.safetensors"
    )
    sizes = [4 * math.prod(shape) for shape in shapes.values()]
    assert 190e6 < sum(sizes) < 260e6
    layout = model_layout(config, MeshSpec(tensor=8), jax.devices())
    peaks: list[int] = []
    tracemalloc.start()
    try:
        weights, _ = load_weights(
            open_folder(tmp_path), layout, np.float32, lambda *_: peaks.append(tracemalloc.get_traced_memory()[1])
        )
        jax.block_until_ready(weights)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(peaks) == len(shapes)
    assert peak > max(sizes) / 8, "the host's buffers are seen"
    assert peak < 3 * max(sizes), (
        f"{peak / 1e6:.0f} MB at the peak, and the largest tensor is {max(sizes) / 1e6:.0f} MB"
    )
    assert float(weights.layers.up_proj.mean()) == pytest.approx(0.01)
