"""What the scheduler knows of a pool: its buckets, the rows that wait for them, and what passes have taken."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from runtime.execution.assignment import OpenBucket
from runtime.execution.buckets import Bucket, Grid
from runtime.execution.fair_queue import FairQueue
from runtime.execution.requests import ScheduledRow

# Weight of the newest iteration in how long one takes.
_NEWEST = 0.3


@dataclass(frozen=True)
class PoolLimits:
    """What the scheduler has to know of a pool.

    Attributes:
      grid: its buckets.
      most_positions: of all open buckets together; unlimited where rows keep no cache.
      data: shards of rows.
    """

    grid: Grid
    most_positions: float = math.inf
    data: int = 1


@dataclass
class PoolState:
    """Rows of one pool.

    Attributes:
      limits: of the pool.
      available: buckets whose programs are there.
      queue: rows that wait for a slot.
      buckets: those that are open.
      demand: how often a bucket without programs would have been used.
      seconds: that an iteration of a bucket took.
      rate: seconds that a unit of cost took last, 0 if nothing has run.
      had: time that each row of an open bucket has had, by the bucket's number.
      numbers: of buckets.
    """

    limits: PoolLimits
    available: set[Bucket]
    queue: FairQueue[ScheduledRow] = field(default_factory=FairQueue)
    buckets: list[OpenBucket] = field(default_factory=list)
    demand: Counter[Bucket] = field(default_factory=Counter)
    seconds: dict[Bucket, float] = field(default_factory=dict)
    rate: float = 0.0
    had: dict[int, float] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def rows(self) -> list[int]:
        """Numbers of the rows in slots."""
        return [row for one in self.buckets for row in one.rows]

    @property
    def held(self) -> dict[int, list[int | None]]:
        """Slots of the buckets that have rows; one without is closed when something else changes."""
        return {one.number: one.slots for one in self.buckets if one.rows}

    def estimate(self, bucket: Bucket) -> float:
        """Seconds of an iteration, 0 where nothing is known."""
        return self.seconds.get(bucket) or self.rate * self.limits.grid.cost(bucket)

    def measured(self, bucket: Bucket, seconds: float) -> None:
        """An iteration took so long."""
        old = self.seconds.get(bucket)
        self.seconds[bucket] = seconds if old is None else old + _NEWEST * (seconds - old)
        self.rate = self.seconds[bucket] / self.limits.grid.cost(bucket)
