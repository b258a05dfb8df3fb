"""One batch of a caller's rows in slots: run whole, in chunks or with hooks, and handed back in the caller's form.

Dimension letters: B batch, S the caller's prompt width, N new tokens, C canvas, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from runtime.decoding.block_schedule import block_schedule
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.execution.canvas import canvas_after
from runtime.execution.programs import fetch, lower_denoise_with_logits, put, shapes_of
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.rows import Rows, end_align, make_canvas, start_align, stop_rows
from runtime.execution.runner import Runner
from runtime.execution.scoring import shifted_logits
from runtime.execution.slots import AutoregressiveSlots, DiffusionSlots, Slots
from sharding.errors import InputError

# hook(step, canvas int32 [B, S + N], logits float32 [B, S + N, V] or None) -> canvas, or None for no change.
# The first call has step None, before any forward pass.
TokensHook = Callable[[int | None, np.ndarray, np.ndarray | None], np.ndarray | None]
# hook(step, canvas, shifted logits) -> logits, or None for no change.
LogitsHook = Callable[[int, np.ndarray, np.ndarray], np.ndarray | None]


@dataclass(frozen=True)
class BatchResult:
    """Tokens of one batch, in the caller's rows.

    Attributes:
      sequences: int32 ``[B, S + N]``.
      commit_steps: int32 ``[B, S + N]``, the step that committed each position, -1 for the prompt and where none has.
      history: int32 ``[steps, B, S + N]`` when asked for.
      log_probabilities: float32 ``[B, S + N]`` when asked for.
      forwards: forward passes that were run.
      positions: positions that they computed for rows that were not done, prompts included.
    """

    sequences: np.ndarray
    commit_steps: np.ndarray
    history: np.ndarray | None
    log_probabilities: np.ndarray | None
    forwards: int
    positions: int


class GenerationBatch:
    """One batch of rows on the mesh, between two steps.

    Attributes:
      steps: the most steps that any row takes: denoise steps, or new tokens of an autoregressive model.
    """

    def __init__(
        self,
        runner: Runner,
        rows: Rows,
        config: DiffusionConfig | SamplingConfig,
        seeds: list[int],
        width: int,
        batch: int,
        samples: int = 1,
    ) -> None:
        """Put a batch on the mesh.

        Args:
          runner: the model on its mesh.
          rows: at most ``batch`` start-aligned prompts.
          config: the request.
          seeds: one per row.
          width: bucket C, at least the longest prompt and its new tokens.
          batch: rows on the devices, empty ones included; a multiple of the data axis.
          samples: adjacent rows that have the same prompt.
        """
        self._runner, self._rows, self._config = runner, rows, config
        self._model = runner.layout.config
        self._start, self._lengths = make_canvas(rows, self._model, config.max_new_tokens, width)
        prompts = [rows.tokens[row, :length].tolist() for row, length in enumerate(rows.lengths)]
        self._requests = [RowRequest(prompt, config, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        self._slots, self.steps = self._open(width, batch, samples)
        # Between the steps of the original algorithm every row has made the same number of steps.
        self._in_step = isinstance(config, DiffusionConfig) and not config.in_blocks
        self._done = 0
        fill = 0 if isinstance(config, DiffusionConfig) else self._model.pad_token_id
        # What is in the caller's rows where no token of ours is: the caller's own padding.
        self._onto = np.pad(rows.original, ((0, 0), (0, config.max_new_tokens)), constant_values=fill)

    def _open(self, width: int, batch: int, samples: int) -> tuple[Slots, int]:
        runner, config, requests = self._runner, self._config, self._requests
        if isinstance(config, SamplingConfig):
            longest = int(self._rows.lengths.max())
            slots = AutoregressiveSlots(runner, config, width, batch, longest, requests, samples)
            return slots, config.max_new_tokens
        masked = (self._start == self._model.mask_token_id) & (np.arange(width) < self._lengths[:, None])
        spans = np.where(masked.any(axis=1), self._lengths - masked.argmax(axis=1), 0)
        length, steps_per_block = block_schedule(config, width)
        steps = max(1, int((-(-spans // length)).max()) * steps_per_block) if config.in_blocks else config.steps
        # Spans are rounded up like canvases, so that few windows are ever compiled.
        span = min(width, runner.bucket(int(spans.max())))
        return DiffusionSlots(runner, config, width, batch, requests=requests, span=span), steps

    @property
    def finished(self) -> bool:
        """Whether every row is done, as far as the host knows."""
        return self._done >= self.steps

    def advance(self, steps: int | None = None) -> None:
        """Run so many steps, or to the end.

        Steps are denoise steps of the original algorithm, in which all rows keep together; otherwise iterations, in
        each of which every row makes a step of its own.
        """
        limit = self.steps if steps is None else min(self._done + steps, self.steps)
        if self._in_step:
            done = self._slots.run(step_limit=limit)
        else:
            done = self._slots.run(max_iterations=limit - self._done)
        self._done = self.steps if done.all() and not self._in_step else limit

    def advance_by(self, steps: int) -> Iterator[int]:
        """Run to the end, so many steps at a time, yielding how many have been made."""
        while not self.finished:
            self.advance(steps)
            yield self._done

    def canvas(self) -> np.ndarray:
        """The canvas as it is now, in the caller's rows: int32 ``[B, S + N]``."""
        canvas = self._slots.canvas()
        # Masks, or positions that an autoregressive model has not come to.
        fill = self._model.mask_token_id if isinstance(self._config, DiffusionConfig) else self._model.pad_token_id
        return self._to_caller(np.where(canvas < 0, fill, canvas))

    def _to_caller(self, values: np.ndarray, onto: np.ndarray | None = None) -> np.ndarray:
        """Values ``[batch, C, ...]`` in the caller's rows ``[B, S + N, ...]``."""
        return end_align(values[: len(self._lengths)], self._lengths, self._onto if onto is None else onto)

    def result(self, history: bool = False) -> BatchResult:
        """Sequences, the steps that committed them, the history when asked for, and what it cost."""
        results = self._slots.collect({row: (row, request) for row, request in enumerate(self._requests)})
        sequences = self._stack([one.sequence for one in results], 0)
        commit_steps = self._stack([one.commit_steps for one in results], -1)
        log_probabilities = None
        if self._config.log_probabilities:
            kept = self._stack([one.log_probabilities for one in results], 0.0)
            log_probabilities = self._to_caller(kept, np.zeros(self._onto.shape, np.float32))
        return BatchResult(
            sequences=self._to_caller(sequences),
            commit_steps=self._to_caller(commit_steps, np.full_like(self._onto, -1)),
            history=self._unfold(results, sequences, commit_steps) if history else None,
            log_probabilities=log_probabilities,
            forwards=self._slots.forwards,
            positions=sum(one.positions for one in results),
        )

    def _stack(self, rows: list[Any], fill: float) -> np.ndarray:
        """Rows of different lengths as an array ``[B, C]``."""
        out = np.full(self._start.shape, fill, rows[0].dtype)
        for row, values in enumerate(rows):
            out[row, : len(values)] = values
        return out

    def _unfold(self, results: list[RowResult], sequences: np.ndarray, commit_steps: np.ndarray) -> np.ndarray:
        """The canvas after each step, int32 ``[steps, B, S + N]``."""
        stop_tokens = stop_rows(self._config.stop_token_ids, len(results))
        canvases = (
            canvas_after(step, self._start, sequences, commit_steps, stop_tokens, self._model)
            for step in range(self.steps)
        )
        return np.stack([self._to_caller(canvas) for canvas in canvases])


