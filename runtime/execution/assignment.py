"""Assignment of rows to buckets: rows keep their slots unless moving them makes a pass cheaper.

All functions here are pure and use no clock, so every host makes the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from runtime.execution.buckets import Bucket, pack


@dataclass(frozen=True)
class Need:
    """How wide a row's bucket must be, in positions.

    Attributes:
      least: smallest width of a bucket in which the row may stay.
      wanted: smallest width of a bucket into which the row may be put.
    """

    least: int
    wanted: int


@dataclass
class OpenBucket:
    """A bucket in use: slots of one shape, and the rows in them.

    Attributes:
      number: identifies the bucket within its pool; numbers are never reused.
      bucket: its shape.
      slots: the row in each slot; None for a free slot.
    """

    number: int
    bucket: Bucket
    slots: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = self.slots or [None] * self.bucket.rows

    @property
    def rows(self) -> list[int]:
        """The rows in the bucket."""
        return [row for row in self.slots if row is not None]

    def without(self, rows: Collection[int]) -> OpenBucket:
        """Return the bucket without these rows, whose slots are then free."""
        if not set(rows) & set(self.rows):
            return self
        return OpenBucket(self.number, self.bucket, [None if row in rows else row for row in self.slots])

    def put(self, rows: Collection[int], data: int) -> None:
        """Put rows into free slots, spread evenly over the ``data`` shards.

        Adjacent rows stay adjacent, because adjacent rows of a shard with the same prompt share one prefill.
        """
        own = self.bucket.rows // data
        order = sorted(range(self.bucket.rows), key=lambda slot: (slot % own, slot // own))
        free = [slot for slot in order if self.slots[slot] is None]
        for slot, row in zip(sorted(free[: len(rows)]), rows, strict=False):
            self.slots[slot] = row


@dataclass(frozen=True)
class Choice:
    """The buckets that :func:`assign` may put rows into, their costs, and when rows move.

    Attributes:
      buckets: shapes whose programs may be used; the first one holds a row of any length.
      price: cost of one pass over a bucket.
      most_positions: limit on the positions of all open buckets together.
      data: numbers of rows are multiples of this, see :attr:`runtime.execution.runner.Runner.row_unit`.
      gain: rows move only if a pass over all rows gets cheaper by at least this fraction.
    """

    buckets: Sequence[Bucket]
    price: Callable[[Bucket], float]
    most_positions: float
    data: int
    gain: float


def assign(
    there: Sequence[OpenBucket], needs: Mapping[int, Need], choice: Choice, numbers: Iterator[int]
) -> list[OpenBucket]:
    """Give every row a slot.

    New rows take free slots that are wide enough, or slots of new buckets. All rows are distributed over buckets anew,
    and some may move, if this makes a pass over all rows cheaper by at least the fraction ``choice.gain``, or if the
    buckets would otherwise exceed ``choice.most_positions``.

    Args:
      there: the open buckets, without rows that are done or aborted.
      needs: width needs of all rows, including those without a slot.
      choice: the buckets that rows may be put into.
      numbers: iterator of numbers for new buckets.

    Returns:
      The new list of open buckets. A row that stays in its bucket keeps its slot.
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
    if not too_many and price(shapes) >= (1 - choice.gain) * price(now):
        return kept
    if positions(shapes) > choice.most_positions:
        # Buckets with the fewest rows stay within the limit: it has room for every slot at the largest width.
        same = [bucket for bucket in choice.buckets if bucket.rows == choice.buckets[0].rows]
        groups = pack([needs[row].wanted for row in order], same, choice.price)
    return _regroup(there, order, groups, choice.data, numbers)


def _descending(needs: Mapping[int, Need], there: Sequence[OpenBucket]) -> list[int]:
    """Sort rows by length, longest first. Rows of equal length that share a bucket are adjacent."""
    places = {row: one.number for one in there for row in one.rows}
    return sorted(needs, key=lambda row: (-needs[row].wanted, places.get(row, -1), row))


def _keep(
    there: Sequence[OpenBucket], needs: Mapping[int, Need], choice: Choice, numbers: Iterator[int]
) -> list[OpenBucket]:
    """Keep rows in their slots, and place rows without a slot, or too long for theirs, as cheaply as possible."""
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
    """Put each group of rows into the open bucket of its shape that holds most of them already, or into a new one."""
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
