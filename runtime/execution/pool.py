"""A pool: the slots of one mode, in buckets of several shapes, and the rows in them.

Dimension letters: S positions of a slot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from runtime.decoding.block_schedule import block_schedule, window_widths
from runtime.decoding.kinds import ParameterError
from runtime.decoding.parameters import DEFAULT_BLOCK_LENGTH, DiffusionConfig, SamplingConfig, one_step_per_token
from runtime.execution.buckets import MAX_PROGRAMS, MOVE_ROOM, Bucket, Grid, PassCost, make_grid
from runtime.execution.memory import Memory
from runtime.execution.pool_state import PoolLimits
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.rows import check_kind, with_model_blocks
from runtime.execution.runner import Runner, weight_bytes
from runtime.execution.slot_kinds import open_slots
from runtime.execution.slots import MovingRow, Row, Slots
from runtime.execution.specialization import divides_drafts, generalized, with_own_drafts
from runtime.execution.step_plan import BucketRun, PoolOutcome, PoolPlan
from runtime.models.kv_cache import cache_bytes_per_device
from sharding.errors import InputError

GenerationConfig = DiffusionConfig | SamplingConfig
# Where a row is: the number of a bucket, and the index of a slot in it.
Place = tuple[int, int]


def uses_cache(config: GenerationConfig) -> bool:
    """Return whether rows of this configuration have a KV cache."""
    return config.use_cache if isinstance(config, SamplingConfig) else config.cache != "none"


def canvases_of(config: GenerationConfig) -> int:
    """Return how many canvases of each row a forward pass computes: its own, and its drafts."""
    return 1 if isinstance(config, SamplingConfig) else 1 + config.drafts


def tokens_per_pass(config: GenerationConfig) -> int:
    """Return the most tokens that a pass adds to an autoregressive row: one, and its drafts; 1 for diffusion."""
    return 1 + config.drafts if isinstance(config, SamplingConfig) else 1


def window_of(runner: Runner, config: GenerationConfig, width: int) -> int:
    """Return the positions of the widest window of a pass with a cache and drafts, on slots of ``width``; 0 without."""
    if not (config.drafts and uses_cache(config)):
        return 0
    if isinstance(config, SamplingConfig):
        return tokens_per_pass(config)
    length, _ = block_schedule(config, width)
    offset = 0 if config.block_rule == "fast_dllm" else runner.layout.config.family.prediction_offset
    return window_widths(config.cache, length, width, config.refresh_blocks, offset=offset)[0]


def rows_at_once(runner: Runner, config: GenerationConfig, width: int, wanted: int) -> int:
    """Return how many of ``wanted`` rows of this configuration to run at a time; see :meth:`Runner.batch_size`."""
    sizes = canvases_of(config), window_of(runner, config, width)
    return runner.batch_size(wanted, width, uses_cache(config), *sizes)


def memory_of(runner: Runner, config: GenerationConfig, width: int, count: int) -> Memory:
    """Estimate the memory of a device while ``count`` rows of this configuration run; see :meth:`Runner.memory`."""
    sizes = canvases_of(config), window_of(runner, config, width)
    return runner.memory(count // runner.row_shards, width, uses_cache(config), *sizes)


def runner_for(runner: Runner, config: GenerationConfig) -> Runner:
    """Return the runner for rows of this configuration: that of ``draft_axis``, or the runner itself."""
    return runner.over_data(canvases_of(config)) if divides_drafts(config) else runner


@dataclass(frozen=True)
class PoolShape:
    """The specification of a pool.

    Attributes:
      config: decoding parameters. The compiled ones hold for all rows; rows may differ in the others.
      canvas: S of the widest bucket, prompt and new tokens together; rounded up to a bucket.
      slots: maximum number of rows at a time, rounded down to a multiple of the data axis and limited by memory.
      max_steps: maximum number of denoise steps per block; None for the larger of S and the steps of ``config``.
      widths: widths of the other buckets, rounded up likewise; None chooses them automatically.
      max_programs: maximum number of buckets.
    """

    config: GenerationConfig
    canvas: int
    slots: int
    max_steps: int | None = None
    widths: tuple[int, ...] | None = None
    max_programs: int = MAX_PROGRAMS


def pool_config(runner: Runner, shape: PoolShape) -> GenerationConfig:
    """Return the decoding parameters that a pool compiles: general ones, with a number of drafts for all its slots."""
    config = generalized(with_model_blocks(shape.config, runner.layout.config))
    return with_own_drafts(config, runner.layout.spec.data, shape.slots, runner.draft is not None)


def steps_per_block(config: GenerationConfig, width: int) -> int:
    """Return the maximum number of denoise steps per block on a canvas of ``width``; 1 if autoregressive."""
    return 1 if isinstance(config, SamplingConfig) else block_schedule(config, width)[1]


def step_limit(config: GenerationConfig, width: int, wanted: int | None) -> int:
    """Return the number of denoise steps per block that slots of this width support; see :attr:`PoolShape.max_steps`.

    Raises:
      ParameterError: ``wanted`` is less than what ``config`` itself needs.
    """
    if isinstance(config, SamplingConfig):
        return 1
    length, own = block_schedule(config, width)
    if wanted is None:
        return max(width, own)
    if wanted < own:
        raise ParameterError(
            "max_steps",
            f"is {wanted}; by default a block of {length} positions has {own} steps (parallel={config.parallel}): "
            "raise max_steps, or lower steps or block_length",
        )
    return wanted


def slot_count(runner: Runner, config: GenerationConfig, width: int, wanted: int, moves: bool = True) -> int:
    """Return how many slots to create: at most ``wanted``, a multiple of the data axis, limited by memory.

    Args:
      runner: the model on its mesh.
      config: configuration of the rows, which says whether they have a cache.
      width: S, a bucket.
      wanted: requested number of slots, at least 1.
      moves: whether rows may move between buckets, which requires memory for the caches of both buckets.
    """
    runner = runner_for(runner, config)
    data, cached = runner.row_unit, uses_cache(config)
    count, room = rows_at_once(runner, config, width, max(data, wanted // data * data)), runner.room()
    while moves and cached and room is not None and count > data:
        if pool_memory(runner, config, width, count) <= room:
            break
        count -= data
    return count


def kept_bytes(runner: Runner, config: GenerationConfig, width: int, count: int) -> int:
    """Return the bytes per device that slots occupy between passes, without weights and with room for moving rows."""
    runner = runner_for(runner, config)
    memory = memory_of(runner, config, width, count)
    kept = sum(tensor.bytes for tensor in memory.resident) - runner.weight_bytes
    return MOVE_ROOM * kept if uses_cache(config) else kept


def pool_memory(runner: Runner, config: GenerationConfig, width: int, count: int) -> int:
    """Return the bytes per device that slots need in total: with weights, moving rows, and the largest pass."""
    runner = runner_for(runner, config)
    memory = memory_of(runner, config, width, count)
    peak = sum(tensor.bytes for tensor in memory.peak)
    return runner.weight_bytes + kept_bytes(runner, config, width, count) + peak


def check_pools(runner: Runner, shapes: list[PoolShape]) -> None:
    """Check that the model allows the shapes, and that the slots of all pools fit into memory together.

    Raises:
      InputError: a configuration does not match the model's objective, a canvas is longer than the model allows, or the
        pools need too much memory.
    """
    model = runner.layout.config
    for shape in shapes:
        check_kind(model, shape.config)
        if shape.canvas > model.max_positions:
            raise InputError(f"a canvas has {shape.canvas} positions; the model allows {model.max_positions}")
    room, weights = runner.room(), runner.weight_bytes
    kept, peak = 0, 0
    for shape in shapes:
        width, config = runner.bucket(shape.canvas), pool_config(runner, shape)
        count = slot_count(runner, config, width, shape.slots)
        own = kept_bytes(runner, config, width, count)
        kept += own
        peak = max(peak, pool_memory(runner, config, width, count) - weights - own)
    # Pools run one after another, so only the largest pass counts; the caches of all pools stay in memory.
    needed = weights + kept + peak
    if len(shapes) > 1 and room is not None and needed > room:
        raise InputError(
            f"the slots of {len(shapes)} modes need {needed / 1e9:.1f} GB per device, {kept / 1e9:.1f} GB of it for "
            f"caches and tokens, but {room / 1e9:.1f} GB are available; use fewer slots or modes, or a shorter canvas"
        )


def pass_cost(runner: Runner, config: GenerationConfig) -> PassCost:
    """Return the cost model of a pass, derived from the type of the devices rather than from measurements."""
    layout, spec = runner.layout, runner.layout.spec
    floor, overhead = runner.pass_floor()
    if isinstance(config, SamplingConfig):
        if not config.use_cache:
            return PassCost(floor, overhead)
        read = cache_bytes_per_device(layout, spec.data, spec.sequence, runner.cache_dtype)
        per_token = max(floor, 1) * read / weight_bytes(layout, runner.dtype)
        found = PassCost(floor, overhead, tokens_per_pass(config), per_token)
        return found if runner.draft is None else _with_draft_model(found, runner, runner.draft, config.draft_tokens)
    if config.cache == "none":
        return PassCost(floor, overhead, canvases=canvases_of(config))
    length = config.block_length or DEFAULT_BLOCK_LENGTH
    # Each block starts with a refresh over whole rows, whose cost is spread over the block's positions. An exact cache
    # needs no refresh: its window is twice as wide instead.
    return PassCost(floor, overhead, length * canvases_of(config), 0.0 if config.cache == "exact" else 1 / length)


def _with_draft_model(cost: PassCost, runner: Runner, draft: Runner, tokens: int) -> PassCost:
    """Add the draft model's passes to the cost of a pass; each of them computes two positions of every row."""
    # The time of a position is proportional to the weights that compute it.
    unit = weight_bytes(draft.layout, draft.dtype) / weight_bytes(runner.layout, runner.dtype)
    return replace(cost, draft=replace(pass_cost(draft, SamplingConfig()), window=2), draft_passes=tokens * unit)


