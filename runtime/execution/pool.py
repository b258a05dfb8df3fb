"""Slots of one shape, and which rows hold them.

Dimension letters: S positions of a slot.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.decoding.block_schedule import block_schedule
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.execution.row_request import RowRequest
from runtime.execution.rows import check_kind
from runtime.execution.runner import Runner, weight_bytes
from runtime.execution.slots import Slots, open_slots
from runtime.execution.specialization import general
from runtime.execution.step_plan import PoolOutcome, PoolPlan
from sharding.errors import InputError

GenerationConfig = DiffusionConfig | SamplingConfig

# Prompts that are read in one step for each shard of ``data``: rows that already generate wait in the meantime.
_PREFILLS_PER_SHARD = 2


def uses_cache(config: GenerationConfig) -> bool:
    """Whether rows of this configuration keep keys and values."""
    return config.use_cache if isinstance(config, SamplingConfig) else config.cache != "none"


@dataclass(frozen=True)
class PoolShape:
    """Slots that are to be made.

    Attributes:
      config: decides what is compiled; rows may differ in everything else.
      width: S, prompt and new tokens; rounded up to a bucket.
      slots: rows at a time; rounded down to a multiple of the data axis, and limited by memory.
      max_steps: denoise steps of a block at most; None for as many as positions, or as ``config`` has.
    """

    config: GenerationConfig
    width: int
    slots: int
    max_steps: int | None = None


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


def slot_count(runner: Runner, config: GenerationConfig, width: int, wanted: int) -> int:
    """Slots that are made where ``wanted`` are asked for: a multiple of the data axis, limited by memory.

    Args:
      runner: the model on its mesh.
      config: of the rows, for whether they keep a cache.
      width: S, a bucket.
      wanted: at least 1.
    """
    data = runner.layout.spec.data
    return runner.batch_size(max(data, wanted // data * data), width, uses_cache(config))


def check_pools(runner: Runner, shapes: list[PoolShape]) -> None:
    """Check that the model allows the shapes, and that their slots fit into memory beside one another.

    Raises:
      InputError: a configuration for the other way of decoding, more positions than the model allows, or more memory
        than there is; says what they need.
    """
    model = runner.layout.config
    for shape in shapes:
        check_kind(model, shape.config)
        if (width := runner.bucket(shape.width)) > model.max_positions:
            raise InputError(f"{width} positions; the model allows {model.max_positions}")
    room, weights, data = runner.room(), weight_bytes(runner.layout, runner.dtype), runner.layout.spec.data
    memories = []
    for shape in shapes:
        width, config = runner.bucket(shape.width), general(shape.config)
        rows = slot_count(runner, config, width, shape.slots) // data
        memories.append(runner.memory(rows, width, uses_cache(config)))
    # Forward passes take turns; caches stay.
    kept = sum(sum(tensor.bytes for tensor in memory.resident) - weights for memory in memories)
    needed = weights + kept + max(sum(tensor.bytes for tensor in memory.peak) for memory in memories)
    if len(shapes) > 1 and room is not None and needed > room:
        raise InputError(
            f"slots of {len(shapes)} kinds need {needed / 1e9:.1f} GB of each device, {kept / 1e9:.1f} GB of it "
            f"for what they keep, and {room / 1e9:.1f} GB are to be had: fewer slots, canvases or ways of decoding"
        )


class Pool:
    """Slots of one shape, and which rows hold them.

    Attributes:
      config: what is compiled.
      width: S, a bucket.
      count: how many slots there are.
      max_steps: denoise steps of a block at most.
      prefill_limit: rows that may be inserted in a step; None for as many as there are free slots.
      held: number and request of the row in each slot that is taken.
    """

    def __init__(self, slots: Slots, config: GenerationConfig, max_steps: int, data: int = 1) -> None:
        """Take free slots.

        Args:
          slots: on the mesh.
          config: that they were made for.
          max_steps: of a block, that they have room for.
          data: shards of the batch.
        """
        self._slots = slots
        self.config, self.max_steps = config, max_steps
        self.width, self.count = slots.width, slots.count
        self.prefill_limit = _PREFILLS_PER_SHARD * data if isinstance(config, SamplingConfig) else None
        self.held: dict[int, tuple[int, RowRequest]] = {}

    @classmethod
    def open(cls, runner: Runner, shape: PoolShape) -> Pool:
        """Make free slots for rows that are not known yet.

        Raises:
          InputError: fewer steps than the configuration takes.
        """
        config, width = general(shape.config), runner.bucket(shape.width)
        max_steps = step_limit(config, width, shape.max_steps)
        count = slot_count(runner, config, width, shape.slots)
        slots = open_slots(runner, config, width, count, max_steps, width)
        return cls(slots, config, max_steps, runner.layout.spec.data)

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
        """Finish, evict, insert, run iterations, and collect the rows that are done."""
        slots, forwards = self._slots, self._slots.forwards
        ended = {slot: self.held.pop(slot) for slot in plan.finish}
        results = slots.collect(ended, ended_early=True) if ended else []
        changes: dict[int, RowRequest | None] = dict.fromkeys([*plan.finish, *plan.evict])
        for slot in plan.evict:
            self.held.pop(slot, None)
        for one in plan.insert:
            changes[one.slot] = one.request
            self.held[one.slot] = one.row, one.request
        if changes:
            slots.insert(changes)
        canvases: dict[int, np.ndarray] = {}
        seconds, iterations = 0.0, slots.iterations
        if self.held and plan.iterations:
            start = time.perf_counter()
            done = slots.run(plan.iterations)
            seconds = time.perf_counter() - start
            finished = {slot: self.held.pop(slot) for slot in list(self.held) if done[slot]}
            results += slots.collect(finished) if finished else []
            if plan.canvases and self.held:
                canvas = slots.canvas()
                canvases = {row: canvas[slot, : request.length] for slot, (row, request) in self.held.items()}
        ran = slots.iterations - iterations
        return PoolOutcome(plan.pool, results, canvases, slots.forwards - forwards, ran, seconds)
