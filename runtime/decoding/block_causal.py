"""Masked diffusion with block-causal attention: what the steps of a block commit, and which positions they compute.

Blocks are those of the attention mask: they are counted from position 0, so that the first one to be filled may begin
with tokens of the prompt. A block is seen whole by itself and by later blocks only, so the keys and values of a block
that is complete change no more. They come into the cache in the first pass of the next block: where the model predicts
a position by its own output that pass also runs the next block, else it commits the next block's first position, which
the complete block predicts alone, as in Fast-dLLM v2 (Wu et al., 2025) and SDAR (Cheng et al., 2025).

Dimension letters: B batch, S canvas.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from runtime.decoding.choices import confidence_ranks
from runtime.decoding.state import DenoiseProgram, DenoiseRequest, DenoiseState, block_start

Array = jax.Array


def block_demand(
    program: DenoiseProgram, mask_token: int, request: DenoiseRequest, state: DenoiseState, in_block: Array
) -> tuple[Array, Array, Array]:
    """What the step that a row has come to asks for; see :func:`runtime.decoding.progress.next_step`.

    Args:
      program: what is compiled in.
      mask_token: of the model.
      request: ends, schedule and sub-blocks.
      state: before the step.
      in_block: bool ``[B, S]``, positions of each row's block.

    Returns:
      Positions whose token it needs bool ``[B, S]``, how many of them it commits at least int32 ``[B]``, and the masks
      of the block before the row's end int32 ``[B]``.
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
    """The sub-block in which the first mask of each row's block is: its first position and the one after it."""
    length = request.sub_block_length
    first = start + (jnp.argmax(masked, axis=1).astype(jnp.int32) - start) // length * length
    return first, jnp.minimum(first + length, start + request.block_length)


def _is_masked_at(masked: Array, place: Array) -> Array:
    clipped = jnp.minimum(place, masked.shape[1] - 1)[:, None]
    return jnp.take_along_axis(masked, clipped, axis=1)[:, 0] & (place < masked.shape[1])


def begins_masked(mask_token: int, request: DenoiseRequest, state: DenoiseState, block: Array) -> Array:
    """Whether the first position of each row's block of this number ``[B]`` is masked: bool ``[B]``."""
    return _is_masked_at(state.canvas == mask_token, block_start(request, block))


def window_bounds(
    program: DenoiseProgram, request: DenoiseRequest, state: DenoiseState, wanted: Array
) -> tuple[Array, Array]:
    """First position of each row's window, and the one after its last: int32 ``[B]``.

    Args:
      program: what is compiled in.
      request: the blocks.
      state: before the step.
      wanted: bool ``[B, S]``, positions whose token each row's step needs.
    """
    start, end = block_start(request, state.block), block_start(request, state.block + 1)
    stale = state.previous_block_stale > 0
    before = jnp.where(stale, block_start(request, state.block - 1), start)
    if program.first_alone:
        # What completes the block before commits the first position of this one, and needs no more of it.
        end = jnp.where(stale, start + 1, end)
    if program.sub_block_window:
        first, last = _sub_block(request, start, wanted)
        begun = jnp.take_along_axis(state.commit_steps, jnp.minimum(start, wanted.shape[1] - 1)[:, None], axis=1)
        passes = state.step_in_block - (program.first_alone & (begun[:, 0] >= 0))
        # An approximation: the rest of the block is as the last pass over all of it left it.
        alone = ~stale & (passes > 0) & ~_is_masked_at(wanted, first)
        before, end = jnp.where(alone, first, before), jnp.where(alone, last, end)
    return before, jnp.minimum(end, request.lengths)


def is_certain_enough(
    program: DenoiseProgram, request: DenoiseRequest, confidences: Array, wanted: Array, counts: Array
) -> Array:
    """The wanted positions that a parallel rule commits: bool ``[B, S]``.

    ``threshold`` takes ``counts`` of them at least and all that are more certain, ``sequential`` the first ``counts``,
    ``entropy_sum`` the most certain ones while the sum of their entropies is below the limit, one at least.

    Args:
      program: what is compiled in.
      request: threshold and limit.
      confidences: float32 ``[B, S]``, -inf where no token is wanted.
      wanted: bool ``[B, S]``.
      counts: int32 ``[B]``.
    """
    if program.parallel == "sequential":
        return wanted & (jnp.cumsum(wanted, axis=1) <= counts[:, None])
    ranks = confidence_ranks(confidences)
    if program.parallel == "threshold":
        return wanted & ((ranks < counts[:, None]) | (confidences > request.threshold[:, None]))
    sums = jnp.cumsum(-jnp.sort(confidences, axis=1, descending=True), axis=1)
    below = jnp.take_along_axis(sums, ranks, axis=1) < request.entropy_limit[:, None]
    return wanted & (below | (ranks == 0))
