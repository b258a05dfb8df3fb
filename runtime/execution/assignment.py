"""Which row is in which bucket: rows stay where they are unless moving them makes a pass cheaper.

Everything here is a function of its arguments, without clocks, so that every host decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from runtime.execution.buckets import Bucket, pack

# Rows move if a pass over all of them becomes cheaper by this share.
_GAIN = 0.1


@dataclass(frozen=True)
class Need:
    """Positions of a row: ``least`` of a bucket that it may stay in, ``wanted`` of one that it is put into."""

    least: int
    wanted: int


@dataclass
class OpenBucket:
    """A bucket that is in use.

    Attributes:
      number: no other bucket of the pool has had it.
      bucket: its shape.
      slots: the row in each slot, None where there is none.
    """

    number: int
    bucket: Bucket
    slots: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = self.slots or [None] * self.bucket.rows

    @property
    def rows(self) -> list[int]:
        """The rows that are in it."""
        return [row for row in self.slots if row is not None]

    def without(self, rows: Collection[int]) -> OpenBucket:
        """The bucket without some rows."""
        if not set(rows) & set(self.rows):
            return self
        return OpenBucket(self.number, self.bucket, [None if row in rows else row for row in self.slots])

    def put(self, rows: Collection[int], data: int) -> None:
        """Put rows into free slots, as many into each shard of ``data``; neighbours stay neighbours, as in a shard
        adjacent rows with the same prompt are read once.
        """
        own = self.bucket.rows // data
        order = sorted(range(self.bucket.rows), key=lambda slot: (slot % own, slot // own))
        free = [slot for slot in order if self.slots[slot] is None]
        for slot, row in zip(sorted(free[: len(rows)]), rows, strict=False):
            self.slots[slot] = row


@dataclass(frozen=True)
class Choice:
    """What rows may be put into.

    Attributes:
      buckets: shapes whose programs may be used; the first one holds a row of any length.
      price: of a pass of one.
      most_positions: of all open buckets together.
      data: shards of rows.
    """

    buckets: Sequence[Bucket]
    price: Callable[[Bucket], float]
    most_positions: float
    data: int


def assign(
    there: Sequence[OpenBucket], needs: Mapping[int, Need], choice: Choice, numbers: Iterator[int]
) -> list[OpenBucket]:
    """Give every row a slot.

    New rows take free slots that are wide enough, or new buckets. Where cutting all rows into buckets anew makes a
    pass over them cheaper by a tenth, they are cut anew, and rows move.

    Args:
      there: the open buckets, of rows that are done or aborted none.
      needs: of all rows, those that have no slot yet included.
      choice: what rows may be put into.
      numbers: of new buckets.

    Returns:
      The open buckets from now on; a row that is in the same one as before has the same slot.
    """
    kept = _keep(there, needs, choice, numbers)

    def price(buckets: Sequence[Bucket]) -> float:
        return sum(map(choice.price, buckets))

    def positions(buckets: Sequence[Bucket]) -> int:
        return sum(bucket.positions for bucket in buckets)

    order = _descending(needs, there)
    groups = pack([needs[row].wanted for row in order], choice.buckets, choice.price)
    shapes, now = [bucket for bucket, _ in groups], [one.bucket for one in kept]
    too_many = positions(now) > choice.most_positions
    if not too_many and price(shapes) >= (1 - _GAIN) * price(now):
        return kept
    if positions(shapes) > choice.most_positions:
        # The first bucket holds every row, and as many of it as there are slots are what memory was counted for.
        same = [bucket for bucket in choice.buckets if bucket.rows == choice.buckets[0].rows]
        groups = pack([needs[row].wanted for row in order], same, choice.price)
    return _regroup(there, order, groups, choice.data, numbers)


def _descending(needs: Mapping[int, Need], there: Sequence[OpenBucket]) -> list[int]:
    """All rows, the longest first; of equal ones those of one bucket next to one another."""
    places = {row: one.number for one in there for row in one.rows}
    return sorted(needs, key=lambda row: (-needs[row].wanted, places.get(row, -1), row))


def _keep(
    there: Sequence[OpenBucket], needs: Mapping[int, Need], choice: Choice, numbers: Iterator[int]
) -> list[OpenBucket]:
    """Every row where it is, and those that have no slot, or have grown out of theirs, in the cheapest way."""
    kept = [
        OpenBucket(
            one.number,
            one.bucket,
            [row if row is not None and needs[row].least <= one.bucket.width else None for row in one.slots],
        )
        for one in there
    ]
    placed = {row for one in kept for row in one.rows}
    rest = []
    for row in _descending(needs, there):
        if row in placed:
            continue
        fitting = [one for one in kept if None in one.slots and one.bucket.width >= needs[row].wanted]
        if fitting:
            min(fitting, key=lambda one: (one.bucket.width, -len(one.rows), one.number)).put([row], choice.data)
        else:
            rest.append(row)
    kept = [one for one in kept if one.rows]
    for bucket, count in pack([needs[row].wanted for row in rest], choice.buckets, choice.price):
        one = OpenBucket(next(numbers), bucket)
        one.put(rest[:count], choice.data)
        kept.append(one)
        rest = rest[count:]
    return kept


def _regroup(
    there: Sequence[OpenBucket],
    order: Sequence[int],
    groups: Sequence[tuple[Bucket, int]],
    data: int,
    numbers: Iterator[int],
) -> list[OpenBucket]:
    """Rows in groups of given shapes, each in the open bucket of its shape that has most of them, or in a new one."""
    rows, first = [], 0
    for _, count in groups:
        rows.append(order[first : first + count])
        first += count
    shared = [
        (len(set(own) & set(one.rows)), index, one)
        for index, ((bucket, _), own) in enumerate(zip(groups, rows, strict=True))
        for one in there
        if one.bucket == bucket
    ]
    chosen: dict[int, OpenBucket] = {}
    for count, index, one in sorted(shared, key=lambda match: (-match[0], match[1], match[2].number)):
        if count and index not in chosen and one not in chosen.values():
            chosen[index] = one
    found = []
    for index, ((bucket, _), own) in enumerate(zip(groups, rows, strict=True)):
        old = chosen.get(index)
        slots = [row if row in own else None for row in old.slots] if old else []
        one = OpenBucket(old.number if old else next(numbers), bucket, slots)
        one.put([row for row in own if row not in one.rows], data)
        found.append(one)
    return found
