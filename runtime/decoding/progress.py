"""Advancing rows through blocks and steps: which step each row runs next, decided before the forward pass.

Dimension letters: B batch, S canvas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from runtime.decoding.block_causal import begins_masked, block_demand
from runtime.decoding.sampling import draw_per_position
from runtime.decoding.state import DenoiseProgram, DenoiseRequest, DenoiseState, block_start, row_steps
from runtime.decoding.variable_length import masks_to_fill
from runtime.models.arrays import only_row_fields, row_fields
from runtime.models.forward import Forward

Array = jax.Array


def next_step(
    forward: Forward, program: DenoiseProgram, request: DenoiseRequest, state: DenoiseState
) -> tuple[DenoiseState, Array, Array]:
    """Advance every row to its next step that commits a token, or to its end. No forward pass runs.

    Returns:
      The new state; the positions for which each row's step needs a token, bool ``[B, S]``; and the number of these
      positions that the schedule commits, int32 ``[B]``. Rows that are done or have reached ``request.step_limit`` need
      no token.
    """
    return _on_rows(_advance, forward, program, request, state)


def step_without_moves(
    forward: Forward, program: DenoiseProgram, request: DenoiseRequest, state: DenoiseState
) -> tuple[DenoiseState, Array, Array, Array]:
    """Return what :func:`next_step` returns, and the rows that it would move to another block or step, bool ``[B]``.

    Here they do not move. If there are none, the results are those of ``next_step``; otherwise only the ends of rows
    are, in the new state.
    """
    return _on_rows(_stay, forward, program, request, state)


def _on_rows(
    advance: Callable[..., tuple[Any, ...]],
    forward: Forward,
    program: DenoiseProgram,
    request: DenoiseRequest,
    state: DenoiseState,
) -> tuple[Any, ...]:
    """Call ``advance`` with the rows of each shard; return the new state, and all else that it returns."""
    own = partial(advance, program, forward.config.mask_token_id)
    rows = replace(only_row_fields(state), log_probabilities=None, entries=None, drafts=None)
    rows, *found = forward.on_rows(own, request, rows)
    return replace(state, **row_fields(rows)), *found


def _stay(
    program: DenoiseProgram, mask_token: int, request: DenoiseRequest, state: DenoiseState
) -> tuple[DenoiseState, Array, Array, Array]:
    """Do the work of :func:`step_without_moves` for the rows of one shard."""
    state = replace(state, done=state.done | _has_ended(mask_token, request, state))
    active = _may_step(request, state)
    demand = _demand(program, mask_token, request, state, active)
    return state, demand.wanted & active[:, None], jnp.where(active, demand.counts, 0), demand.moves


def _advance(
    program: DenoiseProgram, mask_token: int, request: DenoiseRequest, state: DenoiseState
) -> tuple[DenoiseState, Array, Array]:
    """Do the work of :func:`next_step` for the rows of one shard."""
    ended = _has_ended(mask_token, request, state)
    if program.variable_length:
        # A prompt with masks is filled completely, because its positions move.
        ended &= request.first >= request.prompts
        return masks_to_fill(mask_token, request, replace(state, done=state.done | ended))
    state = replace(state, done=state.done | ended)
    demand = partial(_demand, program, mask_token, request)

    def move(carry: tuple[DenoiseState, _Demand]) -> tuple[DenoiseState, _Demand]:
        state, (_, _, over, idle) = carry
        block = jnp.where(over, state.block + 1, state.block)
        # Refresh also after a block that ran no step because it had no masks: a window recomputes only one previous
        # block, so the cache would stay stale before that.
        every = request.refresh_blocks
        due = (state.step_in_block == 0) | ((every > 0) & (block % jnp.maximum(every, 1) == 0))
        if program.first_alone:
            due |= ~begins_masked(mask_token, request, state, block)
        state = replace(
            state,
            block=block,
            step_in_block=jnp.where(over, 0, jnp.where(idle, state.step_in_block + 1, state.step_in_block)),
            steps_until_refresh=jnp.where(over & due, 0, state.steps_until_refresh),
            previous_block_stale=jnp.where(over, 1, state.previous_block_stale),
            done=state.done | _is_behind(request, block),
        )
        return state, demand(state, (over | idle) & _may_step(request, state))

    # In most steps no row moves. The host of a GPU waits for each decision of a loop, so this takes a single one.
    start = (state, demand(state, _may_step(request, state)))
    state, (wanted, counts, _, _) = jax.lax.while_loop(lambda carry: carry[1].moves.any(), move, start)
    state = replace(state, done=state.done | _is_behind(request, state.block))
    active = _may_step(request, state)
    return state, wanted & active[:, None], jnp.where(active, counts, 0)


def _demand(
    program: DenoiseProgram, mask_token: int, request: DenoiseRequest, state: DenoiseState, moving: Array
) -> _Demand:
    """Return what each row's current step needs, and which of the rows in ``moving`` have to move on first."""
    wanted, counts, left = _step_demand(program, mask_token, request, state)
    over = moving & ((left == 0) | (state.step_in_block >= request.steps_per_block))
    # Fast-dLLM runs a forward pass in each step of its schedule.
    idle = moving & ~over & (counts == 0) if program.block_rule == "default" else jnp.zeros_like(over)
    return _Demand(wanted, counts, over, idle)


