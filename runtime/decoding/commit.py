"""Committing tokens: selecting which of the chosen tokens a step writes into the canvas.

The threshold and factor rules follow Fast-dLLM (Wu et al., 2025), the decay of the threshold Streaming-dLLM (arXiv
2601.17917), and the frechet rule Fast-dLLM++ (arXiv 2606.02955). There is one difference: in the first step of a block,
these rules always commit the block's first masked position. Otherwise confident tokens late in the block would be
committed before the text that leads up to them. The entropy_bound rule is that of the EB-Sampler (Ben-Hamu et al.,
2025; arXiv 2505.24857). ``block_rule="fast_dllm"`` is the rule of Fast-dLLM for Dream without that difference.

Dimension letters: B batch, S canvas.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from runtime.decoding.block_causal import is_certain_enough
from runtime.decoding.choices import Choices, confidence_ranks, sums_by_rank
from runtime.decoding.sampling import draw_per_position
from runtime.decoding.state import DenoiseProgram, DenoiseRequest, DenoiseState, block_start, row_steps
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
      request: thresholds, factors and bounds.
      state: the state before the step.
      confidences: float32 ``[B, S]``, -inf at positions that need no token; negative entropies for ``entropy_bound``.
      wanted: bool ``[B, S]``.

    Returns:
      bool ``[B, S]``.
    """
    if program.parallel == "entropy_bound":
        # In ascending order the last entropy is the largest, so sum - maximum is the sum of those before it. It is 0
        # for the first position, which is therefore committed.
        entropies, ranks = jnp.where(wanted, -confidences, 0.0), confidence_ranks(confidences)
        return wanted & (sums_by_rank(entropies, ranks, before=True) <= request.entropy_bound[:, None])
    # Map confidences to 0..1, like probabilities: exp(-entropy) is one over the effective number of candidate tokens.
    certainty = jnp.exp(confidences) if program.algorithm == "entropy" else confidences
    if program.block_rule == "fast_dllm":
        # A refresh has a single wanted position, which is committed below.
        enough = confidences >= request.threshold[:, None]
    elif program.parallel == "threshold":
        enough = certainty > _thresholds(program, request, state, wanted)[:, None]
    elif program.parallel == "frechet":
        # The sum of n certainties minus n - 1 is 1 minus the sum of n uncertainties.
        uncertainty = jnp.where(wanted, 1.0 - certainty, 0.0)
        all_right = jnp.maximum(1.0 - sums_by_rank(uncertainty, confidence_ranks(confidences)), 0.0)
        enough = all_right - uncertainty > 1.0 - request.factor[:, None]
    else:
        enough = certainty >= 1.0 - request.factor[:, None] / (confidence_ranks(confidences) + 2).astype(jnp.float32)
    first_step = state.step_in_block == 0
    at_least = jnp.where(first_step, jnp.argmax(wanted, axis=1), jnp.argmax(confidences, axis=1))
    return wanted & (enough | (jnp.arange(wanted.shape[1]) == at_least[:, None]))


def _thresholds(program: DenoiseProgram, request: DenoiseRequest, state: DenoiseState, wanted: Array) -> Array:
    """Return each row's threshold for this step, float32 ``[B]``; ``wanted`` are the masks of the row's block."""
    if not program.decaying:
        return request.threshold
    start = block_start(request, state.block)
    positions = jnp.maximum(jnp.minimum(request.ends - start, request.block_length), 1)
    filled = 1.0 - wanted.sum(axis=1).astype(jnp.float32) / positions.astype(jnp.float32)
    return request.threshold * (1.0 - request.threshold_decay * filled)