class HookedBatch(GenerationBatch):
    """A batch whose canvas or logits the caller may change between the steps of the original algorithm."""

    _slots: DiffusionSlots

    def run(self, tokens_hook: TokensHook | None, logits_hook: LogitsHook | None, history: bool) -> BatchResult:
        """Run step by step, calling the hooks between steps as the original does.

        Args:
          tokens_hook: see :data:`TokensHook`.
          logits_hook: see :data:`LogitsHook`. It costs a full forward pass and the gathering of ``[B, S + N, V]``
            float32 logits to the host and back in every step, also in steps that commit nothing.
          history: keep the canvas of every step, as the hooks left it.
        """
        kept = []
        self._replace_canvas(None if tokens_hook is None else tokens_hook(None, self.canvas(), None))
        for step in range(self.steps):
            logits = None
            if logits_hook is None:
                self.advance(1)
            else:
                logits = self._advance_with_logits(step, logits_hook)
            self._replace_canvas(None if tokens_hook is None else tokens_hook(step, self.canvas(), logits))
            if history:
                kept.append(self.canvas())
        result = self.result()
        return replace(result, history=np.stack(kept)) if history else result

    def _check_hook(self, name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
        array = np.asarray(value)
        if array.shape != shape:
            raise InputError(f"{name} returned {list(array.shape)}; expected {list(shape)}")
        return array

    def _replace_canvas(self, changed: np.ndarray | None) -> None:
        """Take over a changed canvas, and let every row continue with the next step whatever it holds now."""
        slots = self._slots
        state = slots.state
        if changed is not None:
            changed = self._check_hook("tokens_hook", changed, self._onto.shape)
            canvas = fetch(state.canvas).copy()
            canvas[: len(changed)] = start_align(changed, self._lengths, canvas[: len(changed)])
            if canvas.min() < 0 or canvas.max() >= self._model.vocab_size:
                raise InputError("tokens_hook returned token ids outside the vocabulary")
            state = replace(state, canvas=put(canvas, state.canvas.sharding))
        rows = np.arange(slots.count)
        place = state.done.sharding
        # A hook may mask any position again, also before a row's first mask or after its last.
        slots.request = replace(slots.request, first=put(np.zeros(slots.count, np.int32), place))
        slots.state = replace(
            state,
            block=put(np.zeros(slots.count, np.int32), place),
            step_in_block=put(np.full(slots.count, self._done, np.int32), place),
            done=put(rows >= len(self._lengths), place),
        )

    def _advance_with_logits(self, step: int, logits_hook: LogitsHook) -> np.ndarray:
        """One step from the logits that the hook makes of the model's own; returns them, float32 ``[B, S + N, V]``."""
        slots, layout = self._slots, self._runner.layout
        own = shifted_logits(self._runner, fetch(slots.state.canvas), fetch(slots.request.lengths))
        rows = len(self._lengths)
        logits = end_align(own[:rows], self._lengths, np.zeros((*self._onto.shape, own.shape[-1]), np.float32))
        changed = logits_hook(step, self.canvas(), logits)
        if changed is not None:
            logits = self._check_hook("logits_hook", changed, logits.shape).astype(np.float32)
        own[:rows] = start_align(logits, self._lengths, own[:rows])
        padding = layout.padded_vocab - own.shape[-1]
        padded = np.pad(own, ((0, 0), (0, 0), (0, padding)), constant_values=-np.inf)
        request = replace(slots.request, step_limit=put(np.int32(step + 1), layout.replicated))
        arguments = (request, slots.state, put(padded, layout.sharding("batch", "canvas", "vocab")))
        compiled = self._runner.programs.get(
            ("denoise_with_logits", slots.forward, slots.program, shapes_of(arguments)),
            lambda: lower_denoise_with_logits(slots.forward, slots.program, *arguments),
        )
        slots.state = compiled(*arguments)
        self._done += 1
        return logits
