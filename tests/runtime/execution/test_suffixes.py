"""Tokens after the new tokens: the model sees them, and the rest of a generation is as without them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import DiffusionConfig, InputError, RowRequest, SamplingConfig
from runtime.execution.left_padding import left_padded
from runtime.execution.step_plan import Insertion, PoolPlan, StepPlan
from tests import golden_cases
from tests.runtime.execution.ragged import MASK, MODES

GOLDEN = Path(golden_cases.FOLDER).parent
NEW = 16
SEEDS = [5, 6, 7]
GENERATOR = np.random.default_rng(3)
PROMPTS = [GENERATOR.integers(0, MASK, length).tolist() for length in (3, 11, 20)]
SUFFIXES = [GENERATOR.integers(0, MASK, length).tolist() for length in (9, 0, 4)]
PLAIN = DiffusionConfig(NEW, steps=11, algorithm="entropy", seed=SEEDS)
BLOCKS = PLAIN.replace(block_length=8, steps=NEW)


def generate(config: DiffusionConfig, mesh: str = "data=1", **options: Any) -> Any:
    ids, mask = left_padded(PROMPTS, 0)
    return golden_cases.engine(mesh).generate_tokens(ids, mask, config, suffixes=SUFFIXES, **options)


@functools.cache
def exact(mode: str) -> Any:
    return generate(PLAIN.replace(**MODES[mode]), history=True)


def middle(values: np.ndarray) -> np.ndarray:
    """Return the new tokens of all rows: ``[..., B, S + N]`` -> ``[..., B, N]``."""
    return values[..., -NEW:]


def masks_inside(config: DiffusionConfig) -> Any:
    """Generate the same canvases, given as prompts with masks."""
    canvases = [[*prompt, *[MASK] * NEW, *suffix] for prompt, suffix in zip(PROMPTS, SUFFIXES, strict=True)]
    ids, mask = left_padded(canvases, 0)
    return golden_cases.engine().generate_tokens(ids, mask, config.replace(max_new_tokens=0), history=True)


def new_in(values: np.ndarray, row: int) -> np.ndarray:
    """Return what :func:`masks_inside` filled in a row: ``[..., B, S]`` -> ``[..., N]``."""
    end = values.shape[-1] - len(SUFFIXES[row])
    return values[..., row, end - NEW : end]


@pytest.mark.parametrize("mode", ["entropy-greedy", "origin-sampled"])
def test_a_suffix_equals_masks_in_the_prompt(mode: str) -> None:
    found, expected = exact(mode), masks_inside(PLAIN.replace(**MODES[mode]))
    assert found.sequences.shape == (3, max(map(len, PROMPTS)) + NEW)
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_array_equal(middle(found.history)[:, row], new_in(expected.history, row))
        np.testing.assert_array_equal(middle(found.commit_steps)[row], new_in(expected.commit_steps, row))
        assert found.sequences[row, :-NEW][-len(prompt) :].tolist() == prompt
    # A suffix changes the new tokens of its row only.
    ids, mask = left_padded(PROMPTS, 0)
    without = golden_cases.engine().generate_tokens(ids, mask, PLAIN.replace(**MODES[mode]))
    assert (without.sequences != found.sequences).any(axis=1).tolist() == [True, False, True]


def test_rows_on_a_mesh_and_rows_alone_that_share_a_slot() -> None:
    expected = exact("origin-sampled")
    config = PLAIN.replace(**MODES["origin-sampled"])
    np.testing.assert_array_equal(generate(config, "data=2,tensor=2").sequences, expected.sequences)
    rows = zip(PROMPTS, SEEDS, SUFFIXES, strict=True)
    requests = [RowRequest(prompt, config.replace(seed=0), seed, suffix) for prompt, seed, suffix in rows]
    # One row at a time, in a slot that had another suffix before.
    scheduler = golden_cases.engine().scheduler(requests, slots=1)
    results = sorted((one for some in scheduler.run() for one in some), key=lambda one: one.number)
    for row, result in enumerate(results):
        assert result.sequence.tolist() == [*PROMPTS[row], *middle(expected.sequences)[row]]
    steps = [len(np.unique(one.commit_steps[one.commit_steps >= 0])) for one in results]
    assert [one.positions for one in results] == [
        count * request.canvas_length for count, request in zip(steps, requests, strict=True)
    ]


@pytest.mark.parametrize("cache", ["dual", "prefix"])
def test_a_refresh_in_every_step_changes_nothing(cache: str) -> None:
    expected = generate(BLOCKS, history=True)
    assert expected.stats.steps == NEW, "blocks end before the suffix"
    found = generate(BLOCKS.replace(cache=cache, refresh_interval=1), history=True)
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    np.testing.assert_array_equal(found.history, expected.history)


@pytest.mark.parametrize(
    "changes", [{"cache": "dual", "refresh_blocks": 0}, {"cache": "prefix"}], ids=["dual", "prefix"]
)
def test_blocks_with_a_cache_equal_masks_in_the_prompt(changes: dict[str, Any]) -> None:
    """Windows are the same if the new tokens are whole blocks, and with a parallel rule the steps are too."""
    config = BLOCKS.replace(parallel="threshold", threshold=0.05, **changes)
    found, expected = generate(config), masks_inside(config)
    for row in range(len(PROMPTS)):
        np.testing.assert_array_equal(middle(found.sequences)[row], new_in(expected.sequences, row))


def test_a_last_block_that_ends_before_the_suffix() -> None:
    """With 12 positions per block, the second block has 4 masks. A row of a batch equals the row alone on a mesh."""
    config = BLOCKS.replace(cache="dual", block_length=12)
    together = generate(config)
    alone = golden_cases.engine("tensor=2").generate_tokens(
        [PROMPTS[0]], None, config.replace(seed=SEEDS[:1]), suffixes=SUFFIXES[:1]
    )
    np.testing.assert_array_equal(middle(alone.sequences)[0], middle(together.sequences)[0])
    assert together.stats.masks_left == 0


def test_an_end_token_ends_the_middle_and_not_the_suffix() -> None:
    ids, mask = left_padded(PROMPTS, 0)
    engine = golden_cases.engine()
    free = engine.generate_tokens(ids, mask, PLAIN, suffixes=SUFFIXES)
    stop = int(middle(free.sequences)[0][3])
    # The suffix of another row begins with the token, and does not end that row.
    suffixes = [*SUFFIXES[:2], [stop, *SUFFIXES[2]]]
    free = engine.generate_tokens(ids, mask, PLAIN, suffixes=suffixes)
    ended = engine.generate_tokens(ids, mask, PLAIN.replace(stop_token_ids=(stop,)), suffixes=suffixes)
    assert stop in middle(free.sequences)[0][:-1]
    assert ended.stats.tokens < free.stats.tokens, "row 0 ends early"
    for row in range(len(PROMPTS)):
        new, whole = middle(ended.sequences)[row].tolist(), middle(free.sequences)[row].tolist()
        end = new.index(stop) + 1 if stop in new else NEW
        assert new[:end] == whole[:end]
        committed = middle(ended.commit_steps)[row] >= 0
        assert [token for token, kept in zip(new, committed, strict=True) if not kept] == [
            engine.config.pad_token_id
        ] * int((~committed).sum())


def test_guidance_hides_the_suffix_too() -> None:
    """The second pass of guidance sees neither prompt nor suffix, as in LLaDA's code."""
    engine = golden_cases.engine(folder=GOLDEN / "llada_tiny")
    mask, scale, rows = engine.config.mask_token_id, 4.0, 16
    prompts, suffixes = np.random.default_rng(0).integers(0, mask, (2, rows, 4))
    config = DiffusionConfig(1, steps=1, algorithm="low_confidence", cfg_scale=scale)
    found = engine.generate_tokens(prompts, None, config, suffixes=suffixes.tolist()).sequences[:, -1]
    masks = np.full((rows, 5), mask)
    given, hidden, only_prompt_hidden = (
        engine.logits(np.concatenate([before, masks[:, :1], after], axis=1))[:, 4]
        for before, after in [(prompts, suffixes), (masks[:, :4], masks[:, :4]), (masks[:, :4], suffixes)]
    )

    def guided(without: np.ndarray) -> np.ndarray:
        return (without + (scale + 1) * (given - without)).argmax(axis=-1)

    np.testing.assert_array_equal(found, guided(hidden))
    assert (found != guided(only_prompt_hidden)).any()


