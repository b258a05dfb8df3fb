"""Hugging Face folders: loaded weights equal the files bit for bit, on every mesh and in little memory."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import DEMO, load_weights, loading, open_folder
from checkpoints.opening import open_tensors
from runtime.models.families import model_layout, parse_config
from sharding.errors import InputError, MeshError
from sharding.mesh import MeshSpec
from tests import golden_cases
from tests.checkpoints.golden_folder import GOLDEN, HEAD, change_config, fails, load, same_weights, split


def test_several_files_equal_one_to_the_bit(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    split(folder, tensors)
    same_weights(load(folder), golden_cases.engine())
    same_weights(load(folder, mesh="tensor=4"), golden_cases.engine("tensor=4", scan=False))


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
    """Build the expected unpadded leaf from the file's tensors, without the declarations of weights."""
    D, K, G, H = 224, 2, 7, 16
    if name in ("embedding", "final_norm", "lm_head"):
        source = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": HEAD}[name]
        return tensors[source]
    _, layer, kind = name.split(".")
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
    tensor = tensors[f"model.layers.{layer}.{source}"]
    return (tensor.T if transposed else tensor).reshape(shape)


@pytest.mark.parametrize("mesh", ["data=1", "tensor=2", "tensor=4", "tensor=16", "data=2,sequence=2,tensor=4"])
def test_weights_on_a_mesh_are_those_of_the_file(mesh: str, tensors: dict[str, np.ndarray]) -> None:
    """Un-padded they are the file's tensors to the bit; the rest is zero; every shard has its own part."""
    engine = golden_cases.engine(mesh, scan=False)
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
        q_proj, head = arrays["layers.1.q_proj"], arrays["lm_head"]
        assert q_proj.shape[1] == 8, "seven query heads of a KV head, padded over eight shards"
        assert q_proj.addressable_shards[0].data.shape == (1, 1, 16, 224)
        assert head.shape[0] == 384
        assert head.addressable_shards[0].data.shape == (24, 224)


@pytest.mark.parametrize("mesh", ["data=1", "data=2,tensor=4", "tensor=8"])
def test_small_tensors_are_loaded_without_compiling_a_program(
    mesh: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The host transposes them to the arrays that programs on the devices make of them."""
    spec = MeshSpec.parse(mesh)
    folder = open_folder(DEMO)
    layout = model_layout(parse_config(folder.config), spec, jax.devices()[: spec.size])

    def load_logged() -> tuple[list[jax.Array], int]:
        caplog.clear()
        jax.clear_caches()
        with jax.log_compiles():
            arrays = jax.tree.leaves(load_weights(folder, layout, np.float32)[0])
        return arrays, sum("Compiling" in record.getMessage() for record in caplog.records)

    found, programs = load_logged()
    assert programs == 0
    monkeypatch.setattr(loading, "SMALL_BYTES", 0)
    expected, programs = load_logged()
    assert programs > 0
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding)
        for shard, same in zip(one.addressable_shards, other.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(same.data))


# ---- meshes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        ("tensor=3", ["tensor=3", "512", "A mesh that works on 2 devices: data=1,sequence=1,tensor=2"]),
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


@pytest.mark.parametrize("piece", [1, 1000, 4096])
def test_large_parts_are_read_in_pieces(
    piece: int, tensors: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the pieces, other threads run, such as the one that tells other hosts that this one is alive."""
    monkeypatch.setattr("checkpoints.huggingface.PIECE_BYTES", piece)
    found = open_tensors(open_folder(GOLDEN))
    for name, expected in tensors.items():
        indices = [tuple(slice(0, size) for size in expected.shape), tuple(slice(1, size) for size in expected.shape)]
        for index in (*indices, tuple(slice(2, 3) for _ in expected.shape)):
            data = found[name].read(index)
            assert (data.dtype, data.flags.c_contiguous) == (expected.dtype, True)
            np.testing.assert_array_equal(data, expected[index])


def test_progress_ends_with_all_bytes(tensors: dict[str, np.ndarray]) -> None:
    read: list[tuple[int, int]] = []
    load(GOLDEN, progress=lambda *count: read.append(count))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert read[-1] == (total, total)
    assert [done for done, _ in read] == sorted(done for done, _ in read)
    assert len(read) == len(tensors)


# ---- memory -----------------------------------------------------------------------------------------------------


def test_loading_never_holds_the_model(tmp_path: Path) -> None:
    """200 MB onto eight devices: the host holds the tensor that is put there and the one read next, no third one."""
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
    assert peak < 2.5 * max(sizes), (
        f"{peak / 1e6:.0f} MB at the peak, and the largest tensor is {max(sizes) / 1e6:.0f} MB"
    )
    assert np.mean([layer.up_proj for layer in weights.layers]) == pytest.approx(0.01)
