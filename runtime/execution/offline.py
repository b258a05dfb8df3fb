"""Rows that are all known before: the scheduler over a fixed number of slots, so that no row waits for the slowest.

Rows that may share programs share slots; a row that is done frees its slot, and the next one that waits is inserted.
Which row gets which slot is decided by the requests alone, so that every host decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from runtime.execution.pool import Pool, slot_count, steps_per_block, uses_cache
from runtime.execution.requests import RequestHandle, RowFinished, StopTest
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.runner import Runner
from runtime.execution.scheduler import PoolLimits, Scheduler, SchedulerPolicy, SchedulerStats
from runtime.execution.slots import open_slots_for
from runtime.execution.specialization import compiled_in
from runtime.execution.step_plan import StepOutcome

# Slots for each shard of ``data`` where nobody says how many: enough to fill a device, few enough to empty together.
DEFAULT_SLOTS = 32

# A step runs a share of the iterations that a row takes, and not so many that slots stand empty.
_STEPS_PER_ROW = 16
_MAX_ITERATIONS = 16


@dataclass(frozen=True)
class _Group:
    """Requests that share slots.

    Attributes:
      width: bucket of their canvases.
      slots: how many slots they have.
      numbers: the requests, in the order in which they are inserted.
    """

    width: int
    slots: int
    numbers: list[int]


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
        groups: dict[tuple[int, Hashable], list[int]] = {}
        for number, request in enumerate(requests):
            bucket = width or runner.bucket(request.length)
            groups.setdefault((bucket, compiled_in(runner, request.config, bucket)), []).append(number)
        # Wide canvases first: where memory is short, it shows at once.
        ordered = sorted(groups.items(), key=lambda group: -group[0][0])
        self._groups = [self._group(bucket, numbers, slots) for (bucket, _), numbers in ordered]

    def _group(self, width: int, numbers: list[int], slots: int | None) -> _Group:
        config, data = self._requests[numbers[0]].config, self._runner.layout.spec.data
        if slots is None:
            count = self._runner.batch_size(min(len(numbers), DEFAULT_SLOTS * data), width, uses_cache(config))
        else:
            count = slot_count(self._runner, config, width, min(math.ceil(len(numbers) / data) * data, slots))
        # Long rows first, so that the last ones in their slots are short.
        order = sorted(numbers, key=lambda number: (-self._requests[number].config.max_new_tokens, number))
        return _Group(width, count, order)

    def _open(self, group: _Group) -> Pool:
        requests = [self._requests[number] for number in group.numbers]
        steps = max(steps_per_block(request.config, group.width) for request in requests)
        slots = open_slots_for(self._runner, requests, group.width, group.slots)
        return Pool(slots, requests[0].config, steps)

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
            policy = SchedulerPolicy(iterations or share, step_seconds=None, first_tokens=False)
            scheduler = Scheduler([PoolLimits(pool.count)], policy, self.stats)
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
