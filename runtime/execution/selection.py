"""Choice of the buckets that are worth compiling for rows that are all known in advance.

The choice depends only on the rows and on the programs that are already compiled, so every host makes the same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from runtime.execution.buckets import Bucket, pack

# Number of intervals into which the estimate divides the time with all slots occupied, and the time after it.
_PIECES = 8
# A bucket is added if it lowers the total cost by at least this fraction.
_GAIN = 0.01


class Work(NamedTuple):
    """The work of a row: its length in positions, and its number of iterations."""

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
    """Choose the buckets with which generating all rows costs least, compilation included. The search is greedy.

    Args:
      rows: all rows, in the order in which they get slots.
      slots: number of rows at a time.
      top: a bucket that holds ``slots`` rows of any length; it is always chosen.
      candidates: the other buckets.
      price: cost of a pass of a bucket.
      compiling: cost of compiling a bucket, in the same unit.

    Returns:
      The chosen buckets, ``top`` first.
    """

    # There may be millions of rows, so they are summed once, and not for every set of buckets.
    intervals = _full_intervals(rows, slots)
    last = sorted(rows[max(0, len(rows) - slots) :], key=lambda row: -row.iterations)

    def total(buckets: Sequence[Bucket]) -> float:
        return _total(intervals, last, slots, buckets, price, compiling)

    together, others = total([top]), [bucket for bucket in candidates if bucket != top]
    if not others or together <= min(map(compiling, others)):
        return [top]
    # Narrow buckets help only if the longest rows have a small bucket of their own.
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


def _full_intervals(rows: Sequence[Work], slots: int) -> list[tuple[list[int], int]]:
    """Divide all rows except the last ``slots`` into intervals. All slots are occupied while these rows run.

    Returns:
      For each interval, the lengths of the rows in the slots at its start, and the sum of the iterations of its rows.
    """
    first = max(0, len(rows) - slots)
    size = max(1, -(-first // _PIECES))
    return [
        (
            [row.length for row in rows[start : start + slots]],
            sum(row.iterations for row in rows[start : min(first, start + size)]),
        )
        for start in range(0, first, size)
    ]


def _total(
    intervals: Sequence[tuple[Sequence[int], int]],
    last: Sequence[Work],
    slots: int,
    buckets: Sequence[Bucket],
    price: Callable[[Bucket], float],
    compiling: Callable[[Bucket], float],
) -> float:
    """Estimate the cost of all rows with these buckets: while all slots are occupied, and while the last rows end.

    ``intervals`` are those of :func:`_full_intervals`; ``last`` are the other rows, with the most iterations first.
    """
    used: set[Bucket] = set()

    def passes(lengths: Sequence[int]) -> float:
        found = [bucket for bucket, _ in pack(sorted(lengths, reverse=True), buckets, price)]
        used.update(found)
        return sum(map(price, found))

    # While all slots are occupied, a pass is an iteration of ``slots`` rows, so each row bears its share of the price.
    total = sum(passes(lengths) / slots * iterations for lengths, iterations in intervals)
    made, size = 0, -(-len(last) // _PIECES)
    for start in range((len(last) - 1) // size * size, -1, -size):
        longest = last[start].iterations
        if longest > made:
            total += passes([row.length for row in last[: start + size]]) * (longest - made)
            made = longest
    return total + sum(map(compiling, used))
