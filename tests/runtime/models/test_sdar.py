"""SDAR: the exact cache, lengths, and bugs of the original."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import DEMO, open_folder
from launch.flags.decoding import decoding_config
from runtime import DiffusionConfig, Engine, InputError
from runtime.execution.row_request import RowRequest
from runtime.execution.rows import published_config
from runtime.models.config import ConfigError
from runtime.models.families import parse_config
from runtime.planner.estimate import estimate_workload
from runtime.planner.presets import PRESETS, preset
from runtime.planner.workload import Workload
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology
from tests.checkpoints.small import to_canonical, to_huggingface
from tests.golden_cases import Golden
from tests.golden_cases import engine as golden_engine
from tests.launch.served import served
from tests.launch.test_parameters import flag_values

GOLDEN = Golden(Path(__file__).parents[2] / "golden" / "sdar_tiny")
BLOCK = 8
MASK = 300


def asked(new: int, **changes: Any) -> DiffusionConfig:
    """Return a configuration with one step per position of a block."""
    steps = BLOCK * -(-new // BLOCK)
    settings: dict[str, Any] = {"algorithm": "maskgit_plus", "cache": "exact", "block_length": BLOCK, "steps": steps}
    return DiffusionConfig(new, **settings | changes)


PLAIN = asked(20)


def engine(mesh: str = "data=1") -> Engine:
    return golden_engine(mesh, GOLDEN.folder)


@functools.cache
def prompts() -> tuple[np.ndarray, np.ndarray]:
    """Rows of 19, 16, 5 and 9 tokens, with padding on the left."""
    generator, lengths = np.random.default_rng(5), np.array([19, 16, 5, 9])
    mask = (np.arange(19) >= 19 - lengths[:, None]).astype(np.int32)
    return np.where(mask == 1, generator.integers(0, MASK, mask.shape), 301), mask


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": "threshold", "threshold": 0.3, "steps": 12},
        {"parallel": "sequential", "steps": 9},
        {"parallel": "entropy_sum", "entropy_limit": 3.0},
        {"temperature": 0.7, "seed": 3, "log_probabilities": True, "sub_block_length": 4},
    ],
    ids=["threshold", "sequential", "entropy_sum", "sampled-sub-blocks"],
)
def test_the_cache_changes_no_token(changes: dict[str, Any]) -> None:
    """The rows of a ragged batch need different numbers of steps, and stop tokens end some of them."""
    ids, mask = prompts()
    config = PLAIN.replace(**changes)
    plain = engine().generate_tokens(ids, mask, config.replace(cache="none"))
    stops = (int(plain.sequences[2, 19 + 6]),)
    plain = engine().generate_tokens(ids, mask, config.replace(cache="none", stop_token_ids=stops))
    for mesh in ("data=1", "data=2,tensor=2"):
        cached = engine(mesh).generate_tokens(ids, mask, config.replace(stop_token_ids=stops))
        np.testing.assert_array_equal(cached.sequences, plain.sequences)
        np.testing.assert_array_equal(cached.commit_steps, plain.commit_steps)
        assert cached.stats.positions < plain.stats.positions
    if plain.log_probabilities is not None:
        assert cached.log_probabilities is not None
        np.testing.assert_allclose(cached.log_probabilities, plain.log_probabilities, atol=1e-4)


def test_a_row_of_a_batch_gives_the_tokens_of_a_batch_of_one() -> None:
    ids, mask = prompts()
    config = PLAIN.replace(parallel="threshold", threshold=0.3, temperature=0.7)
    together = engine().generate_tokens(ids, mask, config)
    for row, seed in enumerate(together.seeds):
        start = int(mask[row].argmax())
        alone = engine().generate_tokens(ids[row : row + 1, start:], config=config.replace(seed=[seed]))
        np.testing.assert_array_equal(alone.sequences[0], together.sequences[row, start:])


def test_new_tokens_are_an_exact_limit() -> None:
    """A run with fewer new tokens, in part of a block or of several, gives the first tokens of a longer run."""
    ids, mask = prompts()
    longest = engine().generate_tokens(ids, mask, asked(20)).sequences
    for new in (1, 3, 8, 13):
        found = engine().generate_tokens(ids, mask, asked(new))
        np.testing.assert_array_equal(found.sequences, longest[:, : 19 + new])
        assert found.stats.masks_left == 0


def test_prompts_are_not_overwritten() -> None:
    """A step that may commit a whole block does not change the prompt's tokens in it."""
    ids, mask = prompts()
    found = engine().generate_tokens(ids, mask, asked(11, steps=1))
    np.testing.assert_array_equal(found.sequences[:, :19], np.where(mask == 1, ids, 301))
    assert (found.commit_steps[:, :19] == -1).all()


def test_temperature_0_is_greedy() -> None:
    """The original has no temperature 0. Confidences are those of temperature 1, and no seed matters."""
    ids, mask = prompts()
    found = engine().generate_tokens(ids, mask, asked(11, seed=3))
    expected = engine().generate_tokens(ids, mask, asked(11, temperature=1.0, greedy=True, seed=4))
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    np.testing.assert_array_equal(found.commit_steps, expected.commit_steps)


