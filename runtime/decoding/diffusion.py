"""Masked-diffusion decoding as one device program: exact, in blocks, and with a KV cache.

The exact algorithm is ``diffusion_generate`` of Dream (Ye et al., 2025; HKUNLP/Dream) and DiffuCoder (Gong et al.,
2025). The one difference is that each row uses its own number of masks, where the original uses the batch mean. Exact
decoding is a single block without a cache. Block decoding divides a row into blocks, starting at its first mask, and
fills one block after another; its schedule follows Fast-dLLM (Wu et al., 2025). Every row advances through its own
blocks and steps.

The limits of the ``while_loop`` are run-time arguments. The same compiled program therefore runs a whole generation,
the steps between two updates of a stream, a single step with a hook, and the iterations of a server.

Dimension letters: B batch, S canvas, V vocab.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from runtime.decoding.cached_steps import CachedStep
from runtime.decoding.choices import choose, choose_on_canvas, without_prompt
from runtime.decoding.commit import commit
from runtime.decoding.drafted_windows import DraftedStep
from runtime.decoding.drafts import drafted_pass
from runtime.decoding.progress import next_step
from runtime.decoding.state import DenoiseProgram, DenoiseRequest, DenoiseState, row_steps
from runtime.decoding.variable_length import current_request, move_positions
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.transformer import hidden_states

Array = jax.Array


def denoise(
    forward: Forward, program: DenoiseProgram, weights: Weights, request: DenoiseRequest, state: DenoiseState
) -> DenoiseState:
    """Run denoise steps until every row is done or has reached ``request.step_limit``.

    Each iteration runs one forward pass per row: a refresh, a window, or, without a cache, the whole canvas. With
    drafts, a pass also computes guessed canvases, and may make several steps of a row. Steps of the schedule that
    commit no token are skipped without a forward pass. The loop stops after ``request.max_iterations`` iterations, and
    when fewer than ``request.min_running`` rows are running: a host that gives the slot of a row to another one sets
    this to the number of rows, so that the loop stops in the iteration in which one ends.
    """

    def iterate(carry: tuple[DenoiseState, Array, Array]) -> tuple[DenoiseState, Array, Array]:
        state, wanted, counts = carry
        with jax.named_scope("denoise_step"):
            if program.drafts:
                state = replace(state, iteration=state.iteration + 1, passes=state.passes + wanted.any(axis=1))
                if state.cache is None:
                    return drafted_pass(forward, program, weights, request, state, wanted, counts)
                return DraftedStep(forward, program, weights, request, wanted, counts).make_steps(state)
            if program.variable_length:
                state = _step_of_variable_length(forward, program, weights, request, state, wanted, counts)
            elif state.cache is None:
                state = _whole_step(forward, program, weights, request, state, wanted, counts)
            else:
                state = CachedStep(forward, program, weights, request, wanted, counts).run(state)
            return next_step(forward, program, request, replace(state, iteration=state.iteration + 1))

    def unfinished(carry: tuple[DenoiseState, Array, Array]) -> Array:
        state, wanted, _ = carry
        return (state.iteration < request.max_iterations) & (wanted.any(axis=1).sum() >= request.min_running)

    return jax.lax.while_loop(unfinished, iterate, next_step(forward, program, request, state))[0]


def _whole_step(
    forward: Forward,
    program: DenoiseProgram,
    weights: Weights,
    request: DenoiseRequest,
    state: DenoiseState,
    wanted: Array,
    counts: Array,
) -> DenoiseState:
    """Run one forward pass over the whole canvas of every row, and commit tokens."""
    hidden = hidden_states(forward, weights, state.canvas, request.lengths)
    without = None
    if program.guided:
        with jax.named_scope("unconditional"):
            without = hidden_states(forward, weights, without_prompt(forward, request, state), request.lengths)
    steps = row_steps(request, state)
    choices = choose_on_canvas(forward, program, weights, request, steps, hidden, wanted, unconditional=without)
    state = replace(state, refreshes=state.refreshes + wanted.any(axis=1) * (1 + program.guided))
    return commit(forward, program, request, state, choices, wanted, counts)


def _step_of_variable_length(
    forward: Forward,
    program: DenoiseProgram,
    weights: Weights,
    request: DenoiseRequest,
    state: DenoiseState,
    wanted: Array,
    counts: Array,
) -> DenoiseState:
    """Run one forward pass over every row's canvas at its current length, commit tokens, and move positions."""
    own = current_request(request, state)
    computed = state.window_positions + jnp.where(wanted.any(axis=1), state.lengths, 0)
    made = _whole_step(forward, program, weights, own, state, wanted, counts)
    # Positions are counted as those of windows, because a pass over a whole canvas differs from step to step.
    made = replace(made, refreshes=state.refreshes, window_positions=computed)
    return move_positions(forward, request, made, wanted)


def denoise_with_logits(
    forward: Forward, program: DenoiseProgram, request: DenoiseRequest, state: DenoiseState, logits: Array
) -> DenoiseState:
    """Run one step from logits that a logits hook has changed.

    Args:
      forward: the model.
      program: settings that are compiled in; without a cache and without a parallel rule.
      request: run-time arguments.
      state: the state before the step.
      logits: float32 ``[B, S, V]``, shifted so that the logits at a position predict that position. A hook may set
        some of them to -inf, but NaN and +inf end the row.
    """
    state, wanted, counts = next_step(forward, program, request, state)
    positions = jnp.broadcast_to(jnp.arange(state.canvas.shape[1], dtype=jnp.int32), state.canvas.shape)
    logits = jnp.where(jnp.isnan(logits), jnp.inf, logits)
    choices = choose(forward, program, request, row_steps(request, state), logits, positions)
    active = wanted.any(axis=1)
    state = replace(state, refreshes=state.refreshes + active, iteration=state.iteration + active.any())
    return commit(forward, program, request, state, choices, wanted, counts)
