"""Continuous batching: which waiting rows get slots, in which buckets rows are, and how long a step runs.

The policy:

* A waiting row gets a slot when one is free. Owners take turns; the rows of one owner come in the order in which they
  would end if each began when it came, so that a short one need not wait for a long one that came a little earlier.
* Rows are in the cheapest buckets whose programs are there; they move only where a pass becomes cheaper by a tenth.
* A step takes about ``step_seconds``. Buckets run in it in the order of the time that their rows have had, each row
  counting alike, and new rows first: a long canvas has as much of the devices as a short row, and not more.
* A bucket reads one chunk of a prompt in a step, so that a long prompt does not stall the rows beside it.
* A bucket runs as many iterations as its share of the step holds, but no more than until its first row is done, and
  one at a time while a row in it is new and has shown nothing.

The scheduler decides and the devices execute: :meth:`Scheduler.schedule` makes a plan, :meth:`Scheduler.update` takes
what came of it. It has no threads, no clock and no devices of its own. Whatever it decides, a row's tokens are those
that it has alone; see :mod:`runtime.execution.slots`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.execution.assignment import Choice, Need, OpenBucket, assign
from runtime.execution.buckets import Bucket, Grid, pack
from runtime.execution.fair_queue import FairQueue
from runtime.execution.pool_state import PoolLimits, PoolState
from runtime.execution.requests import (
    CanvasChanged,
    Event,
    FirstToken,
    PrefixGrown,
    RequestFinished,
    RequestHandle,
    RowFinished,
    RowInserted,
    RowsScored,
    ScheduledRow,
    iterations_of,
)
from runtime.execution.result import committed_tokens
from runtime.execution.row_request import RowResult, certain_tokens
from runtime.execution.step_plan import BucketPlan, Insertion, PoolOutcome, PoolPlan, StepOutcome, StepPlan

# Positions that a growing row gets beside those that it needs next.
_ROOM_TO_GROW = 64

# Iterations of a row after each of which it is looked at while nothing of it has been seen.
FIRST_LOOKS = 2


@dataclass(frozen=True)
class SchedulerPolicy:
    """How long a step runs, and what is looked at after it.

    Attributes:
      max_iterations: of a bucket in a step.
      step_seconds: that a step takes, about, by the iterations before; None runs ``max_iterations`` of all buckets.
      first_tokens: whether the first token of every row is watched for, streamed or not.
      chunks: of prompts that a bucket reads in a step, for each shard of ``data``; None for whole prompts.
    """

    max_iterations: int = 16
    step_seconds: float | None = 0.05
    first_tokens: bool = True
    chunks: int | None = 1


@dataclass
class SchedulerStats:
    """What rows have cost so far.

    Attributes:
      rows: rows that are done.
      tokens: tokens committed in them, without what follows the end of a row.
      forwards: forward passes, prefills included.
      slot_iterations: iterations of each bucket times its slots.
      busy_iterations: those in which a row that is done now committed a token.
      in_flight_iterations: those of rows that are still in their slots.
      computed_positions: iterations of each bucket times its positions.
      busy_positions: busy iterations of each row that is done times its length.
      in_flight_positions: the same of rows that are still in their slots.
      moves: rows that went from one slot to another.
    """

    rows: int = 0
    tokens: int = 0
    forwards: int = 0
    slot_iterations: int = 0
    busy_iterations: int = 0
    in_flight_iterations: int = 0
    computed_positions: int = 0
    busy_positions: int = 0
    in_flight_positions: int = 0
    moves: int = 0

    @property
    def utilisation(self) -> float:
        """Share of the slots' iterations that were put to use; 1 if there were none."""
        busy = self.busy_iterations + self.in_flight_iterations
        return busy / self.slot_iterations if self.slot_iterations else 1.0

    @property
    def useful_positions(self) -> int:
        """Positions of live rows, up to their own length, that iterations have computed."""
        return self.busy_positions + self.in_flight_positions

    @property
    def useful_share(self) -> float:
        """Share of the computed positions that were those of live rows up to their own length; 1 if there were none."""
        return self.useful_positions / self.computed_positions if self.computed_positions else 1.0


