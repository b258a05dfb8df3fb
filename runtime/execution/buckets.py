"""Buckets: the shapes that programs are compiled for, the cost of a pass over each, and how rows are put into them.

A bucket is a number of rows times a width. Programs exist for a limited set of buckets. Rows of similar length share a
bucket, so that little padding is computed. All functions here are pure and use no clock, so every host makes the same
decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Default limit on the number of buckets of one mode.
MAX_PROGRAMS = 24

# While rows move between buckets, caches may hold this many times the positions of all slots.
MOVE_ROOM = 2

# Passes with more positions than these multiples of their floor and overhead (see PassCost) gain little from more rows.
_SATURATED_FLOORS = 8
_SATURATED_OVERHEADS = 4
# Fractions by which each width exceeds the next smaller one (or by one step, if that is more), finest first.
_GROWTH = (0.25, 0.5, 1.0)
# The same for rows that are known in advance: only the buckets that they need are compiled.
_FINE_GROWTH = 1 / 16
# A width is rounded up to a multiple of a unit if it exceeds the width by less than this factor.
_ROUNDING = 1.05


@dataclass(frozen=True, order=True)
class Bucket:
    """A shape that programs are compiled for: a number of rows, and their width in positions."""

    rows: int
    width: int

    @property
    def positions(self) -> int:
        """Number of positions of all rows together."""
        return self.rows * self.width


@dataclass(frozen=True)
class PassCost:
    """Cost model of a forward pass. The unit is the time that one additional position takes.

    Attributes:
      floor: number of positions up to which all passes cost the same, because reading the weights dominates.
      overhead: cost that every pass has, regardless of its shape.
      window: positions per row that a pass computes; None for all.
      share: with a window, additional cost per position of the bucket, for refreshes or for reading keys and values.
      canvases: without a window, canvases of each row that a pass computes, see :mod:`runtime.decoding.drafts`.
      draft: cost model of a pass of the draft model, whose unit is a position of that model; None without one.
      draft_passes: passes of the draft model before each pass, times the cost of its unit in units of this model.
      prompt_position: cost of a position of a prompt's chunk. One ``data`` shard reads the chunk, and ``sequence``
        shards do not divide it, so this is the product of the two sizes.
      unit_seconds: estimated seconds of the unit; 0 if unknown. It orders rows while nothing has been measured.
    """

    floor: float
    overhead: float
    window: float | None = None
    share: float = 0.0
    canvases: int = 1
    draft: PassCost | None = None
    draft_passes: float = 0.0
    prompt_position: float = 1.0
    unit_seconds: float = 0.0

    def __call__(self, bucket: Bucket) -> float:
        """Return the cost of one pass over a bucket, with the draft model's passes before it."""
        return self._own(bucket) + (0.0 if self.draft is None else self.draft_passes * self.draft(bucket))

    def of_prompt(self, tokens: int, chunk: int) -> float:
        """Return the cost of reading a prompt of so many tokens in chunks, without the draft model's reading."""
        return math.ceil(tokens / chunk) * (self.overhead + max(self.floor, self.prompt_position * chunk))

    def _own(self, bucket: Bucket) -> float:
        if self.window is None:
            return self.overhead + max(self.floor, self.canvases * bucket.positions)
        computed = bucket.rows * min(self.window, bucket.width)
        return self.overhead + max(self.floor, computed) + self.share * bucket.positions


@dataclass(frozen=True)
class Grid:
    """The buckets of one mode.

    Attributes:
      slots: maximum number of rows at a time.
      canvas: width of the widest bucket.
      buckets: all buckets; the first has the largest width and the fewest rows, and holds any row.
      cost: cost model of a pass.
      grows: whether a row starts in a bucket for its current length, and moves to wider ones as it grows.
    """

    slots: int
    canvas: int
    buckets: tuple[Bucket, ...]
    cost: PassCost
    grows: bool = False

    def width_for(self, length: int) -> int:
        """Return the smallest width that holds a row of this length."""
        return min(bucket.width for bucket in self.buckets if bucket.width >= length)


