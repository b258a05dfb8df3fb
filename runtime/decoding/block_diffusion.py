"""Masked diffusion block by block, against a cache, with several tokens a step: faster than exact, by choice.

A row is cut into blocks from its first mask on, and fills one after another. Each row goes through its own blocks and
steps: nobody waits for the slowest. With a cache a row is *refreshed* (one forward pass over all of it, which renews
every key and value) when it enters a block and every ``refresh_interval`` forwards after that; between refreshes only
a window is computed: the block (``dual``) or the block and everything after it (``prefix``), with the position before
the block, whose output predicts the block's first token. A refresh commits tokens like any other step. With a parallel
rule the first forward of a block sets its first position in any case: else what is certain further on comes to stand
before what leads to it. A block may be entered without a refresh too: its first window then begins with the block
before, whose last tokens the cache has only seen as masks. Rows whose canvases are the same, as all samples of a prompt
are at first, share a refresh.

The block schedule, both caches and the threshold rule follow Fast-dLLM (Wu et al., 2025), the factor rule too; that a
token's keys and values are kept only once it stands, dKV-Cache (Ma et al., 2025); ragged batches, per-row progress,
refreshes within a block, their use as steps and their sharing are ours. Without a cache this is the
exact semi-autoregressive algorithm, and with a single block that of :mod:`runtime.decoding.diffusion`.

Dimension letters: B batch, S canvas.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from runtime.decoding.blocks import BlockProgram, BlockRequest, BlockState, block_start, plan, refresh_chunk
from runtime.decoding.diffusion import Choices, by_schedule, choose_on_canvas, ranks, write_choices
from runtime.models.cached import fill_rows, run_window
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.kv_cache import copy_row
from runtime.models.transformer import hidden_states

Array = jax.Array

# Fields of a request that sampling reads.
_ROW_SAMPLING = ("seeds", "temperature", "top_p", "top_k")


def _commit(
    forward: Forward,
    program: BlockProgram,
    request: BlockRequest,
    state: BlockState,
    choices: Choices,
    wanted: Array,
    counts: Array,
) -> BlockState:
    """Write what a forward pass has made certain enough; rows that want nothing stay as they are."""
    row_step = state.block * request.steps_per_block + state.step_in_block

    def transfer(
        canvas: Array,
        tokens: Array,
        confidences: Array,
        wanted: Array,
        counts: Array,
        seeds: Array,
        step: Array,
        alg_temp: Array,
        threshold: Array,
        factor: Array,
        entering: Array,
    ) -> Array:
        if program.parallel == "none":
            chosen = by_schedule(program.denoise, canvas, confidences, wanted, counts, seeds, step, alg_temp)
        else:
            ranked = jnp.where(wanted, confidences, -jnp.inf)
            # Probability-like, from 0 to 1: a negative entropy becomes one over the number of likely tokens.
            certainty = jnp.exp(confidences) if program.denoise.algorithm == "entropy" else confidences
            if program.parallel == "threshold":
                enough = certainty > threshold[:, None]
            else:
                enough = certainty >= 1.0 - factor[:, None] / (ranks(ranked) + 2).astype(jnp.float32)
            # Whatever is certain, one is set: on entering a block its first open position, later the most certain.
            surest = jnp.where(entering, jnp.argmax(wanted, axis=1), jnp.argmax(ranked, axis=1))
            chosen = wanted & (enough | (jnp.arange(canvas.shape[1]) == surest[:, None]))
        # A model that predicts MASK leaves the position masked, to be counted anew.
        return chosen & (tokens != forward.config.mask_token_id)

    set_now = forward.on_rows(
        transfer,
        state.canvas,
        choices.tokens,
        choices.confidences,
        wanted,
        counts,
        request.seeds,
        row_step,
        request.alg_temp,
        request.threshold,
        request.factor,
        state.step_in_block == 0,
    )
    acted = wanted.any(axis=1)
    state = write_choices(state, choices, set_now, row_step[:, None])
    return replace(state, step_in_block=jnp.where(acted, state.step_in_block + 1, state.step_in_block))


def _refresh(
    forward: Forward,
    program: BlockProgram,
    weights: Weights,
    request: BlockRequest,
    state: BlockState,
    wanted: Array,
    counts: Array,
) -> BlockState:
    """Refresh the rows that ask for it and commit what that decides.

    One row of each ``data`` shard is computed at a time, and serves all that ask with the same canvas: each of them
    decides for itself, with its own seed.
    """
    asking = ~state.done & (state.steps_until_refresh == 0)
    chunk = refresh_chunk(program.denoise.chunk, program.windows, forward.layout.spec.sequence)
    denoise = replace(program.denoise, chunk=chunk)

    def one_each(carry: tuple[BlockState, Array]) -> tuple[BlockState, Array]:
        state, asking = carry

        def take(asking: Array, canvas: Array, lengths: Array) -> tuple[Array, ...]:
            number, mine = _first(asking)
            own, length = (jax.lax.dynamic_slice_in_dim(values, jnp.argmax(asking), 1) for values in (canvas, lengths))
            sharing = asking & (canvas == own).all(axis=1) & (lengths == length)
            return number, mine, sharing, own, length

        number, mine, sharing, canvas, lengths = forward.on_rows(take, asking, state.canvas, request.lengths)
        hidden, cache = fill_rows(forward, weights, state.cache, canvas, lengths, number)
        state = replace(state, cache=cache, refreshes=state.refreshes + mine)

        def decide(carry: tuple[BlockState, Array]) -> tuple[BlockState, Array]:
            state, waiting = carry

            def take(waiting: Array, *rows: Array) -> tuple[Array, ...]:
                own = (jax.lax.dynamic_slice_in_dim(values, jnp.argmax(waiting), 1) for values in rows)
                return *_first(waiting), *own

            row_step = state.block * request.steps_per_block + state.step_in_block
            sampling = [getattr(request, name) for name in _ROW_SAMPLING]
            target, mine, own_step, own_wanted, *own = forward.on_rows(take, waiting, row_step, wanted, *sampling)
            # The head's arguments are those of the rows that decide.
            own_request = replace(request, **dict(zip(_ROW_SAMPLING, own, strict=True)))
            own_wanted = own_wanted & (target >= 0)[:, None]
            choices = choose_on_canvas(forward, denoise, weights, own_request, own_step, hidden, own_wanted)

            def spread(target: Array, example: Array, *values: Array) -> tuple[Array, ...]:
                here = (jnp.arange(len(example)) == target)[:, None]
                return tuple(jnp.where(here, value, jnp.zeros_like(value)) for value in values)

            state = replace(
                state,
                cache=copy_row(forward.layout, state.cache, number, target),
                steps_until_refresh=jnp.where(mine, request.refresh_interval, state.steps_until_refresh),
                previous_block_stale=jnp.where(mine, 0, state.previous_block_stale),
            )
            choices = _on_canvas(forward, state, choices, spread, target)
            state = _commit(forward, program, request, state, choices, wanted & mine[:, None], counts)
            return state, waiting & ~mine

        state, _ = jax.lax.while_loop(lambda carry: carry[1].any(), decide, (state, sharing))
        return state, asking & ~sharing

    return jax.lax.while_loop(lambda carry: carry[1].any(), one_each, (state, asking))[0]


def _first(rows: Array) -> tuple[Array, Array]:
    """Of the rows that are set, the first: its number int32 ``[1]``, -1 for none, and a mask of it bool ``[B]``."""
    row = jnp.argmax(rows)
    return jnp.where(rows.any(), row, -1)[None].astype(jnp.int32), (jnp.arange(len(rows)) == row) & rows


def _on_canvas(forward: Forward, state: BlockState, choices: Choices, spread: Any, where: Array) -> Choices:
    """Choices of a few rows or positions as ``[B, S]``, by ``spread(where, canvas, *choices)``."""
    everywhere = forward.on_rows(spread, where, state.canvas, *jax.tree.leaves(choices))
    spread_out: Choices = jax.tree.unflatten(jax.tree.structure(choices), everywhere)
    return spread_out


def _window_step(
    forward: Forward,
    program: BlockProgram,
    weights: Weights,
    request: BlockRequest,
    state: BlockState,
    wanted: Array,
    counts: Array,
) -> BlockState:
    """One forward over the windows of the rows that want something, the narrowest windows that cover them; or none."""
    active = wanted.any(axis=1)
    start = jnp.maximum(block_start(request.first, state.block - state.previous_block_stale, request) - 1, 0)
    stop = request.lengths
    if program.within_block:
        stop = jnp.minimum(stop, block_start(request.first, state.block + 1, request))
    stop = jnp.where(active, stop, 0)
    needed = jnp.where(active, stop - start, 0).max()
    enough = jnp.array([width >= needed for width in program.windows])
    which = jnp.where(active.any(), jnp.where(enough, jnp.arange(len(program.windows)), 0).max(), -1)

    def at_width(width: int) -> Any:
        def run(state: BlockState) -> BlockState:
            def cut(start: Array, *rows: Array) -> tuple[Array, ...]:
                places = start[:, None] + jnp.arange(width)
                inside = places < rows[0].shape[1]
                clipped = jnp.minimum(places, rows[0].shape[1] - 1)
                return tuple(
                    jnp.where(inside, jnp.take_along_axis(values, clipped, axis=1), jnp.zeros((), values.dtype))
                    for values in rows
                )

            tokens, own_wanted = forward.on_rows(cut, start, state.canvas, wanted)
            hidden, cache = run_window(forward, weights, state.cache, tokens, start, request.lengths, stop)
            row_step = state.block * request.steps_per_block + state.step_in_block
            denoise = replace(program.denoise, chunk=min(program.denoise.chunk, width))
            choices = choose_on_canvas(
                forward.window, denoise, weights, request, row_step, hidden, own_wanted, offset=start
            )

            def spread(start: Array, example: Array, *values: Array) -> tuple[Array, ...]:
                places = jnp.arange(example.shape[1]) - start[:, None]
                inside = (places >= 0) & (places < width)
                clipped = jnp.clip(places, 0, width - 1)
                return tuple(jnp.where(inside, jnp.take_along_axis(value, clipped, axis=1), 0) for value in values)

            choices = _on_canvas(forward, state, choices, spread, start)
            state = replace(
                state,
                cache=cache,
                previous_block_stale=jnp.where(active, 0, state.previous_block_stale),
                window_positions=state.window_positions + jnp.where(active, width, 0),
            )
            return _commit(forward, program, request, state, choices, wanted, counts)

        return run

    # One choice after another, each between a window and nothing: around one between several windows XLA on TPU copies
    # the cache that they all write.
    for number, width in enumerate(program.windows):
        state = jax.lax.cond(which == number, at_width(width), lambda state: state, state)
    return state


def _full_step(
    forward: Forward,
    program: BlockProgram,
    weights: Weights,
    request: BlockRequest,
    state: BlockState,
    wanted: Array,
    counts: Array,
) -> BlockState:
    """One forward over all rows, without a cache."""
    hidden = hidden_states(forward, weights, state.canvas, request.lengths)
    row_step = state.block * request.steps_per_block + state.step_in_block
    choices = choose_on_canvas(forward, program.denoise, weights, request, row_step, hidden, wanted)
    state = replace(state, refreshes=state.refreshes + wanted.any(axis=1))
    return _commit(forward, program, request, state, choices, wanted, counts)


def denoise_blocks(
    forward: Forward, program: BlockProgram, weights: Weights, request: BlockRequest, state: BlockState
) -> BlockState:
    """Run iterations up to ``request.limit``, or until every row is done.

    In each, a row makes its next step that transfers something: by a refresh, by a window, or without a cache by a
    forward pass over everything.
    """

    def iterate(state: BlockState) -> BlockState:
        with jax.named_scope("block_step"):
            state, wanted, counts = plan(forward, program, request, state)
            arguments = (forward, program, weights, request)
            if state.cache is None:

                def full(state: BlockState) -> BlockState:
                    return _full_step(*arguments, state, wanted, counts)

                state = jax.lax.cond(wanted.any(), full, lambda state: state, state)
            else:
                asking = ~state.done & (state.steps_until_refresh == 0)
                state = _refresh(*arguments, state, wanted, counts)
                state = _window_step(*arguments, state, wanted & ~asking[:, None], counts)
                state = replace(state, steps_until_refresh=jnp.maximum(state.steps_until_refresh - 1, 0))
            # The last iteration only finds that all is done.
            return replace(state, step=state.step + wanted.any())

    def unfinished(state: BlockState) -> Array:
        return (state.step < request.limit) & ~state.done.all()

    return jax.lax.while_loop(unfinished, iterate, state)
