"""A pool: the slots of one mode, in buckets of several shapes, and the rows in them.

Dimension letters: S positions of a slot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.decoding.parameters import DiffusionConfig, SamplingConfig, one_step_per_token
from runtime.execution.buckets import Bucket, Grid
from runtime.execution.pool_shape import (
    GenerationConfig,
    PoolShape,
    canvases_of,
    pool_config,
    pool_grid,
    runner_for,
    slot_count,
    step_limit,
    steps_per_block,
    tokens_per_pass,
    uses_cache,
)
from runtime.execution.pool_state import PoolLimits
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.runner import Runner
from runtime.execution.slot_kinds import open_slots
from runtime.execution.slots import MovingRow, Row, Slots
from runtime.execution.step_plan import BucketRun, PoolOutcome, PoolPlan

# Where a row is: the number of a bucket, and the index of a slot in it.
Place = tuple[int, int]


@dataclass
class _Open:
    """An open bucket: its slots, and the number and request of the row in each occupied slot."""

    slots: Slots
    held: dict[int, tuple[int, RowRequest]] = field(default_factory=dict)


class Pool:
    """The slots of one mode, in buckets of several shapes, and the rows in them.

    Attributes:
      config: decoding parameters that are compiled.
      grid: the buckets.
      max_steps: maximum number of denoise steps per block.
    """

    def __init__(
        self,
        config: GenerationConfig,
        grid: Grid,
        max_steps: int,
        make: Callable[[Bucket], Slots],
        data: int = 1,
        prompt_chunk: int = 0,
    ) -> None:
        """Create a pool without rows.

        Args:
          config: decoding parameters that are compiled.
          grid: the buckets.
          max_steps: number of denoise steps per block that slots support.
          make: function that creates the free slots of a bucket.
          data: rows are multiples of this, see :attr:`runtime.execution.runner.Runner.row_unit`.
          prompt_chunk: most positions per chunk of a prompt, for rows with a prefill.
        """
        self.config, self.grid, self.max_steps, self._make, self._data = config, grid, max_steps, make, data
        self._prompt_chunk = prompt_chunk
        self._open: dict[int, _Open] = {}

    @classmethod
    def open(cls, runner: Runner, shape: PoolShape) -> Pool:
        """Create the pool of a server: its rows come later, so the buckets are chosen from the specification alone.

        Args:
          runner: the model on its mesh.
          shape: specification of the pool.

        Raises:
          ParameterError: ``shape.max_steps`` is less than what its configuration needs.
        """
        config = pool_config(runner, shape)
        runner = runner_for(runner, config)
        canvas = runner.bucket(shape.canvas)
        max_steps = step_limit(config, canvas, shape.max_steps)
        count = slot_count(runner, config, canvas, shape.slots)
        grid = pool_grid(runner, config, canvas, count, shape.widths, shape.max_programs)

        def make(bucket: Bucket) -> Slots:
            return open_slots(runner, config, bucket.width, bucket.rows, max_steps, bucket.width)

        return cls(config, grid, max_steps, make, runner.row_unit, runner.prompt_chunk)

    @property
    def width(self) -> int:
        """S of the widest bucket."""
        return self.grid.canvas

    @property
    def count(self) -> int:
        """Maximum number of rows at a time."""
        return self.grid.slots

    @property
    def limits(self) -> PoolLimits:
        """The pool's buckets and limits, for a scheduler."""
        most = self.count * self.width if uses_cache(self.config) else math.inf
        chunk = self._prompt_chunk if isinstance(self.config, SamplingConfig) and self.config.use_cache else 0
        growth = tokens_per_pass(self.config)
        return PoolLimits(self.grid, most, self._data, canvases_of(self.config), growth, chunk)

    @property
    def held(self) -> list[int]:
        """Numbers of the rows that have a slot."""
        return [row for one in self._open.values() for row, _ in one.held.values()]

    def compile(self, bucket: Bucket) -> None:
        """Compile all programs of a bucket. May be called from any thread."""
        slots = self._new_slots(bucket)
        slots.compile()
        slots.compile_moves()

    def _new_slots(self, bucket: Bucket) -> Slots:
        """Create free slots of a bucket. Copies of their caches have room for a row of any bucket."""
        slots = self._make(bucket)
        slots.copied = self.grid.canvas
        return slots

    def steps_per_block(self, config: GenerationConfig) -> int:
        """Return the maximum number of denoise steps per block of a row in this pool; 1 if autoregressive."""
        return steps_per_block(config, self.width)

    def short_config(self, tokens: int) -> GenerationConfig:
        """Return a configuration for this pool whose rows are done after ``tokens`` tokens."""
        changes: dict[str, Any] = {"max_new_tokens": tokens}
        if isinstance(self.config, DiffusionConfig):
            changes["steps"] = one_step_per_token(tokens, self.config.attention_block_length)
        return self.config.replace(**changes)

    def execute(self, plan: PoolPlan) -> PoolOutcome:
        """Execute a plan: finish, insert, move and evict rows, run iterations, and collect the rows that are done."""
        results = self._finish(plan.finish)
        self._arrange(plan)
        canvases: dict[int, np.ndarray] = {}
        runs: list[BucketRun] = []
        unread: list[int] = []
        accepted: dict[int, int] = {}
        for one in plan.buckets:
            there = self._open[one.number]
            if not (there.held and one.iterations):
                continue
            slots, start = there.slots, time.perf_counter()
            least = len(there.held) + 1 - one.until_ended if one.until_ended else 1
            done = slots.run(one.iterations, chunks=one.chunks, min_running=least)
            reading = slots.prefill_seconds
            seconds = time.perf_counter() - start - reading
            runs.append(BucketRun(one.number, slots.forwards, slots.iterations, seconds, reading))
            # The counters start at zero in each step.
            slots.forwards, slots.iterations, slots.prefill_seconds = 0, 0, 0.0
            unread += [there.held[slot][0] for slot in slots.unread if slot in there.held]
            finished = {slot: there.held.pop(slot) for slot in list(there.held) if done[slot]}
            results += slots.collect(finished) if finished else []
            if self.grid.grows:
                drafts = slots.draft_stats()
                accepted |= {row: drafts[slot].accepted for slot, (row, _) in there.held.items() if slot in drafts}
            if one.canvases and there.held:
                canvas = there.slots.canvas()
                canvases |= {row: _at_full_length(canvas[slot], request) for slot, (row, request) in there.held.items()}
        return PoolOutcome(plan.pool, results, canvases, runs, unread, accepted)

    def _finish(self, rows: Sequence[int]) -> list[RowResult]:
        """Return the results of rows that a stop test has ended. The plan has no slots for them, which evicts them."""
        results: list[RowResult] = []
        for there in self._open.values():
            ended = {slot: held for slot, held in there.held.items() if held[0] in rows}
            results += there.slots.collect(ended, ended_early=True) if ended else []
        return results

    # ---- rows that come, go and move --------------------------------------------------------------------------

    def _arrange(self, plan: PoolPlan) -> None:
        """Open and close buckets, insert, move and evict rows, until each slot holds what the plan says."""
        requests = {one.row: one.request for one in plan.insert}
        places = {row: (number, slot) for number, one in self._open.items() for slot, (row, _) in one.held.items()}
        targets = {row: (one.number, slot) for one in plan.buckets for slot, row in enumerate(one.slots)}
        moves = {row: place for row, place in targets.items() if row in places and places[row] != place}
        moving = self._take({row: places[row] for row in moves})
        requests |= {row: self._open[number].held[slot][1] for row, (number, slot) in places.items()}
        held = {
            one.number: {slot: (row, requests[row]) for slot, row in enumerate(one.slots) if row is not None}
            for one in plan.buckets
        }
        for one in plan.buckets:
            if one.number not in self._open:
                self._open[one.number] = _Open(self._new_slots(Bucket(one.rows, one.width)))
        # Move rows before inserting new ones and evicting old ones: both may overwrite caches that are still to move.
        for rows in (list(moving), [*requests, None]) if moving else ([*requests, None],):
            for one in plan.buckets:
                there = self._open[one.number]
                changes: dict[int, Row] = {}
                # In the order of their admission, in which prompts are read.
                for slot, row in sorted(enumerate(one.slots), key=lambda entry: -1 if entry[1] is None else entry[1]):
                    before = there.held.get(slot, (None, None))[0]
                    if row == before or row not in rows:
                        continue
                    changes[slot] = None if row is None else moving.get(row, requests[row])
                if changes or there.slots.request is None:
                    there.slots.insert(changes)
                    there.held |= {slot: held[one.number][slot] for slot, row in changes.items() if row is not None}
            self._move_caches({row: places[row] for row in moving}, moves)
            moving = {}
        self._open = {one.number: self._open[one.number] for one in plan.buckets}
        for number, own in held.items():
            self._open[number].held = own

    def _take(self, places: Mapping[int, Place]) -> dict[int, MovingRow]:
        """Return the requests and states of the rows at these places, without their caches."""
        found: dict[int, MovingRow] = {}
        for number in {number for number, _ in places.values()}:
            rows = {row: slot for row, (own, slot) in places.items() if own == number}
            taken = self._open[number].slots.take(list(rows.values()))
            found |= {row: taken[slot] for row, slot in rows.items()}
        return found

    def _move_caches(self, sources: Mapping[int, Place], targets: Mapping[int, Place]) -> None:
        """Move caches to the new places of their rows, in an order in which no cache is overwritten before it moves."""
        left, taken = dict(sources), {}
        while left:
            ready = [row for row in left if targets[row] not in left.values()]
            # One at a time, so that only one copy is alive. If rows exchange places in a cycle, copy all of them first.
            for row in ready[:1] or left:
                number, slot = sources[row]
                taken[row] = self._open[number].slots.take_caches(slot)
            for row in list(taken):
                number, slot = targets[row]
                self._open[number].slots.put_caches(slot, taken.pop(row))
                del left[row]


def _at_full_length(tokens: np.ndarray, request: RowRequest) -> np.ndarray:
    """Return the tokens of a row at its full length, with -1 at positions beyond the width of its slot."""
    return np.append(tokens[: request.length], np.full(max(0, request.length - len(tokens)), -1, np.int32))
