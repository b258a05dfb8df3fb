"""The functions of one denoise step of ``runtime.decoding.diffusion``, called directly: which positions a step commits.

Dimension letters: B batch, S sequence.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from scipy import stats

from runtime.decoding import diffusion
from runtime.decoding.diffusion import Choices, DenoiseProgram, DenoiseState, Request
from runtime.execution.rows import row_seeds, seed_words
from tests.runtime.decoding.token_choices import MASK, SIGNIFICANCE, VOCAB, chi_square, forward, rule, softmax


def commit_once(
    confidences: np.ndarray, count: int, alg_temp: float, rows: int, *, seeds: list[int] | None = None, step: int = 2
) -> np.ndarray:
    """Which positions ``rows`` rows of equal confidences commit: bool ``[rows, S]``."""
    width = len(confidences)
    program = DenoiseProgram("entropy", rule("entropy"), sample_positions=True, chunk=width)
    canvas = np.full((rows, width), MASK, np.int32)
    words = seed_words(row_seeds(17, rows) if seeds is None else seeds)
    state = DenoiseState(
        canvas=canvas, commit_steps=np.full_like(canvas, -1), step=np.int32(step), forwards=np.int32(0)
    )
    request = Request(
        lengths=np.full(rows, width, np.int32),
        seeds=words,
        ratios=np.zeros(16, np.float32),
        steps=np.int32(16),
        limit=np.int32(16),
        temperature=np.float32(1),
        top_p=np.float32(1),
        top_k=np.int32(VOCAB),
        alg_temp=np.float32(alg_temp),
    )
    tokens = np.full_like(canvas, MASK + 1)
    after = jax.jit(functools.partial(diffusion.commit, forward("data=1"), program))(
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
    """One position of a row: from softmax(confidence / alg_temp)."""
    committed = commit_once(CONFIDENCES, 1, alg_temp, 40_000)
    assert chi_square(committed.sum(axis=0), softmax(CONFIDENCES / alg_temp)) > SIGNIFICANCE


@pytest.mark.parametrize("alg_temp", [0.7, 2.0])
def test_several_positions_are_drawn_without_replacement(alg_temp: float) -> None:
    """Pairs: the second from what the first leaves, renormalised. And all of them when all are wanted."""
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
def test_origin_transfers_each_position_with_the_stated_probability(ratio: float) -> None:
    """Independently: the number of positions of a row is binomial, and each position has the same share."""
    rows, width = 20_000, 6
    program = DenoiseProgram("origin", rule("origin"), sample_positions=False, chunk=width)
    canvas = np.full((rows, width + 2), MASK, np.int32)
    canvas[:, 1] = 3  # not masked
    ratios = np.zeros(16, np.float32)
    ratios[4] = ratio

    def plan(step: int) -> np.ndarray:
        request = Request(
            lengths=np.full(rows, width + 1, np.int32),
            seeds=seed_words(row_seeds(23, rows)),
            ratios=ratios,
            steps=np.int32(6),
            **dict.fromkeys(("limit", "temperature", "top_p", "top_k", "alg_temp"), np.int32(1)),
        )
        state = DenoiseState(canvas=canvas, commit_steps=canvas, step=np.int32(step), forwards=np.int32(0))
        wanted, counts = jax.jit(functools.partial(diffusion.transfer_plan, forward("data=1"), program))(request, state)
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
        assert last[:, [0, *range(2, width + 1)]].all(), "the last step transfers everything"
        assert not plan(3).any(), "a ratio of 0 transfers nothing"
