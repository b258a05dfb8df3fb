"""The two kinds of slots: for diffusion models, and for autoregressive models.

Dimension letters: B slots, S canvas of a request (its prompt and its new tokens).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from runtime.decoding.block_schedule import block_schedule
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.decoding.schedule import padded_steps
from runtime.decoding.state import ENTRIES_PER_STEP
from runtime.execution.autoregressive_slots import AutoregressiveSlots
from runtime.execution.canvas import pad_after_end
from runtime.execution.programs import abstract_denoise, lower_denoise, put
from runtime.execution.result import DraftStats
from runtime.execution.row_arrays import diffusion_row
from runtime.execution.row_request import RowRequest, RowResult, block_span
from runtime.execution.runner import Runner
from runtime.execution.slots import Slots
from runtime.execution.specialization import denoise_program


class DiffusionSlots(Slots):
    """Slots of a diffusion model."""

    def __init__(
        self,
        runner: Runner,
        config: DiffusionConfig,
        width: int,
        count: int,
        steps: int = 1,
        span: int | None = None,
        entries: bool = False,
    ) -> None:
        """Create free slots.

        Args:
          runner: the model on its mesh.
          config: decoding parameters that determine what is compiled. All requests must have the same
            :func:`runtime.execution.specialization.program_key`.
          width: bucket of the canvases.
          count: B, a multiple of the data axis.
          steps: maximum number of steps per block of any request; the steps of ``config`` are always supported.
          span: the largest distance in any row from its first mask to its end, in positions; None for ``width``.
          entries: keep the canvases that the last iteration made, for :meth:`entries` (variable length).
        """
        self._entries = entries
        # The ratio table must have the same size for all rows, including empty slots, which have this configuration.
        self._config, self._steps = config, padded_steps(max(steps, block_schedule(config, width)[1]), width)
        self.forward = runner.forward(width, config.attention_block_length)
        model, chunk = runner.layout.config, runner.chunk(count, width)
        span = width if span is None else span
        parts = runner.part_widths(width)
        self.program = denoise_program(
            config, model, str(runner.dtype), chunk=chunk, width=width, span=span, parts=parts
        )
        super().__init__(runner, width, count, config.cache != "none")

    def _row(self, request: RowRequest | None) -> tuple[Any, Any]:
        model = self._runner.layout.config
        row, state = diffusion_row(request, self._config, model, self.width, self._steps)
        if self._entries:
            state = replace(state, entries=np.full((1, ENTRIES_PER_STEP, self.width), -1, np.int32))
        return row, state

    def _abstract(self) -> tuple[Any, Any]:
        return abstract_denoise(
            self._runner.layout,
            self.count,
            self.width,
            self._steps,
            self._own_cache_dtype,
            log_probabilities=self._config.log_probabilities,
            history=self._entries,
            drafts=self.program.drafts,
        )

    def run(
        self,
        max_iterations: int | None = None,
        step_limit: int | None = None,
        chunks: int | None = None,
        min_running: int = 1,
    ) -> np.ndarray:
        """Run iterations; see :meth:`Slots.run`."""
        del chunks
        limits = {"max_iterations": self._limit(max_iterations), "step_limit": self._limit(step_limit)}
        self.request = replace(self.request, **limits, min_running=self._limit(min_running))
        # The counter starts at 0 in each run, because slots may live for more iterations than an int32 can count.
        arguments = (self._runner.weights, self.request, replace(self.state, iteration=self._device_scalar(0)))
        self.state = self._denoise_program(arguments)(*arguments)
        made = int(np.asarray(self.state.iteration))
        self.iterations += made
        self.forwards += made * (1 + self.program.guided)
        return np.asarray(self.whole()[1].done)

    def _denoise_program(self, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        key = ("denoise", self.forward, self.program)
        return self._compiled(key, arguments, lambda: lower_denoise(self.forward, self.program, *arguments))

    def compile(self) -> None:
        """See :meth:`Slots.compile`."""
        self._denoise_program((self._runner.weights, *self._abstract()))

    def restart(self, canvas: np.ndarray, step: int) -> None:
        """Set every row to a given canvas and step. Rows must have a single block (exact decoding).

        Args:
          canvas: int32 ``[B, S]``. Positions that were already committed may be masked again.
          step: the next step of all rows.
        """
        place = self.state.done.sharding
        zeros = np.zeros(self.count, np.int32)
        if self.program.schedule != "even":  # masks in a prompt do not count in LLaDA's schedule
            self.request = replace(self.request, first=put(zeros, place))
        self.state = replace(
            self.state,
            canvas=put(canvas, self.state.canvas.sharding),
            block=put(zeros, place),
            step_in_block=put(np.full(self.count, step, np.int32), place),
            done=put(np.zeros(self.count, bool), place),
        )

    def _canvases(self) -> tuple[np.ndarray, np.ndarray]:
        """Return canvases, padded after the end of rows that stopped early, and commit steps, both int32 ``[B, S]``."""
        request, state = self.whole()
        canvas, commit_steps = np.asarray(state.canvas), np.asarray(state.commit_steps)
        prompts, stop_tokens = np.asarray(request.prompts), np.asarray(request.stop_tokens)
        if self.program.variable_length:
            # Results have no suffix, and no stop token ends a prompt with masks.
            canvas = np.where(self._inside, canvas, self._runner.layout.config.pad_token_id)
            commit_steps = np.where(self._inside, commit_steps, -1)
            prompts = np.where(self._moving_prompts, self.width, prompts)
        return pad_after_end(canvas, commit_steps, prompts, stop_tokens, self._runner.layout.config), commit_steps

    def canvas(self) -> np.ndarray:
        """Return the slots' tokens; see :meth:`Slots.canvas`. Masks inside a prompt are -1 too.

        If canvases have a variable length, positions that a row may still grow into are -1 too, and so is what follows
        a prompt whose positions still move.
        """
        canvas, _ = self._canvases()
        canvas = np.where(canvas == self._runner.layout.config.mask_token_id, -1, canvas)
        if self.program.variable_length:
            request, state = self.whole()
            after = np.arange(self.width) >= np.asarray(request.prompts)[:, None]
            open_places = (self._moving_prompts[:, None] & after) | ~self._inside
            canvas = np.where(open_places & ~np.asarray(state.done)[:, None], -1, canvas)
        return canvas

    @property
    def _inside(self) -> np.ndarray:
        """The positions of prompt and new tokens that rows have now, if canvases have a variable length: ``[B, S]``."""
        request, state = self.whole()
        suffixes = np.asarray(request.lengths) - np.asarray(request.ends)
        inside: np.ndarray = np.arange(self.width) < (np.asarray(state.lengths) - suffixes)[:, None]
        return inside

    @property
    def _moving_prompts(self) -> np.ndarray:
        """The rows whose prompt has masks, so that its positions move if the canvas has a variable length: ``[B]``."""
        request, _ = self.whole()
        moving: np.ndarray = np.asarray(request.first) < np.asarray(request.prompts)
        return moving

    def entries(self) -> np.ndarray:
        """Return the canvases that the last iteration made; see :attr:`DenoiseState.entries`."""
        return np.asarray(self.whole()[1].entries)

    def collect(self, taken: Mapping[int, tuple[int, RowRequest]], ended_early: bool = False) -> list[RowResult]:
        """Return the results of rows; see :meth:`Slots.collect`."""
        canvas, commit_steps = self._canvases()
        if ended_early:
            model = self._runner.layout.config
            canvas = np.where(canvas == model.mask_token_id, model.pad_token_id, canvas)
        _, state = self.whole()
        log_probabilities, refreshes = self._log_probabilities(), np.asarray(state.refreshes)
        windows, non_finite, drafts = np.asarray(state.window_positions), self.non_finite(), self.draft_stats()
        return [
            RowResult(
                number,
                canvas[slot, : request.length].copy(),
                commit_steps[slot, : request.length].copy(),
                None if log_probabilities is None else log_probabilities[slot, : request.length].copy(),
                int(refreshes[slot]) * request.canvas_length + int(windows[slot]),
                bool(non_finite[slot]),
                drafts.get(slot),
            )
            for slot, (number, request) in taken.items()
        ]

    def draft_stats(self) -> dict[int, DraftStats]:
        """Return the passes and accepted steps of each slot; see :meth:`Slots.draft_stats`."""
        _, state = self.whole()
        if state.drafts is None:
            return {}
        pairs = zip(np.asarray(state.passes).tolist(), np.asarray(state.made_steps).tolist(), strict=True)
        return {slot: DraftStats(made, steps - made) for slot, (made, steps) in enumerate(pairs)}


def open_slots(
    runner: Runner, config: DiffusionConfig | SamplingConfig, width: int, count: int, steps: int, prompt: int
) -> Slots:
    """Create free slots of the kind that ``config`` requires; see the two classes for the arguments."""
    if isinstance(config, DiffusionConfig):
        return DiffusionSlots(runner, config, width, count, steps)
    return AutoregressiveSlots(runner, config, width, count, prompt, together=False)


def longest_span(runner: Runner, requests: Sequence[RowRequest]) -> int:
    """Return the longest distance from a row's first block to its end, or the longest prompt if autoregressive.

    It is rounded up: to a bucket, or to the step of widths of known rows if autoregressive.
    """
    if isinstance(requests[0].config, SamplingConfig):
        step = runner.width_step(known=True)
        return math.ceil(max(len(request.tokens) for request in requests) / step) * step
    return runner.bucket(max(block_span(row, runner.layout.config) + len(row.suffix) for row in requests))


def open_slots_for(
    runner: Runner,
    config: DiffusionConfig | SamplingConfig,
    width: int,
    count: int,
    steps: int,
    span: int,
    entries: bool = False,
) -> Slots:
    """Create free slots for rows that are all known and have the same compiled settings.

    Args:
      runner: the model on its mesh.
      config: decoding parameters of any of the rows.
      width: bucket of the canvases.
      count: B, a multiple of the data axis.
      steps: maximum number of steps per block of any row; not used if autoregressive.
      span: :func:`longest_span` of the rows.
      entries: see :class:`DiffusionSlots`.
    """
    if isinstance(config, SamplingConfig):
        return AutoregressiveSlots(runner, config, width, count, span)
    return DiffusionSlots(runner, config, width, count, steps, min(width, span), entries)
