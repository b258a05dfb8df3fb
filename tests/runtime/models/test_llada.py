"""LLaDA: guidance, its schedule with a cache, and requests that its record rejects."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints import DEMO, open_folder
from runtime import DiffusionConfig, Engine, GenerationResult, InputError, TextTokenizer, end_tokens
from runtime.models.config import ConfigError
from runtime.models.families import parse_config
from runtime.planner.estimate import estimate_workload
from runtime.planner.presets import PRESETS, preset
from runtime.planner.workload import Workload
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology
from tests.checkpoints.small import to_canonical, to_huggingface
from tests.golden_cases import MESHES, Golden
from tests.golden_cases import engine as golden_engine

GOLDEN = Golden(Path(__file__).parents[2] / "golden" / "llada_tiny")
PLAIN = DiffusionConfig(24, steps=24, algorithm="low_confidence", block_length=8)


def engine(mesh: str = "data=1") -> Engine:
    return golden_engine(mesh, GOLDEN.folder)


@functools.cache
def prompts() -> tuple[np.ndarray, np.ndarray | None]:
    return GOLDEN.inputs("left_padded")


@pytest.mark.parametrize("cache", ["dual", "prefix"])
def test_a_refresh_in_every_step_changes_nothing(cache: str) -> None:
    ids, mask = prompts()
    exact = engine().generate_tokens(ids, mask, PLAIN, history=True)
    config = PLAIN.replace(cache=cache, refresh_interval=1)
    for mesh in ("data=1", "data=2,tensor=2"):
        cached = engine(mesh).generate_tokens(ids, mask, config, history=True)
        np.testing.assert_array_equal(cached.sequences, exact.sequences)
        np.testing.assert_array_equal(cached.history, exact.history)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "random"},
        {"temperature": 0.8, "top_p": 0.9},
        {"cache": "dual", "parallel": "threshold", "threshold": 0.3},
        {"cfg_scale": 1.2, "temperature": 0.5},
    ],
    ids=["random", "sampled", "dual-threshold", "guided"],
)
def test_a_row_of_a_batch_gives_the_tokens_of_a_batch_of_one(changes: dict[str, Any]) -> None:
    ids, mask = prompts()
    assert mask is not None
    together = engine().generate_tokens(ids, mask, PLAIN.replace(seed=7, **changes))
    for row, seed in enumerate(together.seeds):
        own = ids[row : row + 1, mask[row].argmax() :]
        alone = engine("tensor=2").generate_tokens(own, config=PLAIN.replace(seed=[seed], **changes))
        np.testing.assert_array_equal(alone.sequences[0], together.sequences[row, mask[row].argmax() :])


def with_holes() -> tuple[np.ndarray, np.ndarray | None]:
    ids, mask = prompts()
    holes = ids.copy()
    holes[:, -3] = engine().config.mask_token_id
    return holes, mask


@pytest.mark.parametrize(
    "changes",
    [{"cache": "dual"}, {"cache": "prefix"}, {"parallel": "threshold", "threshold": 0.3}],
    ids=["dual", "prefix", "threshold"],
)
def test_masks_of_a_prompt_are_filled(changes: dict[str, Any]) -> None:
    ids, mask = with_holes()
    found = engine().generate_tokens(ids, mask, PLAIN.replace(suppress_mask=True, **changes))
    assert found.stats.masks_left == 0
    assert (found.sequences[:, ids.shape[1] - 3] != engine().config.mask_token_id).all()


def test_a_row_ends_when_the_masks_of_its_prompt_are_filled() -> None:
    """A stop token after an open mask of the prompt does not end the row: all tokens before the end are final."""
    ids, mask = prompts()
    ids, new, mask_token = ids.copy(), ids.shape[1], engine().config.mask_token_id
    ids[:, -4] = mask_token
    free = engine().generate_tokens(ids, mask, PLAIN, history=True)
    assert free.history is not None
    # The first new token is there before the mask of the prompt is filled.
    early = (free.history[:, :, new] != mask_token) & (free.history[:, :, new - 4] == mask_token)
    assert early.any(axis=0).all()
    for row, step in enumerate(early.argmax(axis=0)):
        stop = int(free.history[step, row, new])
        ended = engine().generate_tokens(ids, mask, PLAIN.replace(stop_token_ids=(stop,)))
        assert ended.sequences[row, new - 4] != mask_token


def test_a_hook_that_does_nothing_changes_nothing_in_a_prompt_with_masks() -> None:
    ids, mask = with_holes()
    config = DiffusionConfig(8, steps=4, algorithm="low_confidence", block_length=8, suppress_mask=True)
    plain = engine().generate_tokens(ids, mask, config.replace(block_length=None))
    hooked = engine().generate_tokens(ids, mask, config.replace(block_length=None), tokens_hook=lambda *_: None)
    np.testing.assert_array_equal(hooked.sequences, plain.sequences)


def test_guidance_and_a_logits_hook_are_refused_together() -> None:
    config = DiffusionConfig(8, steps=4, algorithm="low_confidence", cfg_scale=1.5)
    with pytest.raises(InputError, match="logits_hook requires cfg_scale=0"):
        engine().generate_tokens(*prompts(), config, logits_hook=lambda *_: None)


def test_random_positions_differ_from_confident_ones_and_follow_the_seed() -> None:
    ids, mask = prompts()
    runs = {
        seed: engine().generate_tokens(ids, mask, PLAIN.replace(algorithm="random", seed=seed)).commit_steps
        for seed in (1, 2)
    }
    confident = engine().generate_tokens(ids, mask, PLAIN).commit_steps
    assert (runs[1] != runs[2]).any()
    assert (runs[1] != confident).any()


@functools.cache
def random_order(mesh: str) -> GenerationResult:
    config = PLAIN.replace(max_new_tokens=12, steps=6, block_length=12, algorithm="random", seed=5)
    return engine(mesh).generate_tokens(*prompts(), config, history=True)


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_random_positions_are_the_same_on_every_mesh(mesh: str) -> None:
    found, expected = random_order(mesh), random_order(MESHES[0])
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    np.testing.assert_array_equal(found.history, expected.history)


def test_confidence_is_of_the_distribution_before_temperature_and_filters() -> None:
    """With top_k=1 every filtered probability is 1, so only unfiltered confidences can rank positions."""
    ids, mask = prompts()
    greedy = engine().generate_tokens(ids, mask, PLAIN, history=True)
    cold = engine().generate_tokens(ids, mask, PLAIN.replace(temperature=0.01, top_k=1), history=True)
    np.testing.assert_array_equal(cold.history, greedy.history)


def test_published_steps_fill_one_position_each_in_a_short_last_block_too() -> None:
    ids, mask = prompts()
    config = engine().published(max_new_tokens=13, block_length=8)
    found = engine().generate_tokens(ids, mask, config)
    steps = found.commit_steps[:, ids.shape[1] :]
    assert (np.sort(steps, axis=1) == np.arange(13)).all()
    assert (steps[:, :8] < 8).all()


def test_guidance_counts_its_passes_and_leaves_rows_without_it_alone() -> None:
    ids, mask = prompts()
    plain = engine().generate_tokens(ids, mask, PLAIN)
    guided = engine().generate_tokens(ids, mask, PLAIN.replace(cfg_scale=1.5))
    assert guided.stats.forwards == 2 * plain.stats.forwards
    assert guided.stats.positions == 2 * plain.stats.positions
    assert (guided.sequences != plain.sequences).any()


def test_int8_is_near() -> None:
    ids, mask = GOLDEN.inputs("forward")
    exact = engine().logits(ids, mask)
    found = Engine.load(GOLDEN.folder, "data=1", dtype="float32", quantize="int8").logits(ids, mask)
    assert 0 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.05


def test_bfloat16_rotates_in_float32() -> None:
    """Rotated queries and keys are cast back to the weights' dtype, which attention kernels require."""
    ids, mask = GOLDEN.inputs("forward")
    found = Engine.load(GOLDEN.folder, "data=1", dtype="bfloat16").logits(ids, mask)
    exact = engine().logits(ids, mask)
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.05


