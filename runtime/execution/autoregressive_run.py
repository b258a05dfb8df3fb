"""Running an autoregressive generation: one batch on the mesh, whole or streamed.

Dimension letters: B batch, S the caller's prompt width, N new tokens, T cache length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from runtime.decoding.autoregressive import DecodeProgram, DecodeRequest, DecodeState
from runtime.decoding.parameters import SamplingConfig
from runtime.decoding.sampling import SamplingRule
from runtime.execution.programs import (
    decode_request_shardings,
    decode_state_shardings,
    empty_cache,
    fetch,
    lower_decode,
    lower_prefill,
    put,
    shapes_of,
)
from runtime.execution.rows import Rows, end_align, make_canvas, sampling_rows, seed_words, stop_rows
from runtime.execution.run_result import RunResult
from runtime.execution.runner import Runner


def decode_program(config: SamplingConfig, vocab_size: int, samples: int = 1) -> DecodeProgram:
    """What of a request is compiled in; everything else is a run-time argument."""
    filtered = (config.top_p is not None and config.top_p < 1.0) or (
        config.top_k is not None and config.top_k < vocab_size
    )
    return DecodeProgram(
        sampling=SamplingRule(
            confidence="maskgit_plus",
            sampled=config.temperature > 0,
            # The most probable token passes every filter.
            filtered=filtered and config.temperature > 0,
            suppress_mask=False,
            confidence_dtype="float32",
        ),
        log_probabilities=config.log_probabilities,
        samples=samples,
    )


def decode_batch(
    runner: Runner, rows: Rows, config: SamplingConfig, seeds: list[int], width: int, batch: int
) -> tuple[DecodeRequest, DecodeState]:
    """A batch as the devices take it, still on the host: the request, and the state without a cache.

    Args:
      runner: the model on its mesh.
      rows: at most ``batch`` start-aligned prompts; none for rows that are all filler.
      config: the request.
      seeds: one per row.
      width: bucket T, at least the longest prompt and its new tokens.
      batch: rows on the devices, filler included.
    """
    model = runner.layout.config
    tokens, ends = make_canvas(rows, model, config.max_new_tokens, width)
    filler = batch - len(tokens)
    canvas = np.pad(tokens, ((0, filler), (0, 0)))
    prompts = np.pad(rows.lengths, (0, filler), constant_values=1).astype(np.int32)
    request = DecodeRequest(
        seeds=seed_words([*seeds, *[0] * filler]),
        prompts=prompts,
        ends=np.pad(ends, (0, filler)).astype(np.int32),
        stop_tokens=stop_rows(config.stop_token_ids, batch),
        limit=np.int32(0),
        # The most probable token passes every filter.
        **sampling_rows(config if config.temperature > 0 else SamplingConfig(), model.vocab_size, batch),
    )
    state = DecodeState(
        tokens=canvas,
        lengths=prompts,
        done=np.arange(batch) >= len(tokens),
        step=np.int32(0),
        log_probabilities=np.zeros(canvas.shape, np.float32) if config.log_probabilities else None,
    )
    return request, state


def put_decode_state(runner: Runner, state: DecodeState, cached: bool) -> DecodeState:
    """A state onto the mesh, with an empty cache where there is to be one."""
    placed: DecodeState = jax.tree.map(put, state, decode_state_shardings(runner.layout, state))
    if not cached:
        return placed
    batch, width = state.tokens.shape
    return replace(placed, cache=empty_cache(runner.layout, batch, width, runner.cache_dtype))


class AutoregressiveRun:
    """One batch of rows on the mesh, between two tokens."""

    def __init__(
        self,
        runner: Runner,
        rows: Rows,
        config: SamplingConfig,
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
          width: bucket T, at least the longest prompt and its new tokens.
          batch: rows on the devices, filler included; a multiple of the data axis.
          samples: rows next to one another that have the same prompt.
        """
        self._runner, self._config = runner, config
        model = runner.layout.config
        request, state = decode_batch(runner, rows, config, seeds, width, batch)
        self._prompts, self._ends = rows.lengths, rows.lengths + np.int32(config.max_new_tokens)
        self._width = min(width, runner.bucket(int(rows.lengths.max())))
        self._forward = runner.forward(self._width if config.use_cache else width)
        where = decode_request_shardings(runner.layout)
        self._request: DecodeRequest = jax.tree.map(put, request, where)
        self._limit_sharding = where.limit
        self._state = put_decode_state(runner, state, config.use_cache)
        # Prompts are shared where no group of samples lies on two shards of data.
        count = len(rows.lengths)
        shared = samples if (batch // runner.layout.spec.data) % samples == 0 and count % samples == 0 else 1
        self._program = decode_program(config, model.vocab_size, shared)
        self._done = 0
        # What stands in the caller's rows where no token of ours does: the caller's own padding.
        self._onto = np.pad(rows.original, ((0, 0), (0, config.max_new_tokens)), constant_values=model.pad_token_id)

    @property
    def steps(self) -> int:
        """Tokens of every row at most."""
        return self._config.max_new_tokens

    @property
    def finished(self) -> bool:
        """Whether every row has all its tokens, as far as the host knows."""
        return self._done >= self.steps

    def advance(self, limit: int) -> None:
        """Generate up to ``limit`` tokens of every row on the devices, without waiting for them."""
        limit = min(limit, self.steps)
        request: DecodeRequest = replace(self._request, limit=put(np.int32(limit), self._limit_sharding))
        arguments: tuple[Any, ...] = (self._runner.weights, request, self._state)
        # Samples share the prefill alone.
        decode = replace(self._program, samples=1)
        shapes = shapes_of(arguments)
        programs = self._runner.programs
        if self._done == 0 and self._config.use_cache:
            compiled = programs.get(
                ("prefill", self._width, self._forward, self._program, shapes),
                lambda: lower_prefill(self._forward, self._program, self._width, *arguments),
            )
            self._state = compiled(*arguments)
            arguments = (*arguments[:2], self._state)
        if limit > 1 or not self._config.use_cache:
            compiled = programs.get(
                ("decode", self._forward, decode, shapes), lambda: lower_decode(self._forward, decode, *arguments)
            )
            self._state = compiled(*arguments)
        self._done = limit

    def advance_by(self, steps: int) -> Iterator[int]:
        """Generate to the end, ``steps`` tokens at a time, yielding how many there are when the devices have them."""
        while not self.finished:
            self.advance(self._done + steps)
            if bool(fetch(self._state.done).all()):
                self._done = self.steps
            yield self._done

    def canvas(self) -> np.ndarray:
        """The tokens so far, in the caller's rows: int32 ``[B, S + N]``, padding where there are none yet."""
        return self._to_caller(fetch(self._state.tokens), self._onto)

    def result(self, history: bool) -> RunResult:
        """Sequences, the step that made each token, and what it cost."""
        del history  # a token's step is its place
        lengths = fetch(self._state.lengths)[: len(self._ends)]
        places = np.arange(self._state.tokens.shape[1]) - self._prompts[:, None]
        made = (places >= 0) & (places < (lengths - self._prompts)[:, None])
        log_probabilities = None
        if self._config.log_probabilities:
            values = fetch(self._state.log_probabilities)
            log_probabilities = self._to_caller(values, np.zeros(self._onto.shape, np.float32))
        return RunResult(
            sequences=self.canvas(),
            commit_steps=self._to_caller(np.where(made, places, -1).astype(np.int32), np.full_like(self._onto, -1)),
            history=None,
            log_probabilities=log_probabilities,
            forwards=int(fetch(self._state.step)),
            positions=self._positions(lengths),
        )

    def _positions(self, lengths: np.ndarray) -> int:
        """Positions that the forwards of rows of these final lengths computed."""
        new = lengths - self._prompts
        if not self._config.use_cache:
            return int((new * self._prompts + new * (new - 1) // 2).sum())
        return int(self._prompts[:: self._program.samples].sum() + (new - 1).sum())

    def _to_caller(self, values: np.ndarray, onto: np.ndarray) -> np.ndarray:
        return end_align(values[: len(self._ends)], self._ends, onto)
