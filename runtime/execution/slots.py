"""Rows that come and go: a fixed number of slots on the mesh, which requests enter and leave one by one.

What a slot computes for its row does not depend on the other slots, and shapes not on how many are taken, so one
program serves a queue of any length, and a row's tokens are those that it has alone.

Dimension letters: B slots, S canvas of a request (its prompt and its new tokens).
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np

from runtime.decoding.autoregressive import DecodeRequest
from runtime.decoding.blocks import BlockRequest, BlockState
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.execution.autoregressive_run import decode_batch, decode_program, put_decode_state
from runtime.execution.block_run import block_batch, block_program, block_schedule, put_block_state
from runtime.execution.canvas import pad_after_end
from runtime.execution.programs import (
    block_request_shardings,
    decode_request_shardings,
    fetch,
    lower_blocks,
    lower_decode,
    lower_insert,
    lower_prefill_inserted,
    put,
    shapes_of,
)
from runtime.execution.rows import Rows
from runtime.execution.runner import Runner

NOBODY = Rows(np.zeros((0, 1), np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int32))


@dataclass(frozen=True)
class RowRequest:
    """One row to generate.

    Attributes:
      tokens: the prompt; a diffusion model fills mask tokens in it too.
      config: what to do; its ``seed`` is not read.
      seed: this row's.
    """

    tokens: Sequence[int]
    config: DiffusionConfig | SamplingConfig
    seed: int

    @property
    def length(self) -> int:
        """S, prompt and new tokens."""
        return len(self.tokens) + self.config.max_new_tokens

    @property
    def rows(self) -> Rows:
        """The prompt as a batch of one."""
        tokens = np.array([self.tokens], np.int32)
        return Rows(tokens, np.array([len(self.tokens)], np.int32), tokens)


@dataclass(frozen=True)
class RowResult:
    """One row that is done.

    Attributes:
      number: which of the requests it is.
      sequence: int32 ``[S]``; padding after the end of a row that ended early.
      commit_steps: int32 ``[S]``, the row's step that set each position, -1 where none has.
      log_probabilities: float32 ``[S]`` where the request asks for them.
    """

    number: int
    sequence: np.ndarray
    commit_steps: np.ndarray
    log_probabilities: np.ndarray | None


def _rows_of(request: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(request) if field.name != "limit")


class Slots(abc.ABC):
    """A fixed number of rows on the mesh, each free or taken by a request.

    Attributes:
      count: B.
      width: S at most, a bucket.
      forwards: forward passes so far.
      iterations: those of them that every taken slot took part in, so all but prefills.
    """

    width: int
    # Fields of the request and of the state that have an entry for every slot.
    _request_rows: tuple[str, ...]
    _state_rows: tuple[str, ...]

    def __init__(
        self, runner: Runner, request: Any, state: Any, nobody: tuple[Any, Any], count: int, limit_sharding: Any
    ) -> None:
        self._runner, self._request, self._state = runner, request, state
        self._limit_sharding = limit_sharding
        self._nobody = nobody
        self.count = count
        self.forwards = self.iterations = 0

    @abc.abstractmethod
    def _arrays(self, request: RowRequest) -> tuple[Any, Any]:
        """Request and state of a batch of one, on the host."""

    @abc.abstractmethod
    def _lowered(self, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """Key and lowering of the program that runs iterations."""

    @abc.abstractmethod
    def canvas(self) -> np.ndarray:
        """What stands in the slots now: int32 ``[B, S]``, -1 where nothing is committed or generated yet."""

    @abc.abstractmethod
    def collect(self, taken: Mapping[int, tuple[int, RowRequest]]) -> list[RowResult]:
        """Results of slots that are done: slot to the number of its request, and the request."""

    def _row_arrays(self, request: Any, state: Any) -> dict[str, Any]:
        pairs = [(request, self._request_rows), (state, self._state_rows)]
        found = {name: getattr(tree, name) for tree, names in pairs for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def insert(self, requests: Mapping[int, RowRequest | None]) -> None:
        """Put requests into slots, by slot; None empties one, whoever is in it."""
        entering = np.zeros(self.count, bool)
        old = self._row_arrays(self._request, self._state)
        new = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in old.items()}
        for slot, request in requests.items():
            entering[slot] = True
            for name, value in self._row_arrays(*(self._nobody if request is None else self._arrays(request))).items():
                new[name][slot] = value[0]
        place = self._runner.layout.sharding("batch")
        arguments = (put(entering, place), old, {name: put(value, old[name].sharding) for name, value in new.items()})
        compiled = self._runner.programs.get(("insert", *old, shapes_of(arguments)), lambda: lower_insert(*arguments))
        rows = compiled(*arguments)
        self._request = replace(self._request, **{name: rows[name] for name in self._request_rows})
        self._state = replace(self._state, **{name: rows[name] for name in self._state_rows if name in rows})

    def run(self, iterations: int) -> np.ndarray:
        """Run so many iterations, fewer where every slot is done before. Returns which slots are done, bool ``[B]``."""
        # Counted from nothing each time: slots may live for more iterations than an int32 counts.
        start, limit = (put(np.int32(count), self._limit_sharding) for count in (0, iterations))
        state = replace(self._state, step=start)
        arguments = (self._runner.weights, replace(self._request, limit=limit), state)
        key, lower = self._lowered(arguments)
        self._state = self._runner.programs.get((key, shapes_of(arguments)), lower)(*arguments)
        made = int(fetch(self._state.step))
        self.iterations += made
        self.forwards += made
        return fetch(self._state.done)


def compiled_in(runner: Runner, config: DiffusionConfig | SamplingConfig, width: int) -> Hashable:
    """What of a request is compiled into the programs of its slots: rows that share slots have it in common.

    Everything else is a row's own: seed, lengths, steps, temperature, filters, thresholds, stop tokens, and without a
    cache the blocks.
    """
    if isinstance(config, SamplingConfig):
        return decode_program(config, runner.layout.config.vocab_size), config.use_cache
    return block_program(runner, config, width, runner.layout.spec.data, width), config.cache


def general(config: DiffusionConfig | SamplingConfig) -> DiffusionConfig | SamplingConfig:
    """The configuration of slots that take requests like this one whatever they draw, filter and keep."""
    changes: dict[str, Any] = {"temperature": 1.0, "top_p": 0.5, "log_probabilities": True}
    if isinstance(config, DiffusionConfig) and config.parallel == "none":
        changes["alg_temp"] = 1.0
    return config.replace(**changes)


class BlockSlots(Slots):
    """Slots of a diffusion model. The original algorithm is a single block without a cache."""

    _request_rows = _rows_of(BlockRequest)
    _state_rows = (
        "canvas",
        "commit_steps",
        "block",
        "step_in_block",
        "steps_until_refresh",
        "previous_block_stale",
        "refreshes",
        "window_positions",
        "done",
        "log_probabilities",
    )

    def __init__(self, runner: Runner, config: DiffusionConfig, width: int, count: int, steps: int) -> None:
        """Make free slots.

        Args:
          runner: the model on its mesh.
          config: decides what is compiled; requests are those whose :func:`compiled_in` is the same.
          width: bucket of their canvases.
          count: B, a multiple of the data axis.
          steps: of a block, the most that any request has; there is room for those of ``config`` anyway.
        """
        self.width = width
        # One table for all rows, whoever enters: an empty slot is one of this configuration.
        self._steps = max(steps, block_schedule(config, width)[1])
        self._forward = runner.forward(width)
        self._program = block_program(runner, config, width, count, width)
        _, request, state = block_batch(runner, NOBODY, config, [], width, count, self._steps)
        nobody = block_batch(runner, NOBODY, config, [], width, 1, self._steps)[1:]
        where = block_request_shardings(runner.layout)
        placed, on_mesh = jax.tree.map(put, request, where), put_block_state(runner, state, config.cache != "none")
        super().__init__(runner, placed, on_mesh, nobody, count, where.limit)

    def _arrays(self, request: RowRequest) -> tuple[BlockRequest, BlockState]:
        assert isinstance(request.config, DiffusionConfig)
        seeds = [request.seed]
        return block_batch(self._runner, request.rows, request.config, seeds, self.width, 1, self._steps)[1:]

    def _lowered(self, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        forward, program = self._forward, self._program
        return ("blocks", forward, program), lambda: lower_blocks(forward, program, *arguments)

    def canvas(self) -> np.ndarray:
        """What stands in the slots now; masks of a prompt are open too."""
        canvas = fetch(self._state.canvas)
        return np.where(canvas == self._runner.layout.config.mask_token_id, -1, canvas)

    def collect(self, taken: Mapping[int, tuple[int, RowRequest]]) -> list[RowResult]:
        """Results of slots that are done."""
        canvas, committed = fetch(self._state.canvas), fetch(self._state.commit_steps)
        kept = self._state.log_probabilities
        log_probabilities = None if kept is None else fetch(kept)
        model = self._runner.layout.config
        return [
            RowResult(
                number,
                pad_after_end(
                    canvas[slot, : request.length],
                    committed[slot, : request.length],
                    request.config.stop_token_ids,
                    model,
                ),
                committed[slot, : request.length].copy(),
                None if log_probabilities is None else log_probabilities[slot, : request.length].copy(),
            )
            for slot, (number, request) in taken.items()
        ]


class DecodeSlots(Slots):
    """Slots of an autoregressive model."""

    _request_rows = _rows_of(DecodeRequest)
    _state_rows = ("tokens", "lengths", "done", "log_probabilities")

    def __init__(self, runner: Runner, config: SamplingConfig, width: int, count: int, prompt: int) -> None:
        """Make free slots.

        Args:
          runner: the model on its mesh.
          config: decides what is compiled; requests are those whose :func:`compiled_in` is the same.
          width: bucket of prompts and their new tokens.
          count: B, a multiple of the data axis.
          prompt: the longest prompt.
        """
        self.width, self._config = width, config
        self._prompt = min(width, runner.bucket(prompt))
        self._forward = runner.forward(self._prompt if config.use_cache else width)
        self._program = decode_program(config, runner.layout.config.vocab_size)
        request, state = decode_batch(runner, NOBODY, config, [], width, count)
        nobody = decode_batch(runner, NOBODY, config, [], width, 1)
        where = decode_request_shardings(runner.layout)
        placed, on_mesh = jax.tree.map(put, request, where), put_decode_state(runner, state, config.use_cache)
        super().__init__(runner, placed, on_mesh, nobody, count, where.limit)

    def _arrays(self, request: RowRequest) -> tuple[Any, Any]:
        assert isinstance(request.config, SamplingConfig)
        return decode_batch(self._runner, request.rows, request.config, [request.seed], self.width, 1)

    def _lowered(self, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        forward, program = self._forward, self._program
        return ("decode", forward, program), lambda: lower_decode(forward, program, *arguments)

    def insert(self, requests: Mapping[int, RowRequest | None]) -> None:
        """Put requests into slots, read their prompts and generate the first token of each; None empties a slot."""
        super().insert(requests)
        new = [slot for slot, request in requests.items() if request is not None]
        if not self._config.use_cache or not new:
            return
        entering = put(np.isin(np.arange(self.count), new), self._runner.layout.sharding("batch"))
        arguments = (self._runner.weights, self._request, self._state, entering)
        compiled = self._runner.programs.get(
            ("prefill inserted", self._prompt, self._forward, self._program, shapes_of(arguments)),
            lambda: lower_prefill_inserted(self._forward, self._program, self._prompt, *arguments),
        )
        self._state = compiled(*arguments)
        own = self.count // self._runner.layout.spec.data
        self.forwards += int(np.bincount([slot // own for slot in new]).max())

    def canvas(self) -> np.ndarray:
        """What stands in the slots now."""
        tokens, lengths = fetch(self._state.tokens), fetch(self._state.lengths)
        return np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, -1)

    def collect(self, taken: Mapping[int, tuple[int, RowRequest]]) -> list[RowResult]:
        """Results of slots that are done."""
        tokens, lengths = fetch(self._state.tokens), fetch(self._state.lengths)
        kept = self._state.log_probabilities
        log_probabilities = None if kept is None else fetch(kept)
        found = []
        for slot, (number, request) in taken.items():
            places = np.arange(request.length)
            steps = np.where(
                (places >= len(request.tokens)) & (places < lengths[slot]), places - len(request.tokens), -1
            )
            own = None if log_probabilities is None else log_probabilities[slot, : request.length].copy()
            found.append(RowResult(number, tokens[slot, : request.length].copy(), steps.astype(np.int32), own))
        return found


def open_slots(
    runner: Runner, config: DiffusionConfig | SamplingConfig, width: int, count: int, steps: int, prompt: int
) -> Slots:
    """Free slots of the kind that ``config`` is for; arguments as of :class:`BlockSlots` and :class:`DecodeSlots`."""
    if isinstance(config, DiffusionConfig):
        return BlockSlots(runner, config, width, count, steps)
    return DecodeSlots(runner, config, width, count, prompt)
