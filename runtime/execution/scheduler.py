"""Continuous batching: rows of requests get slots, move between buckets, and give their slots back.

:meth:`Scheduler.schedule` returns a plan, the devices execute it, and :meth:`Scheduler.update` takes the outcome. Its
policy is in :mod:`runtime.execution.policy`. The scheduler has no threads, clock or devices of its own. Its
decisions do not change the tokens of a row: each row yields the same tokens as in a batch of one, see
:mod:`runtime.execution.slots`.

Rows that are all known in advance are divided into classes (:mod:`runtime.execution.selection`), each with its own
bucket. They get slots class by class, as many at a time as the bucket of the class holds.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

import numpy as np

from runtime.execution.assignment import Choice, Need, OpenBucket, assign
from runtime.execution.buckets import Bucket, pack
from runtime.execution.fair_queue import FairQueue
from runtime.execution.policy import BucketStatus, SchedulerPolicy
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
)
from runtime.execution.result import committed_tokens
from runtime.execution.row_request import RowResult, final_tokens
from runtime.execution.scheduler_stats import SchedulerStats
from runtime.execution.step_plan import BucketPlan, Insertion, PoolOutcome, PoolPlan, StepOutcome, StepPlan

# When a growing row moves, its new bucket has room for this many more positions than it needs next.
_ROOM_TO_GROW = 64
# Offline, iterations end when one row in this many has ended, so that in large batches several waiting rows start
# together. That takes about as long as starting one: the arrays of all rows pass through the host, and every ``data``
# shard reads a prompt at the same time.
_ROWS_PER_END = 16


class Scheduler:
    """Assigns the rows of requests to slots. Not thread-safe, but any thread may read ``waiting`` and ``running``.

    Attributes:
      policy: how long steps run; may be replaced between steps.
      stats: statistics so far.
      waiting: number of waiting rows and score passes.
    """

    def __init__(
        self, pools: Sequence[PoolLimits], policy: SchedulerPolicy | None = None, stats: SchedulerStats | None = None
    ) -> None:
        """Create a scheduler whose slots are all free.

        Args:
          pools: the pools and their limits.
          policy: how long steps run.
          stats: statistics to continue, if several schedulers follow one another.
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
        """Number of rows that got a slot and have no result yet, including aborted rows that are not evicted yet."""
        return len(self._rows)

    @property
    def occupied(self) -> int:
        """Number of occupied slots. Rows whose slots are free, but whose results are on their way, do not count."""
        return sum(len(pool.rows) for pool in self._pools)

    @property
    def usage(self) -> float:
        """Fraction of all slots that are occupied, from 0 to 1."""
        return self.occupied / sum(pool.limits.grid.slots for pool in self._pools)

    @property
    def unfinished(self) -> list[RequestHandle]:
        """Requests that are neither finished nor aborted."""
        return list(self._requests)

    # ---- programs ---------------------------------------------------------------------------------------------

    def restrict(self, pool: int, buckets: Collection[Bucket]) -> None:
        """Limit a pool to these buckets. They must include the pool's first bucket, in which every row fits."""
        self._pools[pool].available = set(buckets)

    def demand(self, pool: int) -> Counter[Bucket]:
        """Return how often each bucket that :meth:`restrict` excludes would have been used."""
        return self._pools[pool].demand

    # ---- requests ---------------------------------------------------------------------------------------------

    def add(self, handle: RequestHandle) -> None:
        """Queue the rows and score passes of a request."""
        pool = self._pools[handle.pool]
        for index, request in enumerate(handle.rows):
            row = ScheduledRow(handle, index)
            pool.queue.push(handle.owner, row, self.policy.rank(row, pool.estimate_alone(request)))
        for index in range(len(handle.score_passes)):
            self._score_queue.push(handle.owner, ScheduledRow(handle, index))
        self.waiting += handle.remaining
        self._requests.add(handle)

    def awaits(self, owner: Hashable) -> bool:
        """Return whether rows or score passes of an owner are waiting."""
        return any(owner in queue for queue in (*(pool.queue for pool in self._pools), self._score_queue))

    def abort(self, handle: RequestHandle) -> bool:
        """Abort a request. At the next step, its waiting rows leave the queue, and its rows in slots are evicted.

        Returns:
          False if the request was already finished or aborted.
        """
        if handle not in self._requests:
            return False
        handle.closed = self._aborted = True
        self._requests.remove(handle)
        return True

    def expire(self, now: float) -> list[RequestHandle]:
        """Abort the requests whose deadline has passed, and return them."""
        expired = [handle for handle in self._requests if handle.deadline <= now]
        for handle in expired:
            self.abort(handle)
        return expired

    # ---- a step -----------------------------------------------------------------------------------------------

    def schedule(self, now: float, admit: bool = True) -> StepPlan:
        """Decide what the next step does. Pass its outcome to :meth:`update` before scheduling another step.

        Args:
          now: the current time.
          admit: whether waiting rows may get slots, and waiting score passes may run.

        Returns:
          The plan, which is empty if there is nothing to do.
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
        iterations = self.policy.iterations(
            {
                (number, one.number): self._status(pool, one)
                for number, pool in enumerate(self._pools)
                for one in pool.buckets
            }
        )
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
        """Free the slots of aborted rows and of rows ended by their stop tests, and return the latter."""
        aborted = {row for row in pool.rows if self._rows[row].handle.closed}
        for number in aborted:
            self._count_passes(self._rows.pop(number))
        # Rows ended by a stop test remain known until their results arrive.
        ended = [row for row in pool.rows if row not in aborted and self._rows[row].counted is not None]
        if aborted or ended:
            pool.buckets = [one.without({*aborted, *ended}) for one in pool.buckets]
        return ended

    def _admit(self, pool: PoolState, now: float) -> list[Insertion]:
        """Take as many waiting rows from the queue as there are free slots."""
        insertions = []
        slots = pool.limits.grid.slots
        for _ in range(min(slots, self.policy.most_rows or slots) - len(pool.rows)):
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
        """Assign all rows of a pool to slots."""
        limits = pool.limits
        needs = {row: self._need(self._rows[row], limits) for row in (*pool.rows, *new)}
        usable = [bucket for bucket in limits.grid.buckets if bucket in pool.available]
        choice = Choice(usable, limits.grid.cost, limits.most_positions, limits.data, self.policy.move_gain)
        places = {row: (one.number, slot) for one in pool.buckets for slot, row in enumerate(one.slots)}
        pool.buckets = assign(pool.buckets, needs, choice, pool.numbers)
        if len(usable) < len(limits.grid.buckets):
            for bucket, _ in pack(sorted((need.wanted for need in needs.values()), reverse=True), *_all(pool)):
                if bucket not in pool.available:
                    pool.demand[bucket] += 1
        # A new bucket starts with the device time of the bucket that has received least.
        least = min((time for other in self._pools for time in other.received.values()), default=0.0)
        pool.received = {one.number: pool.received.get(one.number, least) for one in pool.buckets}
        now = {row: (one.number, slot) for one in pool.buckets for slot, row in enumerate(one.slots)}
        self.stats.moves += sum(row is not None and row in now and now[row] != place for row, place in places.items())

    def _need(self, row: ScheduledRow, limits: PoolLimits) -> Need:
        length = row.request.canvas_length
        if not limits.grid.grows:
            return Need(length, length)
        # The prefill generates one token, and each iteration another one, or more with drafts.
        written = len(row.request.tokens) + 1 + row.iterations + row.accepted
        written += self.policy.max_iterations * limits.growth
        return Need(min(length, written), min(length, written + _ROOM_TO_GROW))

    def _status(self, pool: PoolState, bucket: OpenBucket) -> BucketStatus:
        """Describe an open bucket to the policy."""
        rows, policy = [self._rows[row] for row in bucket.rows], self.policy
        new = any(map(policy.awaits_first_token, rows))
        ended = self._until_ended(pool, bucket)
        # Rows whose prompts are being read take no part in iterations.
        ends = sorted(row.remaining for row in rows if not row.unread)
        until_end = ends[ended - 1] if 0 < ended <= len(ends) else policy.max_iterations
        return BucketStatus(pool.received[bucket.number], pool.estimate(bucket.bucket), new, until_end)

    def _until_ended(self, pool: PoolState, bucket: OpenBucket) -> int:
        """Return how many of a bucket's rows must end before its iterations do; 0 for all of them."""
        if len(bucket.rows) < 2:
            return 0
        if self.policy.step_seconds is not None:
            return 1
        # Offline, an end matters only if a waiting row takes the slot, or the other rows take a smaller bucket.
        matters = bool(pool.queue) or len(pool.available) > 1
        return math.ceil(len(bucket.rows) / _ROWS_PER_END) if matters else 0

    def _bucket_plans(self, number: int, iterations: Mapping[tuple[int, int], int]) -> list[BucketPlan]:
        plans, pool = [], self._pools[number]
        for one in pool.buckets:
            own, shape = iterations.get((number, one.number), 0), one.bucket
            wanted = own > 0 and self._canvases_wanted(one)
            slots, ended = list(one.slots), self._until_ended(pool, one)
            plans.append(BucketPlan(one.number, shape.rows, shape.width, slots, own, wanted, self.policy.chunks, ended))
        return plans

    def _canvases_wanted(self, bucket: OpenBucket) -> bool:
        rows = [self._rows[number] for number in bucket.rows]
        watched = self.policy.first_tokens
        return any(row.handle.stream or row.stop_test or (watched and row.first_token is None) for row in rows)

    # ---- the outcome of a step --------------------------------------------------------------------------------

    def update(self, outcome: StepOutcome, now: float) -> list[Event]:
        """Process the outcome of a step.

        Args:
          outcome: the outcome of the last plan from :meth:`schedule`.
          now: the current time.

        Returns:
          The events since the last call, including events of requests that are closed by now.
        """
        for pool in outcome.pools:
            self._update_pool(pool, now)
        rows = self._rows.values()
        self.stats.in_flight_iterations = sum(row.iterations for row in rows)
        self.stats.in_flight_positions = sum(row.positions for row in rows)
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
            stats.computed_positions += run.iterations * one.bucket.positions * pool.limits.canvases
            pool.ran(one, run, self.policy.step_seconds)
            for held in one.rows:
                row = self._rows[held]
                row.unread = held in outcome.unread
                own = 0 if row.unread else run.iterations
                row.iterations += own
                # A row that grows may be in a bucket that is narrower than its full length.
                length = min(row.request.length_with_suffix, one.bucket.width)
                row.positions += own * length * pool.limits.canvases
                row.accepted = outcome.accepted.get(held, 0)
        for number, canvas in outcome.canvases.items():
            row = self._rows[number]
            prompt = len(row.request.tokens)
            certain = final_tokens(canvas, prompt)
            self._note_prefix(row, len(certain), now)
            # While masks inside the prompt are open, there is no text to search; but the test may end the row anyway.
            filled = (canvas[:prompt] >= 0).all()
            row.run_stop_test(certain if filled else certain[:0], whole=False)
            if row.handle.stream:
                self._events.append(CanvasChanged(row.handle, row.index, canvas[prompt:]))
        for result in outcome.results:
            self._finish_row(pool, result, now)

    def _finish_row(self, pool: PoolState, result: RowResult, now: float) -> None:
        row = self._rows.pop(result.number)
        pool.buckets = [one.without({result.number}) for one in pool.buckets]
        config, prompt = row.request.config, len(row.request.tokens)
        row.run_stop_test(result.sequence[prompt:], whole=True)
        steps = len(np.unique(result.commit_steps[result.commit_steps >= 0]))
        tokens = committed_tokens(result.sequence, result.commit_steps, prompt, config.stop_token_ids, row.counted)
        self.stats.rows += 1
        self.stats.tokens += tokens
        passes, accepted = (steps, 0) if result.drafts is None else (result.drafts.passes, result.drafts.accepted)
        self.stats.accepted_steps += accepted
        if self.policy.step_seconds is None:
            # Offline, iterations may go on after the row's end. Those that committed a token were surely its own.
            row.iterations = max(0, passes - 1) if pool.limits.prompt_chunk else passes  # a prefill is no iteration
            row.positions = min(row.positions, row.iterations * self._positions(row))
        elif not pool.limits.prompt_chunk:
            steps = max(steps, row.iterations + accepted)  # a pass may commit nothing, or what was moved since
        self._count_passes(row)
        self._note_prefix(row, max(1, config.max_new_tokens), now)
        per_token = None
        if row.first_token is not None and tokens > 1:
            per_token = (now - row.first_token) / (tokens - 1)
        self._events.append(RowFinished(row.handle, row.index, result, tokens, steps, now - row.inserted, per_token))
        self._finish(row.handle, now)

    def _count_passes(self, row: ScheduledRow) -> None:
        """Add the iterations of a row that leaves to the statistics."""
        self.stats.busy_iterations += row.iterations
        self.stats.busy_positions += row.positions

    def _positions(self, row: ScheduledRow) -> int:
        """Return the positions of all canvases of a row."""
        return row.request.length_with_suffix * self._pools[row.handle.pool].limits.canvases

    def _note_prefix(self, row: ScheduledRow, prefix: int, now: float) -> None:
        """Record that ``prefix`` tokens precede the row's first open position, and report it if it grew."""
        if prefix <= row.prefix:
            return
        if row.first_token is None:
            row.first_token = now
            self._events.append(FirstToken(row.handle, row.index, now - row.handle.arrived))
        elif row.handle.stream:
            self._events.append(PrefixGrown(row.handle, row.index, now - row.last_growth))
        row.prefix, row.last_growth = prefix, now

    def _finish(self, handle: RequestHandle, now: float) -> None:
        """Count one row or score pass of a request as done."""
        handle.remaining -= 1
        if handle.remaining == 0 and not handle.closed:
            handle.closed = True
            self._requests.remove(handle)
            self._events.append(RequestFinished(handle, now - handle.arrived))


def _all(pool: PoolState) -> tuple[Sequence[Bucket], Callable[[Bucket], float]]:
    return pool.limits.grid.buckets, pool.limits.grid.cost
