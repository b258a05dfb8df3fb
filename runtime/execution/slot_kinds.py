"""Slots of diffusion models and of autoregressive ones.

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
from runtime.execution.canvas import pad_after_end
from runtime.execution.programs import (
    fetch,
    lower_decode,
    lower_denoise,
    lower_prefill,
    lower_prefill_chunks,
    put,
)
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
    ) -> None:
        """Make slots.

        Args:
          runner: the model on its mesh.
          config: decides what is compiled; requests are those with the same
            :func:`runtime.execution.specialization.compiled_in`.
          width: bucket of their canvases.
          count: B, a multiple of the data axis.
          steps: of a block, the most that any request has; there is room for those of ``config`` anyway.
          span: positions from the first mask of any row to its end, at most; None for ``width``.
        """
        # One table of ratios for all rows, whatever is inserted: an empty slot has this configuration.
        self._config, self._steps = config, max(steps, block_schedule(config, width)[1])
        self.forward = runner.forward(width)
        model, chunk = runner.layout.config, runner.chunk(count, width)
        self.program = denoise_program(
            config, model, str(runner.dtype), chunk=chunk, width=width, span=width if span is None else span
        )
        super().__init__(runner, width, count, config.cache != "none")

    def _row(self, request: RowRequest | None) -> tuple[Any, Any]:
        return diffusion_row(request, self._config, self._runner.layout.config, self.width, self._steps)

    def run(
        self, max_iterations: int | None = None, step_limit: int | None = None, chunks: int | None = None
    ) -> np.ndarray:
        """See :meth:`Slots.run`."""
        del chunks
        limits = {"max_iterations": self._limit(max_iterations), "step_limit": self._limit(step_limit)}
        self.request = replace(self.request, **limits)
        # Counted from nothing each time: slots may live for more iterations than an int32 counts.
        arguments = (self._runner.weights, self.request, replace(self.state, iteration=self._number(0)))
        self.state = self._denoising(arguments)(*arguments)
        made = int(fetch(self.state.iteration))
        self.iterations += made
        self.forwards += made * (1 + self.program.guided)
        return fetch(self.state.done)

    def _denoising(self, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        key = ("denoise", self.forward, self.program)
        return self._compiled(key, arguments, lambda: lower_denoise(self.forward, self.program, *arguments))

    def compile(self) -> None:
        """See :meth:`Slots.compile`."""
        self._denoising((self._runner.weights, *self._abstract()))

    def restart(self, canvas: np.ndarray, step: int) -> None:
        """Let every row go on with a canvas and a step of a single block, whatever it has done so far.

        Args:
          canvas: int32 ``[B, S]``; any position may be masked again, also before a row's first mask.
          step: the next one of all rows.
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
        """Canvases, padded after the end of rows that ended early, and commit steps: int32 ``[B, S]`` each."""
        canvas, commit_steps = fetch(self.state.canvas), fetch(self.state.commit_steps)
        prompts, stop_tokens = fetch(self.request.prompts), fetch(self.request.stop_tokens)
        return pad_after_end(canvas, commit_steps, prompts, stop_tokens, self._runner.layout.config), commit_steps

    def canvas(self) -> np.ndarray:
        """See :meth:`Slots.canvas`; masks of a prompt are -1 too."""
        canvas, _ = self._canvases()
        return np.where(canvas == self._runner.layout.config.mask_token_id, -1, canvas)

    def collect(self, taken: Mapping[int, tuple[int, RowRequest]], ended_early: bool = False) -> list[RowResult]:
        """See :meth:`Slots.collect`."""
        canvas, commit_steps = self._canvases()
        if ended_early:
            model = self._runner.layout.config
            canvas = np.where(canvas == model.mask_token_id, model.pad_token_id, canvas)
        log_probabilities, refreshes = self._log_probabilities(), fetch(self.state.refreshes)
        windows = fetch(self.state.window_positions)
        return [
            RowResult(
                number,
                canvas[slot, : request.length].copy(),
                commit_steps[slot, : request.length].copy(),
                None if log_probabilities is None else log_probabilities[slot, : request.length].copy(),
                int(refreshes[slot]) * request.length + int(windows[slot]),
            )
            for slot, (number, request) in taken.items()
        ]


