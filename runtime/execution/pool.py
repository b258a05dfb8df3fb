"""The slots of one way of decoding: buckets of several shapes, and which rows are in them.

Dimension letters: S positions of a slot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.decoding.block_schedule import block_schedule
from runtime.decoding.parameters import DEFAULT_BLOCK_LENGTH, DiffusionConfig, SamplingConfig
from runtime.execution.buckets import MAX_PROGRAMS, MOVE_ROOM, Bucket, Grid, PassCost, make_grid
from runtime.execution.pool_state import PoolLimits
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.rows import check_kind
from runtime.execution.runner import Runner, weight_bytes
from runtime.execution.slot_kinds import open_slots
from runtime.execution.slots import MovingRow, Row, Slots
from runtime.execution.specialization import general
from runtime.execution.step_plan import BucketRun, PoolOutcome, PoolPlan
from runtime.models.kv_cache import cache_bytes_per_device
from sharding.errors import InputError

GenerationConfig = DiffusionConfig | SamplingConfig
# Number of a bucket, and a slot of it.
Place = tuple[int, int]


def uses_cache(config: GenerationConfig) -> bool:
    """Whether rows of this configuration keep keys and values."""
    return config.use_cache if isinstance(config, SamplingConfig) else config.cache != "none"


@dataclass(frozen=True)
class PoolShape:
    """Slots that are to be made.

    Attributes:
      config: decides what is compiled; rows may differ in everything else.
      canvas: S of the widest bucket, prompt and new tokens; rounded up to a bucket.
      slots: rows at a time; rounded down to a multiple of the data axis, and limited by memory.
      max_steps: denoise steps of a block at most; None for as many as positions, or as ``config`` has.
      widths: of the other buckets, rounded up likewise; None for a ladder of them.
      max_programs: shapes of buckets at most.
    """

    config: GenerationConfig
    canvas: int
    slots: int
    max_steps: int | None = None
    widths: tuple[int, ...] | None = None
    max_programs: int = MAX_PROGRAMS


def steps_per_block(config: GenerationConfig, width: int) -> int:
    """Denoise steps that a block of this configuration takes at most on a canvas of ``width``; 1 if autoregressive."""
    return 1 if isinstance(config, SamplingConfig) else block_schedule(config, width)[1]


def step_limit(config: GenerationConfig, width: int, wanted: int | None) -> int:
    """Denoise steps of a block that slots of this width have room for, see :attr:`PoolShape.max_steps`.

    Raises:
      InputError: ``wanted`` is fewer than ``config`` itself takes.
    """
    if isinstance(config, SamplingConfig):
        return 1
    length, own = block_schedule(config, width)
    if wanted is None:
        return max(width, own)
    if wanted < own:
        raise InputError(
            f"max_steps={wanted}: by default a block of {length} positions has {own} steps (parallel="
            f"{config.parallel}); give as many, fewer steps, or a shorter block_length"
        )
    return wanted


def slot_count(runner: Runner, config: GenerationConfig, width: int, wanted: int, moves: bool = True) -> int:
    """Slots that are made where ``wanted`` are asked for: a multiple of the data axis, limited by memory.

    Args:
      runner: the model on its mesh.
      config: of the rows, for whether they keep a cache.
      width: S, a bucket.
      wanted: at least 1.
      moves: whether rows move between buckets, so that caches of both must fit.
    """
    data, cached = runner.layout.spec.data, uses_cache(config)
    count, room = runner.batch_size(max(data, wanted // data * data), width, cached), runner.room()
    while moves and cached and room is not None and count > data:
        if pool_memory(runner, config, width, count) <= room:
            break
        count -= data
    return count


def kept_bytes(runner: Runner, config: GenerationConfig, width: int, count: int) -> int:
    """Bytes of each device that so many slots keep between passes, weights left out: caches of both ends of moves."""
    memory = runner.memory(count // runner.layout.spec.data, width, uses_cache(config))
    kept = sum(tensor.bytes for tensor in memory.resident) - weight_bytes(runner.layout, runner.dtype)
    return MOVE_ROOM * kept if uses_cache(config) else kept


def pool_memory(runner: Runner, config: GenerationConfig, width: int, count: int) -> int:
    """Bytes of each device that so many slots need while rows move, weights and the largest pass included."""
    memory = runner.memory(count // runner.layout.spec.data, width, uses_cache(config))
    peak = sum(tensor.bytes for tensor in memory.peak)
    return weight_bytes(runner.layout, runner.dtype) + kept_bytes(runner, config, width, count) + peak


def check_pools(runner: Runner, shapes: list[PoolShape]) -> None:
    """Check that the model allows the shapes, and that their slots fit into memory beside one another.

    Raises:
      InputError: a configuration for the other way of decoding, more positions than the model allows, or more memory
        than there is; says what they need.
    """
    model = runner.layout.config
    for shape in shapes:
        check_kind(model, shape.config)
        if (width := runner.bucket(shape.canvas)) > model.max_positions:
            raise InputError(f"{width} positions; the model allows {model.max_positions}")
    room, weights = runner.room(), weight_bytes(runner.layout, runner.dtype)
    kept, peak = 0, 0
    for shape in shapes:
        width, config = runner.bucket(shape.canvas), general(shape.config)
        count = slot_count(runner, config, width, shape.slots)
        own = kept_bytes(runner, config, width, count)
        kept += own
        peak = max(peak, pool_memory(runner, config, width, count) - weights - own)
    # Forward passes take turns; caches stay.
    needed = weights + kept + peak
    if len(shapes) > 1 and room is not None and needed > room:
        raise InputError(
            f"slots of {len(shapes)} kinds need {needed / 1e9:.1f} GB of each device, {kept / 1e9:.1f} GB of it "
            f"for what they keep, and {room / 1e9:.1f} GB are to be had: fewer slots, canvases or ways of decoding"
        )


def pass_cost(runner: Runner, config: GenerationConfig) -> PassCost:
    """What a pass of a bucket costs on these devices: from what they are, not from what was measured."""
    layout, spec = runner.layout, runner.layout.spec
    floor, overhead = runner.pass_floor()
    if isinstance(config, SamplingConfig):
        if not config.use_cache:
            return PassCost(floor, overhead)
        read = cache_bytes_per_device(layout, spec.data, spec.sequence, runner.cache_dtype)
        return PassCost(floor, overhead, 1, max(floor, 1) * read / weight_bytes(layout, runner.dtype))
    if config.cache == "none":
        return PassCost(floor, overhead)
    length = config.block_length or DEFAULT_BLOCK_LENGTH
    # A block of so many positions is entered with a pass over whole rows.
    return PassCost(floor, overhead, length, 1 / length)


def pool_grid(
    runner: Runner,
    config: GenerationConfig,
    canvas: int,
    slots: int,
    widths: Sequence[int] | None = None,
    limit: int = MAX_PROGRAMS,
    saturation: int = 1,
) -> Grid:
    """The buckets of a way of decoding.

    Args:
      runner: the model on its mesh.
      config: the way of decoding.
      canvas: S of the widest one.
      slots: rows at a time.
      widths: of the others; None for a ladder of them.
      limit: how many there may be.
      saturation: see :func:`runtime.execution.buckets.make_grid`.
    """
    step = runner.width_step()
    own = None if widths is None else sorted({runner.bucket(width) for width in (*widths, canvas)})
    cost, data = pass_cost(runner, config), runner.layout.spec.data
    grows = isinstance(config, SamplingConfig)
    return make_grid(
        slots, canvas, cost, data=data, step=step, widths=own, limit=limit, grows=grows, saturation=saturation
    )


@dataclass
class _Open:
    """An open bucket: its slots, and the number and request of the row in each slot that is taken."""

    slots: Slots
    held: dict[int, tuple[int, RowRequest]] = field(default_factory=dict)


class Pool:
    """Slots of one way of decoding in buckets of several shapes, and which rows are in them.

    Attributes:
      config: what is compiled.
      grid: the shapes.
      max_steps: denoise steps of a block at most.
    """

    def __init__(
        self, config: GenerationConfig, grid: Grid, max_steps: int, make: Callable[[Bucket], Slots], data: int = 1
    ) -> None:
        """Begin without rows.

        Args:
          config: what is compiled.
          grid: the shapes.
          max_steps: of a block, that slots have room for.
          make: free slots of a shape.
          data: shards of the batch.
        """
        self.config, self.grid, self.max_steps, self._make, self._data = config, grid, max_steps, make, data
        self._open: dict[int, _Open] = {}

    @classmethod
    def open(cls, runner: Runner, shape: PoolShape) -> Pool:
        """Make free slots for rows that are not known yet.

        Raises:
          InputError: fewer steps than the configuration takes.
        """
        config, canvas = general(shape.config), runner.bucket(shape.canvas)
        max_steps = step_limit(config, canvas, shape.max_steps)
        count = slot_count(runner, config, canvas, shape.slots)
        grid = pool_grid(runner, config, canvas, count, shape.widths, shape.max_programs)

        def make(bucket: Bucket) -> Slots:
            return open_slots(runner, config, bucket.width, bucket.rows, max_steps, bucket.width)

        return cls(config, grid, max_steps, make, runner.layout.spec.data)

    @property
    def width(self) -> int:
        """S of the widest bucket."""
        return self.grid.canvas

    @property
    def count(self) -> int:
        """Rows at a time, at most."""
        return self.grid.slots

    @property
    def limits(self) -> PoolLimits:
        """What a scheduler has to know of it."""
        most = self.count * self.width if uses_cache(self.config) else math.inf
        return PoolLimits(self.grid, most, self._data)

    @property
    def held(self) -> list[int]:
        """Numbers of the rows that have a slot."""
        return [row for one in self._open.values() for row, _ in one.held.values()]

    def compile(self, bucket: Bucket) -> None:
        """Compile all programs of a bucket, from any thread."""
        slots = self._make(bucket)
        slots.compile()
        slots.compile_moves(self.grid.canvas)

    def steps_per_block(self, config: GenerationConfig) -> int:
        """Denoise steps that a block of a row takes at most in these slots; 1 if autoregressive."""
        return steps_per_block(config, self.width)

    def short_config(self, tokens: int) -> GenerationConfig:
        """A configuration for these slots whose rows are done after so many tokens."""
        changes: dict[str, Any] = {"max_new_tokens": tokens}
        if isinstance(self.config, DiffusionConfig):
            changes["steps"] = tokens
        return self.config.replace(**changes)

    def execute(self, plan: PoolPlan) -> PoolOutcome:
        """Finish rows, put the others where the plan says, run iterations, and collect the rows that are done."""
        results = self._finish(plan.finish)
        self._arrange(plan)
        canvases: dict[int, np.ndarray] = {}
        runs: list[BucketRun] = []
        unread: list[int] = []
        for one in plan.buckets:
            there = self._open[one.number]
            if not (there.held and one.iterations):
                continue
            slots, start = there.slots, time.perf_counter()
            done = slots.run(one.iterations, chunks=one.chunks)
            reading = slots.prefill_seconds
            seconds = time.perf_counter() - start - reading
            runs.append(BucketRun(one.number, slots.forwards, slots.iterations, seconds, reading))
            # Counted from nothing each time.
            slots.forwards, slots.iterations, slots.prefill_seconds = 0, 0, 0.0
            unread += [there.held[slot][0] for slot in slots.unread if slot in there.held]
            finished = {slot: there.held.pop(slot) for slot in list(there.held) if done[slot]}
            results += slots.collect(finished) if finished else []
            if one.canvases and there.held:
                canvas = there.slots.canvas()
                canvases |= {row: _as_long(canvas[slot], request) for slot, (row, request) in there.held.items()}
        return PoolOutcome(plan.pool, results, canvases, runs, unread)

    def _finish(self, rows: Sequence[int]) -> list[RowResult]:
        """Results of rows that are done with what they have; they are evicted as the plan has no slots for them."""
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
                self._open[one.number] = _Open(self._make(Bucket(one.rows, one.width)))
        # Rows that were somewhere come before new ones, whose prompts may be read over what others leave.
        for rows in ([*moving, None], list(requests)) if moving else ([*requests, None],):
            for one in plan.buckets:
                there = self._open[one.number]
                changes: dict[int, Row] = {}
                for slot, row in enumerate(one.slots):
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
        """What rows at these places have beside their caches."""
        found: dict[int, MovingRow] = {}
        for number in {number for number, _ in places.values()}:
            rows = {row: slot for row, (own, slot) in places.items() if own == number}
            taken = self._open[number].slots.take(list(rows.values()))
            found |= {row: taken[slot] for row, slot in rows.items()}
        return found

    def _move_caches(self, sources: Mapping[int, Place], targets: Mapping[int, Place]) -> None:
        """Bring caches to where their rows are now: none is written over one that is still to be moved."""
        left, taken = dict(sources), {}
        while left:
            ready = [row for row in left if targets[row] not in left.values()]
            # One at a time, so that one copy is alive; where rows change places with one another, all at once.
            for row in ready[:1] or left:
                number, slot = sources[row]
                taken[row] = self._open[number].slots.take_cache(slot, self.grid.canvas)
            for row in list(taken):
                number, slot = targets[row]
                self._open[number].slots.put_cache(slot, taken.pop(row))
                del left[row]


def _as_long(tokens: np.ndarray, request: RowRequest) -> np.ndarray:
    """Tokens of a row at its full length, -1 where its slot does not reach."""
    return np.append(tokens[: request.length], np.full(max(0, request.length - len(tokens)), -1, np.int32))
