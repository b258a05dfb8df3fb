"""Canvases that grow and shrink: masks become two, or are removed, by tokens that the model predicts for them.

The bucket stays as wide as it is. Each row has its length as data, and positions are moved by gathers. The algorithm is
that of DreamOn (Wu et al., 2025); :mod:`runtime.models.dreamon` names the differences.

Dimension letters: B batch, S canvas, V vocab.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from runtime.decoding.state import DenoiseRequest, DenoiseState
from runtime.models.arrays import declarations, only_row_fields, row_fields
from runtime.models.config import ModelConfig
from runtime.models.forward import Forward

Array = jax.Array


def masks_to_fill(mask_token: int, request: DenoiseRequest, state: DenoiseState) -> tuple[DenoiseState, Array, Array]:
    """Return what the next step of each row needs, for the rows of one shard.

    A row is done without masks, or after its limit of steps. Masks are left then.

    Returns:
      The new state; the masks of the rows that make a step, bool ``[B, S]``; and how many of them each row commits,
      int32 ``[B]``.
    """
    masked = (state.canvas == mask_token) & _inside(state)
    left = masked.sum(axis=1, dtype=jnp.int32)
    state = replace(state, done=state.done | (left == 0) | (state.step_in_block >= request.steps_per_block))
    active = ~state.done & (state.step_in_block < request.step_limit)
    counts = jnp.minimum(left, request.number_transfer_tokens)
    return state, masked & active[:, None], jnp.where(active, counts, 0)


def current_request(request: DenoiseRequest, state: DenoiseState) -> DenoiseRequest:
    """Return the arguments of a step: each row's current length, and the expansions that it may still choose.

    A length is at least 1, because attention needs a key.
    """
    room = state.lengths < request.lengths
    budget = jnp.where(room, state.expansions_left, 0)
    changes = {"lengths": jnp.maximum(state.lengths, 1), "expand_budget": budget}
    return replace(request, **changes)


def without_expansion(config: ModelConfig, logits: Array, budget: Array) -> Array:
    """Rule out the expand token where ``budget``, int32 ``[B]`` or ``[B, P]``, is used up: logits ``[B, P, V]``.

    Logits that are not finite stay +inf, see :func:`runtime.decoding.sampling.mark_non_finite`.
    """
    used_up = (budget <= 0).reshape(*budget.shape, *(1,) * (logits.ndim - budget.ndim))
    expand = jnp.arange(logits.shape[-1]) == config.expand_token_id
    return jnp.where(used_up & expand & (logits < jnp.inf), -jnp.inf, logits)


def move_positions(forward: Forward, request: DenoiseRequest, state: DenoiseState, masked: Array) -> DenoiseState:
    """Remove the positions that a step has deleted, then let the expanded ones become two masks.

    Args:
      forward: the model.
      request: run-time arguments.
      state: the state after the step's commit.
      masked: bool ``[B, S]``, masks at the start of the step; none in rows that made no step.
    """
    move = partial(_move, forward.config)
    rows = forward.on_rows(move, request, only_row_fields(state), masked)
    return replace(state, **row_fields(rows))


def _move(config: ModelConfig, request: DenoiseRequest, state: DenoiseState, masked: Array) -> DenoiseState:
    """Do the work of :func:`move_positions` for the rows of one shard."""
    active = masked.any(axis=1)
    committed, at_start = state, state.lengths
    deleted = masked & (state.canvas == config.delete_token_id)
    found = (state.canvas == config.delete_token_id) & _inside(state)
    after = jnp.cumsum(found, axis=1) > 0
    deleted |= masked & after & request.pad_delete_to_right[:, None]
    state = _with_widths(config, state, jnp.where(deleted, 0, 1))

    expanded = (state.canvas == config.expand_token_id) & _inside(state) & active[:, None]
    number = expanded.sum(axis=1, dtype=jnp.int32)
    # Several expansions in one step may need more room than there is.
    grows = expanded & (jnp.cumsum(expanded, axis=1) <= (request.lengths - state.lengths)[:, None])
    values = _of_positions(state, config.mask_token_id)
    masks = {name: jnp.where(expanded, empty, one) for name, (one, empty) in values.items()}
    shrunk, state = state, _with_widths(config, replace(state, **masks), jnp.where(grows, 2, 1))
    if state.entries is not None:
        happened = (active, shrunk.lengths < at_start, number > 0)
        shown = zip((committed, shrunk, state), happened, strict=True)
        entries = jnp.stack([jnp.where(_inside(one) & new[:, None], one.canvas, -1) for one, new in shown], axis=1)
        state = replace(state, entries=entries)
    return replace(state, expansions_left=state.expansions_left - number)


def _inside(state: DenoiseState) -> Array:
    """Return the positions of each row's canvas: bool ``[B, S]``."""
    return jnp.arange(state.canvas.shape[1]) < state.lengths[:, None]


def _with_widths(config: ModelConfig, state: DenoiseState, widths: Array) -> DenoiseState:
    """Return the rows with 0, 1 or 2 copies of each position of the canvas, as ``widths`` ``[B, S]`` says."""
    places = jnp.arange(widths.shape[1], dtype=jnp.int32)
    ends = jnp.cumsum(jnp.where(_inside(state), widths, 0), axis=1, dtype=jnp.int32)
    # The position that a new position is a copy of: the first one that ends after it.
    sources = jax.vmap(lambda own: jnp.searchsorted(own, places, side="right"))(ends)
    sources = jnp.minimum(sources, widths.shape[1] - 1)
    lengths = ends[:, -1]
    there = places < lengths[:, None]

    values = _of_positions(state, config.pad_token_id)
    moved = {
        name: jnp.where(there, jnp.take_along_axis(one, sources, axis=1), empty)
        for name, (one, empty) in values.items()
    }
    return replace(state, lengths=lengths, **moved)


def _of_positions(state: DenoiseState, token: int) -> dict[str, tuple[Array, Array]]:
    """Return the arrays ``[B, S]`` of a state by name, each with its value at a position that is empty or a mask."""
    found = {}
    for name, one in declarations(DenoiseState).items():
        values = getattr(state, name)
        if one.axes == ("batch", "positions") and values is not None:
            found[name] = (values, jnp.asarray(token if name == "canvas" else one.empty, values.dtype))
    return found
