"""The two kinds of slots: for diffusion models, and for autoregressive models.

Dimension letters: B slots, S canvas of a request (its prompt and its new tokens).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from runtime.decoding.block_schedule import block_schedule
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.decoding.schedule import padded_steps
from runtime.decoding.state import ENTRIES_PER_STEP
from runtime.execution.canvas import pad_after_end
from runtime.execution.programs import (
    abstract_decode,
    abstract_denoise,
    fetch,
    lower_decode,
    lower_denoise,
    lower_prefill,
    lower_prefill_chunks,
    put,
)
from runtime.execution.result import DraftStats
from runtime.execution.row_arrays import autoregressive_row, diffusion_row
from runtime.execution.row_request import RowRequest, RowResult, block_span
from runtime.execution.runner import Runner
from runtime.execution.slots import MovingRow, Row, Slots
from runtime.execution.specialization import decode_program, denoise_program


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
        self, max_iterations: int | None = None, step_limit: int | None = None, chunks: int | None = None
    ) -> np.ndarray:
        """Run iterations; see :meth:`Slots.run`."""
        del chunks
        limits = {"max_iterations": self._limit(max_iterations), "step_limit": self._limit(step_limit)}
        self.request = replace(self.request, **limits)
        # The counter starts at 0 in each run, because slots may live for more iterations than an int32 can count.
        arguments = (self._runner.weights, self.request, replace(self.state, iteration=self._device_scalar(0)))
        self.state = self._denoise_program(arguments)(*arguments)
        made = int(fetch(self.state.iteration))
        self.iterations += made
        self.forwards += made * (1 + self.program.guided)
        return fetch(self.state.done)

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
        canvas, commit_steps = fetch(self.state.canvas), fetch(self.state.commit_steps)
        prompts, stop_tokens = fetch(self.request.prompts), fetch(self.request.stop_tokens)
        if self.program.variable_length:
            # Results have no suffix, and no stop token ends a prompt with masks.
            suffixes = fetch(self.request.lengths) - fetch(self.request.ends)
            inside = np.arange(self.width) < (fetch(self.state.lengths) - suffixes)[:, None]
            canvas = np.where(inside, canvas, self._runner.layout.config.pad_token_id)
            commit_steps = np.where(inside, commit_steps, -1)
            prompts = np.where(self._moving_prompts, self.width, prompts)
        return pad_after_end(canvas, commit_steps, prompts, stop_tokens, self._runner.layout.config), commit_steps

    def canvas(self) -> np.ndarray:
        """Return the slots' tokens; see :meth:`Slots.canvas`. Masks inside a prompt are -1 too.

        If canvases have a variable length, padding follows the tokens that a row has now. What follows a prompt whose
        positions still move is -1.
        """
        canvas, _ = self._canvases()
        canvas = np.where(canvas == self._runner.layout.config.mask_token_id, -1, canvas)
        if self.program.variable_length:
            moving = self._moving_prompts & ~fetch(self.state.done)
            after = np.arange(self.width) >= fetch(self.request.prompts)[:, None]
            canvas = np.where(moving[:, None] & after, -1, canvas)
        return canvas

    @property
    def _moving_prompts(self) -> np.ndarray:
        """The rows whose prompt has masks, so that its positions move if the canvas has a variable length: ``[B]``."""
        moving: np.ndarray = fetch(self.request.first) < fetch(self.request.prompts)
        return moving

    def entries(self) -> np.ndarray:
        """Return the canvases that the last iteration made; see :attr:`DenoiseState.entries`."""
        return fetch(self.state.entries)

    def collect(self, taken: Mapping[int, tuple[int, RowRequest]], ended_early: bool = False) -> list[RowResult]:
        """Return the results of rows; see :meth:`Slots.collect`."""
        canvas, commit_steps = self._canvases()
        if ended_early:
            model = self._runner.layout.config
            canvas = np.where(canvas == model.mask_token_id, model.pad_token_id, canvas)
        log_probabilities, refreshes = self._log_probabilities(), fetch(self.state.refreshes)
        windows, non_finite, drafts = fetch(self.state.window_positions), self.non_finite(), self.draft_stats()
        return [
            RowResult(
                number,
                canvas[slot, : request.length].copy(),
                commit_steps[slot, : request.length].copy(),
                None if log_probabilities is None else log_probabilities[slot, : request.length].copy(),
                int(refreshes[slot]) * request.length_with_suffix + int(windows[slot]),
                bool(non_finite[slot]),
                drafts.get(slot),
            )
            for slot, (number, request) in taken.items()
        ]

    def draft_stats(self) -> dict[int, DraftStats]:
        """Return the passes and accepted steps of each slot; see :meth:`Slots.draft_stats`."""
        if self.state.drafts is None:
            return {}
        pairs = zip(fetch(self.state.passes).tolist(), fetch(self.state.made_steps).tolist(), strict=True)
        return {slot: DraftStats(made, steps - made) for slot, (made, steps) in enumerate(pairs)}


class AutoregressiveSlots(Slots):
    """Slots of an autoregressive model."""

    def __init__(
        self, runner: Runner, config: SamplingConfig, width: int, count: int, prompt: int, together: bool = True
    ) -> None:
        """Create free slots.

        Args:
          runner: the model on its mesh.
          config: decoding parameters that determine what is compiled. All requests must have the same
            :func:`runtime.execution.specialization.program_key`.
          width: bucket of prompts with their new tokens.
          count: B, a multiple of the data axis.
          prompt: number of tokens of the longest prompt.
          together: whether one pass prefills all rows of the first insertion, and reads a prompt that adjacent rows
            share only once. All other prompts are read in chunks.
        """
        self._config, self._prompt = config, min(width, runner.bucket(prompt))
        self._chunk = min(width, runner.prompt_chunk)
        self._forward = runner.forward(self._prompt if config.use_cache else width)
        self._program = decode_program(config, runner.layout.config.vocab_size)
        # Size of the groups of adjacent rows with the same prompt in the first insertion, and whether its prefill is
        # still to run.
        self._shared, self._prefill_pending, self._together = 1, False, together
        self._own_prompt = np.ones(count, bool)
        # For each slot, the number of prompt tokens, and how many of them are in the cache.
        self._prompts, self._read = np.ones(count, int), np.ones(count, int)
        super().__init__(runner, width, count, config.use_cache)

    def _row(self, request: RowRequest | None) -> tuple[Any, Any]:
        return autoregressive_row(request, self._config, self._runner.layout.config, self.width)

    def _abstract(self) -> tuple[Any, Any]:
        return abstract_decode(
            self._runner.layout,
            self.count,
            self.width,
            self._own_cache_dtype,
            log_probabilities=self._config.log_probabilities,
            drafts=self._config.drafts > 0,
        )

    @property
    def unread(self) -> list[int]:
        """Slots whose prompts are not completely read; see :attr:`Slots.unread`."""
        return [int(slot) for slot in np.flatnonzero(self._read < self._prompts)]

    def run(
        self, max_iterations: int | None = None, step_limit: int | None = None, chunks: int | None = None
    ) -> np.ndarray:
        """Run iterations, each of one token per row or more; see :meth:`Slots.run`. ``step_limit`` is ignored."""
        del step_limit
        self.request = replace(self.request, max_iterations=self._limit(max_iterations))
        self.state = replace(self.state, iteration=self._device_scalar(0))
        if self._prefill_pending:
            self._prefill()
        elif self.unread:
            self._prefill_chunks(chunks)
        if max_iterations is None or max_iterations > int(fetch(self.state.iteration)):
            arguments = (self._runner.weights, self.request, self.state)
            self.state = self._decode_program(arguments)(*arguments)
        made = int(fetch(self.state.iteration))
        self.iterations += made
        self.forwards += made
        return fetch(self.state.done)

    def insert(self, rows: Mapping[int, Row]) -> None:
        """Insert rows; see :meth:`Slots.insert`. The next runs start by reading the new rows' prompts."""
        first = self.request is None
        super().insert(rows)
        new = [slot for slot, row in rows.items() if isinstance(row, RowRequest)]
        self._own_prompt[[slot for slot, row in rows.items() if row is not None]] = True
        for slot, row in rows.items():
            if isinstance(row, MovingRow):
                self._own_prompt[slot] = row.reads_prompt
        if not self._config.use_cache:
            return
        for slot, row in rows.items():
            self._prompts[slot], self._read[slot] = _prompt_and_read(row)
        if not new:
            return
        if first and self._together and len(new) == len([row for row in rows.values() if row is not None]):
            own = self.count // self._runner.layout.spec.data
            self._shared = _shared_prompt_group(
                [row.tokens for row in rows.values() if isinstance(row, RowRequest)], own
            )
            self._own_prompt, self._prefill_pending = np.arange(self.count) % self._shared == 0, True
        elif self._prefill_pending:
            self._prefill()
            self.forwards += 1

    def take(self, slots: Sequence[int]) -> dict[int, MovingRow]:
        """Copy rows; see :meth:`Slots.take`. A pending prefill runs first."""
        if self._prefill_pending:
            self._prefill()
            self.forwards += 1
        return {
            slot: replace(row, reads_prompt=bool(self._own_prompt[slot])) for slot, row in super().take(slots).items()
        }

    def compile(self) -> None:
        """See :meth:`Slots.compile`."""
        arguments = (self._runner.weights, *self._abstract())
        self._decode_program(arguments)
        if self._config.use_cache:
            chunks = jax.ShapeDtypeStruct((), np.int32, sharding=self._replicated)
            self._prefill_chunks_program((*arguments, chunks))

    def _decode_program(self, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        key = ("decode", self._forward, self._program)
        return self._compiled(key, arguments, lambda: lower_decode(self._forward, self._program, *arguments))

    def _prefill_chunks_program(self, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        return self._compiled(
            ("prefill chunks", self._chunk, self._forward, self._program),
            arguments,
            lambda: lower_prefill_chunks(self._forward, self._program, self._chunk, *arguments),
        )

    def _prefill(self) -> None:
        """Prefill all slots in one pass, and generate the first token of each row."""
        program = replace(self._program, samples=self._shared)
        arguments = (self._runner.weights, self.request, self.state)
        run = self._compiled(
            ("prefill", self._prompt, self._forward, program),
            arguments,
            lambda: lower_prefill(self._forward, program, self._prompt, *arguments),
        )
        self.state, self._prefill_pending, self._read = run(*arguments), False, self._prompts.copy()

    def _prefill_chunks(self, chunks: int | None) -> None:
        """Read the next chunks of prompts. A row whose prompt has been read to its end gets its first token."""
        start, before = time.perf_counter(), self._read
        arguments = (self._runner.weights, self.request, self.state, self._limit(chunks))
        self.state = self._prefill_chunks_program(arguments)(*arguments)
        self._read = fetch(self.state.read).astype(int)
        # Chunks that each slot has read in this run: the number so far, minus the number before.
        passes = -(-self._read // self._chunk) + before // -self._chunk
        self.forwards += int(passes.reshape(self._runner.layout.spec.data, -1).sum(axis=1).max())
        self.prefill_seconds += time.perf_counter() - start

    def canvas(self) -> np.ndarray:
        """Return the slots' tokens; see :meth:`Slots.canvas`."""
        tokens, lengths = fetch(self.state.tokens), fetch(self.state.lengths)
        return np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, -1)

    def collect(self, taken: Mapping[int, tuple[int, RowRequest]], ended_early: bool = False) -> list[RowResult]:
        """Return the results of rows; see :meth:`Slots.collect`. Commit steps are indices of the new tokens."""
        del ended_early  # positions that are not generated hold padding anyway
        tokens, lengths = fetch(self.state.tokens), fetch(self.state.lengths)
        log_probabilities, non_finite, drafts = self._log_probabilities(), self.non_finite(), self.draft_stats()
        found = []
        for slot, (number, request) in taken.items():
            prompt, length = len(request.tokens), int(lengths[slot])
            steps = np.arange(request.length, dtype=np.int32) - prompt
            steps[length:] = -1
            own = None if log_probabilities is None else _at_length(log_probabilities[slot], request.length, 0)
            # A growing row may be in slots that are narrower than its full length.
            sequence = _at_length(tokens[slot], request.length, self._runner.layout.config.pad_token_id)
            passes = drafts[slot].passes if slot in drafts else length - prompt
            positions = self._positions(slot, prompt, passes)
            steps = np.maximum(steps, -1)
            found.append(RowResult(number, sequence, steps, own, positions, bool(non_finite[slot]), drafts.get(slot)))
        return found

    def draft_stats(self) -> dict[int, DraftStats]:
        """Return the passes and accepted steps of each slot; see :meth:`Slots.draft_stats`. A step is a new token."""
        if self.state.passes is None:
            return {}
        new = fetch(self.state.lengths) - fetch(self.request.prompts)
        pairs = zip(fetch(self.state.passes).tolist(), new.tolist(), strict=True)
        return {slot: DraftStats(passes, steps - passes) for slot, (passes, steps) in enumerate(pairs)}

    def _positions(self, slot: int, prompt: int, passes: int) -> int:
        """Return the number of positions that a row's forward passes computed, the first of them for its prompt."""
        if not self._config.use_cache:
            return passes * prompt + passes * (passes - 1) // 2
        return (prompt if self._own_prompt[slot] else 0) + max(0, passes - 1) * (1 + self._program.drafts)


def _prompt_and_read(row: Row) -> tuple[int, int]:
    """Return the number of tokens of a row's prompt, and how many are in the cache. An empty slot has none to read."""
    if isinstance(row, MovingRow):
        return int(row.request.prompts[0]), int(row.state.read[0])
    return (1, 1) if row is None else (len(row.tokens), 0)


def _at_length(values: np.ndarray, length: int, fill: float) -> np.ndarray:
    """Return the first ``length`` values of a row, extended with ``fill`` if there are fewer."""
    own = values[:length]
    return np.append(own, np.full(length - len(own), fill, values.dtype))


def _shared_prompt_group(prompts: Sequence[Sequence[int]], slots: int) -> int:
    """Return the largest size of equal groups of adjacent rows such that the rows of each group share a prompt.

    No group crosses a shard of ``slots`` rows.
    """
    runs = [len(list(same)) for _, same in itertools.groupby(prompts, key=tuple)]
    return math.gcd(*runs, slots) if runs else 1


def open_slots(
    runner: Runner, config: DiffusionConfig | SamplingConfig, width: int, count: int, steps: int, prompt: int
) -> Slots:
    """Create free slots of the kind that ``config`` requires; see the two classes for the arguments."""
    if isinstance(config, DiffusionConfig):
        return DiffusionSlots(runner, config, width, count, steps)
    return AutoregressiveSlots(runner, config, width, count, prompt, together=False)


def longest_span(runner: Runner, requests: Sequence[RowRequest]) -> int:
    """Return the longest distance from a row's first block to its end, or the longest prompt if autoregressive.

    It is rounded up to a bucket.
    """
    if isinstance(requests[0].config, SamplingConfig):
        return runner.bucket(max(len(request.tokens) for request in requests))
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