def ladder(canvas: int, step: int, growth: float, unit: int = 1) -> list[int]:
    """Return ascending widths: multiples of ``step`` that grow by the fraction ``growth``, and ``canvas`` itself.

    Widths are rounded up to multiples of ``unit`` where this adds less than 5 %.
    """
    found = [step]
    while found[-1] < canvas:
        found.append(found[-1] + max(step, int(growth * found[-1]) // step * step))
    whole = {width: math.ceil(width / unit) * unit for width in found}
    widths = {rounded if rounded < _ROUNDING * width else width for width, rounded in whole.items()}
    return [*(width for width in sorted(widths) if width < canvas), canvas]


def make_grid(
    slots: int,
    canvas: int,
    cost: PassCost,
    *,
    data: int,
    step: int,
    unit: int = 1,
    widths: Sequence[int] | None = None,
    limit: int = MAX_PROGRAMS,
    grows: bool = False,
) -> Grid:
    """Choose the buckets for a number of slots and a canvas.

    Numbers of rows are powers of two times the data axis, so any number of rows is a sum of them. A bucket is left out
    if it is so large that one pass over it costs about as much as two passes over half of its rows.

    Args:
      slots: maximum number of rows at a time, a multiple of ``data``.
      canvas: width of the widest bucket.
      cost: cost model of a pass.
      data: numbers of rows are multiples of this, see :attr:`runtime.execution.runner.Runner.row_unit`.
      step: all widths except the canvas are multiples of this.
      unit: widths become multiples of this where it costs little, see :func:`ladder`.
      widths: the widths to use, including the canvas; None generates them with :func:`ladder`.
      limit: maximum number of buckets.
      grows: see :class:`Grid`.
    """
    saturated = max(_SATURATED_FLOORS * cost.floor, _SATURATED_OVERHEADS * cost.overhead)
    doubling = _doubling(slots, data)

    def candidates(growth: float, most_rows: int, step: int) -> list[Bucket]:
        return [
            Bucket(rows, width)
            for width in widths or ladder(canvas, step, growth, unit)
            for rows in doubling
            if rows == data or (rows <= most_rows and rows * (cost.window or width) <= saturated)
        ]

    smallest = Bucket(data, canvas)
    found = [smallest]
    most = (doubling[-1], *reversed(doubling[1:3]), data)
    # If passes compute windows, the width has little influence on their cost, so try all settings with fewer widths
    # before buckets with fewer rows.
    tries = [(growth, rows) for growth in _GROWTH for rows in most]
    if cost.window is not None:
        tries.sort(key=lambda one: -one[1])
    for growth, rows, own in [*((*one, step) for one in tries), *_coarser(canvas, data, step)]:
        if len(fitting := candidates(growth, rows, own)) <= limit:
            found = fitting
            break
    return Grid(slots, canvas, tuple(_by_need(found, smallest)), cost, grows)


def all_buckets(slots: int, canvas: int, *, data: int, step: int) -> list[Bucket]:
    """Return all buckets that rows known in advance may be put into: about as many as there are useful shapes.

    Args:
      slots: maximum number of rows at a time, a multiple of ``data``.
      canvas: width of the widest bucket.
      data: numbers of rows are powers of two times this, or all slots.
      step: widths up to 16 times this, and their distances, are multiples of it; wider ones grow by a sixteenth.
    """
    counts = sorted({*_doubling(slots, data), slots})
    return [Bucket(rows, width) for width in ladder(canvas, step, _FINE_GROWTH) for rows in counts]


def _doubling(slots: int, data: int) -> list[int]:
    return [data << power for power in range((slots // data).bit_length())]


def _coarser(canvas: int, rows: int, step: int) -> list[tuple[float, int, int]]:
    """Return settings ``(growth, most_rows, step)`` for a very small limit on buckets, each with double the step."""
    return [(_GROWTH[-1], rows, step << power) for power in range(1, canvas.bit_length())]


def _by_need(buckets: Sequence[Bucket], first: Bucket) -> list[Bucket]:
    """Sort buckets by how useful they are likely to be, as long as nothing is known about the requests.

    ``first`` comes first, then buckets with few rows before those with many. Those with equally many rows are sorted by
    width: the width of ``first``, then the middle one of the other widths, then the middles of both halves, and so on.
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
    """Distribute rows over buckets at the lowest total price, by dynamic programming.

    Args:
      lengths: lengths of all rows, in descending order; the longest fits into some bucket.
      buckets: the buckets to choose from; each may be used several times.
      price: price of one bucket.

    Returns:
      The buckets, and how many of the rows each gets, in the order of ``lengths``.
    """
    # Of buckets with equal prices, the smallest, which leaves the fewest slots empty.
    priced = sorted(((bucket, price(bucket)) for bucket in buckets), key=lambda one: one[0].positions)
    total = len(lengths)
    # best[i]: the lowest price of rows i and after, and the bucket that starts with row i. A full bucket costs no more
    # than one that is partly filled, so each bucket takes as many rows as it holds.
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
