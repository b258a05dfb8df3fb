"""The rules that commit several tokens per step, against the same rules in NumPy: one step, and whole rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from runtime import DiffusionConfig, can_run
from runtime.decoding.choices import Choices
from runtime.decoding.commit import commit
from runtime.decoding.state import DenoiseProgram
from sharding.errors import InputError
from tests import golden_cases
from tests.runtime.decoding import rules_by_hand
from tests.runtime.decoding.block_rows import BLOCK, LENGTHS, NEW_TOKENS, ragged_rows
from tests.runtime.decoding.test_steps import one_block
from tests.runtime.decoding.token_choices import MASK, forward, rule

WIDTH, ROWS = 24, 64
# Confidences closer to a bound than this could be on its other side in float64.
NEAR = 1e-5


def committed(
    parallel: str, confidences: np.ndarray, wanted: np.ndarray, step: int, decaying: bool = False, **numbers: float
) -> np.ndarray:
    """The positions that one step commits: bool ``[ROWS, WIDTH]``. Positions that are not wanted have a token."""
    program = DenoiseProgram(
        algorithm="maskgit_plus",
        parallel=parallel,
        sampling=rule("maskgit_plus"),
        sample_positions=False,
        chunk=WIDTH,
        schedule="linear_time",
        decaying=decaying,
    )
    canvas = np.where(wanted, MASK, MASK + 2).astype(np.int32)
    request, state = one_block(canvas, [0] * ROWS, np.zeros(WIDTH, np.float32), WIDTH, step, WIDTH)
    request = request.replace(**{name: np.full(ROWS, value, np.float32) for name, value in numbers.items()})
    choices = Choices(np.full_like(canvas, MASK + 1), np.where(wanted, confidences, -np.inf).astype(np.float32))
    run = jax.jit(functools.partial(commit, forward("data=1"), program))
    after = run(request, state, choices, wanted, wanted.sum(axis=1).astype(np.int32))
    return np.asarray(after.canvas) == MASK + 1


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers from 0 to 1, most of them near 1, and the positions that are masked: at least one per row."""
    generator = np.random.default_rng(seed)
    wanted = generator.random((ROWS, WIDTH)) < 0.6
    wanted[np.arange(ROWS), generator.integers(0, WIDTH, ROWS)] = True
    numbers = 1 - generator.random((ROWS, WIDTH)) ** generator.integers(1, 6, (ROWS, 1))
    return numbers.astype(np.float32), wanted


@pytest.mark.parametrize("factor", [0.2, 0.9, 1.0, 1.7])
def test_a_step_of_the_frechet_rule(factor: float) -> None:
    certainty, wanted = drawn(int(10 * factor))
    for step in (0, 3):
        found = committed("frechet", certainty, wanted, step, factor=factor)
        counts = set()
        for row in range(ROWS):
            masked = np.flatnonzero(wanted[row])
            own = certainty[row, masked].astype(np.float64)
            order = masked[np.argsort(-own, kind="stable")]
            fewest, count, most = (rules_by_hand.frechet_count(own, factor + near) for near in (-NEAR, 0, NEAR))
            assert fewest == most, "no row is so near to the bound that rounding decides"
            floor = masked[0] if step == 0 else order[0]
            assert set(np.flatnonzero(found[row])) == {*order[:count], floor}
            counts.add(count)
        assert len(counts) > 2


@pytest.mark.parametrize("bound", [0.0, 0.05, 0.6, 4.0])
def test_a_step_of_the_entropy_bound_rule(bound: float) -> None:
    numbers, wanted = drawn(int(100 * bound))
    entropies = 6 * (1 - numbers)  # above 1 too
    for step in (0, 3):
        found = committed("entropy_bound", -entropies, wanted, step, entropy_bound=bound)
        counts = set()
        for row in range(ROWS):
            masked = np.flatnonzero(wanted[row])
            own = entropies[row, masked].astype(np.float64)
            order = masked[np.argsort(own, kind="stable")]
            count = rules_by_hand.entropy_count(own, bound)
            if bound:
                assert {count} == {rules_by_hand.entropy_count(own, bound + near) for near in (-NEAR, NEAR)}
            assert set(np.flatnonzero(found[row])) == {*order[:count]}
            counts.add(count)
        assert min(counts) >= 1
        assert max(counts) > 1 or not bound