def test_published_lengths_are_an_exact_limit() -> None:
    """The published number of steps is that of whole blocks, so it does not change what a block decodes."""
    ids, mask = prompts()
    own = engine()
    assert [own.published(max_new_tokens=new).steps for new in (1, 8, 13)] == [4, 8, 16]  # type: ignore[union-attr]
    for changes in ({"temperature": 0.0}, {"temperature": 0.0, "parallel": "none", "threshold": 0.9}):
        longest = own.generate_tokens(ids, mask, own.published(max_new_tokens=24, **changes)).sequences
        for new in (1, 3, 13):
            found = own.generate_tokens(ids, mask, own.published(max_new_tokens=new, **changes)).sequences
            np.testing.assert_array_equal(found, longest[:, : 19 + new])


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("JetLM/SDAR-8B-Chat", 4),
        ("JetLM/SDAR-8B-Chat-b8", 8),
        ("/models/SDAR-8B-Chat-b32/", 32),
        ("sdar-4b-chat-B64 ", 64),
        ("converted JetLM/SDAR-8B-Chat-b16", 16),
        ("/data/exp-b16/SDAR-8B-Chat", 4),
        ("/data/sdar-b8-runs/SDAR-8B-Chat-b32 /data/x-b8/y", 32),
        ("SDAR-8B-Chat-b80", 4),
        ("SDAR-8B-Chat-b8bit", 4),
    ],
)
def test_the_block_length_in_a_name(name: str, length: int) -> None:
    """Published settings of these checkpoints decode blocks of the length that they were trained with."""
    found = published_config(engine().config, name, max_new_tokens=33)
    assert isinstance(found, DiffusionConfig)
    assert (found.block_length, found.attention_block_length, found.steps % length) == (length, length, 0)


@pytest.mark.parametrize("rule", ["none", "sequential", "entropy_sum"])
def test_another_rule_than_the_published_one(rule: str) -> None:
    """The published threshold belongs to the published rule: it goes with it, unless the caller sets one too."""
    model = engine().config
    found = published_config(model, "", max_new_tokens=8, parallel=rule)
    assert isinstance(found, DiffusionConfig)
    assert (found.parallel, found.threshold) == (rule, DiffusionConfig().threshold)
    folder = open_folder(GOLDEN.folder, weights=False)
    asked = decoding_config(flag_values("--max_new_tokens=8", f"--parallel={rule}"), folder, model)
    assert asked == found.replace(early_stop=True)
    with pytest.raises(InputError, match="threshold requires"):
        published_config(model, "", parallel=rule, threshold=0.7)


def test_masks_of_a_prompt_are_filled_with_its_end() -> None:
    ids, mask = prompts()
    holes = ids.copy()
    holes[0, [3, 12]] = holes[3, 14] = MASK
    plain = engine().generate_tokens(holes, mask, asked(4, cache="none"))
    cached = engine().generate_tokens(holes, mask, asked(4))
    np.testing.assert_array_equal(cached.sequences, plain.sequences)
    assert not (plain.sequences == MASK).any()
    kept = (holes != MASK) & (mask == 1)
    np.testing.assert_array_equal(plain.sequences[:, :19][kept], ids[kept])


def test_a_model_that_predicts_masks_goes_on_to_the_next_block(tmp_path: Path) -> None:
    """If a block keeps masks, decoding continues with the next block; the original fails."""
    shutil.copy(GOLDEN.folder / "config.json", tmp_path)
    weights = load_file(GOLDEN.folder / "model.safetensors")
    # The mask token is predicted wherever a frequent token was.
    weights["lm_head.weight"][MASK] = 1.2 * weights["lm_head.weight"][65]
    save_file(weights, tmp_path / "model.safetensors")
    other = Engine.load(tmp_path, "data=1", dtype="float32")
    ids, mask = prompts()
    config = asked(20, parallel="threshold", threshold=0.0)
    plain = other.generate_tokens(ids, mask, config.replace(cache="none"))
    cached = other.generate_tokens(ids, mask, config)
    np.testing.assert_array_equal(cached.sequences, plain.sequences)
    assert plain.stats.masks_left > 0
    assert (plain.sequences[:, 19:] != MASK).any(axis=0).sum() > BLOCK


def test_rows_of_a_scheduler_are_those_of_a_batch() -> None:
    ids, mask = prompts()
    config = PLAIN.replace(parallel="threshold", threshold=0.3)
    batch = engine().generate_tokens(ids, mask, config)
    requests = [
        RowRequest(row[real == 1].tolist(), config, seed)
        for row, real, seed in zip(ids, mask, batch.seeds, strict=True)
    ]
    scheduler = engine().scheduler(requests, slots=2)
    found = {one.number: one.sequence for results in scheduler.run() for one in results}
    for row in range(len(ids)):
        np.testing.assert_array_equal(found[row], batch.sequences[row, int(mask[row].argmax()) :])


