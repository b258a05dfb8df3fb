"""Logits and log-probabilities of the engine: for padded rows, on meshes, and combined by an estimator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sharding.errors import InputError
from tests import golden_cases
from tests.divergence import ROUNDING
from tests.runtime.engine_rows import LENGTHS, LOGITS_ROUNDING, MASK, NEW_TOKENS, VOCAB, WIDTH, rows, shifted


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return torch.log_softmax(torch.from_numpy(logits.astype(np.float64)), dim=-1).numpy()


def gather(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, index[..., None], axis=-1)[..., 0]


MESHES = ("data=1", "tensor=8", "data=2,tensor=2", "sequence=4")


@pytest.mark.parametrize("mesh", MESHES)
def test_logits_of_padded_rows_equal_the_rows_alone(mesh: str) -> None:
    ids, mask = rows()
    found = golden_cases.engine(mesh).logits(ids, mask)
    assert found.dtype == np.float32
    assert found.shape == (*ids.shape, VOCAB)
    for row, length in enumerate(LENGTHS):
        own = golden_cases.engine().logits(ids[row : row + 1, WIDTH - length :])
        np.testing.assert_allclose(found[row, WIDTH - length :], own[0], rtol=0, atol=LOGITS_ROUNDING)
        assert not found[row, : WIDTH - length].any()
    assert np.abs(golden_cases.engine().logits(ids) - found)[1, -1].max() > 1e-3, "padding would be seen if attended"


@pytest.mark.parametrize("mesh", ["tensor=1", "data=2,sequence=2,tensor=2"])
def test_nothing_predicts_the_first_token_of_an_autoregressive_row(mesh: str) -> None:
    engine = golden_cases.engine(mesh, golden_cases.FOLDER.parent / "qwen3_tiny")
    ids, mask = [[5, 9, 3, 7], [0, 8, 9, 3]], [[1, 1, 1, 1], [0, 1, 1, 1]]
    found = engine.score(ids, ids, mask)
    assert found[0, 0] == found[1, 0] == found[1, 1] == 0
    sums = [value for value, _ in engine.log_likelihoods([([5], [9, 3, 7]), ([8], [9, 3])])]
    np.testing.assert_allclose(found.sum(axis=1), sums, rtol=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_scores_are_the_log_probabilities_of_the_shifted_logits(mesh: str) -> None:
    ids, mask = rows()
    targets = np.random.default_rng(1).integers(0, VOCAB, ids.shape)
    engine = golden_cases.engine(mesh)
    for temperature in (1.0, 0.6):
        logits = golden_cases.engine().logits(ids) / temperature
        expected = gather(log_softmax(shifted(logits)), targets)
        found = engine.score(ids, targets, temperature=temperature)
        assert found.dtype == np.float32
        assert found.shape == ids.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=LOGITS_ROUNDING)
    # With a mask, each row is scored as in a batch of one, and padding is zero.
    found = engine.score(ids, targets, mask)
    for row, length in enumerate(LENGTHS):
        start = WIDTH - length
        own = log_softmax(shifted(golden_cases.engine().logits(ids[row : row + 1, start:])))
        np.testing.assert_allclose(
            found[row, start:], gather(own, targets[row : row + 1, start:])[0], atol=LOGITS_ROUNDING
        )
        assert not found[row, :start].any()


def test_without_a_mask_pads_are_attended() -> None:
    """Without a mask, padding is attended to, counted from 0, and scored, as in the original's scoring pass."""
    ids, mask = rows()
    engine = golden_cases.engine()
    attended, masked = engine.score(ids, ids), engine.score(ids, ids, mask)
    np.testing.assert_allclose(attended[0], masked[0], rtol=0, atol=ROUNDING)
    assert np.abs(attended - masked)[1, -5:].max() > 1e-3
    assert (attended != 0).all()
    other = ids.copy()
    other[1, 0] = (other[1, 0] + 1) % MASK
    assert np.abs(engine.score(other, ids) - attended)[1, -5:].max() > 1e-4


def test_coupled_grpo_log_probabilities() -> None:
    """Three masked copies of each completion, combined as in the estimator, from scores and from logits."""
    engine = golden_cases.engine()
    generator = np.random.default_rng(2)
    prompts, completions = rows()[0], generator.integers(0, MASK, (3, NEW_TOKENS))
    sequences = np.concatenate([prompts, completions], axis=1)
    share = generator.uniform(0.2, 0.8)
    chosen = generator.random(completions.shape) < share
    assert 0 < chosen.sum() < chosen.size
    noised = []
    for where in (np.ones_like(chosen), chosen, ~chosen):
        copy = sequences.copy()
        copy[:, WIDTH:] = np.where(where, MASK, completions)
        noised.append(copy)

    scores = [engine.score(copy, sequences)[:, WIDTH:].astype(np.float64) for copy in noised]
    from_scores = (scores[0] + np.where(chosen, scores[1] / share, scores[2] / (1 - share))) / 2

    from_logits = np.zeros(completions.shape)
    whole = [log_softmax(engine.logits(copy)) for copy in noised]
    for row, place in np.ndindex(completions.shape):
        values = [copy[row, WIDTH + place - 1, completions[row, place]] for copy in whole]
        weighted = values[1] / share if chosen[row, place] else values[2] / (1 - share)
        from_logits[row, place] = (values[0] + weighted) / 2
    np.testing.assert_allclose(from_scores, from_logits, rtol=0, atol=LOGITS_ROUNDING / min(share, 1 - share))
    assert np.abs(from_scores - scores[0]).max() > 0.1


def test_logits_of_a_row_in_wide_padding() -> None:
    """Padding does not count towards the model's maximum length in `logits` either."""
    engine = golden_cases.engine()
    wide, mask = np.ones((1, 600), int), (np.arange(600) >= 597).astype(int)[None]
    found = engine.logits(wide, mask)
    np.testing.assert_allclose(found[0, -3:], engine.logits(wide[:, -3:])[0], rtol=0, atol=ROUNDING)


def test_bad_scores() -> None:
    engine = golden_cases.engine()
    ids, mask = rows()
    with pytest.raises(InputError, match="targets"):
        engine.score(ids, ids[:, 1:])
    with pytest.raises(InputError, match="targets"):
        engine.score(ids, ids[:2])
    with pytest.raises(InputError):
        engine.score(ids, ids.astype(float))
    with pytest.raises(InputError, match="outside the vocabulary"):
        engine.score(ids, np.full_like(ids, VOCAB))
    for temperature in (0, -1.0, float("nan"), float("inf"), "1"):
        with pytest.raises(InputError, match="temperature"):
            engine.score(ids, ids, temperature=temperature)
    for size in ({"batch": -1}, {"batch": 0}, {"width": -64}, {"width": 0}, {"width": "1"}, {"batch": 1.5}):
        with pytest.raises(InputError, match="expected a positive multiple"):
            engine.score(ids, ids, **size)
    with pytest.raises(InputError, match=r"batch=3: expected a positive multiple of the data axis \(2\)"):
        golden_cases.engine("data=2").score(ids, ids, batch=3)
    # Targets at padding are ignored.
    engine.score(ids, np.where(mask == 1, ids, -100), mask)
