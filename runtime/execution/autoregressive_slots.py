"""Slots of an autoregressive model: prefill, chunks of prompts, and new tokens, with or without drafts.

Dimension letters: B slots, T positions of a slot.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from runtime.decoding.decode_state import DraftedWeights
from runtime.decoding.parameters import SamplingConfig
from runtime.execution.programs import (
    abstract_decode,
    lower_decode,
    lower_prefill,
    lower_prefill_chunks,
)
from runtime.execution.result import DraftStats
from runtime.execution.row_arrays import autoregressive_row
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.runner import Runner
from runtime.execution.slots import MovingRow, Row, Slots
from runtime.execution.specialization import decode_program


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
          prompt: number of positions of the prefill of all rows; ``width`` if it is larger.
          together: whether one pass prefills all rows of the first insertion, and reads a prompt that adjacent rows
            share only once. All other prompts are read in chunks.
        """
        self._config, self._prompt = config, min(width, prompt)
        self._chunk = min(width, runner.prompt_chunk)
        self._forward = runner.forward(self._prompt if config.use_cache else width)
        self._draft = runner.draft if config.use_cache and config.draft_tokens else None
        draft = None if self._draft is None else self._draft.forward(self._prompt)
        self._program = decode_program(config, runner.layout.config.vocab_size, draft=draft)
        # Size of the groups of adjacent rows with the same prompt in the first insertion, and whether its prefill is
        # still to run.
        self._shared, self._prefill_pending = 1, False
        # A prefill attends to its own keys and values, a chunk to those in the cache. If the cache rounds them, only
        # chunks give a row the same tokens whenever it comes.
        rounds = jnp.promote_types(runner.cache_dtype, runner.dtype) != runner.cache_dtype
        self._together = together and not rounds
        self._own_prompt = np.ones(count, bool)
        # For each slot, the number of prompt tokens, and how many of them are in the cache.
        self._prompts, self._read = np.ones(count, int), np.ones(count, int)
        self._turn = 0  # of the row that came last
        super().__init__(runner, width, count, config.use_cache)

    def _row(self, request: RowRequest | None) -> tuple[Any, Any]:
        return autoregressive_row(request, self._config, self._runner.layout.config, self.width)

    def _row_arrays(self, row: Row) -> tuple[Any, Any]:
        request, state = super()._row_arrays(row)
        if row is not None:
            # In the order of their arrival here: a row in a low slot must not overtake those that wait in higher ones.
            self._turn += 1
            request = replace(request, turns=np.full(1, self._turn, np.int32))
        return request, state

    def _abstract(self) -> tuple[Any, Any]:
        return abstract_decode(
            self._runner.layout,
            self.count,
            self.width,
            self._own_cache_dtype,
            log_probabilities=self._config.log_probabilities,
            drafts=self._config.drafts > 0,
            draft=None if self._draft is None else (self._draft.layout, self._draft.cache_dtype),
        )

    @property
    def _caches(self) -> dict[str, Runner]:
        return super()._caches | ({} if self._draft is None else {"draft_cache": self._draft})

    @property
    def _weights(self) -> Any:
        """The weights that the programs take: the model's, with those of the draft model if there is one."""
        model = self._runner.weights
        return model if self._draft is None else DraftedWeights(model, self._draft.weights)

    @property
    def unread(self) -> list[int]:
        """Slots whose prompts are not completely read; see :attr:`Slots.unread`."""
        return [int(slot) for slot in np.flatnonzero(self._read < self._prompts)]

    def run(
        self,
        max_iterations: int | None = None,
        step_limit: int | None = None,
        chunks: int | None = None,
        min_running: int = 1,
    ) -> np.ndarray:
        """Run iterations, each of one token per row or more; see :meth:`Slots.run`. ``step_limit`` is ignored."""
        del step_limit
        self.request = replace(self.request, max_iterations=self._limit(max_iterations))
        self.state = replace(self.state, iteration=self._device_scalar(0))
        reads, most = bool(self.unread), max_iterations
        if self._prefill_pending:
            self._prefill()
        elif reads:
            self._prefill_chunks(chunks)
        running = max(1, min_running - len(self.unread))
        left = int((~np.asarray(self.whole()[1].done)).sum()) - len(self.unread) if reads else running
        if 0 < left < running:
            # Rows ended with their prompt. In a bucket where some row always does, the others would never advance.
            running, most = 1, 1 if most is None else min(1, most)
        limits = {"max_iterations": self._limit(most), "min_running": self._limit(running)}
        self.request = replace(self.request, **limits)
        if max_iterations is None or max_iterations > int(np.asarray(self.state.iteration)):
            arguments = (self._weights, self.request, self.state)
            self.state = self._decode_program(arguments)(*arguments)
        made = int(np.asarray(self.state.iteration))
        self.iterations += made
        self.forwards += made
        return np.asarray(self.whole()[1].done)

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
            prompts = {slot: tuple(row.tokens) for slot, row in rows.items() if isinstance(row, RowRequest)}
            self._shared = shared_prompt_group(prompts, self.count // self._runner.layout.spec.data)
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
        arguments = (self._weights, *self._abstract())
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
        arguments = (self._weights, self.request, self.state)
        run = self._compiled(
            ("prefill", self._prompt, self._forward, program),
            arguments,
            lambda: lower_prefill(self._forward, program, self._prompt, *arguments),
        )
        self.state, self._prefill_pending, self._read = run(*arguments), False, self._prompts.copy()

    def _prefill_chunks(self, chunks: int | None) -> None:
        """Read the next chunks of prompts. A row whose prompt has been read to its end gets its first token."""
        start, before = time.perf_counter(), self._read
        arguments = (self._weights, self.request, self.state, self._limit(chunks))
        self.state = self._prefill_chunks_program(arguments)(*arguments)
        self._read = np.asarray(self.whole()[1].read).astype(int)
        # Chunks that each slot has read in this run: the number so far, minus the number before.
        passes = -(-self._read // self._chunk) + before // -self._chunk
        self.forwards += int(passes.reshape(self._runner.layout.spec.data, -1).sum(axis=1).max())
        self.prefill_seconds += time.perf_counter() - start

    def canvas(self) -> np.ndarray:
        """Return the slots' tokens; see :meth:`Slots.canvas`."""
        _, state = self.whole()
        tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
        return np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, -1)

    def collect(self, taken: Mapping[int, tuple[int, RowRequest]], ended_early: bool = False) -> list[RowResult]:
        """Return the results of rows; see :meth:`Slots.collect`. Commit steps are indices of the new tokens."""
        del ended_early  # positions that are not generated hold padding anyway
        _, state = self.whole()
        tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
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
        request, state = self.whole()
        if state.passes is None:
            return {}
        new = np.asarray(state.lengths) - np.asarray(request.prompts)
        pairs = zip(np.asarray(state.passes).tolist(), new.tolist(), strict=True)
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


def shared_prompt_group(prompts: Mapping[int, tuple[int, ...]], slots: int) -> int:
    """Return the largest size of equal groups of adjacent slots such that the rows of each group share a prompt.

    The prompt of a group is read from its first slot, so this slot has a row if the group has any.

    Args:
      prompts: the prompts, by slot.
      slots: slots of a ``data`` shard, which no group crosses.
    """

    def shared(size: int) -> bool:
        first = {group: prompts.get(group * size) for group in {slot // size for slot in prompts}}
        return all(first[slot // size] == prompt for slot, prompt in prompts.items())

    return next(size for size in range(slots, 0, -1) if slots % size == 0 and shared(size))
