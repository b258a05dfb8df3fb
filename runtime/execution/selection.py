"""Classes of rows that are all known in advance, and the bucket that each class runs in.

The choice depends only on the rows and on the programs that are already compiled, so every host makes the same choice.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from runtime.execution.buckets import Bucket


class Work(NamedTuple):
    """The work of a row: its length in positions, and its number of iterations."""

    length: int
    iterations: int


class RowClass(NamedTuple):
    """Rows of similar length that run in one bucket.

    Attributes:
      bucket: its width holds all of them; its number of rows is how many run at a time.
      rows: numbers of the rows, those with the most iterations first.
    """

    bucket: Bucket
    rows: list[int]


def divide(
    rows: Sequence[Work],
    buckets: Sequence[Bucket],
    price: Callable[[Bucket], float],
    compiling: Callable[[Bucket], float],
) -> list[RowClass]:
    """Divide rows into the classes with which generating all of them costs least, compilation included.

    In a class, the next row takes the slot of a row that is done, and the longest rows start first. So a class needs
    about as many passes as its longest row has iterations, or all iterations divided by the bucket's rows, if that is
    more: with few long rows among many short ones, a bucket with few rows is cheapest. The classes are found by dynamic
    programming over the widths of the buckets.

    Args:
      rows: all rows, at least one.
      buckets: buckets to choose from; the widest is wide enough for every row.
      price: cost of a pass of a bucket.
      compiling: cost of compiling a bucket, in the same unit.

    Returns:
      The classes, widest first. Each row is in one of them.
    """
    shapes: dict[int, list[tuple[Bucket, float, float]]] = {}
    for bucket in buckets:
        shapes.setdefault(bucket.width, []).append((bucket, price(bucket), compiling(bucket)))
    all_widths = sorted(shapes)
    by_width: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        by_width.setdefault(all_widths[bisect.bisect_left(all_widths, row.length)], []).append(number)
    widths = sorted(by_width, reverse=True)
    # Wider buckets serve only if they need not be compiled.
    compiled = [(bucket, own, once) for several in shapes.values() for bucket, own, once in several if not once]
    options = [[*shapes[width], *(one for one in compiled if one[0].width > width)] for width in widths]
    work = [[rows[number].iterations for number in by_width[width]] for width in widths]
    totals, longest = list(map(sum, work)), list(map(max, work))
    # best[i]: the lowest cost of the rows of widths[i] and narrower ones, the bucket of the first class among them, and
    # the index of the width at which the next class starts.
    best: list[tuple[float, Bucket, int]] = [(0.0, buckets[0], len(widths))] * (len(widths) + 1)
    for first in range(len(widths) - 1, -1, -1):
        best[first] = (math.inf, *best[first][1:])
        iterations, passes = 0, 0
        for last in range(first, len(widths)):
            iterations, passes = iterations + totals[last], max(passes, longest[last])
            for bucket, own, once in options[first]:
                cost = once + own * max(passes, iterations / bucket.rows) + best[last + 1][0]
                if cost < best[first][0]:
                    best[first] = cost, bucket, last + 1
    found, first = [], 0
    while first < len(widths):
        _, bucket, end = best[first]
        numbers = [number for width in widths[first:end] for number in by_width[width]]
        found.append(RowClass(bucket, sorted(numbers, key=lambda number: -rows[number].iterations)))
        first = end
    return found
