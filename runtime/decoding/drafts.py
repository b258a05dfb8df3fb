"""Lossless speculation: a forward pass over each row's canvas and over guesses of the canvases after its next steps.

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

import math
from dataclasses import replace
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp

from runtime.decoding.choices import Choices, choose_on_canvas, without_prompt
from runtime.decoding.commit import commit
from runtime.decoding.progress import next_step
from runtime.decoding.state import DenoiseProgram, DenoiseRequest, DenoiseState, row_steps
from runtime.models.arrays import declarations, row_fields
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.transformer import hidden_states

Array = jax.Array

# Positions per row of a head chunk that draws again the tokens of the few positions that a guessed step commits.
_REDRAWN_POSITIONS = 16
# The steps of a pass so far; state, wanted and counts of the next step; the index of each row's canvas, whether its
# outputs are there, and the index of the last canvas whose outputs were used.
_Walk = tuple[Array, DenoiseState, Array, Array, Array, Array, Array]


def redrawn_chunk(sequence: int) -> int:
    """Return the positions per row of a head chunk for a few positions, a multiple of the sequence axis."""
    return math.lcm(_REDRAWN_POSITIONS, sequence)


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
    state, wanted, counts, last = _make_steps(forward, program, weights, request, state, outputs, wanted, counts)
    with jax.named_scope("drafts"):
        kept = _of_canvas(forward, program, outputs, last)
        drafts = _guess(forward, program, weights, request, state, kept, wanted, counts)
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


def _find(canvases: Array, canvas: Array) -> tuple[Array, Array]:
    """Return the index of each row's canvas among those of the pass, int32 ``[B]``, and whether it is there."""
    same = (canvases == canvas[:, None]).all(axis=-1)
    return jnp.argmax(same, axis=1).astype(jnp.int32), same.any(axis=1)


def _commit(
    forward: Forward,
    program: DenoiseProgram,
    request: DenoiseRequest,
    state: DenoiseState,
    choices: Choices,
    wanted: Array,
    counts: Array,
) -> DenoiseState:
    """Commit tokens, see :func:`runtime.decoding.commit.commit`, and leave its arrays divided as they are declared.

    Otherwise the compiler may divide an array further inside a loop, and gather it beside the loop over head chunks.
    XLA's CPU runtime would run their collectives in an order that differs between hosts.
    """
    state, declared = commit(forward, program, request, state, choices, wanted, counts), declarations(DenoiseState)
    placed = {name: forward.constrain(value, *declared[name].axes) for name, value in row_fields(state).items()}
    return replace(state, **placed)


def _make_steps(
    forward: Forward,
    program: DenoiseProgram,
    weights: Weights,
    request: DenoiseRequest,
    state: DenoiseState,
    outputs: _Outputs,
    wanted: Array,
    counts: Array,
) -> tuple[DenoiseState, Array, Array, Array]:
    """Make the steps of each row whose canvases are among those of the pass.

    Returns:
      The state, ``wanted`` and ``counts`` of the next step, and the index of the last canvas whose outputs were used,
      int32 ``[B]``.
    """

    def may_step(made: Array, state: DenoiseState, wanted: Array) -> tuple[Array, Array]:
        index, there = forward.on_rows(_find, outputs.canvases, state.canvas)
        return index, there & wanted.any(axis=1) & (made <= jnp.minimum(request.draft_steps, program.drafts))

    def step(carry: _Walk) -> _Walk:
        made, state, wanted, counts, index, going, last = carry
        own, numbers = wanted & going[:, None], row_steps(request, state)
        hidden, without = _of_canvas(forward, program, outputs, index)
        choices = choose_on_canvas(forward, program, weights, request, numbers, hidden, own, unconditional=without)
        state = _commit(forward, program, request, state, choices, own, counts)
        state = replace(state, made_steps=state.made_steps + going)
        state, wanted, counts = next_step(forward, program, request, state)
        last = jnp.where(going, index, last)
        return made + 1, state, wanted, counts, *may_step(made + 1, state, wanted), last

    none, first = jnp.zeros((), jnp.int32), jnp.zeros(len(wanted), jnp.int32)
    start = (none, state, wanted, counts, *may_step(none, state, wanted), first)
    _, state, wanted, counts, _, _, last = jax.lax.while_loop(lambda carry: carry[5].any(), step, start)
    return state, wanted, counts, last


def _guess(
    forward: Forward,
    program: DenoiseProgram,
    weights: Weights,
    request: DenoiseRequest,
    state: DenoiseState,
    outputs: tuple[Array, Array | None],
    wanted: Array,
    counts: Array,
) -> Array:
    """Guess the canvases after the next K steps of every row: int32 ``[B, K, S]``.

    The steps are those of the decoder, with their own random bits, but from ``outputs`` for an earlier canvas. The head
    runs once on all open positions; the tokens that later steps sample are drawn for the positions that they commit.
    """
    program, (hidden, without) = replace(program, log_probabilities=False), outputs

    def choose(program: DenoiseProgram, state: DenoiseState, wanted: Array) -> Choices:
        numbers = row_steps(request, state)
        return choose_on_canvas(forward, program, weights, request, numbers, hidden, wanted, unconditional=without)

    places = jnp.arange(state.canvas.shape[1])
    open_positions = (state.canvas == forward.config.mask_token_id) & (places < request.lengths[:, None])
    first = choose(program, state, open_positions)
    ranks_at_random = program.algorithm == "random" and program.parallel == "none"
    few = replace(program, chunk=min(program.chunk, redrawn_chunk(forward.layout.spec.sequence)))

    def step(carry: tuple[DenoiseState, Array, Array], _: None) -> tuple[tuple[DenoiseState, Array, Array], Array]:
        state, wanted, counts = carry
        choices = choose(program, state, wanted) if ranks_at_random else first
        made = _commit(forward, program, request, state, choices, wanted, counts)
        if program.sampling.sampled and not ranks_at_random:
            committed = made.canvas != state.canvas
            tokens = choose(few, state, committed).tokens
            # Without a finite logit, there is no token.
            made = replace(made, canvas=jnp.where(committed & (tokens >= 0), tokens, made.canvas))
        return next_step(forward, program, request, made), made.canvas

    start = (replace(state, log_probabilities=None), wanted, counts)
    _, canvases = jax.lax.scan(step, start, length=program.drafts)
    return jnp.moveaxis(canvases, 0, 1)