def test_int8_is_near() -> None:
    ids, mask = GOLDEN.inputs("forward_block8")
    exact = engine().logits(ids, mask, block_length=8)
    found = Engine.load(GOLDEN.folder, "data=1", dtype="float32", quantize="int8").logits(ids, mask, block_length=8)
    assert 0 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.05


def test_there_and_back(tmp_path: Path) -> None:
    canonical = to_canonical(GOLDEN.folder, tmp_path / "canonical")
    exported = load_file(to_huggingface(canonical, tmp_path / "exported") / "model.safetensors")
    original = load_file(GOLDEN.folder / "model.safetensors")
    assert {name: value.tobytes() for name, value in exported.items()} == {
        name: value.tobytes() for name, value in original.items()
    }


def test_the_plan_has_the_published_parameters() -> None:
    workload = Workload(preset("sdar-8b"), batch=8, cache="exact", block_length=4)
    found = estimate_workload(workload, parse_topology("v5e:2x4"), MeshSpec(tensor=8))
    assert found.layout.parameter_count == 8_190_735_360
    assert found.fits


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention_bias": True}, "attention_bias is True"),
        ({"head_dim": None}, '"head_dim" is missing'),
        ({"block_size": 0}, '"block_size" is 0'),
        ({"model_type": "sdar_moe"}, "'sdar_moe'.* is not supported"),
        ({"use_regular_causal": True}, "use_regular_causal.* is not supported"),
    ],
)
def test_what_the_forward_pass_does_not_have_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config({**PRESETS["sdar-8b"], **change})


def test_blocks_are_the_configurations_else_the_familys() -> None:
    raw = {key: value for key, value in PRESETS["sdar-8b"].items() if key not in ("block_size", "mask_token_id")}
    assert parse_config(raw).attention_block_length == 4
    assert parse_config(raw).mask_token_id == 151669
    assert parse_config({**raw, "block_size": 64}).attention_block_length == 64
    ids, _ = GOLDEN.inputs("forward_block4")
    np.testing.assert_array_equal(engine().logits(ids), engine().logits(ids, block_length=4))


def test_requests_of_another_family_are_refused() -> None:
    ids, mask = prompts()
    for changes, said in [
        ({"cache": "dual"}, "cache=dual is not available for sdar models; use one of none, exact"),
        (
            {"parallel": "factor"},
            "parallel=factor is not available for sdar models; use one of none, threshold, sequential",
        ),
        ({"algorithm": "entropy"}, "algorithm=entropy is not available for sdar models"),
        ({"sub_block_cache": True}, "sub_block_cache requires sub_block_length"),
    ]:
        with pytest.raises(InputError, match=said):
            engine().generate_tokens(ids, mask, PLAIN.replace(**changes))
    dream = golden_engine()
    plain = DiffusionConfig(8)
    for changes, said in [
        ({"cache": "exact"}, "cache=exact is not available for dream models"),
        ({"sub_block_length": 4}, "sub_block_length is not available for dream models"),
        ({"parallel": "entropy_sum"}, "parallel=entropy_sum is not available for dream models"),
    ]:
        with pytest.raises(InputError, match=said):
            dream.generate_tokens(ids % 200, mask, plain.replace(**changes))
    with pytest.raises(InputError, match="block_length is not available for dream models"):
        dream.logits(ids % 200, mask, block_length=4)
    with pytest.raises(InputError, match="block_length is 0; expected an integer from 1 to"):
        engine().logits(ids, mask, block_length=0)
    with pytest.raises(InputError, match="estimate_log_likelihoods does not support block-causal models"):
        engine().estimate_log_likelihoods([([1, 2], [3, 302])])


def test_served(tmp_path: Path) -> None:
    """The server returns the same text as the engine."""
    demo = json.loads((DEMO / "config.json").read_text())
    raw = json.loads((GOLDEN.folder / "config.json").read_text())
    raw |= {name: demo[name] for name in ("vocab_size", "mask_token_id", "pad_token_id", "eos_token_id")}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, tmp_path)
    folder = open_folder(tmp_path, weights=False)
    own = Engine.random(parse_config(folder.config), "data=1", folder=folder)
    config = own.published(max_new_tokens=11, temperature=0.0)
    assert (config.cache, config.parallel, config.threshold) == ("exact", "threshold", 0.85)  # type: ignore[union-attr]
    expected = own.generate(["def f("], config=config)[0].text
    with served(own, config, name="sdar") as there:
        answer = there.client().completions.create(model="sdar", prompt="def f(", max_tokens=11, temperature=0.0)
        refused = there.post("/v1/completions", {"prompt": "def f(", "suffix": "x"})
    assert answer.choices[0].text == expected
    assert refused.status_code == 400
    assert "suffix is not available for sdar models" in refused.json()["error"]["message"]