class _Demand(NamedTuple):
    """What each row's current step needs, and the rows that have to move on first.

    Attributes:
      wanted: bool ``[B, S]``, positions that need a token.
      counts: int32 ``[B]``, number of commits.
      over: bool ``[B]``, rows whose block is finished.
      idle: bool ``[B]``, rows whose step commits nothing.
    """

    wanted: Array
    counts: Array
    over: Array
    idle: Array

    @property
    def moves(self) -> Array:
        """The rows that move to another block or step: bool ``[B]``."""
        return self.over | self.idle


def _is_behind(request: DenoiseRequest, block: Array) -> Array:
    """Return the rows that have no block of this number, int32 ``[B]``: bool ``[B]``."""
    return block_start(request, block) >= request.ends


def _may_step(request: DenoiseRequest, state: DenoiseState) -> Array:
    return ~state.done & (row_steps(request, state) < request.step_limit)


def _has_ended(mask_token: int, request: DenoiseRequest, state: DenoiseState) -> Array:
    """Return the rows that have a committed stop token with no mask before it: bool ``[B]``."""
    places = jnp.arange(state.canvas.shape[1])
    masked = (state.canvas == mask_token) & (places < request.lengths[:, None])
    # A stop token that fills a mask inside the prompt does not end the row.
    is_stop = (state.canvas[..., None] == request.stop_tokens[:, None]).any(axis=-1)
    is_stop &= (places >= request.prompts[:, None]) & (state.commit_steps >= 0)
    first_stop, first_mask = (jnp.where(one, places, len(places)).min(axis=1) for one in (is_stop, masked))
    return first_stop < first_mask


def _in_block(request: DenoiseRequest, state: DenoiseState) -> Array:
    """Return the positions of each row's current block: bool ``[B, S]``."""
    places = jnp.arange(state.canvas.shape[1])
    start = block_start(request, state.block)[:, None]
    return (places >= start) & (places < start + request.block_length[:, None]) & (places < request.lengths[:, None])


