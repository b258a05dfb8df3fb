"""Generation of rows that are all known in advance, with continuous batching over a fixed number of slots.

Rows that can share programs form a group with its own buckets. When a row is done, the next waiting row takes its slot.
Decisions depend only on the requests and on the programs that are compiled, so every host makes the same decisions;
with a :class:`Pace`, they depend on a clock as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.execution.buckets import Bucket, Grid, all_buckets
from runtime.execution.policy import SchedulerPolicy
from runtime.execution.pool import Pool
from runtime.execution.pool_shape import pass_cost, runner_for, slot_count, steps_per_block, uses_cache
from runtime.execution.requests import RequestHandle, RowFinished, StopTest, iterations_of, may_end_early
from runtime.execution.row_feed import RowFeed
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.runner import Runner
from runtime.execution.scheduler import Scheduler
from runtime.execution.scheduler_stats import SchedulerStats
from runtime.execution.selection import RowClass, Work, divide
from runtime.execution.slot_kinds import longest_span, open_slots_for
from runtime.execution.slots import Slots
from runtime.execution.specialization import program_key, with_own_drafts
from runtime.execution.step_plan import StepOutcome

# Default number of slots per ``data`` shard: enough to fill a device, and few enough that slots do not stay empty
# for long at the end, when no rows wait.
DEFAULT_SLOTS = 32

# A step runs a fraction of the iterations of a row, so that slots of finished rows do not stay empty for long.
_STEPS_PER_ROW = 16
_MAX_ITERATIONS = 16

# Rows without a cache move if a pass becomes cheaper by this fraction. Their arrays are few and small, and every step
# runs all rows, so a move pays for itself within a step.
_MOVE_GAIN = 0.03

# With a pace, a step has at most this many times the iterations of the one before it.
_GROWTH = 4


@dataclass(frozen=True)
class _Group:
    """Requests that share slots.

    Attributes:
      grid: the buckets that the rows may be in.
      classes: the rows, by the numbers of their requests, and how many of them run at a time.
      known: buckets whose programs have been compiled.
      steps: maximum number of denoise steps per block of any row.
      span: see :func:`runtime.execution.slot_kinds.longest_span`.
    """

    grid: Grid
    classes: list[RowClass]
    known: set[Bucket]
    steps: int
    span: int

    @property
    def fits_one_bucket(self) -> bool:
        """Whether the rows fit into one bucket. Then no row is inserted or moved."""
        return len(self.grid.buckets) == 1 and sum(len(one.rows) for one in self.classes) <= self.grid.slots

    @property
    def first(self) -> int:
        """Number of a request of the group."""
        return self.classes[0].rows[0]


class Pace:
    """Chooses the number of iterations of each step by time, so that the caller sees the rows in regular intervals.

    The choice depends on this host's clock, so it is for a single host.
    """

    def __init__(self, seconds: float) -> None:
        """Aim at steps of this many seconds; a step has at least one iteration."""
        self._seconds = seconds
        self.iterations = 1

    def ran(self, iterations: int, seconds: float) -> None:
        """Take note of a step, and choose :attr:`iterations` of the next one."""
        if iterations:
            fitting = int(self._seconds * iterations / max(seconds, 1e-9))
            # One fast step is no reason to expect a very long one to be fast. The first one also compiles.
            self.iterations = max(1, min(fitting, _GROWTH * self.iterations))


class OfflineScheduler:
    """Generates rows that are all known in advance, in groups of rows that can share programs.

    Attributes:
      stats: statistics of the rows so far.
    """

    def __init__(
        self,
        runner: Runner,
        requests: Sequence[RowRequest],
        slots: int | None = None,
        width: int | None = None,
        stop_tests: Sequence[StopTest | None] = (),
    ) -> None:
        """Sort requests into groups.

        Args:
          runner: the model on its mesh.
          requests: all rows, already checked. Include rows that :meth:`run` will skip, because the number of slots
            depends on all of them.
          slots: rows on the devices at a time, rounded down to a multiple of the data axis and limited by memory. The
            default is :data:`DEFAULT_SLOTS` per ``data`` shard.
          width: width of the widest bucket, for one call among others: narrower buckets then have widths that other
            calls use too, and so share programs. By default, all widths follow the lengths of these rows.
          stop_tests: one per request, see :data:`runtime.execution.requests.StopTest`; empty for none.
        """
        requests = _with_own_drafts(runner, requests, slots)
        self._runner, self._requests = runner, requests
        self._stop_tests = stop_tests or [None] * len(requests)
        self.stats = SchedulerStats()
        self._work = _work_of(requests)
        widest = width or runner.bucket(max((one.length for one in self._work), default=1))
        keys = {id(config): program_key(runner, config, widest) for config in _configs(requests)}
        groups: dict[Hashable, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(keys[id(request.config)], []).append(number)
        found = [self._group(numbers, slots, width) for numbers in groups.values()]
        # Wide canvases first, so that a lack of memory shows at once.
        self._groups = sorted(found, key=lambda group: -group.grid.canvas)

    def _group(self, numbers: list[int], slots: int | None, width: int | None) -> _Group:
        requests, runner = [self._requests[number] for number in numbers], self._runner
        config = requests[0].config
        data = runner_for(runner, config).row_unit
        work = [self._work[number] for number in numbers]
        canvas = width or runner.bucket(max(one.length for one in work))
        most = min(math.ceil(len(numbers) / data) * data, DEFAULT_SLOTS * data if slots is None else slots)
        # If all rows have the same length and a slot each, one bucket is enough.
        several = len({one.length for one in work}) > 1 or len(numbers) > most
        configs = _configs(requests)
        # Groups with these values in common have programs that differ only in the bucket's shape.
        steps = max(steps_per_block(own, canvas) for own in configs)
        span = longest_span(runner, requests)
        known = runner.buckets.setdefault((program_key(runner, config, canvas), steps, span), set())
        # The last rows move to smaller buckets, unless all rows end at the same time.
        tests = any(self._stop_tests[number] for number in numbers)
        apart = several or tests or len(set(work)) > 1 or any(map(may_end_early, configs))
        count = slot_count(runner, config, canvas, most, moves=several or (apart and len(known) > 0))
        top, cost = Bucket(count, canvas), pass_cost(runner, config)

        def compiling(bucket: Bucket) -> float:
            # The bucket of all rows of a call is preferred to known smaller ones that would only save its compilation.
            free = bucket in known or (width is not None and bucket == top)
            return 0.0 if free else runner.compile_positions()

        candidates = all_buckets(count, canvas, data=data, step=runner.width_step(known=width is None))
        classes = divide(work, candidates if several else [top], cost, compiling)
        chosen = [one.bucket for one in classes]
        if apart:
            chosen += [bucket for bucket in candidates if bucket in known and bucket not in chosen]
        # The scheduler requires that a bucket with all slots comes first.
        buckets = chosen if chosen[0] == top else [top, *(bucket for bucket in chosen if bucket != top)]
        grid = Grid(count, canvas, tuple(buckets), cost)
        own = [RowClass(one.bucket, [numbers[index] for index in one.rows]) for one in classes]
        return _Group(grid, own, known, steps, span)

    def _open(self, group: _Group) -> Pool:
        config = self._requests[group.first].config
        runner = runner_for(self._runner, config)

        def make(bucket: Bucket) -> Slots:
            slots = open_slots_for(runner, config, bucket.width, bucket.rows, group.steps, group.span)
            group.known.add(bucket)
            return slots

        return Pool(config, group.grid, group.steps, make, runner.row_unit, runner.prompt_chunk)

    @property
    def fits_one_bucket(self) -> bool:
        """Whether each group's rows fit into one bucket. Then no row is inserted or moved during the run."""
        return all(group.fits_one_bucket for group in self._groups)

    def run(
        self,
        skip: Collection[int] = (),
        more: Callable[[], bool] = lambda: True,
        iterations: int | Pace | None = None,
    ) -> Iterator[list[RowResult]]:
        """Generate all rows.

        Args:
          skip: numbers of requests to leave out.
          more: called before each step. Once it returns False, no more rows are inserted, and the run ends when the
            rows in slots are done.
          iterations: maximum number of iterations per step, or a :class:`Pace` that chooses it by time. The default is
            a fraction of the iterations of a row; it also limits a pace where rows wait or may move.

        Yields:
          After each step, the rows that are done; the list may be empty. A row's ``number`` is that of its request.
          A row with ``non_finite`` has no result; :meth:`RowResult.check` makes this an error.
        """
        admit = True
        for group in self._groups:
            feed = RowFeed(group.classes, self._handle, skip)
            if not len(feed) or not admit:
                continue
            pool = self._open(group)
            gain = SchedulerPolicy.move_gain if uses_cache(pool.config) else _MOVE_GAIN
            policy = SchedulerPolicy(step_seconds=None, first_tokens=False, chunks=None, move_gain=gain)
            scheduler = Scheduler([pool.limits], policy, self.stats)
            while True:
                feed.top_up(scheduler, group.grid.slots)
                if not scheduler.waiting and not scheduler.running:
                    break
                admit = admit and more()
                most = self._most_iterations(group, iterations)
                scheduler.policy = replace(policy, max_iterations=most, most_rows=feed.most_rows)
                plan, began = scheduler.schedule(0.0, admit), time.perf_counter()
                if not plan.pools:
                    break
                outcome = StepOutcome([pool.execute(one) for one in plan.pools])
                if isinstance(iterations, Pace):
                    longest = max((run.iterations for one in outcome.pools for run in one.runs), default=0)
                    iterations.ran(longest, time.perf_counter() - began)
                events = scheduler.update(outcome, 0.0)
                yield [
                    replace(event.result, number=feed.finish(event))
                    for event in events
                    if isinstance(event, RowFinished)
                ]

    def _most_iterations(self, group: _Group, iterations: int | Pace | None) -> int:
        """Return the maximum number of iterations of a group's next step; see :meth:`run`."""
        longest = self._requests[group.first].config.max_new_tokens
        share = min(_MAX_ITERATIONS, max(1, longest // _STEPS_PER_ROW))
        if isinstance(iterations, Pace):
            return iterations.iterations if group.fits_one_bucket else min(share, iterations.iterations)
        return iterations or share

    def _handle(self, numbers: Sequence[int]) -> RequestHandle:
        tests = [self._stop_tests[number] for number in numbers]
        return RequestHandle(rows=[self._requests[number] for number in numbers], stop_tests=tests)


def _with_own_drafts(runner: Runner, requests: Sequence[RowRequest], slots: int | None) -> Sequence[RowRequest]:
    """Return the requests with the numbers of drafts that they have, for as many rows as run at a time."""
    data = runner.layout.spec.data
    rows = min(len(requests), DEFAULT_SLOTS * data if slots is None else slots)
    configs = _configs(requests)
    own = {id(config): with_own_drafts(config, data, rows, runner.draft is not None) for config in configs}
    if all(own[id(config)] is config for config in configs):
        return requests
    return [replace(request, config=own[id(request.config)]) for request in requests]


def _work_of(requests: Sequence[RowRequest]) -> list[Work]:
    """Return the work of each request."""
    # There may be millions of requests, but they share few configurations and lengths.
    found: dict[tuple[int, int], Work] = {}
    work = []
    for request in requests:
        key = id(request.config), request.given
        if key not in found:
            found[key] = Work(request.canvas_length, iterations_of(request))
        work.append(found[key])
    return work


def _configs(requests: Sequence[RowRequest]) -> list[DiffusionConfig | SamplingConfig]:
    """Return the configuration objects of the requests, each once, in order of their first use."""
    return list({id(request.config): request.config for request in requests}.values())
