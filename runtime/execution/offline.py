"""Rows that are all known before: the scheduler over a fixed number of slots, so that no row waits for the slowest.

Rows that may share programs share a grid of buckets; a row that is done frees its slot, and the next one that waits is
inserted. Which row is where is decided by the requests and by the programs that are there alone, so that every host
decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from runtime.execution.buckets import Bucket, Grid
from runtime.execution.pool import Pool, pool_grid, slot_count, steps_per_block
from runtime.execution.requests import RequestHandle, RowFinished, StopTest, iterations_of
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.runner import Runner
from runtime.execution.scheduler import Scheduler, SchedulerPolicy, SchedulerStats
from runtime.execution.selection import Work, select
from runtime.execution.slot_kinds import longest_span, open_slots_for
from runtime.execution.slots import Slots
from runtime.execution.specialization import compiled_in
from runtime.execution.step_plan import StepOutcome

# Slots for each shard of ``data`` where nobody says how many: enough to fill a device, few enough to empty together.
DEFAULT_SLOTS = 32

# Buckets that are chosen from, and how full passes may be: many rows wait, and few buckets are compiled for them.
_CANDIDATES = 96
_SATURATION = 4

# A step runs a share of the iterations that a row takes, and not so many that slots stand empty.
_STEPS_PER_ROW = 16
_MAX_ITERATIONS = 16


@dataclass(frozen=True)
class _Group:
    """Requests that share slots.

    Attributes:
      grid: the buckets that they may be in.
      numbers: the requests, in the order in which they are inserted.
      known: buckets whose programs are there.
    """

    grid: Grid
    numbers: list[int]
    known: set[Bucket]


class OfflineScheduler:
    """Generates rows that are all known before, in as many groups as there are programs.

    Attributes:
      stats: what the rows have cost so far.
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
          requests: all rows, checked, those included that will be skipped: the number of slots follows from them.
          slots: rows on the devices at a time, rounded down to a multiple of the data axis and limited by memory;
            default :data:`DEFAULT_SLOTS` for each shard of it.
          width: bucket of all canvases; default each row's own.
          stop_tests: of each request, see :data:`runtime.execution.requests.StopTest`; empty for none.
        """
        self._runner, self._requests = runner, requests
        self._stop_tests = stop_tests or [None] * len(requests)
        self.stats = SchedulerStats()
        widest = width or runner.bucket(max((request.length for request in requests), default=1))
        groups: dict[Hashable, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(compiled_in(runner, request.config, widest), []).append(number)
        found = [self._group(numbers, slots, width) for numbers in groups.values()]
        # Wide canvases first: where memory is short, it shows at once.
        self._groups = sorted(found, key=lambda group: -group.grid.canvas)

    def _group(self, numbers: list[int], slots: int | None, width: int | None) -> _Group:
        requests, runner = [self._requests[number] for number in numbers], self._runner
        config, data = requests[0].config, runner.layout.spec.data
        canvas = width or runner.bucket(max(request.length for request in requests))
        most = min(math.ceil(len(numbers) / data) * data, DEFAULT_SLOTS * data if slots is None else slots)
        # Rows of one width that all have a slot need one bucket.
        several = len({request.length for request in requests}) > 1 or len(numbers) > most
        count = slot_count(runner, config, canvas, most, moves=several)
        work = [Work(self._requests[number].length, iterations_of(self._requests[number])) for number in numbers]
        # Rows of similar length are in slots together, and fit their buckets; the last ones are short.
        order = sorted(range(len(numbers)), key=lambda index: (-work[index].length, -work[index].iterations, index))
        grid = pool_grid(runner, config, canvas, count, limit=_CANDIDATES, saturation=_SATURATION)
        top = Bucket(count, canvas)
        known = runner.buckets.setdefault(self._programs(requests, canvas), set())

        def compiling(bucket: Bucket) -> float:
            return 0.0 if bucket in known else runner.compile_positions()

        rows = [work[index] for index in order]
        chosen = select(rows, count, top, grid.buckets, grid.cost, compiling) if several else [top]
        chosen += [bucket for bucket in grid.buckets if bucket in known and bucket not in chosen]
        return _Group(replace(grid, buckets=tuple(chosen), grows=False), [numbers[index] for index in order], known)

    def _programs(self, requests: Sequence[RowRequest], canvas: int) -> Hashable:
        """What the programs of a bucket depend on beside its shape."""
        runner, config = self._runner, requests[0].config
        steps = max(steps_per_block(request.config, canvas) for request in requests)
        return compiled_in(runner, config, canvas), steps, longest_span(runner, requests)

    def _open(self, group: _Group) -> Pool:
        requests = [self._requests[number] for number in group.numbers]
        steps = max(steps_per_block(request.config, group.grid.canvas) for request in requests)

        def make(bucket: Bucket) -> Slots:
            group.known.add(bucket)
            return open_slots_for(self._runner, requests, bucket.width, bucket.rows, steps)

        return Pool(requests[0].config, group.grid, steps, make, self._runner.layout.spec.data)

    @property
    def in_one_run(self) -> bool:
        """Whether nothing can happen between the first iteration of every row and its last."""
        return all(len(group.grid.buckets) == 1 and len(group.numbers) <= group.grid.slots for group in self._groups)

    def run(
        self,
        skip: Collection[int] = (),
        more: Callable[[], bool] = lambda: True,
        iterations: int | None = None,
    ) -> Iterator[list[RowResult]]:
        """Generate every row.

        Args:
          skip: numbers of requests that are left out.
          more: asked before each step whether waiting rows may still be inserted; once it says no, those in slots are
            the last.
          iterations: of a step; default a share of what a row takes, so that slots do not stand empty for long.

        Yields:
          The rows that are done after each step, often none; their numbers are those of the requests.
        """
        admit = True
        for group in self._groups:
            numbers = [number for number in group.numbers if number not in skip]
            if not numbers or not admit:
                continue
            pool = self._open(group)
            longest = self._requests[group.numbers[0]].config.max_new_tokens
            share = min(_MAX_ITERATIONS, max(1, longest // _STEPS_PER_ROW))
            policy = SchedulerPolicy(iterations or share, step_seconds=None, first_tokens=False, chunks=None)
            scheduler = Scheduler([pool.limits], policy, self.stats)
            rows, tests = zip(*((self._requests[number], self._stop_tests[number]) for number in numbers), strict=True)
            scheduler.add(RequestHandle(rows=rows, stop_tests=tests))
            while scheduler.waiting or scheduler.running:
                admit = admit and more()
                plan = scheduler.schedule(0.0, admit)
                if not plan.pools:
                    break
                events = scheduler.update(StepOutcome([pool.execute(one) for one in plan.pools]), 0.0)
                yield [
                    replace(event.result, number=numbers[event.index])
                    for event in events
                    if isinstance(event, RowFinished)
                ]
