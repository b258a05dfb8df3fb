"""Which step of which block each row makes next, before any forward pass.

Dimension letters: B batch, S canvas.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from runtime.decoding.block_causal import begins_masked, block_demand
from runtime.decoding.sampling import draw_per_position
from runtime.decoding.state import DenoiseProgram, DenoiseRequest, DenoiseState, block_start, row_steps
from runtime.models.arrays import row_fields, rows_alone
from runtime.models.forward import Forward

Array = jax.Array


def next_step(
    forward: Forward, program: DenoiseProgram, request: DenoiseRequest, state: DenoiseState
) -> tuple[DenoiseState, Array, Array]:
    """Bring every row to its next step that commits something, or to its end, without any forward pass.

    Returns:
      The state; the positions whose token each row's step needs, bool ``[B, S]``, none for a row that is done or has
      reached ``request.step_limit``; and how many of them it commits by its schedule, int32 ``[B]``.
    """
    advance = partial(_advance, program, forward.config.mask_token_id)
    rows = replace(rows_alone(state), log_probabilities=None)
    rows, wanted, counts = forward.on_rows(advance, request, rows)
    return replace(state, **row_fields(rows)), wanted, counts


def _advance(
    program: DenoiseProgram, mask_token: int, request: DenoiseRequest, state: DenoiseState
) -> tuple[DenoiseState, Array, Array]:
    """:func:`next_step` for the rows of one device."""
    state = replace(state, done=state.done | _has_ended(mask_token, request, state))

    def move(carry: tuple[DenoiseState, Array]) -> tuple[DenoiseState, Array]:
        state, moving = carry
        _, counts, left = _step_demand(program, mask_token, request, state)
        over = moving & ((left == 0) | (state.step_in_block >= request.steps_per_block))
        idle = moving & ~over & (counts == 0)
        block = jnp.where(over, state.block + 1, state.block)
        # A block without masks was never computed: one window cannot catch up with what lies before it.
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
            done=state.done | (block_start(request, block) >= request.ends),
        )
        return state, (over | idle) & _may_step(request, state)

    start = (state, _may_step(request, state))
    state, _ = jax.lax.while_loop(lambda carry: carry[1].any(), move, start)
    wanted, counts, _ = _step_demand(program, mask_token, request, state)
    active = _may_step(request, state)
    return state, wanted & active[:, None], jnp.where(active, counts, 0)


def _may_step(request: DenoiseRequest, state: DenoiseState) -> Array:
    return ~state.done & (row_steps(request, state) < request.step_limit)


def _has_ended(mask_token: int, request: DenoiseRequest, state: DenoiseState) -> Array:
    """Rows with a stop token among the new tokens before which nothing is masked: bool ``[B]``."""
    places = jnp.arange(state.canvas.shape[1])
    generated = (places >= request.first[:, None]) & (places < request.lengths[:, None])
    masked_before = jnp.cumsum((state.canvas == mask_token) & generated, axis=1)
    # A stop token that fills a mask of the prompt ends nothing.
    is_stop = (state.canvas[..., None] == request.stop_tokens[:, None]).any(axis=-1)
    is_stop &= places >= request.prompts[:, None]
    return (is_stop & (state.commit_steps >= 0) & (masked_before == 0)).any(axis=1)


def _in_block(request: DenoiseRequest, state: DenoiseState) -> Array:
    """Positions of each row's block: bool ``[B, S]``."""
    places = jnp.arange(state.canvas.shape[1])
    start = block_start(request, state.block)[:, None]
    return (places >= start) & (places < start + request.block_length[:, None]) & (places < request.lengths[:, None])


def _step_demand(
    program: DenoiseProgram, mask_token: int, request: DenoiseRequest, state: DenoiseState
) -> tuple[Array, Array, Array]:
    """What the step that a row has come to asks for.

    Returns:
      Positions whose token it needs bool ``[B, S]``, how many of them it commits by its schedule int32 ``[B]``, and the
      masks of its block int32 ``[B]``.
    """
    in_block = _in_block(request, state)
    if program.attention_block_length:
        return block_demand(program, mask_token, request, state, in_block)
    masked = (state.canvas == mask_token) & in_block
    left = masked.sum(axis=1, dtype=jnp.int32)
    if program.parallel != "none":
        return masked, left, left
    if program.schedule == "even":
        return *_even_demand(program, mask_token, request, state, in_block), left
    step, ratios = state.step_in_block, request.ratios
    last = step >= request.steps_per_block - 1
    ratio = jnp.take_along_axis(ratios, jnp.minimum(step, ratios.shape[1] - 1)[:, None], axis=1)[:, 0]
    if program.algorithm == "origin":
        draws = draw_per_position(jax.random.uniform, request.seeds, row_steps(request, state), state.canvas)
        wanted = masked & ((draws < ratio[:, None]) | last[:, None])
        return wanted, wanted.sum(axis=1, dtype=jnp.int32), left
    counts = jnp.where(last, left, (left.astype(jnp.float32) * ratio).astype(jnp.int32))
    return masked & (counts > 0)[:, None], counts, left


def _even_demand(
    program: DenoiseProgram, mask_token: int, request: DenoiseRequest, state: DenoiseState, in_block: Array
) -> tuple[Array, Array]:
    """The ``even`` schedule: positions that compete for a step bool ``[B, S]``, and how many it commits int32 ``[B]``.

    The masks that a block has when it is entered are shared among its steps, the remainder first. Masks before the
    block compete with its own, but are not counted: ``generate.py`` of LLaDA (Nie et al., 2025). A cached step computes
    the block alone, and its masks alone compete.
    """
    masked = state.canvas == mask_token
    # Nothing after a block's end is committed before it is entered: what is committed in it was a mask then.
    total = (in_block & (masked | (state.commit_steps >= 0))).sum(axis=1, dtype=jnp.int32)
    steps = request.steps_per_block
    counts = total // steps + (state.step_in_block < total % steps)
    if program.windows:
        competing = masked & in_block
    else:
        end = jnp.minimum(block_start(request, state.block) + request.block_length, request.lengths)
        competing = masked & (jnp.arange(state.canvas.shape[1]) < end[:, None])
    return competing & (counts > 0)[:, None], counts
