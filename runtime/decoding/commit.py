"""Committing tokens: selecting which of the chosen tokens a step writes into the canvas.

The threshold and factor rules follow Fast-dLLM (Wu et al., 2025), with one difference: in the first step of a block,
a parallel rule always commits the block's first masked position. Otherwise confident tokens late in the block would be
committed before the text that leads up to them.

Dimension letters: B batch, S canvas.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from runtime.decoding.block_causal import is_certain_enough
from runtime.decoding.choices import Choices, confidence_ranks
from runtime.decoding.sampling import draw_per_position
from runtime.decoding.state import DenoiseProgram, DenoiseRequest, DenoiseState, row_steps
from runtime.models.arrays import only_row_fields
from runtime.models.forward import Forward

Array = jax.Array


def commit(
    forward: Forward,
    program: DenoiseProgram,
    request: DenoiseRequest,
    state: DenoiseState,
    choices: Choices,
    wanted: Array,
    counts: Array,
) -> DenoiseState:
    """Commit the chosen tokens that the schedule or the parallel rule selects, and advance the rows by one step.

    A position whose chosen token is the mask token stays masked, and counts as a mask in the next step. A row ends
    without a commit if the logits of a wanted position are not finite.

    Args:
      forward: the model.
      program: settings that are compiled in.
      request: seeds, thresholds and alg_temp.
      state: the state before the step.
      choices: tokens and confidences ``[B, S]``.
      wanted: bool ``[B, S]``, positions that may be committed. A row without any does not change or advance.
      counts: int32 ``[B]``, number of positions that the schedule commits in each row.
    """

    def select(
        request: DenoiseRequest, state: DenoiseState, choices: Choices, wanted: Array, counts: Array
    ) -> tuple[Array, Array]:
        confidences = jnp.where(wanted, choices.confidences, -jnp.inf)
        if program.parallel == "none":
            chosen = _by_schedule(program, request, state, confidences, wanted, counts)
        elif program.attention_block_length:
            chosen = is_certain_enough(program, request, confidences, wanted, counts)
        else:
            chosen = _by_certainty(program, request, state, confidences, wanted)
        non_finite = (wanted & (choices.tokens < 0)).any(axis=1)
        return chosen & (choices.tokens != forward.config.mask_token_id) & ~non_finite[:, None], non_finite

    chosen, non_finite = forward.on_rows(select, request, only_row_fields(state), choices, wanted, counts)
    kept = state.log_probabilities
    if kept is not None and choices.log_probabilities is not None:
        kept = jnp.where(chosen, choices.log_probabilities, kept)
    return replace(
        state,
        canvas=jnp.where(chosen, choices.tokens, state.canvas),
        commit_steps=jnp.where(chosen, row_steps(request, state)[:, None], state.commit_steps),
        step_in_block=state.step_in_block + wanted.any(axis=1),
        done=state.done | non_finite,
        non_finite=state.non_finite | non_finite,
        log_probabilities=kept,
    )


def _by_schedule(
    program: DenoiseProgram,
    request: DenoiseRequest,
    state: DenoiseState,
    confidences: Array,
    wanted: Array,
    counts: Array,
) -> Array:
    """Select the ``counts`` most confident wanted positions of each row, or all of them for ``origin``.

    Returns:
      bool ``[B, S]``.
    """
    if program.algorithm == "origin":
        return wanted
    if program.sample_positions:
        # Gumbel-top-k draws k without replacement from softmax(confidence / alg_temp) (Kool et al., 2019).
        alg_temp = request.alg_temp[:, None]
        noisy = confidences / jnp.where(alg_temp > 0, alg_temp, 1.0)
        noisy += draw_per_position(jax.random.gumbel, request.seeds, row_steps(request, state), state.canvas)
        confidences = jnp.where(alg_temp > 0, noisy, confidences)
    return wanted & (confidence_ranks(confidences) < counts[:, None])


def _by_certainty(
    program: DenoiseProgram, request: DenoiseRequest, state: DenoiseState, confidences: Array, wanted: Array
) -> Array:
    """Select the wanted positions that are certain enough for the parallel rule, at least one per row.

    Args:
      program: settings that are compiled in.
      request: thresholds and factors.
      state: the state before the step.
      confidences: float32 ``[B, S]``, -inf at positions that need no token.
      wanted: bool ``[B, S]``.

    Returns:
      bool ``[B, S]``.
    """
    # Map confidences to 0..1, like probabilities: exp(-entropy) is one over the effective number of candidate tokens.
    certainty = jnp.exp(confidences) if program.algorithm == "entropy" else confidences
    if program.parallel == "threshold":
        enough = certainty > request.threshold[:, None]
    else:
        enough = certainty >= 1.0 - request.factor[:, None] / (confidence_ranks(confidences) + 2).astype(jnp.float32)
    first_step = state.step_in_block == 0
    at_least = jnp.where(first_step, jnp.argmax(wanted, axis=1), jnp.argmax(confidences, axis=1))
    return wanted & (enough | (jnp.arange(wanted.shape[1]) == at_least[:, None]))
