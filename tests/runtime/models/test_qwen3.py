"""Qwen3, which is only a module and an entry in the list of families: all other code must work from its record."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from checkpoints import DEMO
from runtime import Engine, SamplingConfig
from runtime.models.config import ConfigError
from runtime.models.families import parse_config
from runtime.models.qwen3 import QWEN3
from runtime.planner.estimate import estimate_workload
from runtime.planner.presets import PRESETS, preset
from runtime.planner.workload import Workload
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology
from tests.launch.served import served

GOLDEN = Path(__file__).parents[2] / "golden"
FOLDERS = ("qwen3_tiny", "qwen3_tied_tiny")
MESHES = ("tensor=2", "tensor=4", "tensor=8", "sequence=2", "data=2", "data=2,sequence=2,tensor=2")
NEW = 12


@functools.cache
def engine(folder: str, mesh: str = "data=1", **changes: Any) -> Engine:
    return Engine.load(GOLDEN / folder, mesh, dtype="float32", **changes)


@functools.cache
def golden(folder: str) -> tuple[dict[str, dict[str, Any]], dict[str, np.ndarray]]:
    cases = json.loads((GOLDEN / folder / "cases.json").read_text())["cases"]
    with np.load(GOLDEN / folder / "cases.npz") as file:
        return {case["name"]: case for case in cases}, dict(file)


def check_case(folder: str, mesh: str, name: str) -> None:
    """Compare each row up to its stop token, after which the original code uses another padding token."""
    cases, arrays = golden(folder)
    ids, expected = arrays[f"{name}.input_ids"], arrays[f"{name}.sequences"]
    stops = tuple(cases[name]["stop_token_ids"] or ())
    config = SamplingConfig(cases[name]["max_new_tokens"], temperature=0.0, stop_token_ids=stops)
    found = engine(folder, mesh).generate_tokens(ids, arrays.get(f"{name}.attention_mask"), config).sequences
    width = ids.shape[1]
    for own, row in zip(found, expected, strict=True):
        ends = np.flatnonzero(np.isin(row[width:], stops))
        end = width + ends[0] + 1 if ends.size else len(row)
        np.testing.assert_array_equal(own[:end], row[:end])


# Every case runs on one device in tests/runtime/test_golden.py.
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_golden_tokens_on_every_mesh(folder: str, mesh: str) -> None:
    for name in ("left_padded", "stop_ragged"):
        check_case(folder, mesh, name)


@pytest.mark.parametrize("mesh", ["tensor=8", "data=2,sequence=2,tensor=2"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_golden_logits(folder: str, mesh: str) -> None:
    _, arrays = golden(folder)
    for name in ("forward", "forward_padded"):
        mask, expected = arrays.get(f"{name}.attention_mask"), arrays[f"{name}.logits"]
        found = engine(folder, mesh).logits(arrays[f"{name}.input_ids"], mask)
        real = np.ones(found.shape[:2], bool) if mask is None else mask.astype(bool)
        assert np.abs(found - expected)[real].max() < 1e-4
        assert np.abs(expected).max() > 1.0  # the bound means something


def write_random_model(folder: Path, *, tied: bool, vocab_size: int) -> transformers.Qwen3ForCausalLM:
    """Write a random Qwen3 whose head_dim differs from hidden_size / heads, and whose norm scales are not one."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_transformers(tied: bool, tmp_path: Path) -> None:
    model = write_random_model(tmp_path, tied=tied, vocab_size=331)
    ids = np.random.default_rng(2).integers(1, 331, (2, 11))
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.numpy()
    for mesh in ("tensor=1", "tensor=8"):
        found = Engine.load(tmp_path, mesh, dtype="float32").logits(ids)
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_cached_is_uncached() -> None:
    _, arrays = golden("qwen3_tiny")
    ids, mask = arrays["left_padded.input_ids"], arrays["left_padded.attention_mask"]
    for mesh in ("data=1", "data=2,sequence=2,tensor=2"):
        config = SamplingConfig(NEW, temperature=1.0, seed=3, log_probabilities=True)
        cached = engine("qwen3_tiny", mesh).generate_tokens(ids, mask, config)
        plain = engine("qwen3_tiny", mesh).generate_tokens(ids, mask, config.replace(use_cache=False))
        np.testing.assert_array_equal(cached.sequences, plain.sequences)
        assert cached.log_probabilities is not None
        np.testing.assert_allclose(cached.log_probabilities, plain.log_probabilities, atol=1e-4)


