"""LoRA adapters: loading, conversion and export equal a merge of whole matrices, and what cannot be merged is named."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import convert, export_checkpoint, folder_fingerprint, load_weights, lora, open_folder, verify
from checkpoints.lora import CONFIG_FILE, WEIGHTS_FILE, merged_tensors
from checkpoints.opening import open_tensors
from checkpoints.output import FolderOutput
from launch import convert as convert_command
from launch import export as export_command
from launch import generate as generate_command
from runtime import Engine
from runtime.models.families import model_layout, parse_config
from sharding.errors import InputError
from sharding.mesh import MeshSpec
from tests.checkpoints.golden_folder import Bomb, same_weights
from tests.checkpoints.lora_folder import (
    ALPHA,
    BFLOAT16,
    RANK,
    rank_stabilized,
    write_adapter,
    write_merged,
)
from tests.checkpoints.small import CUT, MICRO, contents, layout_of, to_canonical, write_source
from tests.launch.mistakes import refusal

# Matrices of several tiles, in rows and in columns, with 6 heads.
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 131,
    "n_embd": 288,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 32,
    "torch_dtype": "bfloat16",
}
LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
CONV1D = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
MODULES = {
    "Dream": (*(f"model.layers.{layer}.{name}" for layer in range(2) for name in LINEAR), "lm_head"),
    "gpt2": tuple(f"transformer.h.{layer}.{name}" for layer in range(2) for name in CONV1D),
}
MESHES = {"Dream": ("tensor=1", "sequence=2,tensor=4"), "gpt2": ("tensor=1", "data=2,tensor=6")}


@pytest.fixture(scope="module", params=MODULES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def source(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"), CUT if kind == "Dream" else GPT2)


@pytest.fixture(scope="module")
def adapter(kind: str, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return write_adapter(folder, source, MODULES[kind], fan_in_fan_out=kind == "gpt2")


@pytest.fixture(scope="module")
def merged(source: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_merged(tmp_path_factory.mktemp("merged") / "model", source, adapter)


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("micro"), MICRO)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(lora, "TILE", 128)
    return lora.TILE


def weights(folder: Path, mesh: str, dtype: str, adapter: Path | None = None, **options: Any) -> list[jax.Array]:
    opened = open_folder(folder, lora=adapter)
    spec = MeshSpec.parse(mesh)
    layout = model_layout(parse_config(opened.config), spec, jax.devices()[: spec.size], **options)
    return jax.tree.leaves(load_weights(opened, layout, dtype)[0])


def same(found: list[jax.Array], expected: list[jax.Array]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.sharding == other.sharding
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.usefixtures("small_tiles")
def test_loaded_as_an_offline_merge_to_the_bit(kind: str, source: Path, adapter: Path, merged: Path) -> None:
    for mesh in MESHES[kind]:
        same(weights(source, mesh, "float32", adapter), weights(merged, mesh, "float32"))
    found, before = (weights(source, "tensor=1", "float32", lora) for lora in (adapter, None))
    changed = [bool((np.asarray(one) != np.asarray(other)).any()) for one, other in zip(found, before, strict=True)]
    assert sum(changed) == len(MODULES[kind])
    stacked = weights(source, "tensor=2", "float32", adapter, scan_layers=True)
    same(stacked, weights(merged, "tensor=2", "float32", scan_layers=True))


GOLDEN = Path(__file__).parents[1] / "golden"
# Modules by golden folder. LLaDA's head and its layers' down projections have the same last name.
FAMILIES = {
    "llada_tiny": ("blocks.0.q_proj", "blocks.1.attn_out", "blocks.0.ff_proj", "blocks.1.ff_out", "ff_out"),
    "sdar_tiny": ("layers.0.self_attn.k_proj", "layers.1.mlp.up_proj"),
    "fast_dllm_v2_tiny": ("layers.0.self_attn.v_proj", "layers.1.mlp.down_proj"),
    "dreamon_tiny": ("layers.0.self_attn.o_proj", "layers.1.mlp.gate_proj"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_every_family(name: str, tmp_path: Path) -> None:
    prefix = "model.transformer." if name == "llada_tiny" else "model."
    modules = [prefix + module for module in FAMILIES[name]]
    targets = sorted({module.rpartition(".")[2] for module in modules})
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / name, modules, target_modules=targets)
    merged = write_merged(tmp_path / "merged", GOLDEN / name, adapter)
    found, expected = (
        weights(*one) for one in ((GOLDEN / name, "tensor=2", "float32", adapter), (merged, "tensor=2", "float32"))
    )
    same(found, expected)
    before = weights(GOLDEN / name, "tensor=2", "float32")
    assert sum(bool((np.asarray(a) != np.asarray(b)).any()) for a, b in zip(found, before, strict=True)) == len(modules)
    quantized = [
        weights(folder, "tensor=1", "float32", lora, quantization="int8")
        for folder, lora in ((GOLDEN / name, adapter), (merged, None))
    ]
    same(*quantized)


def test_merged_before_a_cast_and_before_quantization(source: Path, adapter: Path, merged: Path) -> None:
    same(weights(source, "tensor=2", "bfloat16", adapter), weights(merged, "tensor=2", "bfloat16"))
    for quantization in ("int8", "int4"):
        found = weights(source, "tensor=2", "bfloat16", adapter, quantization=quantization)
        assert any(leaf.dtype == np.int8 for leaf in found)
        same(found, weights(merged, "tensor=2", "bfloat16", quantization=quantization))


def test_a_part_is_the_same_bits_as_in_the_whole(kind: str, source: Path, adapter: Path, small_tiles: int) -> None:
    folder = open_folder(source, lora=adapter)
    found = merged_tensors(folder, layout_of(source), open_tensors(folder), "float32")
    tensor = found[f"{MODULES[kind][3]}.weight"]
    whole = tensor.read(tuple(slice(0, size) for size in tensor.shape))
    assert min(tensor.shape) > 2 * small_tiles, "several tiles in each dimension"
    generator = np.random.default_rng(0)
    for _ in range(40):
        ends = (sorted(generator.choice(size + 1, 2, replace=False)) for size in tensor.shape)
        part = tuple(slice(int(low), int(high)) for low, high in ends)
        assert tensor.read(part).tobytes() == np.ascontiguousarray(whole[part]).tobytes(), part


def test_a_part_reads_a_part_of_the_adapter(tmp_path: Path, small_tiles: int) -> None:
    source = write_source(tmp_path / "source", CUT)
    folder = open_folder(source, lora=write_adapter(tmp_path / "adapter", source, ["lm_head"]))
    found = open_tensors(folder)
    tensor = merged_tensors(folder, layout_of(source), found)["lm_head.weight"]
    tensor.read((slice(0, 16), slice(0, 448)))
    base, a, b = 16 * 448 * 2, RANK * 448 * 4, small_tiles * RANK * 4
    assert found.bytes_read.total == base + a + b


def test_converted_as_the_offline_merge(source: Path, adapter: Path, merged: Path, tmp_path: Path) -> None:
    folder = open_folder(source, lora=adapter)

    def converted(name: str, **options: Any) -> Path:
        FolderOutput(tmp_path / name).prepare(overwrite=False)
        convert(folder, layout_of(source), FolderOutput(tmp_path / name), **options)
        verify(open_folder(tmp_path / name))
        return tmp_path / name

    assert contents(converted("float32", dtype="float32")) == contents(merged)
    stored = write_merged(tmp_path / "stored", source, adapter, dtype=BFLOAT16)
    assert contents(converted("as stored")) == contents(stored)
    assert json.loads((tmp_path / "as stored" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    FolderOutput(tmp_path / "int8").prepare(overwrite=False)
    convert(open_folder(stored), layout_of(stored), FolderOutput(tmp_path / "int8"), quantize="int8")
    assert contents(converted("merged int8", quantize="int8")) == contents(tmp_path / "int8")
    # A canonical checkpoint takes an adapter as well, and an export merges it too.
    canonical = to_canonical(source, tmp_path / "canonical")
    same(weights(canonical, "tensor=2", "float32", adapter), weights(merged, "tensor=2", "float32"))
    export_checkpoint(open_folder(canonical, lora=adapter), FolderOutput(tmp_path / "exported"))
    assert contents(tmp_path / "exported") == contents(stored)


PATTERNS: dict[str, dict[str, Any]] = {
    "rank": {"rank_pattern": {"q_proj": 2}},
    # The first key that matches is used, from the start of the name or from a dot.
    "both": {
        "rank_pattern": {"model.layers.0.self_attn.q_proj": 3, "q_proj": 2, "_proj": 7},
        "alpha_pattern": {r"layers\.\d.mlp.down_proj": 5, "^layers.0.self_attn.q_proj": 9},
    },
    # More patterns than Python's own cache holds, of which none but the last ones match
    "many": {
        "rank_pattern": {f"q_pro.{number:04}": 9 for number in range(4094)}
        | {r"^model.layers\.0.self_attn\.q_proj": 3, r"self_att..q_proj": 2},
        "alpha_pattern": {"q" * 200: 1, "^mlp.down_proj": 9, "p.down_proj": 9, r"layers.\d.mlp\.down_proj": 5},
    },
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("stabilized", [False, True])
def test_ranks_and_scales_are_those_of_peft(name: str, stabilized: bool, micro: Path, tmp_path: Path) -> None:
    modules = MODULES["Dream"]
    q, down = ([f"model.layers.{layer}.{end}" for layer in range(2)] for end in ("self_attn.q_proj", "mlp.down_proj"))
    ranks = {q[0]: 2, q[1]: 2} if name == "rank" else {q[0]: 3, q[1]: 2}
    alphas = {} if name == "rank" else dict.fromkeys(down, 5)
    scales = {}
    for module in modules:
        rank, alpha = ranks.get(module, RANK), alphas.get(module, ALPHA)
        scales[module] = rank_stabilized(alpha, rank) if stabilized else alpha / rank
    adapter = write_adapter(tmp_path / "adapter", micro, modules, ranks, use_rslora=stabilized, **PATTERNS[name])
    merged = write_merged(tmp_path / "merged", micro, adapter, scales)
    one, other = (Engine.load(micro, "data=1", "float32", lora=adapter), Engine.load(merged, "data=1", "float32"))
    same_weights(one, other)


def test_an_adapter_in_bfloat16_and_names_without_a_prefix(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", GPT2 | {"n_embd": 48})
    modules = MODULES["gpt2"]
    adapter = write_adapter(tmp_path / "adapter", source, modules, dtype=BFLOAT16)
    merged = write_merged(tmp_path / "merged", source, adapter)
    # PEFT around GPT2Model instead of GPT2LMHeadModel.
    tensors = load_file(adapter / WEIGHTS_FILE)
    save_file({name.replace("transformer.", ""): value for name, value in tensors.items()}, adapter / WEIGHTS_FILE)
    same(weights(source, "tensor=2", "float32", adapter), weights(merged, "tensor=2", "float32"))


def test_the_weights_of_a_running_engine_are_replaced(micro: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", micro, MODULES["Dream"])
    engine = Engine.load(micro, "data=1", "float32")
    engine.replace_weights(open_folder(micro, lora=adapter))
    same_weights(engine, Engine.load(micro, "data=1", "float32", lora=adapter))


def test_another_adapter_is_another_checkpoint(micro: Path, tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one", micro, MODULES["Dream"])
    other = write_adapter(tmp_path / "other", micro, MODULES["Dream"], lora_alpha=7)
    seen = {folder_fingerprint(open_folder(micro, lora=lora)) for lora in (None, one, other)}
    assert len(seen) == 3


# Changes of the configuration that are refused, and the key that the message names
CONFIGS: dict[str, dict[str, Any]] = {
    "peft_type": {"peft_type": "LOHA"},
    "use_dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "bias": {"bias": "lora_only"},
    "init_lora_weights": {"init_lora_weights": "pissa_niter_4"},
    "lora_bias": {"lora_bias": True},
    "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    "trainable_token_indices": {"trainable_token_indices": [1]},
    "a_key_of_a_later_version": {"a_key_of_a_later_version": "x"},
    "r": {"r": 0},
    "lora_alpha": {"lora_alpha": None},
    "rank_pattern": {"rank_pattern": {"q_.*": 2}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": "2"}},
    "use_rslora": {"use_rslora": "yes"},
    "target_modules": {"target_modules": [["q_proj"]]},
}
# ... and those with more or longer names than the largest models need
NAMES: list[tuple[str, Any, str]] = [
    ("rank_pattern", dict.fromkeys(map(str, range(4097)), 4), "has 4097 names; at most 4096"),
    ("alpha_pattern", {"q" * 201: 4}, "has a name of 201 characters; at most 200"),
    ("target_modules", ["q_proj"] * 4097, "has 4097 names; at most 4096"),
    ("target_modules", ["q_proj", "q" * 201], "has a name of 201 characters; at most 200"),
]


@pytest.mark.parametrize("key", CONFIGS)
def test_features_that_are_not_supported_are_named(key: str, micro: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", micro, MODULES["Dream"], **CONFIGS[key])
    with pytest.raises(InputError, match=rf"{CONFIG_FILE}: {key} is "):
        Engine.load(micro, "data=1", lora=adapter)


@pytest.mark.parametrize(("key", "value", "said"), NAMES)
def test_names_are_few_and_short(key: str, value: Any, said: str, micro: Path, tmp_path: Path) -> None:
    """Each is compared with each module, which could take hours."""
    adapter = write_adapter(tmp_path / "adapter", micro, MODULES["Dream"], **{key: value})
    with pytest.raises(InputError, match=f"{CONFIG_FILE}: {key} {said}"):
        Engine.load(micro, "data=1", lora=adapter)


MODEL = "base_model.model.model."
Q = f"{MODEL}layers.0.self_attn.q_proj"


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


# What the message says, the tensor that it names, and the tensor's value; None leaves it out
TENSORS: list[tuple[str, str, np.ndarray | None]] = [
    ("missing: lora_B of model.layers.0.self_attn.q_proj", f"{Q}.lora_B.weight", None),
    ("unknown: {name} [56]", f"{Q}.lora_magnitude_vector", ones(56)),
    ("unknown: {name} [56]", f"{Q}.lora_B.bias", ones(56)),
    ("unknown: {name} [4, 56]", f"{MODEL}layers.2.mlp.up_proj.lora_A.weight", ones(4, 56)),
    ("unknown: {name} [4, 56]", f"{MODEL}norm.lora_A.weight", ones(4, 56)),
    ("unknown: {name} [4, 56]", f"{MODEL}embed_tokens.lora_A.weight", ones(4, 56)),
    ("unknown: {name} [4, 96]", f"{MODEL}embed_tokens.lora_embedding_A", ones(4, 96)),
    ("unknown: {name} [96, 56]", "lm_head.weight", ones(96, 56)),
    ("shape: {name} is [4, 57]; the model and adapter_config.json need [4, 56]", f"{Q}.lora_A.weight", ones(4, 57)),
    ("shape: {name} is [56, 5]; the model and adapter_config.json need [56, 4]", f"{Q}.lora_B.weight", ones(56, 5)),
    ("dtype: {name} is F64", f"{Q}.lora_A.weight", ones(4, 56, dtype=np.float64)),
    ("{name} contains NaN or infinity", f"{Q}.lora_A.weight", np.nan * ones(4, 56)),
]


@pytest.mark.parametrize(("message", "name", "value"), TENSORS, ids=[f"{one[0][:7]} {one[1]}" for one in TENSORS])
def test_tensors_that_do_not_match_are_named(
    message: str, name: str, value: np.ndarray | None, micro: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", micro, MODULES["Dream"])
    tensors = load_file(adapter / WEIGHTS_FILE)
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    save_file(tensors, adapter / WEIGHTS_FILE)
    with pytest.raises(InputError, match=re.escape(message.format(name=name))):
        Engine.load(micro, "data=1", lora=adapter)


def test_an_adapter_without_tensors_is_refused(micro: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are no tensors"):
        Engine.load(micro, "data=1", lora=write_adapter(tmp_path / "adapter", micro, []))


def test_a_module_outside_of_the_targets_is_named(micro: Path, tmp_path: Path) -> None:
    listed = {"target_modules": ["q_proj", "k_proj", "o_proj", "gate_proj", "lm_head"]}
    adapter = write_adapter(tmp_path / "adapter", micro, MODULES["Dream"], **listed)
    with pytest.raises(InputError, match=r"mlp\.down_proj\.lora_A\.weight is not one of the target_modules"):
        Engine.load(micro, "data=1", lora=adapter)


def test_a_target_without_tensors_is_named(micro: Path, tmp_path: Path) -> None:
    ends = [module.rpartition(".")[2] for module in MODULES["Dream"]]
    assert "up_proj" not in ends
    adapter = write_adapter(tmp_path / "adapter", micro, MODULES["Dream"], target_modules=[*ends, "up_proj"])
    with pytest.raises(InputError, match="missing: no tensors of 'up_proj', one of the target_modules"):
        Engine.load(micro, "data=1", lora=adapter)


def test_targets_of_other_models_are_ignored(micro: Path, tmp_path: Path) -> None:
    """As in PEFT: one list of names often serves several families."""
    ends = [module.rpartition(".")[2] for module in MODULES["Dream"]]
    adapter = write_adapter(tmp_path / "adapter", micro, MODULES["Dream"], target_modules=[*ends, "ff_out", "c_attn"])
    plain = write_adapter(tmp_path / "plain", micro, MODULES["Dream"])
    found, expected = (jax.tree.leaves(Engine.load(micro, "data=1", lora=one).weights) for one in (adapter, plain))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_pickle_is_refused_by_name_and_never_read(micro: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", micro, MODULES["Dream"])
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    Engine.load(micro, "data=1", lora=adapter)
    (adapter / WEIGHTS_FILE).unlink()
    with pytest.raises(InputError, match=r"adapter_model\.bin: a pickle"):
        Engine.load(micro, "data=1", lora=adapter)
    assert not (tmp_path / "exploded").exists()


def test_adapters_that_cannot_be_merged(micro: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", micro, MODULES["Dream"])
    FolderOutput(tmp_path / "int8").prepare(overwrite=False)
    convert(open_folder(micro), layout_of(micro), FolderOutput(tmp_path / "int8"), quantize="int8")
    with pytest.raises(InputError, match="stored as int8; a LoRA adapter is merged into the original weights"):
        Engine.load(tmp_path / "int8", "data=1", lora=adapter)
    with pytest.raises(InputError, match=f"{CONFIG_FILE}: no such file"):
        Engine.load(micro, "data=1", lora=micro)
    (adapter / WEIGHTS_FILE).write_bytes(b"not a file of tensors")
    with pytest.raises(InputError, match="truncated or invalid safetensors file"):
        Engine.load(micro, "data=1", lora=adapter)


@pytest.mark.parametrize("wrong", ["an empty name", "no folder", "another model"])
def test_commands_exit_with_2_and_write_nothing(
    wrong: str, micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", micro, ["lm_head"], r=3)
    lora = {"an empty name": "", "no folder": str(tmp_path / "absent"), "another model": str(adapter)}[wrong]
    output, message = tmp_path / "output", {"an empty name": "--lora is empty", "no folder": "absent: no such folder"}
    for command, arguments in (
        (convert_command.run, [f"--source={micro}", f"--output={output}", "--compile_cache="]),
        (export_command.run, [f"--checkpoint={micro}", f"--output={output}"]),
    ):
        said = refusal(capsys, lambda run=command, rest=arguments: run(["command", f"--lora={lora}", *rest]))  # type: ignore[misc]
        assert message.get(wrong, "shape: base_model.model.lm_head.lora_A.weight") in said
        assert not output.exists()
    if wrong == "another model":
        return
    generate = ["generate", f"--checkpoint={micro}", "--prompt=x", f"--lora={lora}"]
    assert message[wrong] in refusal(capsys, lambda: generate_command.run(generate))


def test_commands_merge_the_adapter(micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = write_adapter(tmp_path / "adapter", micro, MODULES["Dream"])
    stored = contents(write_merged(tmp_path / "merged", micro, adapter, dtype=BFLOAT16))
    assert stored != contents(micro)
    convert_command.run(
        ["convert", f"--source={micro}", f"--output={tmp_path / 'converted'}", f"--lora={adapter}", "--compile_cache="]
    )
    assert contents(tmp_path / "converted") == stored
    export_command.run(["export", f"--checkpoint={micro}", f"--output={tmp_path / 'exported'}", f"--lora={adapter}"])
    assert contents(tmp_path / "exported") == stored
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "converted"), str(tmp_path / "exported")]