def pool_grid(
    runner: Runner,
    config: GenerationConfig,
    canvas: int,
    slots: int,
    widths: Sequence[int] | None = None,
    limit: int = MAX_PROGRAMS,
) -> Grid:
    """Choose the buckets of a pool.

    Args:
      runner: the model on its mesh.
      config: decoding parameters that are compiled.
      canvas: S of the widest bucket.
      slots: maximum number of rows at a time.
      widths: widths of the other buckets; None chooses them automatically.
      limit: maximum number of buckets.
    """
    own = None if widths is None else sorted({*map(runner.bucket, widths), canvas})
    cost, data = pass_cost(runner, config), runner_for(runner, config).row_unit
    grows = isinstance(config, SamplingConfig)
    step, unit = runner.width_step(), runner.width_unit()
    return make_grid(slots, canvas, cost, data=data, step=step, unit=unit, widths=own, limit=limit, grows=grows)


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
        self, config: GenerationConfig, grid: Grid, max_steps: int, make: Callable[[Bucket], Slots], data: int = 1
    ) -> None:
        """Create a pool without rows.

        Args:
          config: decoding parameters that are compiled.
          grid: the buckets.
          max_steps: number of denoise steps per block that slots support.
          make: function that creates the free slots of a bucket.
          data: rows are multiples of this, see :attr:`runtime.execution.runner.Runner.row_unit`.
        """
        self.config, self.grid, self.max_steps, self._make, self._data = config, grid, max_steps, make, data
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

        return cls(config, grid, max_steps, make, runner.row_unit)

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
        prefills = isinstance(self.config, SamplingConfig) and self.config.use_cache
        growth = tokens_per_pass(self.config)
        return PoolLimits(self.grid, most, self._data, canvases_of(self.config), growth, prefills)

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
            done = slots.run(one.iterations, chunks=one.chunks)
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
        # Move rows before inserting new ones, because prefills of new rows may overwrite caches that are still to move.
        for rows in ([*moving, None], list(requests)) if moving else ([*requests, None],):
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