def test_int8_is_near_and_the_same_on_every_mesh() -> None:
    ids = golden("qwen3_tiny")[1]["forward.input_ids"]
    exact = engine("qwen3_tiny").logits(ids)
    found = engine("qwen3_tiny", quantize="int8").logits(ids)
    gap = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 0 < gap < 0.05
    for mesh in ("tensor=8", "data=2,sequence=2,tensor=2"):
        elsewhere = engine("qwen3_tiny", mesh, quantize="int8").logits(ids)
        assert np.abs(elsewhere - found).max() <= 1e-5 * np.abs(found).max()


@pytest.mark.parametrize(("name", "parameters"), [("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360)])
def test_plans_have_the_published_parameters(name: str, parameters: int) -> None:
    workload = Workload(preset(name), batch=8)
    found = estimate_workload(workload, parse_topology("8xh100"), MeshSpec(tensor=8))
    assert found.layout.parameter_count == parameters
    assert found.fits
    assert [phase.phase.name for phase in found.phases] == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention_bias": True}, "attention_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"head_dim": None}, '"head_dim" is missing'),
        ({"head_dim": 33}, "even head_dim"),
    ],
)
def test_what_the_forward_pass_does_not_have_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config({**PRESETS["qwen3-8b"], **change})


def test_end_tokens_are_the_familys_where_the_configuration_names_none() -> None:
    raw = {key: value for key, value in PRESETS["qwen3-8b"].items() if key != "eos_token_id"}
    assert parse_config(raw).end_token_ids == (151645, 151643)
    assert parse_config({**raw, "eos_token_id": 5}).end_token_ids == (5,)


def test_served(tmp_path: Path) -> None:
    """The server returns the engine's text, and with a suffix that of a fill-in-the-middle prompt."""
    vocab = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    infilling = QWEN3.infilling
    assert infilling is not None
    special = dict.fromkeys((infilling.prefix, infilling.suffix, infilling.middle, *infilling.ends))
    write_random_model(tmp_path, tied=True, vocab_size=vocab + len(special))
    shutil.copy(DEMO / "tokenizer_config.json", tmp_path)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    kind = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [kind | {"id": vocab + place, "content": name} for place, name in enumerate(special)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    own = Engine.load(tmp_path, "tensor=1", dtype="float32")
    assert {vocab + place for place, name in enumerate(special) if name in infilling.ends} <= {*own.end_token_ids}
    config = SamplingConfig(NEW, temperature=0.0)
    expected = own.generate(["def f("], config=config)[0].text
    joined = "<|fim_prefix|>def f(<|fim_suffix|>return y<|fim_middle|>"
    [filled, plain] = own.generate(["def f("] * 2, config=config, suffixes=["return y", ""])
    assert filled.text == own.generate(joined, config=config)[0].text != expected == plain.text
    assert filled.whole_text == f"def f({filled.text}return y"
    with served(own, config, name="qwen3") as there:
        body: dict[str, Any] = {"model": "qwen3", "prompt": "def f(", "max_tokens": NEW, "temperature": 0.0}
        answer = there.client().completions.create(**body)
        infilled = there.client().completions.create(**body, suffix="return y")
        uncached = there.post("/v1/completions", {"prompt": "def f(", "cache": "none"})
    error = uncached.json()["error"]
    assert error["message"] == "This server does not offer cache=none. Available: the defaults."
    assert (uncached.status_code, error["param"]) == (400, "cache")
    assert answer.choices[0].text == expected
    assert infilled.choices[0].text == filled.text
    assert infilled.usage is not None
    assert infilled.usage.prompt_tokens == len(own.tokenizer.encode(joined))
