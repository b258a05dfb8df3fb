"""The choice of buckets to compile for rows that are all known in advance."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.execution.buckets import Bucket, PassCost, make_grid
from runtime.execution.selection import Work, select

COST = PassCost(0.0, 64.0)
GRID = make_grid(32, 512, COST, data=1, step=32)


def chosen(rows: list[Work], slots: int, compiling: float) -> list[Bucket]:
    top = Bucket(slots, max(row.length for row in rows))
    return select(rows, slots, top, [one for one in GRID.buckets if one.rows <= slots], COST, lambda bucket: compiling)


def test_few_rows_of_one_length_need_one_bucket() -> None:
    assert chosen([Work(64, 30)], 1, 1e4) == [Bucket(1, 64)]
    assert chosen([Work(64, 30)] * 6, 6, 1e5) == [Bucket(6, 64)]


def test_many_rows_of_all_lengths_are_worth_several() -> None:
    random = np.random.default_rng(0)
    rows = [Work(int(length), 100) for length in random.integers(30, 512, 200)]
    found = chosen(rows, 32, 4e4)
    assert 3 <= len(found) < len(GRID.buckets)
    assert found[0] == Bucket(32, max(row.length for row in rows)), "the bucket in which all rows fit comes first"
    assert len(chosen(rows, 32, 1e9)) == 1, "unless compiling takes longer than everything else"
    assert len(chosen(rows, 32, 0.0)) >= len(found)


def test_a_long_end_is_worth_a_small_bucket() -> None:
    rows = [Work(500, 500), *[Work(60, 10)] * 7]
    found = chosen(rows, 8, 1e5)
    assert any(bucket.rows == 1 for bucket in found)


def test_rows_are_visited_once_and_not_for_every_set_of_buckets() -> None:
    class Visited(list[Work]):
        count = 0

        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            self.count += len(found) if isinstance(key, slice) else 1
            return found

    random = np.random.default_rng(0)
    rows = Visited(Work(int(length), 100) for length in random.integers(30, 512, 2000))
    assert len(select(rows, 32, Bucket(32, 512), GRID.buckets, COST, lambda bucket: 4e4)) > 1
    assert rows.count <= len(rows) + 10 * 32
