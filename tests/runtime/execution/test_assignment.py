"""Rows get slots, and keep them unless moving them makes a pass cheaper."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from runtime.execution.assignment import Choice, Need, OpenBucket, assign
from runtime.execution.buckets import PassCost, make_grid


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("cost", [PassCost(0.0, 64.0), PassCost(206.0, 50.0)])
@pytest.mark.parametrize("bounded", [False, True])
def test_every_row_has_one_slot_that_is_wide_enough(data: int, cost: PassCost, bounded: bool) -> None:
    slots, canvas = 8, 512
    grid = make_grid(slots, canvas, cost, data=data, step=64)
    choice = Choice(grid.buckets, cost, slots * canvas if bounded else math.inf, data, gain=0.1)
    random, numbers, rows = np.random.default_rng(1), itertools.count(), itertools.count()
    there: list[OpenBucket] = []
    lengths: dict[int, int] = {}
    for _ in range(200):
        for row in [row for row in lengths if random.random() < 0.2]:
            del lengths[row]
        for _ in range(int(random.integers(0, slots + 1 - len(lengths)))):
            lengths[next(rows)] = int(random.integers(1, canvas + 1))
        # The remaining rows grow a little.
        lengths = {row: min(canvas, length + int(random.integers(0, 9))) for row, length in lengths.items()}
        needs = {row: Need(length, min(canvas, length + 32)) for row, length in lengths.items()}
        there = [
            OpenBucket(one.number, one.bucket, [row if row in lengths else None for row in one.slots]) for one in there
        ]
        before = {one.number: one for one in there}
        there = assign(there, needs, choice, numbers)
        held = [row for one in there for row in one.rows]
        assert sorted(held) == sorted(lengths)
        assert len({one.number for one in there}) == len(there)
        assert not bounded or sum(one.bucket.positions for one in there) <= slots * canvas
        for one in there:
            assert one.rows
            assert all(lengths[row] <= one.bucket.width for row in one.rows)
            if (old := before.get(one.number)) is not None:
                assert old.bucket == one.bucket
                for slot, row in enumerate(old.slots):
                    assert row not in one.rows or one.slots[slot] == row, (
                        "a row that stays in its bucket keeps its slot"
                    )
        assert assign(there, needs, choice, numbers) == there, "nothing moves without a reason"


def test_rows_are_spread_over_the_shards() -> None:
    bucket = OpenBucket(0, make_grid(8, 64, PassCost(1000.0, 1.0), data=2, step=64).buckets[-1])
    assert bucket.bucket.rows == 8
    bucket.put([1, 2, 3, 4], data=2)
    assert [sum(row is not None for row in bucket.slots[part]) for part in (slice(0, 4), slice(4, 8))] == [2, 2]
