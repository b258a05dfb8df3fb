"""Buckets: the shapes that rows are computed at, what a pass of each costs, and which rows share one.

Programs exist for a bounded set of buckets, a number of rows times a width each. Rows of similar length share a bucket,
so that what is computed follows what is there. All decisions here are functions of their arguments, without clocks, so
that every host makes the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Programs of one way of decoding, unless somebody says how many.
MAX_PROGRAMS = 24

# Caches of a grid may hold so many times the positions of all its slots while rows move between buckets.
MOVE_ROOM = 2

# A pass of so many positions, in times of its floor or of its overhead, gains nothing from more rows.
_SATURATED_FLOORS = 8
_SATURATED_OVERHEADS = 4
# Widths grow by at most this share, or by one step.
_GROWTH = (0.25, 0.5, 1.0)


@dataclass(frozen=True, order=True)
class Bucket:
    """A shape: so many rows of so many positions each."""

    rows: int
    width: int

    @property
    def positions(self) -> int:
        """Positions of all rows."""
        return self.rows * self.width


@dataclass(frozen=True)
class PassCost:
    """What one forward pass of a bucket costs, in the time that one more position takes.

    Attributes:
      floor: positions at which a pass stops being bound by reading the weights.
      overhead: what each pass costs whatever its shape.
      window: positions of a row that a pass computes; None for all.
      share: beside a window, what each position of a bucket adds: refreshes, or keys and values that are read.
    """

    floor: float
    overhead: float
    window: float | None = None
    share: float = 0.0

    def __call__(self, bucket: Bucket) -> float:
        """Cost of one pass."""
        if self.window is None:
            return self.overhead + max(self.floor, bucket.positions)
        computed = bucket.rows * min(self.window, bucket.width)
        return self.overhead + max(self.floor, computed) + self.share * bucket.positions


@dataclass(frozen=True)
class Grid:
    """The buckets of one way of decoding.

    Attributes:
      slots: rows at a time, at most.
      canvas: width of the widest bucket.
      buckets: all of them; the first is the widest one with the fewest rows, in which every row fits.
      cost: of a pass.
      grows: whether a row begins in a bucket for what it has so far, and moves on as it gets longer.
    """

    slots: int
    canvas: int
    buckets: tuple[Bucket, ...]
    cost: PassCost
    grows: bool = False

    def width_for(self, length: int) -> int:
        """The narrowest width that holds a row of this length."""
        return min(bucket.width for bucket in self.buckets if bucket.width >= length)


def ladder(canvas: int, step: int, growth: float) -> list[int]:
    """Widths up to ``canvas``: multiples of ``step`` that grow by ``growth``, and the canvas itself."""
    found = [step]
    while found[-1] < canvas:
        found.append(found[-1] + max(step, int(growth * found[-1]) // step * step))
    return [*(width for width in found if width < canvas), canvas]


def make_grid(
    slots: int,
    canvas: int,
    cost: PassCost,
    *,
    data: int,
    step: int,
    widths: Sequence[int] | None = None,
    limit: int = MAX_PROGRAMS,
    grows: bool = False,
    saturation: int = 1,
) -> Grid:
    """The buckets for so many slots of a canvas.

    Rows are powers of two times the data axis: any number of rows of one width is a sum of them. A bucket gets more
    rows only as long as a pass of it is cheaper than two passes of half as many.

    Args:
      slots: rows at a time, a multiple of ``data``.
      canvas: positions of the widest bucket.
      cost: of a pass.
      data: shards of rows.
      step: that widths are multiples of, but for the canvas.
      widths: the widths themselves, the canvas among them; None for a ladder.
      limit: how many buckets there may be.
      grows: see :class:`Grid`.
      saturation: times the positions of a pass from which on more rows gain little. Above 1 for rows that are there in
        plenty, which fill buckets of many.
    """
    saturated = saturation * max(_SATURATED_FLOORS * cost.floor, _SATURATED_OVERHEADS * cost.overhead)
    doubling = [data << power for power in range((slots // data).bit_length())]

    def candidates(growth: float, most_rows: int, step: int) -> list[Bucket]:
        return [
            Bucket(rows, width)
            for width in widths or ladder(canvas, step, growth)
            for rows in doubling
            if rows == data or (rows <= most_rows and rows * (cost.window or width) <= saturated)
        ]

    smallest = Bucket(data, canvas)
    found = [smallest]
    most = (doubling[-1], *reversed(doubling[1:3]), data)
    # Where a pass computes windows, its width costs little and more rows cost little: widths are given up first.
    tries = [(growth, rows) for growth in _GROWTH for rows in most]
    if cost.window is not None:
        tries.sort(key=lambda one: -one[1])
    for growth, rows, own in [*((*one, step) for one in tries), *_coarser(canvas, data, step)]:
        if len(fitting := candidates(growth, rows, own)) <= limit:
            found = fitting
            break
    return Grid(slots, canvas, tuple(_by_need(found, smallest)), cost, grows)


def _coarser(canvas: int, rows: int, step: int) -> list[tuple[float, int, int]]:
    """Wider and wider steps, where there may be very few buckets: growth, most rows, and the step."""
    return [(_GROWTH[-1], rows, step << power) for power in range(1, canvas.bit_length())]


def _by_need(buckets: Sequence[Bucket], first: Bucket) -> list[Bucket]:
    """Buckets in the order in which they help most while nothing is known about requests.

    Few rows before many, and widths by halving the gaps between those that are there.
    """
    order, found = [first], sorted({bucket.width for bucket in buckets} - {first.width})
    spans = [found]
    ranked: list[int] = [first.width]
    while spans:
        span = spans.pop(0)
        if span:
            middle = len(span) // 2
            ranked.append(span[middle])
            spans += [span[:middle], span[middle + 1 :]]
    rank = {width: place for place, width in enumerate(ranked)}
    return order + sorted(set(buckets) - {first}, key=lambda bucket: (bucket.rows, rank[bucket.width]))


def pack(
    lengths: Sequence[int], buckets: Sequence[Bucket], price: Callable[[Bucket], float]
) -> list[tuple[Bucket, int]]:
    """Cut rows into buckets at the lowest price.

    Args:
      lengths: of all rows, descending; the longest fits some bucket.
      buckets: to choose from, each as often as wanted.
      price: of one bucket.

    Returns:
      Buckets and how many of the rows each gets, one after another.
    """
    priced = [(bucket, price(bucket)) for bucket in buckets]
    total = len(lengths)
    # The price of the rows from each one on, and the bucket of that one: full buckets cost no more than others.
    best: list[tuple[float, Bucket]] = [(math.inf, buckets[0])] * total + [(0.0, buckets[0])]
    for first in range(total - 1, -1, -1):
        for bucket, own in priced:
            if bucket.width >= lengths[first]:
                whole = own + best[min(total, first + bucket.rows)][0]
                if whole < best[first][0]:
                    best[first] = whole, bucket
    found: list[tuple[Bucket, int]] = []
    first = 0
    while first < total:
        bucket = best[first][1]
        found.append((bucket, min(bucket.rows, total - first)))
        first += bucket.rows
    return found
