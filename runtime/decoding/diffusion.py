"""Masked-diffusion decoding as one device program: exact, in blocks, and against a cache.

The exact algorithm is ``diffusion_generate`` of Dream (Ye et al., 2025; HKUNLP/Dream) and DiffuCoder (Gong et al.,
2025), with each row's own number of masks where the original takes the batch mean. It is a single block without a
cache. Otherwise a row is cut into blocks from its first mask on, and its blocks are filled one after another; the
block schedule follows Fast-dLLM (Wu et al., 2025). Every row goes through its own blocks and steps.

One ``while_loop`` runs up to limits that are run-time arguments: a whole generation, a streamed chunk, a single hooked
step and the iterations of a server are the same compiled program.

Dimension letters: B batch, S canvas, V vocab.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from runtime.decoding.cached_steps import CachedStep
from runtime.decoding.choices import choose, choose_on_canvas
from runtime.decoding.commit import commit
from runtime.decoding.progress import next_step
from runtime.decoding.state import DenoiseProgram, DenoiseRequest, DenoiseState, row_steps
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.transformer import hidden_states

Array = jax.Array


def denoise(
    forward: Forward, program: DenoiseProgram, weights: Weights, request: DenoiseRequest, state: DenoiseState
) -> DenoiseState:
    """Run iterations until every row is done or has reached ``request.step_limit``, ``request.max_iterations`` at most.

    In each iteration a row makes its next step that commits something, by one forward pass: a refresh, a window, or
    without a cache a pass over its whole canvas. A step that commits nothing runs no forward pass.
    """

    def iterate(carry: tuple[DenoiseState, Array, Array]) -> tuple[DenoiseState, Array, Array]:
        state, wanted, counts = carry
        with jax.named_scope("denoise_step"):
            if state.cache is None:
                state = _whole_step(forward, program, weights, request, state, wanted, counts)
            else:
                state = CachedStep(forward, program, weights, request, wanted, counts).run(state)
            return next_step(forward, program, request, replace(state, iteration=state.iteration + 1))

    def unfinished(carry: tuple[DenoiseState, Array, Array]) -> Array:
        state, wanted, _ = carry
        return (state.iteration < request.max_iterations) & wanted.any()

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
    """One forward pass over all canvases, and its commits."""
    hidden = hidden_states(forward, weights, state.canvas, request.lengths)
    without = None
    if program.guided:
        with jax.named_scope("unconditional"):
            without = hidden_states(forward, weights, _without_prompt(forward, request, state), request.lengths)
    steps = row_steps(request, state)
    choices = choose_on_canvas(forward, program, weights, request, steps, hidden, wanted, unconditional=without)
    state = replace(state, refreshes=state.refreshes + wanted.any(axis=1) * (1 + program.guided))
    return commit(forward, program, request, state, choices, wanted, counts)


def _without_prompt(forward: Forward, request: DenoiseRequest, state: DenoiseState) -> Array:
    """Canvases ``[B, S]`` with MASK in the place of every prompt token; masks of a prompt stay as they were filled."""
    places = jnp.arange(state.canvas.shape[1])
    prompt = (places < request.first[:, None]) & (state.commit_steps < 0)
    return jnp.where(prompt, forward.config.mask_token_id, state.canvas)


def denoise_with_logits(
    forward: Forward, program: DenoiseProgram, request: DenoiseRequest, state: DenoiseState, logits: Array
) -> DenoiseState:
    """One step from given logits: what a logits hook has made of the model's own.

    Args:
      forward: the model.
      program: what is compiled in; no cache and no parallel rule.
      request: the run-time arguments.
      state: before the step.
      logits: float32 ``[B, S, V]``, shifted: those that predict each position.
    """
    state, wanted, counts = next_step(forward, program, request, state)
    positions = jnp.broadcast_to(jnp.arange(state.canvas.shape[1], dtype=jnp.int32), state.canvas.shape)
    choices = choose(forward, program, request, row_steps(request, state), logits, positions)
    active = wanted.any(axis=1)
    state = replace(state, refreshes=state.refreshes + active, iteration=state.iteration + active.any())
    return commit(forward, program, request, state, choices, wanted, counts)
