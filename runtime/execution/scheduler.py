"""Continuous batching: which waiting row is inserted into which slot, which rows are evicted, how long a step runs.

The scheduler decides and the devices execute: :meth:`Scheduler.schedule` makes a plan, :meth:`Scheduler.update` takes
what came of it. It has no threads, no clock and no devices of its own. Whatever it decides, a row's tokens are those
that it has alone; see :mod:`runtime.execution.slots`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.execution.fair_queue import FairQueue
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
from runtime.execution.row_request import RowResult
from runtime.execution.step_plan import Insertion, PoolOutcome, PoolPlan, StepOutcome, StepPlan

# Iterations of a row after each of which it is looked at while nothing of it has been seen.
FIRST_LOOKS = 2


@dataclass(frozen=True)
class SchedulerPolicy:
    """How long a step runs, and what is looked at after it.

    Attributes:
      max_iterations: of a step; a row that nobody has seen anything of is looked at after each of its first
        :data:`FIRST_LOOKS`.
      step_seconds: that a step takes, about, by the iterations of the step before; None runs ``max_iterations``.
      first_tokens: whether the first token of every row is watched for, streamed or not.
    """

    max_iterations: int = 16
    step_seconds: float | None = 0.03
    first_tokens: bool = True


@dataclass(frozen=True)
class PoolLimits:
    """What the scheduler has to know of a pool.

    Attributes:
      slots: how many there are.
      prefill_limit: rows that may be inserted in a step; None for as many as there are free slots.
    """

    slots: int
    prefill_limit: int | None = None


@dataclass
class SchedulerStats:
    """What rows have cost so far.

    Attributes:
      rows: rows that are done.
      tokens: tokens committed in them, without what follows the end of a row.
      forwards: forward passes, prefills included.
      slot_iterations: iterations of each pool times its slots.
      busy_iterations: those in which a row that is done now committed a token.
      in_flight_iterations: those of rows that are still in their slots.
    """

    rows: int = 0
    tokens: int = 0
    forwards: int = 0
    slot_iterations: int = 0
    busy_iterations: int = 0
    in_flight_iterations: int = 0

    @property
    def utilisation(self) -> float:
        """Share of the slots' iterations that were put to use; 1 if there were none."""
        busy = self.busy_iterations + self.in_flight_iterations
        return busy / self.slot_iterations if self.slot_iterations else 1.0


@dataclass
class _PoolState:
    """Rows of one pool.

    Attributes:
      limits: of the pool.
      queue: rows that wait for a slot.
      slots: number of the row in each slot that is taken.
      seconds: that an iteration took last, 0 if there was none.
    """

    limits: PoolLimits
    queue: FairQueue[ScheduledRow] = field(default_factory=FairQueue)
    slots: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0


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
        self._pools = [_PoolState(limits) for limits in pools]
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
        return self.running / sum(pool.limits.slots for pool in self._pools)

    @property
    def unfinished(self) -> list[RequestHandle]:
        """Requests that are neither finished nor aborted."""
        return list(self._requests)

    # ---- requests ---------------------------------------------------------------------------------------------

    def add(self, handle: RequestHandle) -> None:
        """Queue the rows and score passes of a request."""
        for index in range(len(handle.rows)):
            self._pools[handle.pool].queue.push(handle.owner, ScheduledRow(handle, index))
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
        plans = [self._plan_pool(number, now, admit) for number in range(len(self._pools))]
        self._scoring = row = self._score_queue.pop() if admit else None
        if row is not None:
            self.waiting -= 1
        score = None if row is None else row.handle.score_passes[row.index]
        return StepPlan([plan for plan in plans if plan is not None], score)

    def _plan_pool(self, number: int, now: float, admit: bool) -> PoolPlan | None:
        pool = self._pools[number]
        aborted = [slot for slot, row in pool.slots.items() if self._rows[row].handle.closed]
        for slot in aborted:
            del self._rows[pool.slots.pop(slot)]
        # Rows whose stop test has ended them are there until their results are.
        finish = [slot for slot, row in pool.slots.items() if self._rows[row].counted is not None]
        for slot in finish:
            del pool.slots[slot]
        insertions = self._insert(pool, now) if admit else []
        inserted = {one.slot for one in insertions}
        evict = [slot for slot in aborted if slot not in inserted]
        if not (pool.slots or evict or finish):
            return None
        canvases = self._canvases_wanted(pool)
        return PoolPlan(number, evict, insertions, self._iterations(pool, canvases), canvases, finish)

    def _insert(self, pool: _PoolState, now: float) -> list[Insertion]:
        """Give free slots to waiting rows."""
        free = [slot for slot in range(pool.limits.slots) if slot not in pool.slots]
        insertions = []
        for slot in free[: pool.limits.prefill_limit]:
            row = pool.queue.pop()
            if row is None:
                break
            self.waiting -= 1
            number = next(self._row_numbers)
            row.inserted = now
            self._rows[number], pool.slots[slot] = row, number
            insertions.append(Insertion(slot, number, row.request))
            self._events.append(RowInserted(row.handle, row.index, now - row.handle.arrived))
        return insertions

    def _iterations(self, pool: _PoolState, canvases: bool) -> int:
        policy = self.policy
        if policy.step_seconds is None:
            return policy.max_iterations
        rows = [self._rows[number] for number in pool.slots.values()]
        if not pool.seconds or (canvases and any(not row.prefix and row.iterations < FIRST_LOOKS for row in rows)):
            return 1
        return max(1, min(policy.max_iterations, int(policy.step_seconds / pool.seconds)))

    def _canvases_wanted(self, pool: _PoolState) -> bool:
        rows = [self._rows[number] for number in pool.slots.values()]
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
        if outcome.scores is not None and self._scoring is not None:
            handle, index = self._scoring.handle, self._scoring.index
            self.stats.forwards += 1
            first = sum(len(one.rows) for one in handle.score_passes[:index])
            self._events.append(RowsScored(handle, first, outcome.scores))
            self._finish(handle, now)
        events, self._events = self._events, []
        return events

    def _update_pool(self, outcome: PoolOutcome, now: float) -> None:
        pool = self._pools[outcome.pool]
        self.stats.forwards += outcome.forwards
        self.stats.slot_iterations += outcome.iterations * pool.limits.slots
        if outcome.iterations:
            pool.seconds = outcome.seconds / outcome.iterations
        for number in pool.slots.values():
            self._rows[number].iterations += outcome.iterations
        for number, canvas in outcome.canvases.items():
            row = self._rows[number]
            prompt = len(row.request.tokens)
            new = canvas[prompt:]
            prefix = int(np.argmax(np.append(new, -1) < 0))
            self._note_prefix(row, prefix, now)
            if (canvas[:prompt] >= 0).all():  # else masks of the prompt are still to be filled
                row.look(new[:prefix], whole=False)
            if row.handle.stream:
                self._events.append(CanvasChanged(row.handle, row.index, new))
        for result in outcome.results:
            self._finish_row(pool, result, now)

    def _finish_row(self, pool: _PoolState, result: RowResult, now: float) -> None:
        row = self._rows.pop(result.number)
        pool.slots = {slot: number for slot, number in pool.slots.items() if number != result.number}
        config, prompt = row.request.config, len(row.request.tokens)
        row.look(result.sequence[prompt:], whole=True)
        steps = len(np.unique(result.commit_steps[result.commit_steps >= 0]))
        tokens = committed_tokens(result.sequence, result.commit_steps, prompt, config.stop_token_ids, row.counted)
        self.stats.rows += 1
        self.stats.tokens += tokens
        self.stats.busy_iterations += steps
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