def test_a_suffix_reaches_other_hosts() -> None:
    row = Insertion(0, RowRequest([1, 2], PLAIN.replace(seed=0), 3, [4, 5]))
    plan = StepPlan([PoolPlan(0, [row], [], [])])
    assert StepPlan.from_json(plan.to_json()).pools[0].insert[0].request == row.request


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "one suffix for two prompts": (
        lambda: golden_cases.engine().generate_tokens([[1], [2]], None, PLAIN, suffixes=[[3]]),
        "1 suffixes for 2 rows",
    ),
    "no token": (
        lambda: golden_cases.engine().generate_tokens([[1]], None, PLAIN, suffixes=[[999]]),
        "token id 999 is outside the vocabulary",
    ),
    "a mask": (
        lambda: golden_cases.engine().generate_tokens([[1]], None, PLAIN.replace(seed=0), suffixes=[[3, MASK]]),
        "the suffix contains the mask token",
    ),
    "too long": (
        lambda: golden_cases.engine().generate_tokens([[1]], None, PLAIN.replace(seed=0), suffixes=[[3] * 5000]),
        "1 prompt tokens, 5000 suffix tokens and 16 new tokens",
    ),
    "block-causal": (
        lambda: golden_cases.engine(folder=GOLDEN / "sdar_tiny").generate_tokens(
            [[1]], None, DiffusionConfig(4, algorithm="maskgit_plus"), suffixes=[[3]]
        ),
        "suffix is not available for sdar models: their attention is block-causal",
    ),
    "causal": (
        lambda: golden_cases.engine(folder=GOLDEN / "qwen3_tiny").generate_tokens(
            [[1]], None, SamplingConfig(4), suffixes=[[3]]
        ),
        "suffix is not available for qwen3 models: their attention is causal",
    ),
    "a scheduler's row": (
        lambda: golden_cases.engine(folder=GOLDEN / "sdar_tiny").scheduler(
            [
                RowRequest([1], config := DiffusionConfig(4, algorithm="maskgit_plus"), 0),
                RowRequest([1], config, 0, [3]),
            ]
        ),
        "request 1: suffix is not available for sdar models",
    ),
    "a scheduler's token": (
        lambda: golden_cases.engine().scheduler([RowRequest([1], PLAIN, 0, [2**40])]),
        "request 0: token id 1099511627776 is outside the vocabulary",
    ),
    "a token of a scheduler's prompt": (
        lambda: golden_cases.engine().scheduler([RowRequest([2**40], PLAIN, 0, [3])]),
        "request 0: token id 1099511627776 is outside the vocabulary",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused_suffixes(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        call()