def _step_demand(
    program: DenoiseProgram, mask_token: int, request: DenoiseRequest, state: DenoiseState
) -> tuple[Array, Array, Array]:
    """Return the positions that each row's current step must choose tokens for, and how many tokens it commits.

    Returns:
      Positions that need a token, bool ``[B, S]``; how many of them the schedule commits, int32 ``[B]``; and the number
      of masks left in the row's block, int32 ``[B]``.
    """
    in_block = _in_block(request, state)
    if program.attention_block_length:
        return block_demand(program, mask_token, request, state, in_block)
    masked = (state.canvas == mask_token) & in_block
    left = masked.sum(axis=1, dtype=jnp.int32)
    if program.block_rule == "fast_dllm":
        return *_fast_dllm_demand(program, request, state, masked, left), left
    if program.parallel != "none":
        return masked, left, left
    if program.schedule == "even":
        return *_even_demand(program, mask_token, request, state, in_block), left
    ratio, last = _ratio(request, state)
    if program.algorithm == "origin":
        draws = draw_per_position(jax.random.uniform, request.seeds, row_steps(request, state), state.canvas)
        wanted = masked & ((draws < ratio[:, None]) | last[:, None])
        return wanted, wanted.sum(axis=1, dtype=jnp.int32), left
    counts = jnp.where(last, left, (left.astype(jnp.float32) * ratio).astype(jnp.int32))
    return masked & (counts > 0)[:, None], counts, left


def _ratio(request: DenoiseRequest, state: DenoiseState) -> tuple[Array, Array]:
    """Return the fraction of the remaining masks that each row's step commits, and whether it is the block's last."""
    step, ratios = state.step_in_block, request.ratios
    last = step >= request.steps_per_block - 1
    return jnp.take_along_axis(ratios, jnp.minimum(step, ratios.shape[1] - 1)[:, None], axis=1)[:, 0], last


def _fast_dllm_demand(
    program: DenoiseProgram, request: DenoiseRequest, state: DenoiseState, masked: Array, left: Array
) -> tuple[Array, Array]:
    """Return what each row's current step needs in the block decoder of Fast-dLLM for Dream (Wu et al., 2025).

    A block's first step is a refresh, which commits the first mask whatever its confidence. The other steps choose
    tokens for all masks, even if the schedule commits none of them.

    Args:
      program: settings that are compiled in.
      request: run-time arguments.
      state: state before the step.
      masked: bool ``[B, S]``, the masks of each row's block.
      left: int32 ``[B]``, their number.

    Returns:
      Positions that need a token, bool ``[B, S]``; and the number of commits, int32 ``[B]``.
    """
    refresh, counts = state.step_in_block == 0, left
    if program.parallel == "none":
        ratio, last = _ratio(request, state)
        counts = jnp.where(last, left, (left.astype(jnp.float32) * ratio).astype(jnp.int32))
    first = jnp.arange(masked.shape[1]) == jnp.argmax(masked, axis=1)[:, None]
    return masked & (first | ~refresh[:, None]), jnp.where(refresh, jnp.minimum(left, 1), counts)


def _even_demand(
    program: DenoiseProgram, mask_token: int, request: DenoiseRequest, state: DenoiseState, in_block: Array
) -> tuple[Array, Array]:
    """Return what each row's current step needs by the ``even`` schedule of LLaDA (``generate.py``; Nie et al., 2025).

    The masks that a block has on entry are divided evenly among its steps, and the first steps take the remainder.
    Masks before the block are candidates too, but do not add to the number of commits. With a cache, only the masks of
    the block are candidates, because only the block is computed.

    Returns:
      Candidate positions bool ``[B, S]``, and the number of commits int32 ``[B]``.
    """
    masked = state.canvas == mask_token
    # Positions of a block are committed only after the block is entered. So a position with a commit step was a mask
    # on entry.
    total = (in_block & (masked | (state.commit_steps >= 0))).sum(axis=1, dtype=jnp.int32)
    steps = request.steps_per_block
    counts = total // steps + (state.step_in_block < total % steps)
    if program.windows:
        competing = masked & in_block
    else:
        end = jnp.minimum(block_start(request, state.block) + request.block_length, request.lengths)
        competing = masked & (jnp.arange(state.canvas.shape[1]) < end[:, None])
    return competing & (counts > 0)[:, None], counts
