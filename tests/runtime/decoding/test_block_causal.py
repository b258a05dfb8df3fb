"""Rules by which a block step commits tokens, and the shapes of blocks and windows, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from runtime.decoding.block_causal import is_certain_enough
from runtime.decoding.block_schedule import block_schedule, canvas_length, steps_of_a_block, window_widths
from runtime.decoding.parameters import DiffusionConfig

NOT_WANTED = -np.inf


def committed(rule: str, confidences: list[float], count: int, **numbers: float) -> list[int]:
    """Positions that a rule commits in a single row."""
    row = np.array([confidences], np.float32)
    request: Any = SimpleNamespace(**{name: jnp.array([value], jnp.float32) for name, value in numbers.items()})
    program: Any = SimpleNamespace(parallel=rule)
    found = is_certain_enough(program, request, jnp.array(row), jnp.array(np.isfinite(row)), jnp.array([count]))
    return np.flatnonzero(np.asarray(found)[0]).tolist()


@pytest.mark.parametrize(
    ("threshold", "count", "expected"),
    [
        (0.95, 1, [3]),  # the most certain one, whatever the threshold
        (0.5, 1, [1, 3]),
        (0.6, 1, [3]),  # above, not at
        (0.5, 3, [1, 3, 4]),  # at least as many as the schedule requires
        (0.95, 9, [1, 2, 3, 4]),  # and no more than there are
    ],
)
def test_threshold_commits_what_is_certain_and_what_the_schedule_says(
    threshold: float, count: int, expected: list[int]
) -> None:
    confidences = [NOT_WANTED, 0.6, 0.1, 0.9, 0.3]
    assert committed("threshold", confidences, count, threshold=threshold) == expected


def test_sequential_commits_the_first_masks() -> None:
    confidences = [NOT_WANTED, 0.1, NOT_WANTED, 0.9, 0.3]
    assert committed("sequential", confidences, 1) == [1]
    assert committed("sequential", confidences, 2) == [1, 3]


@pytest.mark.parametrize(("limit", "expected"), [(0.05, [3]), (0.31, [1, 3]), (0.29, [3]), (1.0, [1, 3, 4])])
def test_entropies_are_added_from_the_lowest(limit: float, expected: list[int]) -> None:
    """Positions with 0.1, 0.2 and 0.5 nats are committed while their sum is below the limit; the lowest always is."""
    confidences = [NOT_WANTED, -0.2, NOT_WANTED, -0.1, -0.5]
    assert committed("entropy_sum", confidences, 3, entropy_limit=limit) == expected


def test_blocks_cover_a_row_and_share_its_steps() -> None:
    config = DiffusionConfig(10, steps=9, attention_block_length=4, block_length=4, cache="exact")
    assert block_schedule(config, 64) == (4, 4)
    assert steps_of_a_block(config, 4) == 3
    assert [canvas_length(prompt, config) for prompt in (1, 2, 3, 6)] == [12, 12, 16, 16]
    assert canvas_length(3, DiffusionConfig(10)) == 13
    assert window_widths("exact", 4, 64, offset=0) == (8, 4)
    assert window_widths("exact", 32, 64, offset=1) == (33,)
    assert window_widths("exact", 32, 64, offset=1, sub_block=8) == (33, 9)
    assert window_widths("exact", 8, 64, offset=1, sub_block=8) == (9,)
