"""Which buckets are worth compiling for rows that are all known.

A function of the rows and of the programs that are there, without clocks, so that every host decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.execution.buckets import Bucket, pack

# Pieces that the rows are cut into, and the end, where fewer and fewer rows are left.
_PIECES = 8
# A bucket is added if it makes everything cheaper by this share at least.
_GAIN = 0.01


@dataclass(frozen=True)
class Work:
    """A row that is to be generated: its length, and the iterations that it takes."""

    length: int
    iterations: int


def select(
    rows: Sequence[Work],
    slots: int,
    top: Bucket,
    candidates: Sequence[Bucket],
    price: Callable[[Bucket], float],
    compiling: Callable[[Bucket], float],
) -> list[Bucket]:
    """The buckets that make generating all rows cheapest, their compilation included.

    Args:
      rows: in the order in which they get slots.
      slots: rows at a time.
      top: a bucket that holds as many rows of any length; it is always among those that are chosen.
      candidates: the others.
      price: of a pass of a bucket.
      compiling: what compiling a bucket costs, in the same unit.

    Returns:
      ``top`` first.
    """

    def total(buckets: Sequence[Bucket]) -> float:
        return _total(rows, slots, buckets, price, compiling)

    together, others = total([top]), [bucket for bucket in candidates if bucket != top]
    if not others or together <= min(map(compiling, others)):
        return [top]
    # Narrow buckets are of use only where the longest rows have one of their own.
    fewest = min(bucket.rows for bucket in others)
    chosen = [top, max(bucket for bucket in others if bucket.rows == fewest)]
    cheapest = total(chosen)
    while left := [bucket for bucket in others if bucket not in chosen]:
        cost, best = min((total([*chosen, bucket]), bucket) for bucket in left)
        if cost > (1 - _GAIN) * cheapest:
            break
        chosen.append(best)
        cheapest = cost
    return chosen if cheapest < (1 - _GAIN) * together else [top]


def _total(
    rows: Sequence[Work],
    slots: int,
    buckets: Sequence[Bucket],
    price: Callable[[Bucket], float],
    compiling: Callable[[Bucket], float],
) -> float:
    """What all rows cost with these buckets: while every slot is taken, and then while the last rows end."""
    used: set[Bucket] = set()

    def passes(lengths: Sequence[int]) -> float:
        found = [bucket for bucket, _ in pack(sorted(lengths, reverse=True), buckets, price)]
        used.update(found)
        return sum(map(price, found))

    total, first = 0.0, max(0, len(rows) - slots)
    if first:
        # Rows that follow one another are in slots together.
        size = -(-first // _PIECES)
        for start in range(0, first, size):
            cost = passes([row.length for row in rows[start : start + slots]]) / slots
            total += cost * sum(row.iterations for row in rows[start : min(first, start + size)])
    last = sorted(rows[first:], key=lambda row: -row.iterations)
    made, size = 0, -(-len(last) // _PIECES)
    for start in range((len(last) - 1) // size * size, -1, -size):
        longest = last[start].iterations
        if longest > made:
            total += passes([row.length for row in last[: start + size]]) * (longest - made)
            made = longest
    return total + sum(map(compiling, used))