class AutoregressiveSlots(Slots):
    """Slots of an autoregressive model."""

    def __init__(
        self, runner: Runner, config: SamplingConfig, width: int, count: int, prompt: int, together: bool = True
    ) -> None:
        """Make slots.

        Args:
          runner: the model on its mesh.
          config: decides what is compiled; requests are those with the same
            :func:`runtime.execution.specialization.compiled_in`.
          width: bucket of prompts and their new tokens.
          count: B, a multiple of the data axis.
          prompt: tokens of the longest prompt.
          together: whether the prompts of the first insertion are read in one pass, each that several rows have once.
            All others are read in chunks.
        """
        self._config, self._prompt = config, min(width, runner.bucket(prompt))
        self._chunk = min(width, runner.prompt_chunk)
        self._forward = runner.forward(self._prompt if config.use_cache else width)
        self._program = decode_program(config, runner.layout.config.vocab_size)
        # Adjacent rows with the same prompt among the first that were inserted, and whether those are still to be read.
        self._shared, self._prefill_pending, self._together = 1, False, together
        self._own_prompt = np.ones(count, bool)
        # Tokens of each slot's prompt, and how many of them are in the cache.
        self._prompts, self._read = np.ones(count, int), np.ones(count, int)
        super().__init__(runner, width, count, config.use_cache)

    def _row(self, request: RowRequest | None) -> tuple[Any, Any]:
        return autoregressive_row(request, self._config, self._runner.layout.config, self.width)

    @property
    def unread(self) -> list[int]:
        """See :attr:`Slots.unread`."""
        return [int(slot) for slot in np.flatnonzero(self._read < self._prompts)]

    def run(
        self, max_iterations: int | None = None, step_limit: int | None = None, chunks: int | None = None
    ) -> np.ndarray:
        """See :meth:`Slots.run`; each iteration generates one token per row, and there are no steps to limit."""
        del step_limit
        self.request = replace(self.request, max_iterations=self._limit(max_iterations))
        self.state = replace(self.state, iteration=self._number(0))
        if self._prefill_pending:
            self._prefill()
        elif self.unread:
            self._prefill_chunks(chunks)
        if max_iterations is None or max_iterations > int(fetch(self.state.iteration)):
            arguments = (self._runner.weights, self.request, self.state)
            self.state = self._decoding(arguments)(*arguments)
        made = int(fetch(self.state.iteration))
        self.iterations += made
        self.forwards += made
        return fetch(self.state.done)

    def insert(self, rows: Mapping[int, Row]) -> None:
        """See :meth:`Slots.insert`; the prompts of requests will be read before their first new token."""
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
            self._shared = _samples([row.tokens for row in rows.values() if isinstance(row, RowRequest)], own)
            self._own_prompt, self._prefill_pending = np.arange(self.count) % self._shared == 0, True
        elif self._prefill_pending:
            self._prefill()
            self.forwards += 1

    def take(self, slots: Sequence[int]) -> dict[int, MovingRow]:
        """See :meth:`Slots.take`; prompts that are still to be read are read first."""
        if self._prefill_pending:
            self._prefill()
            self.forwards += 1
        return {
            slot: replace(row, reads_prompt=bool(self._own_prompt[slot])) for slot, row in super().take(slots).items()
        }

    def compile(self) -> None:
        """See :meth:`Slots.compile`."""
        arguments = (self._runner.weights, *self._abstract())
        self._decoding(arguments)
        if self._config.use_cache:
            chunks = jax.ShapeDtypeStruct((), np.int32, sharding=self._everywhere)
            self._prefilling_chunks((*arguments, chunks))

    def _decoding(self, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        key = ("decode", self._forward, self._program)
        return self._compiled(key, arguments, lambda: lower_decode(self._forward, self._program, *arguments))

    def _prefilling_chunks(self, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        return self._compiled(
            ("prefill chunks", self._chunk, self._forward, self._program),
            arguments,
            lambda: lower_prefill_chunks(self._forward, self._program, self._chunk, *arguments),
        )

    def _prefill(self) -> None:
        """Read the prompts of all slots together, and generate the first token of each."""
        program = replace(self._program, samples=self._shared)
        arguments = (self._runner.weights, self.request, self.state)
        run = self._compiled(
            ("prefill", self._prompt, self._forward, program),
            arguments,
            lambda: lower_prefill(self._forward, program, self._prompt, *arguments),
        )
        self.state, self._prefill_pending = run(*arguments), False
        self._read[:] = self._prompts

    def _prefill_chunks(self, chunks: int | None) -> None:
        """Read the next chunks of prompts; a row whose prompt is read to its end gets its first token."""
        start, before = time.perf_counter(), self._read
        arguments = (self._runner.weights, self.request, self.state, self._limit(chunks))
        self.state = self._prefilling_chunks(arguments)(*arguments)
        self._read = fetch(self.state.read).astype(int)
        passes = -(-self._read // self._chunk) + before // -self._chunk
        self.forwards += int(passes.reshape(self._runner.layout.spec.data, -1).sum(axis=1).max())
        self.prefill_seconds += time.perf_counter() - start

    def canvas(self) -> np.ndarray:
        """See :meth:`Slots.canvas`."""
        tokens, lengths = fetch(self.state.tokens), fetch(self.state.lengths)
        return np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, -1)

    def collect(self, taken: Mapping[int, tuple[int, RowRequest]], ended_early: bool = False) -> list[RowResult]:
        """See :meth:`Slots.collect`; the step of a token is its place among the new ones."""
        del ended_early  # what is not generated is padding anyway
        tokens, lengths = fetch(self.state.tokens), fetch(self.state.lengths)
        log_probabilities = self._log_probabilities()
        found = []
        for slot, (number, request) in taken.items():
            prompt, length = len(request.tokens), int(lengths[slot])
            steps = np.arange(request.length, dtype=np.int32) - prompt
            steps[length:] = -1
            own = None if log_probabilities is None else _at_length(log_probabilities[slot], request.length, 0)
            # A row that grows may be in slots that are narrower than its end.
            sequence = _at_length(tokens[slot], request.length, self._runner.layout.config.pad_token_id)
            positions = self._positions(slot, prompt, length - prompt)
            found.append(RowResult(number, sequence, np.maximum(steps, -1), own, positions))
        return found

    def _positions(self, slot: int, prompt: int, new: int) -> int:
        """Positions that forward passes computed for a row with so many new tokens."""
        if not self._config.use_cache:
            return new * prompt + new * (new - 1) // 2
        return (prompt if self._own_prompt[slot] else 0) + max(0, new - 1)


def _prompt_and_read(row: Row) -> tuple[int, int]:
    """Tokens of a row's prompt, and how many of them are in its cache; an empty slot has one, which needs none."""
    if isinstance(row, MovingRow):
        return int(row.request["prompts"][0]), int(row.state["read"][0])
    return (1, 1) if row is None else (len(row.tokens), 0)


def _at_length(values: np.ndarray, length: int, fill: float) -> np.ndarray:
    """The first ``length`` values of a row, ``fill`` where there are not as many."""
    own = values[:length]
    return np.append(own, np.full(length - len(own), fill, values.dtype))


def _samples(prompts: Sequence[Sequence[int]], slots: int) -> int:
    """Size of the groups of adjacent rows with the same prompt, so that no group lies on two shards of ``slots``."""
    runs = [len(list(same)) for _, same in itertools.groupby(prompts, key=tuple)]
    return math.gcd(*runs, slots) if runs else 1


def open_slots(
    runner: Runner, config: DiffusionConfig | SamplingConfig, width: int, count: int, steps: int, prompt: int
) -> Slots:
    """Free slots of the kind that ``config`` is for; see :class:`DiffusionSlots` and :class:`AutoregressiveSlots`."""
    if isinstance(config, DiffusionConfig):
        return DiffusionSlots(runner, config, width, count, steps)
    return AutoregressiveSlots(runner, config, width, count, prompt, together=False)


def longest_span(runner: Runner, requests: Sequence[RowRequest]) -> int:
    """Positions of the longest prompt, or from the first mask of a row to its end, rounded up like canvases."""
    if isinstance(requests[0].config, SamplingConfig):
        return runner.bucket(max(len(request.tokens) for request in requests))
    return runner.bucket(max(block_span(request, runner.layout.config) for request in requests))


def open_slots_for(
    runner: Runner, requests: Sequence[RowRequest], width: int, count: int, steps: int | None = None
) -> Slots:
    """Free slots for rows that are all known and have their compiled parts in common.

    Args:
      runner: the model on its mesh.
      requests: the rows, at least one.
      width: bucket of their canvases.
      count: B, a multiple of the data axis.
      steps: of a block, the most that any row has; None to find out.
    """
    config, span = requests[0].config, longest_span(runner, requests)
    if isinstance(config, SamplingConfig):
        return AutoregressiveSlots(runner, config, width, count, span)
    if steps is None:
        steps = max(block_schedule(request.config, width)[1] for request in requests)  # type: ignore[arg-type]
    return DiffusionSlots(runner, config, width, count, steps, min(width, span))
