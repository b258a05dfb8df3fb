"""Masked diffusion with block-causal attention: what each step of a block commits and computes.

The blocks are those of the attention mask. They are counted from position 0, so the first block that is filled may
begin with prompt tokens. A position sees its own block and the blocks before it. Keys and values of a finished block
are therefore final, and caching them is exact.

The first pass of a block also writes the keys and values of the previous block, which is finished by then. If the model
has no prediction offset, one window computes both blocks. Otherwise the output at the previous block's last position
predicts the new block's first position, which is committed alone: that pass computes the previous block only.

The algorithms are those of SDAR (Cheng et al., 2025) and Fast-dLLM v2 (Wu et al., 2025).

Dimension letters: B batch, S canvas.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from runtime.decoding.choices import confidence_ranks, sums_by_rank
from runtime.decoding.state import DenoiseProgram, DenoiseRequest, DenoiseState, block_start, row_steps

Array = jax.Array


def block_demand(
    program: DenoiseProgram, mask_token: int, request: DenoiseRequest, state: DenoiseState, in_block: Array
) -> tuple[Array, Array, Array]:
    """Return what the next step of each row needs; see :func:`runtime.decoding.progress.next_step`.

    Args:
      program: compiled settings.
      mask_token: the model's mask token.
      request: run-time arguments.
      state: state before the step.
      in_block: bool ``[B, S]``, positions of each row's current block.

    Returns:
      The positions that the step chooses tokens for, bool ``[B, S]``; the number of them that it commits at least,
      int32 ``[B]``; and the number of masks of the block that are left before the row's end, int32 ``[B]``.
    """
    places = jnp.arange(state.canvas.shape[1])
    start = block_start(request, state.block)
    masked = (state.canvas == mask_token) & in_block
    left = (masked & (places < request.ends[:, None])).sum(axis=1, dtype=jnp.int32)
    first, last = _sub_block(request, start, masked)
    wanted = masked & (places >= first[:, None]) & (places < last[:, None])
    if program.first_alone:
        alone = _is_masked_at(masked, start) & (start > 0)
        wanted = jnp.where(alone[:, None], places == start[:, None], wanted)
    wanted &= (left > 0)[:, None]
    share, rest = request.block_length // request.block_steps, request.block_length % request.block_steps
    least = jnp.maximum(share + (state.step_in_block < rest), 1)
    return wanted, jnp.minimum(least, wanted.sum(axis=1, dtype=jnp.int32)), left


def _sub_block(request: DenoiseRequest, start: Array, masked: Array) -> tuple[Array, Array]:
    """Return the sub-block that contains each row's first mask: its first position and the position after its last."""
    length = request.sub_block_length
    first = start + (jnp.argmax(masked, axis=1).astype(jnp.int32) - start) // length * length
    return first, jnp.minimum(first + length, start + request.block_length)


def _is_masked_at(masked: Array, place: Array) -> Array:
    clipped = jnp.minimum(place, masked.shape[1] - 1)[:, None]
    return jnp.take_along_axis(masked, clipped, axis=1)[:, 0] & (place < masked.shape[1])


def begins_masked(mask_token: int, request: DenoiseRequest, state: DenoiseState, block: Array) -> Array:
    """Return whether block ``block`` ``[B]`` of each row starts with a mask: bool ``[B]``."""
    return _is_masked_at(state.canvas == mask_token, block_start(request, block))


def window_bounds(
    program: DenoiseProgram, request: DenoiseRequest, state: DenoiseState, wanted: Array
) -> tuple[Array, Array]:
    """Return the start and the end (exclusive) of each row's window, both int32 ``[B]``.

    Args:
      program: compiled settings.
      request: run-time arguments.
      state: state before the step.
      wanted: bool ``[B, S]``, positions that each row's step chooses tokens for.
    """
    start, end = block_start(request, state.block), block_start(request, state.block + 1)
    stale = state.previous_block_stale > 0
    before = jnp.where(stale, block_start(request, state.block - 1), start)
    if program.first_alone:
        # The pass that writes the previous block needs only the first position of the current one.
        # If it predicts a mask there, the next pass needs the position before once more.
        again = ~stale & (start > 0) & _is_masked_at(wanted, start)
        before = jnp.where(again, start - 1, before)
        end = jnp.where(stale | again, start + 1, end)
    if program.sub_block_window:
        first, last = _sub_block(request, start, wanted)
        begun = jnp.take_along_axis(state.commit_steps, jnp.minimum(start, wanted.shape[1] - 1)[:, None], axis=1)[:, 0]
        # Passes over the whole block: those after the step that committed its first position alone.
        passes = jnp.where(
            program.first_alone & (begun >= 0), row_steps(request, state) - begun - 1, state.step_in_block
        )
        # This is an approximation: the rest of the block keeps keys and values of the last pass over the whole block.
        alone = ~stale & (passes > 0) & ~_is_masked_at(wanted, first)
        before, end = jnp.where(alone, first, before), jnp.where(alone, last, end)
    return before, jnp.minimum(end, request.lengths)


def is_certain_enough(
    program: DenoiseProgram, request: DenoiseRequest, confidences: Array, wanted: Array, counts: Array
) -> Array:
    """Return the positions that the parallel rule commits, bool ``[B, S]``.

    ``threshold`` commits the ``counts`` most certain positions and all whose confidence is above the threshold.
    ``sequential`` commits the first ``counts`` positions. ``entropy_sum`` commits the most certain positions while the
    sum of their entropies stays below the limit, and at least one.

    Args:
      program: compiled settings.
      request: run-time arguments.
      confidences: float32 ``[B, S]``, -inf where no token is wanted; negative entropies for ``entropy_sum``.
      wanted: bool ``[B, S]``, positions that have a chosen token.
      counts: int32 ``[B]``, the number that the schedule gives.
    """
    if program.parallel == "sequential":
        return wanted & (jnp.cumsum(wanted, axis=1) <= counts[:, None])
    ranks = confidence_ranks(confidences)
    if program.parallel == "threshold":
        return wanted & ((ranks < counts[:, None]) | (confidences > request.threshold[:, None]))
    entropies = jnp.where(wanted, -confidences, 0.0)
    below = sums_by_rank(entropies, ranks) < request.entropy_limit[:, None]
    return wanted & (below | (ranks == 0))