def test_there_and_back(tmp_path: Path) -> None:
    canonical = to_canonical(GOLDEN.folder, tmp_path / "canonical")
    ids, mask = GOLDEN.inputs("forward")
    np.testing.assert_array_equal(
        Engine.load(canonical, "tensor=2", dtype="float32").logits(ids, mask), engine("tensor=2").logits(ids, mask)
    )
    exported = load_file(to_huggingface(canonical, tmp_path / "exported") / "model.safetensors")
    original = load_file(GOLDEN.folder / "model.safetensors")
    assert {name: value.tobytes() for name, value in exported.items()} == {
        name: value.tobytes() for name, value in original.items()
    }


def test_an_answer_ends_with_its_turn(tmp_path: Path) -> None:
    """The chat template ends each turn with a token that config.json and generation_config.json do not name."""
    made = (DEMO / "tokenizer.json").read_text().replace("<|im_end|>", "<|eot_id|>")
    (tmp_path / "tokenizer.json").write_text(made)
    (tmp_path / "config.json").write_text((GOLDEN.folder / "config.json").read_text())
    folder = open_folder(tmp_path, weights=False)
    tokenizer = TextTokenizer.from_folder(folder)
    assert tokenizer is not None
    ends = tokenizer.known_ids(["<|eot_id|>", "<|endoftext|>"])
    assert len(ends) == 2
    assert {*ends} < {*end_tokens(engine().config, folder, tokenizer)}