def test_certain_tokens_are_committed_together() -> None:
    """Saturated confidences are common: any number of entropies of 0 and of certainties of 1 fits every bound."""
    wanted = np.ones((ROWS, WIDTH), bool)
    certain = np.ones((ROWS, WIDTH), np.float32)
    certain[:, 5] = 0.0
    for step in (0, 3):
        found = committed("frechet", certain, wanted, step, factor=1.0)
        assert (found == (certain == 1)).all()
        found = committed("entropy_bound", certain - 1, wanted, step, entropy_bound=0.0)
        # The first entropy above 0 may follow: the sum without the largest is still 0.
        assert found.all()


@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
def test_a_step_of_a_threshold_that_decays(decay: float) -> None:
    certainty, wanted = drawn(int(10 * decay))
    found = committed("threshold", certainty, wanted, 3, decaying=True, threshold=0.8, threshold_decay=decay)
    for row in range(ROWS):
        threshold = 0.8 * (1 - decay * (1 - wanted[row].mean()))
        assert (np.abs(certainty[row] - threshold) > 1e-6).all()
        floor = np.arange(WIDTH) == np.argmax(np.where(wanted[row], certainty[row], -1))
        np.testing.assert_array_equal(found[row], wanted[row] & ((certainty[row] > threshold) | floor))
    if decay == 0:
        plain = committed("threshold", certainty, wanted, 3, threshold=0.8)
        np.testing.assert_array_equal(found, plain)


RULES: list[dict[str, Any]] = [
    {"parallel": "frechet", "factor": 1.72, "algorithm": "maskgit_plus"},
    {"parallel": "entropy_bound", "entropy_bound": 4.0},
    {"parallel": "threshold", "threshold": 0.5, "threshold_decay": 0.8, "algorithm": "maskgit_plus"},
]
PLACES: list[dict[str, Any]] = [
    {},
    {"block_length": BLOCK},
    {"block_length": BLOCK, "cache": "dual"},
    {"block_length": BLOCK, "cache": "prefix"},
]


@pytest.mark.parametrize("place", PLACES, ids=["exact", "blocks", "dual", "prefix"])
@pytest.mark.parametrize("own", RULES, ids=lambda own: own["parallel"])
def test_whole_rows(own: dict[str, Any], place: dict[str, Any]) -> None:
    engine = golden_cases.engine("tensor=1")
    ids, _ = ragged_rows()
    config = DiffusionConfig(max_new_tokens=NEW_TOKENS, **own, **place)
    prompt = ids[1, -LENGTHS[1] :]
    found, expected = engine.generate_tokens(prompt[None], None, config), rules_by_hand.decode(engine, prompt, config)
    np.testing.assert_array_equal(found.sequences[0], expected.tokens)
    assert found.stats.forwards == expected.forwards < NEW_TOKENS, "several tokens per step"
    blocks = -(-NEW_TOKENS // BLOCK) if place else 1
    assert expected.forwards > blocks, "several steps per block"


def test_programs_with_a_decay_run_rows_without_one() -> None:
    plain = DiffusionConfig(parallel="threshold")
    decaying = plain.replace(threshold_decay=0.5)
    assert can_run(decaying, plain)
    assert can_run(decaying, decaying.replace(threshold_decay=0.1))
    assert not can_run(plain, decaying)
    # Their other numbers are run-time arguments.
    assert can_run(plain.replace(parallel="frechet"), plain.replace(parallel="frechet", factor=0.5))
    assert can_run(plain.replace(parallel="entropy_bound"), plain.replace(parallel="entropy_bound", entropy_bound=2.0))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": "frechet", "entropy_bound": 0.5}, "entropy_bound requires parallel=entropy_bound"),
        ({"parallel": "entropy_bound", "entropy_bound": -0.5}, "entropy_bound is -0.5"),
        ({"parallel": "entropy_bound", "factor": 1.5}, "factor requires parallel=factor or parallel=frechet"),
        ({"parallel": "factor", "threshold_decay": 0.5}, "threshold_decay requires parallel=threshold"),
        ({"parallel": "threshold", "threshold_decay": 1.5}, "threshold_decay is 1.5; expected a number from 0 to 1"),
        ({"parallel": "frechet", "alg_temp": 0.5, "algorithm": "entropy"}, "alg_temp requires parallel=none"),
    ],
)
def test_numbers_without_their_rule(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as found:
        DiffusionConfig(**changes)
    assert said in str(found.value)
