"""Classes of rows that are all known in advance, and their buckets."""

from __future__ import annotations

import itertools

import numpy as np

from runtime.execution.buckets import Bucket, PassCost, all_buckets
from runtime.execution.selection import RowClass, Work, divide

COST = PassCost(0.0, 64.0)


def divided(rows: list[Work], slots: int, compiling: float) -> list[RowClass]:
    """Divide rows; each class holds all its rows, and every row is in one of them."""
    found = divide(rows, all_buckets(slots, 512, data=1, step=32), COST, lambda bucket: compiling)
    assert sorted(number for one in found for number in one.rows) == list(range(len(rows)))
    for one in found:
        iterations = [rows[number].iterations for number in one.rows]
        assert iterations == sorted(iterations, reverse=True), "the longest rows start first"
        assert max(rows[number].length for number in one.rows) <= one.bucket.width
    assert [one.bucket.width for one in found] == sorted((one.bucket.width for one in found), reverse=True)
    return found


def buckets(found: list[RowClass]) -> list[Bucket]:
    return [one.bucket for one in found]


def total(rows: list[Work], found: list[RowClass], compiling: float) -> float:
    """The cost that the choice minimizes."""
    cost = 0.0
    for bucket, numbers in found:
        iterations = [rows[number].iterations for number in numbers]
        cost += compiling + COST(bucket) * max(max(iterations), sum(iterations) / bucket.rows)
    return cost


def test_few_rows_of_one_length_need_one_bucket() -> None:
    assert buckets(divided([Work(64, 30)], 1, 1e4)) == [Bucket(1, 64)]
    assert buckets(divided([Work(64, 30)] * 6, 6, 1e5)) == [Bucket(6, 64)]
    assert buckets(divided([Work(64, 30)] * 50, 8, 1e5)) == [Bucket(8, 64)]


def test_many_rows_of_all_lengths_are_worth_several() -> None:
    random = np.random.default_rng(0)
    rows = [Work(int(length), 100) for length in random.integers(30, 512, 200)]
    found = divided(rows, 32, 4e4)
    assert 3 <= len(found) < 16, "there are 16 widths"
    assert len(divided(rows, 32, 1e9)) == 1, "unless compiling takes longer than everything else"
    assert len(divided(rows, 32, 0.0)) > len(found)


def test_a_long_row_does_not_wait_among_empty_slots() -> None:
    rows = [Work(500, 500), *[Work(60, 10)] * 8]
    assert buckets(divided(rows, 8, 1e3)) == [Bucket(1, 512), Bucket(8, 64)]
    assert buckets(divided(rows, 8, 1e5)) == [Bucket(1, 512)], "one after another, without another program"
    # Rows of one length, of which one is long: two rows at a time end together.
    assert buckets(divided([Work(60, 70), *[Work(60, 10)] * 7], 8, 1e3)) == [Bucket(2, 64)]


def test_no_other_division_costs_less() -> None:
    """Against every division of a few rows between different widths, with every bucket."""
    random = np.random.default_rng(1)
    some = [Bucket(rows, width) for width in (64, 128, 256, 512) for rows in (1, 2, 4)]
    for compiling in (0.0, 3e3, 1e5):
        rows = [Work(int(length), int(new)) for length, new in random.integers([30, 1], [512, 200], (12, 2))]
        order = sorted(range(12), key=lambda number: -rows[number].length)
        widths = [min(one.width for one in some if one.width >= rows[number].length) for number in order]
        found = divide(rows, some, COST, lambda bucket, price=compiling: price)
        cheapest = np.inf
        for cuts in itertools.product((False, True), repeat=11):
            if any(cut and widths[place] == widths[place + 1] for place, cut in enumerate(cuts)):
                continue
            edges = [0, *(place + 1 for place, cut in enumerate(cuts) if cut), 12]
            parts = [order[start:end] for start, end in itertools.pairwise(edges)]
            cost = sum(
                min(
                    total(rows, [RowClass(bucket, part)], compiling)
                    for bucket in some
                    if bucket.width >= rows[part[0]].length
                )
                for part in parts
            )
            cheapest = min(cheapest, cost)
        assert total(rows, found, compiling) <= cheapest * (1 + 1e-9)


def test_buckets_of_known_rows() -> None:
    found = all_buckets(12, 1000, data=4, step=16)
    assert {one.rows for one in found} == {4, 8, 12}
    widths = sorted({one.width for one in found})
    assert widths[:16] == list(range(16, 257, 16))
    assert widths[-1] == 1000
    assert all(after - before <= max(16, before / 16) for before, after in itertools.pairwise(widths))
    assert len({one.width for one in all_buckets(1, 131_072, data=1, step=16)}) < 200