class Scheduler:
    """Requests on one side, slots on the other. Not thread-safe; ``waiting`` and ``running`` may be read anywhere.

    Attributes:
      policy: may be replaced between steps.
      stats: what the rows have cost so far.
      waiting: rows and score passes that wait.
    """

    def __init__(
        self, pools: Sequence[PoolLimits], policy: SchedulerPolicy | None = None, stats: SchedulerStats | None = None
    ) -> None:
        """Begin with free slots.

        Args:
          pools: what there is.
          policy: how long steps run.
          stats: where to count on, if several schedulers follow one another.
        """
        self.policy = policy or SchedulerPolicy()
        self.stats = stats or SchedulerStats()
        self.waiting = 0
        self._pools = [PoolState(limits, set(limits.grid.buckets)) for limits in pools]
        self._score_queue: FairQueue[ScheduledRow] = FairQueue()
        self._scoring: ScheduledRow | None = None
        self._requests: set[RequestHandle] = set()
        self._rows: dict[int, ScheduledRow] = {}
        self._row_numbers = itertools.count()
        self._aborted = False
        self._events: list[Event] = []

    @property
    def running(self) -> int:
        """Rows in slots, aborted ones included until their slots are free."""
        return len(self._rows)

    @property
    def usage(self) -> float:
        """Share of all slots that are taken, from 0 to 1."""
        return self.running / sum(pool.limits.grid.slots for pool in self._pools)

    @property
    def unfinished(self) -> list[RequestHandle]:
        """Requests that are neither finished nor aborted."""
        return list(self._requests)

    # ---- programs ---------------------------------------------------------------------------------------------

    def restrict(self, pool: int, buckets: Collection[Bucket]) -> None:
        """Use these buckets of a pool alone, the widest one with the fewest rows among them."""
        self._pools[pool].available = set(buckets)

    def demand(self, pool: int) -> Counter[Bucket]:
        """How often buckets that may not be used would have been."""
        return self._pools[pool].demand

    # ---- requests ---------------------------------------------------------------------------------------------

    def add(self, handle: RequestHandle) -> None:
        """Queue the rows and score passes of a request."""
        pool = self._pools[handle.pool]
        for index, request in enumerate(handle.rows):
            alone = Bucket(pool.limits.data, pool.limits.grid.width_for(request.length))
            # When it would end: one that comes later and takes less time may be done before.
            seconds = pool.estimate(alone) * iterations_of(request) if self.policy.step_seconds else 0.0
            pool.queue.push(handle.owner, ScheduledRow(handle, index), handle.arrived + seconds)
        for index in range(len(handle.score_passes)):
            self._score_queue.push(handle.owner, ScheduledRow(handle, index))
        self.waiting += handle.remaining
        self._requests.add(handle)

    def abort(self, handle: RequestHandle) -> bool:
        """Give a request up: rows that wait leave the queue, rows in slots are evicted, at the next step.

        Returns:
          Whether there was anything to give up: False if the request is finished, or was aborted before.
        """
        if handle not in self._requests:
            return False
        handle.closed = self._aborted = True
        self._requests.remove(handle)
        return True

    def expire(self, now: float) -> list[RequestHandle]:
        """Abort the requests whose deadline has come, and return them."""
        expired = [handle for handle in self._requests if handle.deadline <= now]
        for handle in expired:
            self.abort(handle)
        return expired

    # ---- a step -----------------------------------------------------------------------------------------------

    def schedule(self, now: float, admit: bool = True) -> StepPlan:
        """Decide what the next step does. Its outcome goes to :meth:`update` before the next one is scheduled.

        Args:
          now: the time.
          admit: whether waiting rows may get slots, and waiting passes may be scored.

        Returns:
          The plan, empty if there is nothing to do.
        """
        if self._aborted:
            self._aborted = False
            for queue in (*(pool.queue for pool in self._pools), self._score_queue):
                self.waiting -= len(queue.remove(lambda row: row.handle.closed))
        insertions, finish, changed = {}, {}, set()
        for number, pool in enumerate(self._pools):
            before = pool.held
            finish[number] = self._evict(pool)
            insertions[number] = self._admit(pool, now) if admit else []
            self._assign(pool, [one.row for one in insertions[number]])
            if before != pool.held:
                changed.add(number)
        iterations = self._share_step()
        plans = [
            PoolPlan(number, insertions[number], self._bucket_plans(number, iterations), finish[number])
            for number, pool in enumerate(self._pools)
            if number in changed or any((number, one.number) in iterations for one in pool.buckets)
        ]
        self._scoring = row = self._score_queue.pop() if admit else None
        if row is not None:
            self.waiting -= 1
        return StepPlan(plans, None if row is None else row.handle.score_passes[row.index])

    def _evict(self, pool: PoolState) -> list[int]:
        """Free the slots of aborted rows, and of those that their stop tests have ended, which are returned."""
        aborted = {row for row in pool.rows if self._rows[row].handle.closed}
        for row in aborted:
            del self._rows[row]
        # These are there until their results are.
        ended = [row for row in pool.rows if row not in aborted and self._rows[row].counted is not None]
        if aborted or ended:
            pool.buckets = [one.without({*aborted, *ended}) for one in pool.buckets]
        return ended

    def _admit(self, pool: PoolState, now: float) -> list[Insertion]:
        """Waiting rows that get a slot now."""
        insertions = []
        for _ in range(pool.limits.grid.slots - len(pool.rows)):
            row = pool.queue.pop()
            if row is None:
                break
            self.waiting -= 1
            number = next(self._row_numbers)
            row.inserted = now
            self._rows[number] = row
            insertions.append(Insertion(number, row.request))
            self._events.append(RowInserted(row.handle, row.index, now - row.handle.arrived))
        return insertions

    def _assign(self, pool: PoolState, new: Sequence[int]) -> None:
        """Give every row a slot."""
        limits = pool.limits
        needs = {row: self._need(self._rows[row], limits.grid) for row in (*pool.rows, *new)}
        usable = [bucket for bucket in limits.grid.buckets if bucket in pool.available]
        choice = Choice(usable, limits.grid.cost, limits.most_positions, limits.data)
        places = {row: (one.number, slot) for one in pool.buckets for slot, row in enumerate(one.slots)}
        pool.buckets = assign(pool.buckets, needs, choice, pool.numbers)
        if len(usable) < len(limits.grid.buckets):
            for bucket, _ in pack(sorted((need.wanted for need in needs.values()), reverse=True), *_all(pool)):
                if bucket not in pool.available:
                    pool.demand[bucket] += 1
        # What is new has had as much as the one that has had least.
        least = min((time for other in self._pools for time in other.had.values()), default=0.0)
        pool.had = {one.number: pool.had.get(one.number, least) for one in pool.buckets}
        now = {row: (one.number, slot) for one in pool.buckets for slot, row in enumerate(one.slots)}
        self.stats.moves += sum(row is not None and row in now and now[row] != place for row, place in places.items())

    def _need(self, row: ScheduledRow, grid: Grid) -> Need:
        length = row.request.length
        if not grid.grows:
            return Need(length, length)
        # One token comes with the prompt, one with each iteration.
        written = len(row.request.tokens) + 1 + row.iterations + self.policy.max_iterations
        return Need(min(length, written), min(length, written + _ROOM_TO_GROW))

    def _share_step(self) -> dict[tuple[int, int], int]:
        """Iterations of this step, by pool and bucket."""
        policy, found = self.policy, {}
        waiting = [
            (not self._is_news(one), pool.had[one.number], number, one)
            for number, pool in enumerate(self._pools)
            for one in pool.buckets
        ]
        left = policy.step_seconds or 0.0
        for place, (_, _, number, one) in enumerate(sorted(waiting, key=lambda entry: entry[:3])):
            pool = self._pools[number]
            seconds = pool.estimate(one.bucket)
            if policy.step_seconds is None:
                # Where rows wait, no slot stands empty until others are done.
                until = self._until_news(one) if pool.queue else policy.max_iterations
                found[number, one.number] = min(policy.max_iterations, until)
                continue
            if found and (seconds > left or not seconds):
                break
            share = left / (len(waiting) - place)
            iterations = min(policy.max_iterations, int(share / seconds)) if seconds else 1
            found[number, one.number] = iterations = max(1, min(iterations, self._until_news(one)))
            left -= iterations * seconds
        return found

    def _until_news(self, bucket: OpenBucket) -> int:
        """Iterations until a row is looked at for the first time, or is done while others go on."""
        if self._is_news(bucket):
            return 1
        rows = [self._rows[row] for row in bucket.rows]
        return min(row.remaining for row in rows) if len(rows) > 1 else self.policy.max_iterations

    def _is_news(self, bucket: OpenBucket) -> bool:
        """Whether somebody waits to see a row after one of its first iterations."""
        rows = (self._rows[row] for row in bucket.rows)
        return any(
            not row.prefix and row.iterations < FIRST_LOOKS and (row.handle.stream or self.policy.first_tokens)
            for row in rows
            if not row.unread
        )

    def _bucket_plans(self, number: int, iterations: Mapping[tuple[int, int], int]) -> list[BucketPlan]:
        plans = []
        for one in self._pools[number].buckets:
            own, shape = iterations.get((number, one.number), 0), one.bucket
            wanted = own > 0 and self._canvases_wanted(one)
            slots = list(one.slots)
            plans.append(BucketPlan(one.number, shape.rows, shape.width, slots, own, wanted, self.policy.chunks))
        return plans

    def _canvases_wanted(self, bucket: OpenBucket) -> bool:
        rows = [self._rows[number] for number in bucket.rows]
        watched = self.policy.first_tokens
        return any(row.handle.stream or row.stop_test or (watched and row.first_token is None) for row in rows)

    # ---- its outcome ------------------------------------------------------------------------------------------

    def update(self, outcome: StepOutcome, now: float) -> list[Event]:
        """Take what came of the plan.

        Args:
          outcome: of the plan that :meth:`schedule` made last.
          now: the time.

        Returns:
          What has happened to requests since the last call, those that are closed included.
        """
        for pool in outcome.pools:
            self._update_pool(pool, now)
        self.stats.in_flight_iterations = sum(row.iterations for row in self._rows.values())
        self.stats.in_flight_positions = sum(row.iterations * row.request.length for row in self._rows.values())
        if outcome.scores is not None and self._scoring is not None:
            handle, index = self._scoring.handle, self._scoring.index
            self.stats.forwards += 1
            first = sum(len(one.rows) for one in handle.score_passes[:index])
            self._events.append(RowsScored(handle, first, outcome.scores))
            self._finish(handle, now)
        events, self._events = self._events, []
        return events

    def _update_pool(self, outcome: PoolOutcome, now: float) -> None:
        pool, stats = self._pools[outcome.pool], self.stats
        buckets = {one.number: one for one in pool.buckets}
        for run in outcome.runs:
            one = buckets[run.number]
            stats.forwards += run.forwards
            stats.slot_iterations += run.iterations * one.bucket.rows
            stats.computed_positions += run.iterations * one.bucket.positions
            # A run without an iteration says nothing of how long one takes.
            if run.iterations:
                pool.measured(one.bucket, run.seconds / run.iterations)
                pool.had[one.number] += run.seconds / len(one.rows)
            pool.had[one.number] += run.prefill_seconds / len(one.rows)
            for held in one.rows:
                row = self._rows[held]
                row.unread = held in outcome.unread
                row.iterations += 0 if row.unread else run.iterations
        for number, canvas in outcome.canvases.items():
            row = self._rows[number]
            prompt = len(row.request.tokens)
            certain = certain_tokens(canvas, prompt)
            self._note_prefix(row, len(certain), now)
            if (canvas[:prompt] >= 0).all():  # else masks of the prompt are still to be filled
                row.look(certain, whole=False)
            if row.handle.stream:
                self._events.append(CanvasChanged(row.handle, row.index, canvas[prompt:]))
        for result in outcome.results:
            self._finish_row(pool, result, now)

    def _finish_row(self, pool: PoolState, result: RowResult, now: float) -> None:
        row = self._rows.pop(result.number)
        pool.buckets = [one.without({result.number}) for one in pool.buckets]
        config, prompt = row.request.config, len(row.request.tokens)
        row.look(result.sequence[prompt:], whole=True)
        steps = len(np.unique(result.commit_steps[result.commit_steps >= 0]))
        tokens = committed_tokens(result.sequence, result.commit_steps, prompt, config.stop_token_ids, row.counted)
        self.stats.rows += 1
        self.stats.tokens += tokens
        self.stats.busy_iterations += steps
        self.stats.busy_positions += steps * row.request.length
        self._note_prefix(row, max(1, config.max_new_tokens), now)
        per_token = None
        if row.first_token is not None and tokens > 1:
            per_token = (now - row.first_token) / (tokens - 1)
        self._events.append(RowFinished(row.handle, row.index, result, tokens, steps, now - row.inserted, per_token))
        self._finish(row.handle, now)

    def _note_prefix(self, row: ScheduledRow, prefix: int, now: float) -> None:
        """Note that so many tokens stand before the row's first open position."""
        if prefix <= row.prefix:
            return
        if row.first_token is None:
            row.first_token = now
            self._events.append(FirstToken(row.handle, row.index, now - row.handle.arrived))
        elif row.handle.stream:
            self._events.append(PrefixGrown(row.handle, row.index, now - row.last_growth))
        row.prefix, row.last_growth = prefix, now

    def _finish(self, handle: RequestHandle, now: float) -> None:
        """Count one row or pass of a request as done."""
        handle.remaining -= 1
        if handle.remaining == 0 and not handle.closed:
            handle.closed = True
            self._requests.remove(handle)
            self._events.append(RequestFinished(handle, now - handle.arrived))


def _all(pool: PoolState) -> tuple[Sequence[Bucket], Callable[[Bucket], float]]:
    return pool.limits.grid.buckets, pool.limits.grid.cost
