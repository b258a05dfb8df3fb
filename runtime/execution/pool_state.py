"""The scheduler's view of a pool: its buckets, its waiting rows, and measured times of iterations."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from runtime.execution.assignment import OpenBucket
from runtime.execution.buckets import Bucket, Grid
from runtime.execution.fair_queue import FairQueue
from runtime.execution.requests import ScheduledRow, iterations_of
from runtime.execution.row_request import RowRequest
from runtime.execution.step_plan import BucketRun

# Weight of the newest measurement in the moving average of an iteration's time.
_NEWEST = 0.3
# A run counts as at most so many times its estimate: the rest was a pause of the process or of its devices, and no time
# that the rows received.
_LONGEST = 4


@dataclass(frozen=True)
class PoolLimits:
    """The properties of a pool that the scheduler needs and that do not change: its buckets and limits.

    Attributes:
      grid: the buckets of the pool.
      most_positions: limit on the positions of all open buckets together; infinite if rows have no cache.
      data: numbers of rows are multiples of this, see :attr:`runtime.execution.runner.Runner.row_unit`.
      canvases: canvases of each row that a pass computes, see :mod:`runtime.decoding.drafts`.
      growth: most tokens that an iteration adds to a growing row: one, and its drafts.
      prompt_chunk: most positions per chunk of a prompt; 0 if prompts need no prefill. With a prefill, a row's first
        token comes with its prompt's last chunk, which is no iteration.
    """

    grid: Grid
    most_positions: float = math.inf
    data: int = 1
    canvases: int = 1
    growth: int = 1
    prompt_chunk: int = 0


@dataclass
class PoolState:
    """The state of a pool in the scheduler.

    Attributes:
      limits: the pool's buckets and limits.
      available: buckets whose programs have been compiled.
      queue: rows that wait for a slot.
      buckets: open buckets.
      demand: how often each bucket would have been used if its programs had been compiled.
      seconds: average time of an iteration, by bucket.
      rate: most recent number of seconds per unit of cost; 0 if nothing has run.
      received: device time per row that each open bucket has received, by the bucket's number.
      numbers: iterator of numbers for new buckets.
    """

    limits: PoolLimits
    available: set[Bucket]
    queue: FairQueue[ScheduledRow] = field(default_factory=FairQueue)
    buckets: list[OpenBucket] = field(default_factory=list)
    demand: Counter[Bucket] = field(default_factory=Counter)
    seconds: dict[Bucket, float] = field(default_factory=dict)
    rate: float = 0.0
    received: dict[int, float] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def rows(self) -> list[int]:
        """Numbers of the rows in slots."""
        return [row for one in self.buckets for row in one.rows]

    @property
    def held(self) -> dict[int, list[int | None]]:
        """Slots of the buckets that have rows. Others are left out: they are closed when something else changes."""
        return {one.number: one.slots for one in self.buckets if one.rows}

    def estimate(self, bucket: Bucket) -> float:
        """Estimate the seconds of an iteration of a bucket; 0 if nothing has been measured."""
        return self.seconds.get(bucket) or self.rate * self.limits.grid.cost(bucket)

    def estimate_alone(self, row: RowRequest) -> float:
        """Estimate the seconds that a row would take alone, in the smallest bucket that holds it, prefill included.

        Before anything has been measured, the cost model tells, so that the rows of a first burst are in order too.
        """
        limits, cost = self.limits, self.limits.grid.cost
        bucket = Bucket(limits.data, limits.grid.width_for(row.canvas_length))
        unit = self.rate or cost.unit_seconds
        seconds = iterations_of(row) * (self.estimate(bucket) or unit * cost(bucket))
        if limits.prompt_chunk:
            seconds += unit * cost.of_prompt(len(row.tokens), min(limits.prompt_chunk, bucket.width))
        return seconds

    def ran(self, one: OpenBucket, run: BucketRun, step_seconds: float | None) -> None:
        """Count the time of a run: what each row of the open bucket has received, and what an iteration takes.

        Args:
          one: the bucket, with its rows.
          run: the run.
          step_seconds: approximate duration of a step. None means that all buckets run in every step, whatever they
            take, so all time is counted.
        """

        def counted(seconds: float, estimate: float) -> float:
            return min(seconds, _LONGEST * estimate) if estimate and step_seconds is not None else seconds

        # How long a prompt's chunk takes is not measured, but it should not take much longer than a step.
        received = counted(run.prefill_seconds, self._chunk_estimate(one.bucket, step_seconds or 0.0))
        # Only runs with iterations tell how long an iteration takes.
        if run.iterations:
            seconds = counted(run.seconds, self.estimate(one.bucket) * run.iterations)
            self._measured(one.bucket, seconds / run.iterations)
            received += seconds
        self.received[one.number] += received / len(one.rows)

    def _chunk_estimate(self, bucket: Bucket, least: float) -> float:
        """Estimate the seconds of a chunk of a prompt, at least ``least``; 0 if nothing has been measured."""
        chunk = min(self.limits.prompt_chunk or bucket.width, bucket.width)
        return self.rate and max(least, self.rate * self.limits.grid.cost.of_prompt(chunk, chunk))

    def _measured(self, bucket: Bucket, seconds: float) -> None:
        """Record the measured time of an iteration of a bucket."""
        old = self.seconds.get(bucket)
        self.seconds[bucket] = seconds if old is None else old + _NEWEST * (seconds - old)
        self.rate = self.seconds[bucket] / self.limits.grid.cost(bucket)
