"""Lossless speculation: a forward pass over each row's canvas and over guesses of the canvases after its next steps.

This is the pass without a cache; the one with a cache is in :mod:`runtime.decoding.drafted_windows`.

A step depends on the model's outputs for one canvas. A pass computes the outputs for K + 1 canvases of each row: its
own, and K drafts. The first step reads the outputs of the row's own canvas. If the canvas that it makes is among those
of the pass, then the outputs for the next step are there too, and so on. Every step is thus one that the decoder
without drafts would make, from outputs for the same canvas and with the random bits of the same step. Afterwards, the
drafts of the next pass are guessed: the decoder makes K further steps from the last outputs that were used, which
belong to an earlier canvas. Drafts that are wrong cost time, but never change a token.

Speculation of this kind for masked diffusion is due to FreeDave (Wu et al., 2025, arXiv 2510.00294).

Dimension letters: B batch, K drafts, S canvas, D embed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp

from runtime.decoding.choices import Choices, choose_on_canvas, without_prompt
from runtime.decoding.draft_chain import DraftChain
from runtime.decoding.state import DenoiseProgram, DenoiseRequest, DenoiseState, row_steps
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.transformer import hidden_states

Array = jax.Array


@flax.struct.dataclass
class _Outputs:
    """The canvases of a pass, and what the model computed for them.

    Attributes:
      canvases: int32 ``[B, K + 1, S]``; the first is the row's own.
      hidden: activations ``[B * (K + 1), S, D]``, all canvases of a row one after another.
      unconditional: those without the prompt, for classifier-free guidance; otherwise None.
    """

    canvases: Array
    hidden: Array
    unconditional: Array | None


def drafted_pass(
    forward: Forward,
    program: DenoiseProgram,
    weights: Weights,
    request: DenoiseRequest,
    state: DenoiseState,
    wanted: Array,
    counts: Array,
) -> tuple[DenoiseState, Array, Array]:
    """Run one forward pass over the canvas and the drafts of every row, and make all steps that it allows.

    A row makes at least one step, and at most one more than the smaller of ``request.draft_steps`` and K.

    Args:
      forward: the model.
      program: settings that are compiled in, with drafts and without a cache.
      weights: the model's weights.
      request: run-time arguments.
      state: the state before the pass.
      wanted, counts: see :func:`runtime.decoding.progress.next_step`.

    Returns:
      The state with new drafts, advanced like that of ``next_step``; and the same two arrays for the next step.
    """
    outputs = _compute(forward, program, weights, request, state)
    passes = (program.drafts + 1) * (1 + program.guided)
    state = replace(state, refreshes=state.refreshes + wanted.any(axis=1) * passes, drafts=None)
    chain = DraftChain(forward, program, request)

    def choose(
        program: DenoiseProgram, state: DenoiseState, wanted: Array, hidden: Array, without: Array | None
    ) -> Choices:
        numbers = row_steps(request, state)
        return choose_on_canvas(forward, program, weights, request, numbers, hidden, wanted, unconditional=without)

    def choose_at(state: DenoiseState, wanted: Array, index: Array) -> Choices:
        return choose(program, state, wanted, *_of_canvas(forward, program, outputs, index))

    state, wanted, counts, last = chain.make_steps(state, wanted, counts, outputs.canvases, choose_at)
    with jax.named_scope("drafts"):
        hidden, without = _of_canvas(forward, program, outputs, last)
        inside = jnp.arange(state.canvas.shape[1]) < request.lengths[:, None]
        masks = (state.canvas == forward.config.mask_token_id) & inside
        drafts = chain.guess(state, wanted, counts, masks, partial(choose, hidden=hidden, without=without))
    return replace(state, drafts=drafts), wanted, counts


def _compute(
    forward: Forward, program: DenoiseProgram, weights: Weights, request: DenoiseRequest, state: DenoiseState
) -> _Outputs:
    """Run the transformer on the canvas and the drafts of every row, as one batch of rows."""
    canvases = jnp.concatenate([state.canvas[:, None], state.drafts], axis=1)
    rows, number, width = canvases.shape
    lengths = jnp.repeat(request.lengths, number, total_repeat_length=rows * number)
    divided = forward.over_data if program.over_data else forward

    def run(canvases: Array) -> Array:
        tokens = divided.constrain(canvases.reshape(-1, width), "batch", "positions")
        return hidden_states(divided, weights, tokens, lengths)

    hidden, unconditional = run(canvases), None
    if program.guided:
        with jax.named_scope("unconditional"):
            # A draft differs from the canvas only in masks, which are kept.
            given = forward.constrain(without_prompt(forward, request, state) != state.canvas, "batch", "positions")
            unconditional = run(jnp.where(given[:, None], forward.config.mask_token_id, canvases))
    return _Outputs(canvases, hidden, unconditional)


def _of_canvas(
    forward: Forward, program: DenoiseProgram, outputs: _Outputs, index: Array
) -> tuple[Array, Array | None]:
    """Return the activations of each row's canvas with this index ``[B]``, and those without the prompt."""
    chosen = jnp.arange(outputs.canvases.shape[1]) == index[:, None]
    select = partial(_sum_over_data if program.over_data else _sum_of_rows, forward, chosen)
    return select(outputs.hidden), None if outputs.unconditional is None else select(outputs.unconditional)


# A gather by row would be divided across devices less well than these sums, each with a single term that is not zero.
def _sum_of_rows(forward: Forward, chosen: Array, values: Array) -> Array:
    """Return the one canvas of each row that is chosen: ``[B, K + 1]``, ``[B * (K + 1), S, D]`` -> ``[B, S, D]``."""
    values = forward.constrain(values.reshape(*chosen.shape, *values.shape[1:]), "batch", None, "canvas", "embed")
    found = jnp.where(chosen[..., None, None], values, 0).sum(axis=1)
    return forward.constrain(found, "batch", "canvas", "embed")


def _sum_over_data(forward: Forward, chosen: Array, values: Array) -> Array:
    """Like :func:`_sum_of_rows`, for canvases that are divided over ``data``; the result is on all of its shards."""
    rules, divided = forward.layout.rules, forward.over_data.layout.rules
    axes, dimensions = divided.mesh_axes("batch"), ("batch", "canvas", "embed")

    def own(chosen: Array, values: Array) -> Array:
        count = len(values)
        flat = jax.lax.axis_index(axes) * count + jnp.arange(count)
        of_row = (flat // chosen.shape[1] == jnp.arange(len(chosen))[:, None]) & chosen.reshape(-1)[flat]
        return jax.lax.psum(jnp.where(of_row[..., None, None], values, 0).sum(axis=1), axes)

    specs, mesh = (jax.sharding.PartitionSpec(), divided.spec(*dimensions)), forward.layout.mesh
    call = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=rules.spec(*dimensions), check_vma=False)
    return call(chosen, values)
