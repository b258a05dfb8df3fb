"""Running block diffusion: one batch on the mesh, whole or streamed.

Dimension letters: B batch, S the caller's prompt width, N new tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from runtime.decoding.blocks import BlockProgram, BlockRequest, BlockState
from runtime.decoding.parameters import DEFAULT_BLOCK_LENGTH, DiffusionConfig
from runtime.decoding.schedule import padded_steps, transfer_ratios
from runtime.execution.canvas import CanvasRows, denoise_program
from runtime.execution.programs import (
    block_request_shardings,
    block_state_shardings,
    empty_cache,
    fetch,
    lower_blocks,
    put,
    shapes_of,
)
from runtime.execution.rows import Rows, sampling_rows, seed_words, stop_rows
from runtime.execution.run_result import RunResult
from runtime.execution.runner import Runner

_NEVER = 1 << 30


def block_schedule(config: DiffusionConfig, width: int) -> tuple[int, int]:
    """Positions of a block, and steps that it takes at most.

    A parallel rule commits at least one token a step, so a block has as many steps as positions; else the steps of the
    request are shared among the blocks of its new tokens.
    """
    length = config.block_length or (width if config.cache == "none" else DEFAULT_BLOCK_LENGTH)
    length = min(length, width)
    if config.parallel != "none":
        return length, length
    return length, max(1, math.ceil(config.steps / max(1, math.ceil(config.max_new_tokens / length))))


def window_widths(cache: str, length: int, span: int, refresh_blocks: int = 1) -> tuple[int, ...]:
    """Widths of the windows that are compiled: of the block alone, or of all that follows, halved down to a block.

    Where blocks are entered without a refresh there is one of two blocks as well.

    Args:
      cache: ``none``, ``prefix`` or ``dual``.
      length: of a block.
      span: from the first mask of any row to its end.
      refresh_blocks: blocks from one that is entered with a refresh to the next; 0 for the first alone.
    """
    if cache == "none":
        return ()
    if cache == "dual":
        return (length + 1,) if refresh_blocks == 1 else (2 * length + 1, length + 1)
    widths = [span]
    while widths[-1] > 2 * length:
        widths.append(-(-widths[-1] // 2))
    return tuple(width + 1 for width in widths)


def block_batch(
    runner: Runner, rows: Rows, config: DiffusionConfig, seeds: list[int], width: int, batch: int, steps: int = 1
) -> tuple[CanvasRows, BlockRequest, BlockState]:
    """A batch as the devices take it, still on the host: its rows, the request, and the state without a cache.

    Args:
      runner: the model on its mesh.
      rows: at most ``batch`` start-aligned prompts; none for rows that are all filler.
      config: the request.
      seeds: one per row.
      width: bucket, at least the longest prompt and its new tokens.
      batch: rows on the devices, filler included.
      steps: of a block, for which the request has room at least.
    """
    model = runner.layout.config
    own = CanvasRows(runner, rows, config, width, batch)
    canvas, lengths = own.canvas, own.lengths
    masked = canvas == model.mask_token_id
    first = np.where(masked.any(axis=1), masked.argmax(axis=1), lengths).astype(np.int32)
    length, steps_per_block = block_schedule(config, width)
    ratios = np.zeros((batch, padded_steps(max(steps_per_block, steps), width)), np.float32)
    ratios[:, :steps_per_block] = transfer_ratios(steps_per_block, float(config.eps))

    def each(value: np.generic) -> np.ndarray:
        return np.full(batch, value)

    request = BlockRequest(
        lengths=lengths,
        first=first,
        seeds=seed_words([*seeds, *[0] * (batch - len(seeds))]),
        ratios=ratios,
        block_length=each(np.int32(length)),
        steps_per_block=each(np.int32(steps_per_block)),
        refresh_interval=each(np.int32(config.refresh_interval or _NEVER)),
        refresh_blocks=each(np.int32(config.refresh_blocks)),
        stop_tokens=stop_rows(config.stop_token_ids, batch),
        limit=np.int32(0),
        threshold=each(np.float32(config.threshold)),
        factor=each(np.float32(config.factor)),
        alg_temp=each(np.float32(config.alg_temp or 0.0)),
        **sampling_rows(config, model.vocab_size, batch),
    )
    zeros = np.zeros(batch, np.int32)
    state = BlockState(
        canvas=canvas,
        commit_steps=np.full_like(canvas, -1),
        **dict.fromkeys(
            ("block", "step_in_block", "steps_until_refresh", "previous_block_stale", "refreshes", "window_positions"),
            zeros,
        ),
        done=first >= lengths,
        step=np.int32(0),
        log_probabilities=np.zeros(canvas.shape, np.float32) if config.log_probabilities else None,
    )
    return own, request, state


def block_program(runner: Runner, config: DiffusionConfig, width: int, batch: int, span: int) -> BlockProgram:
    """What of a request is compiled in, for rows whose masks span at most ``span`` positions."""
    vocab_size, chunk = runner.layout.config.vocab_size, runner.chunk(batch, width)
    return BlockProgram(
        denoise=denoise_program(config, vocab_size, str(runner.dtype), chunk),
        parallel=config.parallel,
        windows=window_widths(config.cache, block_schedule(config, width)[0], span, config.refresh_blocks),
        within_block=config.cache == "dual",
    )


def put_block_state(runner: Runner, state: BlockState, cached: bool) -> BlockState:
    """A state onto the mesh, with an empty cache where there is to be one."""
    placed: BlockState = jax.tree.map(put, state, block_state_shardings(runner.layout, state))
    if not cached:
        return placed
    batch, width = state.canvas.shape
    return replace(placed, cache=empty_cache(runner.layout, batch, width, runner.cache_dtype))


class BlockRun:
    """One batch of rows on the mesh, between two iterations."""

    def __init__(
        self,
        runner: Runner,
        rows: Rows,
        config: DiffusionConfig,
        seeds: list[int],
        width: int,
        batch: int,
    ) -> None:
        """Put a batch on the mesh.

        Args:
          runner: the model on its mesh.
          rows: at most ``batch`` start-aligned prompts.
          config: the request.
          seeds: one per row.
          width: bucket, at least the longest prompt and its new tokens.
          batch: rows on the devices, filler included; a multiple of the data axis.
        """
        self._runner = runner
        self._forward = runner.forward(width)
        self._rows, request, state = block_batch(runner, rows, config, seeds, width, batch)
        spans = request.lengths - request.first
        length, steps_per_block = block_schedule(config, width)
        self.steps = max(1, int((-(-spans // length)).max()) * steps_per_block)
        where = block_request_shardings(runner.layout)
        self._request: BlockRequest = jax.tree.map(put, request, where)
        self._limit_sharding = where.limit
        self._state = put_block_state(runner, state, config.cache != "none")
        # Spans are rounded up like canvases, so that few windows are ever compiled.
        span = min(width, runner.bucket(int(spans.max())))
        self._program = block_program(runner, config, width, batch, span)
        self._done = 0

    @property
    def finished(self) -> bool:
        """Whether every row is done, as far as the host knows."""
        return self._done >= self.steps

    def advance(self, limit: int) -> None:
        """Run up to iteration ``limit`` on the devices, without waiting for them."""
        limit = min(limit, self.steps)
        request: BlockRequest = replace(self._request, limit=put(np.int32(limit), self._limit_sharding))
        arguments: tuple[Any, ...] = (self._runner.weights, request, self._state)
        compiled = self._runner.programs.get(
            ("blocks", self._forward, self._program, shapes_of(arguments)),
            lambda: lower_blocks(self._forward, self._program, *arguments),
        )
        self._state = compiled(*arguments)
        self._done = limit

    def advance_by(self, steps: int) -> Iterator[int]:
        """Run to the end, ``steps`` iterations at a time, yielding how many there have been when they are over."""
        while not self.finished:
            self.advance(self._done + steps)
            if bool(fetch(self._state.done).all()):
                self._done = self.steps
            yield self._done

    def canvas(self) -> np.ndarray:
        """The canvas as it is now, in the caller's rows: int32 ``[B, S + N]``."""
        return self._rows.canvas_of(self._state)

    def result(self, history: bool) -> RunResult:
        """Sequences, the row's step that set each position, the history when asked for, and what it cost."""
        refreshes, windows = fetch(self._state.refreshes), fetch(self._state.window_positions)
        positions = int((refreshes * self._rows.lengths + windows)[: self._rows.count].sum())
        return self._rows.result(self._state, self.steps, history, int(fetch(self._state.step)), positions)