def test_the_plan_has_the_published_parameters() -> None:
    found = estimate_workload(Workload(preset("llada-8b"), batch=8), parse_topology("v5e:2x4"), MeshSpec(tensor=8))
    assert found.layout.parameter_count == 8_015_581_184
    assert found.fits


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_type": "sequential"}, "block_type is 'sequential'"),
        ({"block_type": None}, "block_type is None"),
        ({"activation_type": "swiglu"}, "activation_type is 'swiglu'"),
        ({"include_qkv_bias": True}, "include_qkv_bias is True"),
        ({"weight_tying": True}, "weight_tying is True"),
        ({"d_model": None}, '"d_model" is missing'),
        ({"n_layers": "32"}, "\"n_layers\" is '32'"),
        ({"embedding_size": 0}, "is larger than embedding_size 0"),
        ({"embedding_size": "126464"}, '"embedding_size" is'),
        ({"embedding_size": 100}, "is larger than embedding_size"),
    ],
)
def test_what_the_forward_pass_does_not_have_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config({**PRESETS["llada-8b"], **change})


def test_an_absent_norm_epsilon_is_that_of_the_original_code() -> None:
    """Other families have 1e-6, and a wrong one changes tokens without an error."""
    assert parse_config({**PRESETS["llada-8b"], "rms_norm_eps": 1e-4}).norm_eps == 1e-4
    raw = {key: value for key, value in PRESETS["llada-8b"].items() if key != "rms_norm_eps"}
    assert parse_config(raw).norm_eps == 1e-5


@pytest.mark.parametrize(("given", "dtype"), [({}, "bfloat16"), ({"dtype": "float32"}, "float32")])
def test_an_absent_dtype_is_that_of_the_authors_weights(given: dict[str, Any], dtype: str) -> None:
    """Their config.json has a precision instead, which is that of training."""
    raw = {key: value for key, value in PRESETS["llada-8b"].items() if key != "torch_dtype"}
    assert parse_config(raw | {"precision": "amp_bf16"} | given).dtype == dtype


def test_requests_of_another_family_are_refused() -> None:
    ids, mask = prompts()
    with pytest.raises(
        InputError, match="algorithm=entropy is not available for llada models; use one of low_confidence, random"
    ):
        engine().generate_tokens(ids, mask, PLAIN.replace(algorithm="entropy"))
    with pytest.raises(InputError, match="cfg_scale requires cache=none"):
        PLAIN.replace(cache="dual", cfg_scale=1.0)
    dream = golden_engine()
    with pytest.raises(InputError, match="algorithm=random is not available for dream models"):
        dream.generate_tokens(ids, mask, PLAIN.replace(algorithm="random"))
    with pytest.raises(InputError, match="cfg_scale is not available for dream models"):
        dream.generate_tokens(ids, mask, DiffusionConfig(8, cfg_scale=1.0))
    published = DiffusionConfig(8, steps=8, algorithm="low_confidence", block_length=32)
    assert engine().published(max_new_tokens=8) == published


@pytest.mark.parametrize(
    "changes",
    [
        {"cache": "dual"},
        pytest.param({"cache": "prefix", "refresh_blocks": 2}, marks=pytest.mark.slow),
        pytest.param({"cache": "dual", "parallel": "threshold", "threshold": 0.3}, marks=pytest.mark.slow),
        pytest.param({"cache": "dual", "temperature": 0.6, "seed": 3}, marks=pytest.mark.slow),
        pytest.param({"cfg_scale": 1.2}, marks=pytest.mark.slow),
    ],
    ids=["dual", "prefix", "threshold", "sampled", "guided"],
)
def test_drafts_change_nothing(changes: dict[str, Any]) -> None:
    ids, mask = prompts()
    config = PLAIN.replace(log_probabilities=True, **changes)
    plain = engine().generate_tokens(ids, mask, config, history=True)
    found = engine().generate_tokens(ids, mask, config.replace(draft_steps=3), history=True)
    np.testing.assert_array_equal(found.sequences, plain.sequences)
    np.testing.assert_array_equal(found.history, plain.history)
    assert found.log_probabilities is not None
    assert plain.log_probabilities is not None
    np.testing.assert_allclose(found.log_probabilities, plain.log_probabilities, atol=1e-4)
    assert found.stats.accepted_steps > 0
