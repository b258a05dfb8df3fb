"""Continuous filling: many rows through a fixed number of slots, so that nobody waits for the slowest row.

Rows that may share programs share slots; a row that is done leaves its slot, and the next one
waiting takes it. Which row lands where is decided by the requests alone, and changes no row's tokens.

Dimension letters: S canvas of a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.decoding.block_schedule import block_schedule
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.rows import check_request
from runtime.execution.runner import Runner
from runtime.execution.slots import Slots, open_slots
from runtime.execution.specialization import compiled_in
from sharding.errors import InputError

# Slots for each shard of ``data`` where nobody says how many: enough to fill a device, few enough to empty together.
DEFAULT_SLOTS = 32

# Iterations between two looks at who is done: a share of what a row takes, and not so many that slots stand empty.
_LOOKS_PER_ROW = 16
_MOST_ITERATIONS = 16


@dataclass
class FillingStats:
    """What filling has cost so far.

    Attributes:
      rows: rows that are done.
      tokens: tokens committed in them.
      forwards: forward passes, prefills included.
      slot_iterations: slots times the iterations they were there for.
      busy_iterations: those in which a row that is done now set a token.
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
        """Share of what the slots could do that was done; 1 where nothing ran."""
        busy = self.busy_iterations + self.in_flight_iterations
        return busy / self.slot_iterations if self.slot_iterations else 1.0


@dataclass(frozen=True)
class _Group:
    """Requests that share slots.

    Attributes:
      width: bucket of their canvases.
      slots: how many slots they have.
      numbers: the requests, in the order in which they enter.
    """

    width: int
    slots: int
    numbers: list[int]


class Filling:
    """Rows on their way through the slots of a mesh.

    Attributes:
      stats: what it has cost so far.
    """

    def __init__(self, runner: Runner, requests: Sequence[RowRequest], slots: int | None = None) -> None:
        """Sort requests into buckets.

        Args:
          runner: the model on its mesh.
          requests: all rows, those included that will be skipped: the number of slots follows from them.
          slots: slots at a time, rounded down to a multiple of the data axis and limited by memory; default
            :data:`DEFAULT_SLOTS` for each shard of it.

        Raises:
          InputError: a row that cannot be generated.
        """
        self._runner, self._requests = runner, requests
        self.stats = FillingStats()
        layout = runner.layout
        groups: dict[Hashable, list[int]] = {}
        for number, request in enumerate(requests):
            try:
                check_request(request.rows, layout.config, request.config)
            except InputError as error:
                raise InputError(f"request {number}: {error}") from error
            width = runner.bucket(request.length)
            groups.setdefault((width, compiled_in(runner, request.config, width)), []).append(number)
        self._groups = []
        # Wide canvases first: where memory is short, it shows at once.
        for (width, _), numbers in sorted(groups.items(), key=lambda group: -group[0][0]):  # type: ignore[index, misc]
            config = requests[numbers[0]].config
            cached = config.use_cache if isinstance(config, SamplingConfig) else config.cache != "none"
            wanted = min(len(numbers), slots or DEFAULT_SLOTS * layout.spec.data)
            if slots is not None:
                wanted = max(layout.spec.data, wanted // layout.spec.data * layout.spec.data)
            # Long rows first, so that the last ones to leave are short.
            numbers.sort(key=lambda number: (-requests[number].config.max_new_tokens, number))
            self._groups.append(_Group(width, runner.batch_size(wanted, width, cached), numbers))

    def _open(self, group: _Group) -> Slots:
        requests = [self._requests[number] for number in group.numbers]
        steps = [
            block_schedule(request.config, group.width)[1]
            for request in requests
            if isinstance(request.config, DiffusionConfig)
        ]
        longest = max(len(request.tokens) for request in requests)
        return open_slots(self._runner, requests[0].config, group.width, group.slots, max(steps, default=1), longest)

    def run(self, skip: Collection[int] = (), more: Callable[[], bool] = lambda: True) -> Iterator[list[RowResult]]:
        """Generate every row.

        Args:
          skip: numbers of requests that are left out.
          more: asked before each look whether rows may still enter; once it says no, those in flight are the last.

        Yields:
          The rows that are done, after every few iterations: often none.
        """
        entering = True
        for group in self._groups:
            waiting = deque(number for number in group.numbers if number not in skip)
            if not waiting or not entering:
                continue
            slots = self._open(group)
            held: dict[int, tuple[int, RowRequest]] = {}
            since: dict[int, int] = {}
            longest = self._requests[group.numbers[0]].config.max_new_tokens
            every = min(_MOST_ITERATIONS, max(1, longest // _LOOKS_PER_ROW))
            while waiting or held:
                entering = entering and more()
                forwards, iterations = slots.forwards, slots.iterations
                free = [slot for slot in range(slots.count) if slot not in held] if entering else []
                new = {slot: waiting.popleft() for slot in free[: len(waiting)]}
                if new:
                    slots.insert({slot: self._requests[number] for slot, number in new.items()})
                    held |= {slot: (number, self._requests[number]) for slot, number in new.items()}
                    since |= dict.fromkeys(new, iterations)
                if not held:
                    break
                done = slots.run(every)
                leaving = {slot: held.pop(slot) for slot in list(held) if done[slot]}
                results = slots.collect(leaving) if leaving else []
                self._count(results, slots, forwards, iterations)
                self.stats.in_flight_iterations = sum(slots.iterations - since[slot] for slot in held)
                yield results

    def _count(self, results: list[RowResult], slots: Slots, forwards: int, iterations: int) -> None:
        stats = self.stats
        stats.rows += len(results)
        stats.forwards += slots.forwards - forwards
        stats.slot_iterations += (slots.iterations - iterations) * slots.count
        for result in results:
            steps = result.commit_steps[result.commit_steps >= 0]
            stats.tokens += len(steps)
            stats.busy_iterations += len(np.unique(steps))
