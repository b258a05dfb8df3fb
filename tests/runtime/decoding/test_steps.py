"""The parts of a denoise step, called directly: which positions it needs, and which it commits.

Dimension letters: B batch, S sequence.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from scipy import stats

from runtime.decoding.choices import Choices
from runtime.decoding.commit import commit
from runtime.decoding.progress import next_step
from runtime.decoding.state import DenoiseProgram, DenoiseRequest, DenoiseState
from runtime.execution.rows import row_seeds, seed_words
from tests.runtime.decoding.token_choices import MASK, SIGNIFICANCE, VOCAB, chi_square, forward, rule, softmax


def one_block(
    canvas: np.ndarray, seeds: list[int], ratios: np.ndarray, steps: int, step: int, length: int, alg_temp: float = 0.0
) -> tuple[DenoiseRequest, DenoiseState]:
    """Rows of exact decoding (a single block without a cache) before this step; no later step may start."""
    rows = len(canvas)

    def each(value: float, dtype: type = np.int32) -> np.ndarray:
        return np.full(rows, value, dtype)

    request = DenoiseRequest(
        lengths=each(length),
        ends=each(length),
        prompts=each(0),
        first=each(0),
        seeds=seed_words(seeds),
        ratios=np.tile(ratios, (rows, 1)),
        block_length=each(canvas.shape[1]),
        sub_block_length=each(canvas.shape[1]),
        steps_per_block=each(steps),
        block_steps=each(steps),
        refresh_interval=each(1),
        refresh_blocks=each(1),
        suffix_window=each(0),
        stop_tokens=np.full((rows, 1), -1, np.int32),
        threshold=each(0, np.float32),
        threshold_decay=each(0, np.float32),
        factor=each(0, np.float32),
        entropy_bound=each(0, np.float32),
        entropy_limit=each(0, np.float32),
        cfg_scale=each(0, np.float32),
        temperature=each(1, np.float32),
        top_p=each(1, np.float32),
        top_k=each(VOCAB),
        alg_temp=each(alg_temp, np.float32),
        max_iterations=np.int32(1),
        min_running=np.int32(1),
        step_limit=np.int32(step + 1),
    )
    counters = ("block", "steps_until_refresh", "previous_block_stale", "refreshes", "window_positions")
    state = DenoiseState(
        canvas=canvas,
        commit_steps=np.full_like(canvas, -1),
        step_in_block=each(step),
        **dict.fromkeys(counters, each(0)),
        done=np.zeros(rows, bool),
        non_finite=np.zeros(rows, bool),
        iteration=np.int32(0),
    )
    return request, state


def commit_once(
    confidences: np.ndarray, count: int, alg_temp: float, rows: int, *, seeds: list[int] | None = None, step: int = 2
) -> np.ndarray:
    """The positions that ``rows`` rows with equal confidences commit: bool ``[rows, S]``."""
    width = len(confidences)
    program = DenoiseProgram(
        algorithm="entropy", sampling=rule("entropy"), sample_positions=True, chunk=width, schedule="linear_time"
    )
    canvas = np.full((rows, width), MASK, np.int32)
    own = row_seeds(17, rows) if seeds is None else seeds
    request, state = one_block(canvas, own, np.zeros(16, np.float32), 16, step, width, alg_temp)
    tokens = np.full_like(canvas, MASK + 1)
    after = jax.jit(functools.partial(commit, forward("data=1"), program))(
        request,
        state,
        Choices(tokens, np.broadcast_to(confidences.astype(np.float32), canvas.shape)),
        np.ones_like(canvas, bool),
        np.full(rows, count, np.int32),
    )
    committed = np.asarray(after.canvas) != MASK
    np.testing.assert_array_equal(committed, np.asarray(after.commit_steps) == step)
    assert (committed.sum(axis=1) == count).all()
    return committed


CONFIDENCES = np.array([-0.2, -1.5, -0.9, -0.2, -2.5])


@pytest.mark.parametrize("alg_temp", [0.4, 1.0, 5.0])
def test_first_positions_are_drawn_by_confidence(alg_temp: float) -> None:
    """If one position is committed, it is drawn from softmax(confidence / alg_temp)."""
    committed = commit_once(CONFIDENCES, 1, alg_temp, 40_000)
    assert chi_square(committed.sum(axis=0), softmax(CONFIDENCES / alg_temp)) > SIGNIFICANCE


@pytest.mark.parametrize("alg_temp", [0.7, 2.0])
def test_several_positions_are_drawn_without_replacement(alg_temp: float) -> None:
    """Pairs are drawn without replacement, with renormalised probabilities; asking for all positions commits all."""
    probabilities = softmax(CONFIDENCES / alg_temp)
    pairs = {}
    for one in range(5):
        for other in range(one + 1, 5):
            first = probabilities[one] * probabilities[other] / (1 - probabilities[one])
            second = probabilities[other] * probabilities[one] / (1 - probabilities[other])
            pairs[one, other] = first + second
    committed = commit_once(CONFIDENCES, 2, alg_temp, 40_000)
    found = np.array([(committed[:, one] & committed[:, other]).sum() for one, other in pairs])
    assert chi_square(found, np.array(list(pairs.values()))) > SIGNIFICANCE
    assert commit_once(CONFIDENCES, 5, alg_temp, 8).all()


def test_positions_are_drawn_anew_in_every_step() -> None:
    first, second = (commit_once(CONFIDENCES, 1, 1.0, 40_000, step=step).argmax(axis=1) for step in (2, 3))
    probabilities = softmax(CONFIDENCES)
    counts = np.bincount(5 * first + second, minlength=25)
    assert chi_square(counts, np.outer(probabilities, probabilities).ravel()) > SIGNIFICANCE


@pytest.mark.parametrize("ratio", [0.03, 0.25, 0.5, 0.9])
def test_origin_commits_each_position_with_the_stated_probability(ratio: float) -> None:
    """Positions are drawn independently: their number per row is binomial, and each is equally likely."""
    rows, width = 20_000, 6
    program = DenoiseProgram(
        algorithm="origin", sampling=rule("origin"), sample_positions=False, chunk=width, schedule="linear_time"
    )
    canvas = np.full((rows, width + 2), MASK, np.int32)
    canvas[:, 1] = 3  # not masked
    ratios = np.zeros(16, np.float32)
    ratios[4] = ratio

    def plan(step: int) -> np.ndarray:
        request, state = one_block(canvas, row_seeds(23, rows), ratios, 6, step, width + 1)
        _, wanted, counts = jax.jit(functools.partial(next_step, forward("data=1"), program))(request, state)
        np.testing.assert_array_equal(np.asarray(counts), np.asarray(wanted).sum(axis=1))
        return np.asarray(wanted)

    wanted = plan(4)
    assert not wanted[:, 1].any()
    assert not wanted[:, width + 1].any(), "filler after the row"
    masked = np.delete(wanted[:, : width + 1], 1, axis=1)
    for position in range(width):
        assert stats.binomtest(int(masked[:, position].sum()), rows, ratio).pvalue > SIGNIFICANCE
    expected = stats.binom.pmf(np.arange(width + 1), width, ratio)
    counts = np.bincount(masked.sum(axis=1), minlength=width + 1)
    assert chi_square(counts, expected) > SIGNIFICANCE
    if ratio == 0.5:
        last = plan(5)
        assert last[:, [0, *range(2, width + 1)]].all(), "the last step commits everything"
        assert not plan(3).any(), "a ratio of 0 commits nothing"
