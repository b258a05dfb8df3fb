"""Running a diffusion generation: one batch on the mesh, whole, streamed, or hooked step by step.

Dimension letters: B batch, S the caller's prompt width, N new tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from runtime.decoding.diffusion import DenoiseState, Request
from runtime.decoding.parameters import DiffusionConfig
from runtime.decoding.schedule import padded_steps, transfer_ratios
from runtime.execution.canvas import CanvasRows, denoise_program
from runtime.execution.programs import (
    fetch,
    lower_denoise,
    lower_denoise_with_logits,
    put,
    request_shardings,
    shapes_of,
    state_shardings,
)
from runtime.execution.rows import Rows, end_align, sampling_scalars, seed_words, start_align
from runtime.execution.run_result import RunResult
from runtime.execution.runner import Runner
from runtime.execution.scoring import shifted_logits
from sharding.errors import InputError

# hook(step, canvas int32 [B, S + N], logits float32 [B, S + N, V] or None) -> canvas, or None for no change.
# The first call has step None, before any forward pass.
TokensHook = Callable[[int | None, np.ndarray, np.ndarray | None], np.ndarray | None]
# hook(step, canvas, shifted logits) -> logits, or None for no change.
LogitsHook = Callable[[int, np.ndarray, np.ndarray], np.ndarray | None]


class DiffusionRun:
    """One batch of rows on the mesh, between two steps."""

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
        self._runner, self._config = runner, config
        self._forward, self._programs = runner.forward(width), runner.programs
        layout, model = runner.layout, runner.layout.config
        self._rows = CanvasRows(runner, rows, config, width, batch)
        canvas = self._rows.canvas
        ratios = transfer_ratios(config.steps, float(config.eps))
        where = request_shardings(layout)
        self._request: Request = jax.tree.map(
            put,
            Request(
                lengths=self._rows.lengths,
                seeds=seed_words([*seeds, *[0] * (batch - len(seeds))]),
                ratios=np.pad(ratios, (0, padded_steps(config.steps, width) - config.steps)),
                steps=np.int32(config.steps),
                limit=np.int32(0),
                alg_temp=np.float32(config.alg_temp or 1.0),
                **sampling_scalars(config, model.vocab_size),
            ),
            where,
        )
        self._limit_sharding = where.limit
        self._state: DenoiseState = jax.tree.map(
            put,
            DenoiseState(
                canvas=canvas,
                commit_steps=np.full_like(canvas, -1),
                step=np.int32(0),
                forwards=np.int32(0),
                log_probabilities=np.zeros(canvas.shape, np.float32) if config.log_probabilities else None,
            ),
            state_shardings(layout, config.log_probabilities),
        )
        self._program = denoise_program(config, model.vocab_size, str(runner.dtype), runner.chunk(batch, width))
        self._step = 0
        self._hooked_history: list[np.ndarray] = []

    @property
    def finished(self) -> bool:
        """Whether every step is done."""
        return self._step >= self._config.steps

    def advance(self, limit: int) -> None:
        """Run up to step ``limit`` on the devices, without waiting for them."""
        limit = min(limit, self._config.steps)
        request = replace(self._request, limit=put(np.int32(limit), self._limit_sharding))
        arguments = (self._runner.weights, request, self._state)
        compiled = self._programs.get(
            ("denoise", self._forward, self._program, shapes_of(arguments)),
            lambda: lower_denoise(self._forward, self._program, *arguments),
        )
        self._state = compiled(*arguments)
        self._step = limit

    def advance_by(self, steps: int) -> Iterator[int]:
        """Run to the end, ``steps`` at a time, yielding the steps done when the devices have done them."""
        while not self.finished:
            self.advance(self._step + steps)
            jax.block_until_ready(self._state)
            yield self._step

    def canvas(self) -> np.ndarray:
        """The canvas as it is now, in the caller's rows: int32 ``[B, S + N]``."""
        return self._rows.to_caller(fetch(self._state.canvas))

    def run_hooked(
        self,
        tokens_hook: TokensHook | None,
        logits_hook: LogitsHook | None,
        history: bool,
    ) -> None:
        """Run step by step, calling the hooks between steps as the original does.

        Args:
          tokens_hook: see :data:`TokensHook`.
          logits_hook: see :data:`LogitsHook`. It costs a full forward pass and the gathering of ``[B, S + N, V]``
            float32 logits to the host and back in every step, also in steps that transfer nothing.
          history: keep the canvas of every step, as the hooks left it.
        """
        if tokens_hook is not None:
            self._replace_canvas(tokens_hook(None, self.canvas(), None))
        while not self.finished:
            step, logits = self._step, None
            if logits_hook is None:
                self.advance(step + 1)
            else:
                own = shifted_logits(self._runner, fetch(self._state.canvas), fetch(self._request.lengths))
                logits = end_align(
                    own, self._rows.own_lengths, np.zeros((*self._rows.onto.shape, own.shape[-1]), np.float32)
                )
                changed = logits_hook(step, self.canvas(), logits)
                if changed is not None:
                    logits = self._check_hook("logits_hook", changed, logits.shape).astype(np.float32)
                self._advance_with_logits(start_align(logits, self._rows.own_lengths, own))
            if tokens_hook is not None:
                self._replace_canvas(tokens_hook(step, self.canvas(), logits))
            if history:
                self._hooked_history.append(self.canvas())

    @property
    def steps(self) -> int:
        """Denoise steps in all."""
        return self._config.steps

    def result(self, history: bool) -> RunResult:
        """Sequences, the steps that set them, the history when asked for, and what it cost."""
        forwards = int(fetch(self._state.forwards))
        positions = forwards * int(self._rows.lengths[: self._rows.count].sum())
        hooked = bool(self._hooked_history)
        result = self._rows.result(self._state, self._config.steps, history and not hooked, forwards, positions)
        return replace(result, history=np.stack(self._hooked_history)) if history and hooked else result

    def _check_hook(self, name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
        array = np.asarray(value)
        if array.shape != shape:
            raise InputError(f"{name} returned {list(array.shape)}; expected {list(shape)}")
        return array

    def _replace_canvas(self, changed: np.ndarray | None) -> None:
        if changed is None:
            return
        changed = self._check_hook("tokens_hook", changed, self._rows.onto.shape)
        canvas = start_align(changed, self._rows.own_lengths, fetch(self._state.canvas))
        if canvas.min() < 0 or canvas.max() >= self._forward.config.vocab_size:
            raise InputError("tokens_hook returned token ids outside the vocabulary")
        self._state = replace(self._state, canvas=put(canvas, self._state.canvas.sharding))

    def _advance_with_logits(self, logits: np.ndarray) -> None:
        layout = self._forward.layout
        padding = layout.padded_vocab - logits.shape[-1]
        padded = np.pad(logits, ((0, 0), (0, 0), (0, padding)), constant_values=-np.inf)
        arguments = (self._request, self._state, put(padded, layout.sharding("batch", "canvas", "vocab")))
        compiled = self._programs.get(
            ("denoise_with_logits", self._forward, self._program, shapes_of(arguments)),
            lambda: lower_denoise_with_logits(self._forward, self._program, *arguments),
        )
        self._state = compiled(*arguments)
        self._step += 1
