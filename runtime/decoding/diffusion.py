"""Exact masked-diffusion decoding as one device program.

The algorithm is ``diffusion_generate`` of Dream (Ye et al., 2025; HKUNLP/Dream) and DiffuCoder (Gong et al., 2025),
with each row's own number of masks where the original takes the batch mean.

One ``while_loop`` runs from the state's step up to a limit that is a run-time argument, so that a whole generation,
a streamed chunk and a single hooked step are the same compiled program and cannot disagree.

Dimension letters: B batch, S canvas, P positions of one head chunk, D embed, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from runtime.decoding.sampling import (
    TOKEN_STREAM,
    SamplingRule,
    choose_tokens,
    draw_per_position,
    log_probabilities,
    position_keys,
)
from runtime.models.config import ModelConfig
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.transformer import hidden_states, pick_positions, project_logits

Array = jax.Array
# In the structs below: an array, or in its place a sharding or an abstract shape, in trees that describe one.
Leaf = Any


@dataclass(frozen=True)
class DenoiseProgram:
    """The parts of a generation that are compiled in.

    Attributes:
      algorithm: one of :data:`runtime.decoding.sampling.ALGORITHMS`.
      sampling: how tokens are chosen.
      sample_positions: draw the positions to transfer by confidence (``alg_temp`` above 0), else take the best.
      chunk: positions per row that the head is run on at a time, P.
      log_probabilities: keep the log-probability of every token that is committed.
    """

    algorithm: str
    sampling: SamplingRule
    sample_positions: bool
    chunk: int
    log_probabilities: bool = False


@flax.struct.dataclass
class Request:
    """Run-time arguments of a generation.

    Attributes:
      lengths: int32 ``[B]``, canvas length of each row, prompt and new tokens.
      seeds: uint32 ``[B, 2]``, key data of each row.
      ratios: float32 ``[R]``, R at least ``steps``; see :func:`runtime.decoding.schedule.transfer_ratios`.
      steps: int32, denoise steps of the whole generation.
      limit: int32, run up to this step.
      temperature, top_p, top_k, alg_temp: scalars, read where the program uses them.
    """

    lengths: Leaf
    seeds: Leaf
    ratios: Leaf
    steps: Leaf
    limit: Leaf
    temperature: Leaf
    top_p: Leaf
    top_k: Leaf
    alg_temp: Leaf


@flax.struct.dataclass
class DenoiseState:
    """What a generation carries from step to step.

    Attributes:
      canvas: int32 ``[B, S]``, start-aligned; the mask token where nothing is committed yet.
      commit_steps: int32 ``[B, S]``, the step that set a position, -1 where none has.
      step: int32, the next step.
      forwards: int32, forward passes run so far.
      log_probabilities: float32 ``[B, S]`` of committed tokens, or None.
    """

    canvas: Leaf
    commit_steps: Leaf
    step: Leaf
    forwards: Leaf
    log_probabilities: Leaf = None


@flax.struct.dataclass
class Choices:
    """What the model chose for positions of the canvas, ``[B, S]`` each or ``[B, P]`` of a chunk.

    Attributes:
      tokens: int32.
      confidences: float32, -inf where no token was wanted.
      log_probabilities: float32 of the tokens under the model itself, or None.
    """

    tokens: Array
    confidences: Array
    log_probabilities: Array | None = None


def _masked(config: ModelConfig, canvas: Array, lengths: Array) -> Array:
    inside = jnp.arange(canvas.shape[1]) < lengths[:, None]
    return (canvas == config.mask_token_id) & inside


def transfer_plan(
    forward: Forward, program: DenoiseProgram, request: Request, state: DenoiseState
) -> tuple[Array, Array]:
    """What a step is going to transfer, before any forward pass.

    Returns:
      wanted: bool ``[B, S]``, positions whose token is needed.
      counts: int32 ``[B]``, how many of them each row commits (``origin`` commits all it wants).
    """

    def plan(canvas: Array, lengths: Array, seeds: Array, step: Array, ratio: Array, last: Array) -> Any:
        masked = _masked(forward.config, canvas, lengths)
        if program.algorithm == "origin":
            wanted = masked & ((draw_per_position(jax.random.uniform, seeds, step, canvas) < ratio) | last)
            return wanted, wanted.sum(axis=1, dtype=jnp.int32)
        left = masked.sum(axis=1, dtype=jnp.int32)
        counts = jnp.where(last, left, (left.astype(jnp.float32) * ratio).astype(jnp.int32))
        # A row that commits nothing in this step needs no tokens either.
        return masked & (counts > 0)[:, None], counts

    ratio, last = request.ratios[state.step], state.step == request.steps - 1
    return forward.on_rows(plan, state.canvas, request.lengths, request.seeds, state.step, ratio, last)


def choose(
    forward: Forward, program: DenoiseProgram, request: Any, step: Array, logits: Array, positions: Array
) -> Choices:
    """Choose a token for each of these positions from their logits.

    Args:
      forward: the model.
      program: what is compiled in.
      request: seeds, temperature, top_p and top_k.
      step: int32, one for all rows or ``[B]``.
      logits: float32 ``[B, P, V]``.
      positions: int32 ``[B, P]``.
    """
    keys = position_keys(request.seeds, step, TOKEN_STREAM, positions)
    tokens, confidences = choose_tokens(
        forward.config, program.sampling, logits, keys, request.temperature, request.top_p, request.top_k
    )
    return Choices(tokens, confidences, log_probabilities(logits, tokens) if program.log_probabilities else None)


def choose_on_canvas(
    forward: Forward,
    program: DenoiseProgram,
    weights: Weights,
    request: Any,
    step: Array,
    hidden: Array,
    wanted: Array,
    offset: Array | None = None,
) -> Choices:
    """Choose a token for every wanted position, running the head on those alone, ``program.chunk`` a row at a time.

    Args:
      forward: layout and attention.
      program: what is compiled in.
      weights: the model; only its head is used.
      request: seeds, temperature, top_p and top_k.
      step: int32, one for all rows or ``[B]``.
      hidden: ``[B, S, D]``.
      wanted: bool ``[B, S]``.
      offset: int32 ``[B]``, where each row's S positions start on its canvas; None for 0.

    Returns:
      Choices ``[B, S]``.
    """
    width = wanted.shape[1]

    def choose_at(positions: Array) -> Choices:
        # The prediction for position i is the output at i - 1; position 0 keeps its own.
        logits = project_logits(forward, weights, pick_positions(forward, hidden, jnp.maximum(positions - 1, 0)))
        places = positions if offset is None else positions + offset[:, None]
        return choose(forward, program, request, step, logits, places)

    if program.chunk >= width:
        return choose_at(jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), wanted.shape))
    # Per row the wanted positions, ascending, then the others.
    order = forward.on_rows(lambda wanted: jnp.argsort(~wanted, axis=1, stable=True).astype(jnp.int32), wanted)
    chunks = (wanted.sum(axis=1).max() + program.chunk - 1) // program.chunk

    def place(positions: Array, *values: Array) -> tuple[Array, ...]:
        row, half = jnp.arange(positions.shape[0])[:, None], len(values) // 2
        return tuple(old.at[row, positions].set(new) for old, new in zip(values[:half], values[half:], strict=True))

    def body(chunk: Array, filled: Choices) -> Choices:
        # The last chunk of a canvas that the chunk does not divide starts earlier and repeats a few positions.
        start = jnp.minimum(chunk * program.chunk, width - program.chunk)
        positions = forward.on_rows(
            lambda order, start: jax.lax.dynamic_slice_in_dim(order, start, program.chunk, axis=1), order, start
        )
        chosen = choose_at(positions)
        placed = forward.on_rows(place, positions, *jax.tree.leaves(filled), *jax.tree.leaves(chosen))
        return jax.tree.unflatten(jax.tree.structure(filled), placed)

    nothing = Choices(
        jnp.zeros(wanted.shape, jnp.int32),
        jnp.full(wanted.shape, -jnp.inf, jnp.float32),
        jnp.zeros(wanted.shape, jnp.float32) if program.log_probabilities else None,
    )
    return jax.lax.fori_loop(0, chunks, body, nothing)


def ranks(confidences: Array) -> Array:
    """Rank of every position by confidence, 0 for the highest, ties to the lowest position: ``[B, S]`` -> int32."""
    ranking = jnp.argsort(confidences, axis=1, stable=True, descending=True)
    return jnp.argsort(ranking, axis=1, stable=True).astype(jnp.int32)


def by_schedule(
    program: DenoiseProgram,
    canvas: Array,
    confidences: Array,
    wanted: Array,
    counts: Array,
    seeds: Array,
    step: Array,
    alg_temp: Array,
) -> Array:
    """The ``counts`` most confident wanted positions of each row, all of them for ``origin``: bool ``[B, S]``.

    Ties go to the lowest position. ``alg_temp`` is one for all rows or ``[B]``; 0 draws no positions.
    """
    if program.algorithm == "origin":
        return wanted
    confidences = jnp.where(wanted, confidences, -jnp.inf)
    if program.sample_positions:
        # Gumbel-top-k draws k without replacement from softmax(confidence / alg_temp) (Kool et al., 2019).
        alg_temp = jnp.broadcast_to(alg_temp, len(canvas))[:, None]
        noisy = confidences / jnp.where(alg_temp > 0, alg_temp, 1.0)
        noisy += draw_per_position(jax.random.gumbel, seeds, step, canvas)
        confidences = jnp.where(alg_temp > 0, noisy, confidences)
    return wanted & (ranks(confidences) < counts[:, None])


def commit(
    forward: Forward,
    program: DenoiseProgram,
    request: Request,
    state: DenoiseState,
    choices: Choices,
    wanted: Array,
    counts: Array,
) -> DenoiseState:
    """Write the ``counts`` most confident wanted tokens of each row; ties go to the lowest position."""

    def transfer(canvas: Array, tokens: Array, *rest: Array) -> Array:
        # A model that predicts MASK leaves the position masked, to be counted anew.
        return by_schedule(program, canvas, *rest) & (tokens != forward.config.mask_token_id)

    set_now = forward.on_rows(
        transfer,
        state.canvas,
        choices.tokens,
        choices.confidences,
        wanted,
        counts,
        request.seeds,
        state.step,
        request.alg_temp,
    )
    return replace(write_choices(state, choices, set_now, state.step), step=state.step + 1, forwards=state.forwards + 1)


def write_choices(state: Any, choices: Choices, set_now: Array, step: Array) -> Any:
    """A state with canvas, steps and log-probabilities of the positions ``set_now`` ``[B, S]`` taken from choices."""
    kept = state.log_probabilities
    if kept is not None and choices.log_probabilities is not None:
        kept = jnp.where(set_now, choices.log_probabilities, kept)
    return replace(
        state,
        canvas=jnp.where(set_now, choices.tokens, state.canvas),
        commit_steps=jnp.where(set_now, step, state.commit_steps),
        log_probabilities=kept,
    )


def denoise(
    forward: Forward, program: DenoiseProgram, weights: Weights, request: Request, state: DenoiseState
) -> DenoiseState:
    """Run denoise steps from ``state.step`` up to ``request.limit``; a step that transfers nothing runs no forward."""

    def step(state: DenoiseState) -> DenoiseState:
        with jax.named_scope("denoise_step"):
            wanted, counts = transfer_plan(forward, program, request, state)

            def forward_and_commit(state: DenoiseState) -> DenoiseState:
                hidden = hidden_states(forward, weights, state.canvas, request.lengths)
                choices = choose_on_canvas(forward, program, weights, request, state.step, hidden, wanted)
                return commit(forward, program, request, state, choices, wanted, counts)

            def skip(state: DenoiseState) -> DenoiseState:
                return replace(state, step=state.step + 1)

            return jax.lax.cond(counts.max() > 0, forward_and_commit, skip, state)

    return jax.lax.while_loop(lambda state: state.step < request.limit, step, state)


def denoise_with_logits(
    forward: Forward, program: DenoiseProgram, request: Request, state: DenoiseState, logits: Array
) -> DenoiseState:
    """One step from given shifted logits float32 ``[B, S, V]``: what a logits hook has made of the model's own."""
    wanted, counts = transfer_plan(forward, program, request, state)
    positions = jnp.broadcast_to(jnp.arange(state.canvas.shape[1], dtype=jnp.int32), state.canvas.shape)
    choices = choose(forward, program, request, state.step, logits, positions)
    return commit(forward, program, request, state, choices, wanted, counts)
