"""Slots: a fixed number of rows on the mesh, which requests are inserted into and evicted from one by one.

The tokens of a row depend neither on the other slots nor on how many are taken, and shapes do not either: one program
serves a queue of any length.

Dimension letters: B slots, S canvas of a request (its prompt and its new tokens).
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from runtime.decoding.block_schedule import block_schedule
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.execution.canvas import pad_after_end
from runtime.execution.programs import (
    empty_cache,
    fetch,
    lower_decode,
    lower_denoise,
    lower_insert,
    lower_prefill,
    lower_prefill_inserted,
    put,
    put_tree,
    shapes_of,
)
from runtime.execution.row_arrays import UNLIMITED, autoregressive_row, diffusion_row, join_rows
from runtime.execution.row_request import RowRequest, RowResult, masked_span
from runtime.execution.runner import Runner
from runtime.execution.specialization import decode_program, denoise_program
from runtime.models.arrays import row_fields


class Slots(abc.ABC):
    """A fixed number of rows on the mesh, each free or taken by a request.

    Attributes:
      count: B.
      width: S at most, a bucket.
      forwards: forward passes so far.
      iterations: those of them that every taken slot took part in: all but the prefills of inserted rows.
      request: run-time arguments of all slots, on the mesh.
      state: the loop's state of all slots, on the mesh.
    """

    def __init__(self, runner: Runner, width: int, count: int, cached: bool) -> None:
        """Make free slots."""
        self._runner, self.width, self.count = runner, width, count
        self.forwards = self.iterations = 0
        self._cache = empty_cache(runner.layout, count, width, runner.cache_dtype) if cached else None
        self._unused = True
        self._place({})

    @abc.abstractmethod
    def _row(self, request: RowRequest | None) -> tuple[Any, Any]:
        """Request and state of one row on the host, every array ``[1, ...]``; None for an empty slot."""

    @abc.abstractmethod
    def run(self, max_iterations: int | None = None, step_limit: int | None = None) -> np.ndarray:
        """Run iterations until every slot is done, or a limit is reached.

        Args:
          max_iterations: None for no limit.
          step_limit: no row begins this step of its own, or a later one (diffusion); None for no limit.

        Returns:
          Which slots are done, bool ``[B]``; empty ones are.
        """

    @abc.abstractmethod
    def canvas(self) -> np.ndarray:
        """The tokens in the slots now: int32 ``[B, S]``, -1 where nothing is committed or generated yet."""

    @abc.abstractmethod
    def collect(self, taken: Mapping[int, tuple[int, RowRequest]], ended_early: bool = False) -> list[RowResult]:
        """Results of slots: slot to the number of its request, and the request. Evicts nothing.

        Args:
          taken: the slots.
          ended_early: the rows are done as they are: padding takes the place of their masks.
        """

    def _place(self, requests: Mapping[int, RowRequest | None]) -> None:
        """Put all slots onto the mesh anew: these requests, and nothing in the others."""
        free = self._row(None)
        rows = [free if (one := requests.get(slot)) is None else self._row(one) for slot in range(self.count)]
        self.request = put_tree(self._runner.layout, join_rows([request for request, _ in rows]))
        state = put_tree(self._runner.layout, join_rows([state for _, state in rows]))
        self.state = replace(state, cache=self._cache)

    def insert(self, requests: Mapping[int, RowRequest | None]) -> None:
        """Insert requests, by slot; None evicts whatever a slot holds.

        The first insertion places all slots from the host and needs no program.
        """
        if self._unused:
            self._unused = False
            self._place(requests)
        else:
            self._exchange(requests)

    def _exchange(self, requests: Mapping[int, RowRequest | None]) -> None:
        """Replace some rows on the mesh."""
        inserted = np.zeros(self.count, bool)
        old = [row_fields(tree) for tree in (self.request, self.state)]
        new = [{name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in part.items()} for part in old]
        for slot, request in requests.items():
            inserted[slot] = True
            for part, tree in zip(new, self._row(request), strict=True):
                for name, value in row_fields(tree).items():
                    part[name][slot] = value[0]
        placed = jax.tree.map(lambda value, like: put(value, like.sharding), new, old)
        arguments = (put(inserted, self._runner.layout.sharding("batch")), old, placed)
        rows = self._compiled(("insert", type(self)), arguments, lambda: lower_insert(*arguments))(*arguments)
        self.request, self.state = replace(self.request, **rows[0]), replace(self.state, **rows[1])

    def _compiled(
        self, key: Hashable, arguments: tuple[Any, ...], lower: Callable[[], jax.stages.Lowered]
    ) -> jax.stages.Compiled:
        return self._runner.programs.get((key, shapes_of(arguments)), lower)

    def _scalar(self, value: int | None) -> jax.Array:
        return put(UNLIMITED if value is None else np.int32(value), self._runner.layout.replicated)

    def _log_probabilities(self) -> np.ndarray | None:
        kept = self.state.log_probabilities
        return None if kept is None else fetch(kept)


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

    def run(self, max_iterations: int | None = None, step_limit: int | None = None) -> np.ndarray:
        """See :meth:`Slots.run`."""
        limits = {"max_iterations": self._scalar(max_iterations), "step_limit": self._scalar(step_limit)}
        self.request = replace(self.request, **limits)
        # Counted from nothing each time: slots may live for more iterations than an int32 counts.
        arguments = (self._runner.weights, self.request, replace(self.state, iteration=self._scalar(0)))
        key = ("denoise", self.forward, self.program)
        run = self._compiled(key, arguments, lambda: lower_denoise(self.forward, self.program, *arguments))
        self.state = run(*arguments)
        made = int(fetch(self.state.iteration))
        self.iterations += made
        self.forwards += made
        return fetch(self.state.done)

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

    def __init__(self, runner: Runner, config: SamplingConfig, width: int, count: int, prompt: int) -> None:
        """Make slots.

        Args:
          runner: the model on its mesh.
          config: decides what is compiled; requests are those with the same
            :func:`runtime.execution.specialization.compiled_in`.
          width: bucket of prompts and their new tokens.
          count: B, a multiple of the data axis.
          prompt: tokens of the longest prompt.
        """
        self._config, self._prompt = config, min(width, runner.bucket(prompt))
        self._forward = runner.forward(self._prompt if config.use_cache else width)
        self._program = decode_program(config, runner.layout.config.vocab_size)
        # Adjacent rows with the same prompt among the first that were inserted, and whether those are still to be read.
        self._shared, self._unread = 1, False
        self._own_prompt = np.ones(count, bool)
        super().__init__(runner, width, count, config.use_cache)

    def _row(self, request: RowRequest | None) -> tuple[Any, Any]:
        return autoregressive_row(request, self._config, self._runner.layout.config, self.width)

    def run(self, max_iterations: int | None = None, step_limit: int | None = None) -> np.ndarray:
        """See :meth:`Slots.run`; each iteration generates one token per row, and there are no steps to limit."""
        del step_limit
        self.request = replace(self.request, max_iterations=self._scalar(max_iterations))
        self.state = replace(self.state, iteration=self._scalar(0))
        if self._unread:
            self._prefill()
        if max_iterations is None or max_iterations > int(fetch(self.state.iteration)):
            arguments = (self._runner.weights, self.request, self.state)
            key = ("decode", self._forward, self._program)
            run = self._compiled(key, arguments, lambda: lower_decode(self._forward, self._program, *arguments))
            self.state = run(*arguments)
        made = int(fetch(self.state.iteration))
        self.iterations += made
        self.forwards += made
        return fetch(self.state.done)

    def _place(self, requests: Mapping[int, RowRequest | None]) -> None:
        super()._place(requests)
        own = self.count // self._runner.layout.spec.data
        self._shared = _samples([one.tokens for one in requests.values() if one is not None], own)
        self._own_prompt = np.arange(self.count) % self._shared == 0
        self._unread = bool(requests) and self._config.use_cache

    def _exchange(self, requests: Mapping[int, RowRequest | None]) -> None:
        super()._exchange(requests)
        new = [slot for slot, request in requests.items() if request is not None]
        self._own_prompt[new] = True
        if self._unread:
            self._prefill()
            self.forwards += 1
        elif self._config.use_cache and new:
            self._prefill_inserted(new)

    def _prefill(self) -> None:
        """Read the prompts of all slots together, and generate the first token of each."""
        program = replace(self._program, samples=self._shared)
        arguments = (self._runner.weights, self.request, self.state)
        run = self._compiled(
            ("prefill", self._prompt, self._forward, program),
            arguments,
            lambda: lower_prefill(self._forward, program, self._prompt, *arguments),
        )
        self.state, self._unread = run(*arguments), False

    def _prefill_inserted(self, slots: Sequence[int]) -> None:
        """Read the prompts of rows that have just been inserted, and generate the first token of each."""
        inserted = put(np.isin(np.arange(self.count), slots), self._runner.layout.sharding("batch"))
        arguments = (self._runner.weights, self.request, self.state, inserted)
        run = self._compiled(
            ("prefill inserted", self._prompt, self._forward, self._program),
            arguments,
            lambda: lower_prefill_inserted(self._forward, self._program, self._prompt, *arguments),
        )
        self.state = run(*arguments)
        own = self.count // self._runner.layout.spec.data
        self.forwards += int(np.bincount([slot // own for slot in slots]).max())

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
            own = None if log_probabilities is None else log_probabilities[slot, : request.length].copy()
            sequence = tokens[slot, : request.length].copy()
            positions = self._positions(slot, prompt, length - prompt)
            found.append(RowResult(number, sequence, np.maximum(steps, -1), own, positions))
        return found

    def _positions(self, slot: int, prompt: int, new: int) -> int:
        """Positions that forward passes computed for a row with so many new tokens."""
        if not self._config.use_cache:
            return new * prompt + new * (new - 1) // 2
        return (prompt if self._own_prompt[slot] else 0) + max(0, new - 1)


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
    return AutoregressiveSlots(runner, config, width, count, prompt)


def open_slots_for(runner: Runner, requests: Sequence[RowRequest], width: int, count: int) -> Slots:
    """Free slots for rows that are all known and have their compiled parts in common.

    Args:
      runner: the model on its mesh.
      requests: the rows, at least one.
      width: bucket of their canvases.
      count: B, a multiple of the data axis.
    """
    config = requests[0].config
    if isinstance(config, SamplingConfig):
        return AutoregressiveSlots(runner, config, width, count, max(len(request.tokens) for request in requests))
    model = runner.layout.config
    steps = max(block_schedule(request.config, width)[1] for request in requests)  # type: ignore[arg-type]
    # Spans are rounded up like canvases, so that few widths of windows are ever compiled.
    span = min(width, runner.bucket(max(masked_span(request, model) for request in requests)))
    return DiffusionSlots(runner, config, width, count, steps, span)
