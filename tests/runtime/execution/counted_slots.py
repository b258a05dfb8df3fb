"""Simulated slots for tests of the scheduler, without devices and with a simulated clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from runtime import (
    Bucket,
    Event,
    Grid,
    PoolLimits,
    RequestFinished,
    RequestHandle,
    RowRequest,
    RowResult,
    SamplingConfig,
    Scheduler,
    SchedulerPolicy,
    StepOutcome,
    StepPlan,
)
from runtime.execution.buckets import PassCost
from runtime.execution.step_plan import BucketRun, PoolOutcome, PoolPlan

PROMPT = [7, 7]
WIDTH = 512
# A pass costs a number of seconds per position.
COST = PassCost(0.0, 0.0)


class CountedSlots:
    """Executes plans without a device: each row commits one token per iteration, from left to right."""

    def __init__(
        self,
        seconds: float,
        per_position: float = 0.0,
        hidden: int = 0,
        chunk: int | None = None,
        ends: Mapping[int, int] | None = None,
    ) -> None:
        """Create the slots.

        Args:
          seconds: simulated duration of an iteration.
          per_position: simulated seconds that each position of a bucket adds.
          hidden: number of first iterations of a row that commit nothing visible. A row with such iterations has a
            mask in its prompt, which is filled in the last of them.
          chunk: number of tokens in a prompt chunk; None if prompts need not be read.
          ends: by seed, the number of tokens after which a row ends at a stop token, which no scheduler knows before.
        """
        self.now = 100.0
        self._hidden, self._chunk, self._ends = hidden, chunk, ends or {}
        self._read: dict[int, int] = {}
        self.order: list[RowRequest] = []
        self.plans: list[PoolPlan] = []
        self._seconds, self._per_position = seconds, per_position
        # The request and the number of tokens of each row, and the slots of each open bucket.
        self._made: dict[int, tuple[RowRequest, int]] = {}
        self._slots: dict[int, dict[int, list[int | None]]] = {}

    def rows(self, pool: int = 0) -> dict[int, int]:
        """Numbers of the rows in occupied slots, bucket by bucket."""
        slots = [row for bucket in self._slots.get(pool, {}).values() for row in bucket]
        return {slot: row for slot, row in enumerate(slots) if row is not None}

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Execute a plan as real slots would, after converting it to JSON and back."""
        plan = StepPlan.from_json(json.loads(json.dumps(plan.to_json())))
        scores = None if plan.score is None else [np.full(len(row), -1.0, np.float32) for row in plan.score.rows]
        return StepOutcome([self._execute(pool) for pool in plan.pools], scores)

    def _execute(self, plan: PoolPlan) -> PoolOutcome:
        self.plans.append(plan)
        for one in plan.insert:
            self._made[one.row] = one.request, 0
            self.order.append(one.request)
        held = [row for bucket in plan.buckets for row in bucket.slots if row is not None]
        assert len(set(held)) == len(held), "a row has one slot"
        results, canvases, runs = [self._result(row) for row in plan.finish], {}, []
        unread: list[int] = []
        for bucket in plan.buckets:
            rows = [row for row in bucket.slots if row is not None]
            assert rows, "a bucket without rows is closed"
            assert all(self._made[row][0].length <= bucket.width for row in rows)
            unread += self._prefill(rows, bucket.chunks) if bucket.iterations else []
            rows = [row for row in rows if row not in unread]
            left = [self._end(self._made[row][0]) - self._made[row][1] for row in rows]
            last = min(bucket.until_ended or len(left), len(left))
            most = sorted(left)[last - 1] if left else 0
            ran = min(bucket.iterations, most)
            seconds = ran * (self._seconds + self._per_position * bucket.rows * bucket.width)
            self.now += seconds
            if bucket.iterations:
                runs.append(BucketRun(bucket.number, ran, ran, seconds))
            for row in rows:
                request, made = self._made[row]
                new = self._end(request)
                self._made[row] = request, (made := min(new, made + ran))
                if made == new:
                    results.append(self._result(row))
                elif bucket.canvases:
                    positions = np.arange(request.length) - len(request.tokens)
                    canvas = np.where(positions < made - self._hidden, request.seed, -1).astype(np.int32)
                    canvas[0] = request.seed if made >= self._hidden else -1
                    canvases[row] = canvas
        self._slots[plan.pool] = {
            bucket.number: [row if row in self._made else None for row in bucket.slots] for bucket in plan.buckets
        }
        return PoolOutcome(plan.pool, results, canvases, runs, unread)

    def _end(self, request: RowRequest) -> int:
        return min(request.config.max_new_tokens, self._ends.get(request.seed, request.config.max_new_tokens))

    def _prefill(self, rows: Sequence[int], chunks: int | None) -> list[int]:
        """Read chunks of the oldest prompt that is not read to its end; the rows whose prompts are not after that."""
        if self._chunk is None:
            return []
        prompts = {row: len(self._made[row][0].tokens) for row in rows}
        unread = [row for row in rows if self._read.get(row, 0) < prompts[row]]
        if unread:
            first = min(unread)
            self._read[first] = prompts[first] if chunks is None else self._read.get(first, 0) + chunks * self._chunk
        return [row for row in unread if self._read.get(row, 0) < prompts[row]]

    def _result(self, row: int) -> RowResult:
        request, made = self._made.pop(row)
        positions = np.arange(request.length) - len(request.tokens)
        steps = np.where(positions < made, np.maximum(positions, -1), -1).astype(np.int32)
        return RowResult(row, np.full(request.length, request.seed, np.int32), steps, None)


def rows(*tokens: int, seed: int = 0) -> list[RowRequest]:
    """Create rows with these numbers of new tokens."""
    return [RowRequest(PROMPT, SamplingConfig(max_new_tokens=new), seed) for new in tokens]


def step(scheduler: Scheduler, slots: CountedSlots) -> list[Event]:
    plan = scheduler.schedule(slots.now)
    return scheduler.update(slots.execute(plan), slots.now)


def drain(scheduler: Scheduler, slots: CountedSlots, most: int = 1000) -> list[Event]:
    events: list[Event] = []
    while scheduler.waiting or scheduler.running:
        events += step(scheduler, slots)
        most -= 1
        assert most, "it does not end"
    return events


def finished(events: Sequence[Event]) -> list[RequestHandle]:
    return [event.handle for event in events if isinstance(event, RequestFinished)]


def one_bucket(slots: int) -> Grid:
    """A grid with a single bucket that has all slots."""
    return Grid(slots, WIDTH, (Bucket(slots, WIDTH),), COST)


def single(slots: int, **policy: object) -> Scheduler:
    return Scheduler([PoolLimits(one_bucket(slots))], SchedulerPolicy(**policy))  # type: ignore[arg-type]
