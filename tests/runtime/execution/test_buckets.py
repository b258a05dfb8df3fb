"""The grid of buckets: limited in number, with room for every row; and packing at the lowest price."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from runtime.execution.buckets import Bucket, Grid, PassCost, ladder, make_grid, pack

CPU, GPU = PassCost(0.0, 64.0), PassCost(206.0, 50.0)
WINDOWS = PassCost(206.0, 50.0, 32, 1 / 32)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 24, 100])
@pytest.mark.parametrize("cost", [CPU, GPU, WINDOWS])
@pytest.mark.parametrize(("slots", "canvas", "data"), [(8, 512, 1), (16, 2048, 2), (1, 64, 1), (12, 640, 4)])
def test_a_grid_is_bounded_and_has_room_for_every_row(
    slots: int, canvas: int, data: int, cost: PassCost, limit: int
) -> None:
    grid = make_grid(slots, canvas, cost, data=data, step=64, limit=limit)
    assert len(set(grid.buckets)) == len(grid.buckets) <= limit
    assert grid.buckets[0] == Bucket(data, canvas), "every row fits into the first compiled bucket"
    for bucket in grid.buckets:
        assert bucket.rows % data == 0
        assert bucket.rows <= slots
        assert bucket.width <= canvas
    assert grid.width_for(1) == min(bucket.width for bucket in grid.buckets)


def test_widths_are_fine_at_the_small_end() -> None:
    widths = ladder(512, 32, 0.25)
    assert widths[:8] == list(range(32, 257, 32))
    assert widths[-1] == 512
    assert all(wide <= 1.25 * narrow + 32 for narrow, wide in itertools.pairwise(widths))
    assert ladder(100, 64, 0.25) == [64, 100]


def test_widths_that_somebody_wants_are_the_only_ones() -> None:
    grid = make_grid(8, 128, CPU, data=1, step=32, widths=[64, 128])
    assert {bucket.width for bucket in grid.buckets} == {64, 128}


def test_what_is_compiled_first_helps_most() -> None:
    order = make_grid(8, 512, CPU, data=1, step=32).buckets
    assert [bucket.rows for bucket in order] == sorted(bucket.rows for bucket in order)
    first = sorted(bucket.width for bucket in order[:4])
    gaps = np.diff([0, *first])
    assert max(gaps) < 512 * 0.7, "four programs cover all lengths closely"


def _cheapest(lengths: list[int], grid: Grid) -> float:
    """The lowest price, found by trying all ways to distribute sorted rows over buckets."""
    if not lengths:
        return 0.0
    best = float("inf")
    for bucket in grid.buckets:
        if bucket.width >= lengths[0]:
            best = min(best, grid.cost(bucket) + _cheapest(lengths[bucket.rows :], grid))
    return best


@pytest.mark.parametrize("cost", [CPU, GPU, WINDOWS])
def test_rows_are_packed_at_the_lowest_price(cost: PassCost) -> None:
    grid = make_grid(8, 256, cost, data=1, step=64)
    random = np.random.default_rng(0)
    for count in range(6):
        lengths = sorted((int(length) for length in random.integers(1, 257, count)), reverse=True)
        found = pack(lengths, grid.buckets, cost)
        assert sum(rows for _, rows in found) == count
        first = 0
        for bucket, rows in found:
            assert rows <= bucket.rows
            assert lengths[first] <= bucket.width
            first += rows
        assert sum(cost(bucket) for bucket, _ in found) == pytest.approx(_cheapest(lengths, grid))


def test_where_weights_are_what_takes_time_short_rows_share_a_pass() -> None:
    rows = [60] * 8
    on_gpu = pack(rows, make_grid(8, 512, GPU, data=1, step=64).buckets, GPU)
    assert [bucket.rows for bucket, _ in on_gpu] == [4, 4], "enough work for the devices"
