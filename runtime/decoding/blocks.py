"""Blocks of masked diffusion: what a generation carries, and which step of which block each row makes next.

Dimension letters: B batch, S canvas, W window, R padded steps of a block, E stop tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from runtime.decoding.diffusion import DenoiseProgram
from runtime.decoding.sampling import draw_per_position
from runtime.models.forward import Forward

Array = jax.Array
# In the structs below: an array, or in its place a sharding or an abstract shape, in trees that describe one.
Leaf = Any


@dataclass(frozen=True)
class BlockProgram:
    """The parts of a generation that are compiled in.

    Attributes:
      denoise: how tokens are chosen.
      parallel: ``none`` (the schedule says how many), ``threshold`` or ``factor``.
      windows: widths W that a cached step may compute, descending; empty without a cache.
      within_block: a window ends with its row's block, else with the row.
    """

    denoise: DenoiseProgram
    parallel: str
    windows: tuple[int, ...]
    within_block: bool


@flax.struct.dataclass
class BlockRequest:
    """Run-time arguments of a generation.

    Attributes:
      lengths: int32 ``[B]``, canvas length of each row.
      first: int32 ``[B]``, where each row's first block starts.
      seeds: uint32 ``[B, 2]``, key data of each row.
      ratios: float32 ``[B, R]``, share of a block's remaining masks that each of its steps transfers.
      block_length: int32 ``[B]``, positions of a block.
      steps_per_block: int32 ``[B]``, steps of a block at most.
      refresh_interval: int32 ``[B]``, forwards from one refresh to the next at most, the refresh included.
      refresh_blocks: int32 ``[B]``, blocks from one that is entered with a refresh to the next; 0 for the first alone.
      stop_tokens: int32 ``[B, E]``: a row is done when one of these and all before it is committed; -1 for none.
      limit: int32, run up to this iteration.
      threshold, factor: float32 ``[B]``, of the parallel rules.
      temperature, top_p, top_k, alg_temp: ``[B]``, read where the program uses them; ``alg_temp`` 0 draws no positions.
    """

    lengths: Leaf
    first: Leaf
    seeds: Leaf
    ratios: Leaf
    block_length: Leaf
    steps_per_block: Leaf
    refresh_interval: Leaf
    refresh_blocks: Leaf
    stop_tokens: Leaf
    limit: Leaf
    threshold: Leaf
    factor: Leaf
    temperature: Leaf
    top_p: Leaf
    top_k: Leaf
    alg_temp: Leaf


@flax.struct.dataclass
class BlockState:
    """What a generation carries from iteration to iteration; in each, every row that is not done makes one forward.

    Attributes:
      canvas: int32 ``[B, S]``, start-aligned; the mask token where nothing is committed yet.
      commit_steps: int32 ``[B, S]``, the row's step that set a position, -1 where none has.
      block: int32 ``[B]``, the block a row is in.
      step_in_block: int32 ``[B]``, the step within it.
      steps_until_refresh: int32 ``[B]``, forwards that may follow before the next refresh; 0 asks for one.
      previous_block_stale: int32 ``[B]``, 1 where the cache has yet to see the block before as it stands, else 0.
      refreshes: int32 ``[B]``, forwards over the whole canvas.
      window_positions: int32 ``[B]``, positions computed in windows.
      done: bool ``[B]``.
      step: int32, iterations so far.
      log_probabilities: float32 ``[B, S]`` of committed tokens, or None.
      cache: a :class:`runtime.models.kv_cache.KVCache`, or None.
    """

    canvas: Leaf
    commit_steps: Leaf
    block: Leaf
    step_in_block: Leaf
    steps_until_refresh: Leaf
    previous_block_stale: Leaf
    refreshes: Leaf
    window_positions: Leaf
    done: Leaf
    step: Leaf
    log_probabilities: Leaf = None
    cache: Leaf = None


# Fields of a state and of a request that are one entry a row, in the order in which row functions take them.
_ROW_STATE = ("canvas", "commit_steps", "block", "step_in_block", "steps_until_refresh", "previous_block_stale", "done")
_ROW_REQUEST = (
    "lengths",
    "first",
    "seeds",
    "ratios",
    "block_length",
    "steps_per_block",
    "refresh_blocks",
    "stop_tokens",
)


def refresh_chunk(chunk: int, windows: tuple[int, ...], sequence: int) -> int:
    """Positions that the head is run on at a time after a refresh, which decides within one block.

    Args:
      chunk: the same where all of a canvas is to be decided.
      windows: see :class:`BlockProgram`; the narrowest is at least a block and the position before it.
      sequence: shards of a canvas, of which the chunk is a multiple.
    """
    return min(chunk, -(-(windows[-1] - 1) // sequence) * sequence)


def block_start(first: Array, block: Array, request: BlockRequest) -> Array:
    """Position at which each row's block of this number starts: int32 ``[B]``."""
    return first + block * request.block_length


def _in_block(canvas: Array, lengths: Array, first: Array, block: Array, block_length: Array) -> Array:
    """Positions of each row's block: bool ``[B, S]``."""
    places = jnp.arange(canvas.shape[1])
    start = (first + block * block_length)[:, None]
    return (places >= start) & (places < start + block_length[:, None]) & (places < lengths[:, None])


def _transfer_counts(
    program: BlockProgram,
    mask_token: int,
    request: tuple[Array, ...],
    canvas: Array,
    block: Array,
    step_in_block: Array,
) -> tuple[Array, Array, Array]:
    """What a row's step wants: bool ``[B, S]``, how many it commits by schedule ``[B]``, and masks left ``[B]``."""
    lengths, first, seeds, ratios, block_length, steps_per_block = request
    masked = (canvas == mask_token) & _in_block(canvas, lengths, first, block, block_length)
    left = masked.sum(axis=1, dtype=jnp.int32)
    if program.parallel != "none":
        return masked, left, left
    last = step_in_block >= steps_per_block - 1
    ratio = jnp.take_along_axis(ratios, jnp.minimum(step_in_block, ratios.shape[1] - 1)[:, None], axis=1)[:, 0]
    if program.denoise.algorithm == "origin":
        draws = draw_per_position(jax.random.uniform, seeds, block * steps_per_block + step_in_block, canvas)
        wanted = masked & ((draws < ratio[:, None]) | last[:, None])
        return wanted, wanted.sum(axis=1, dtype=jnp.int32), left
    counts = jnp.where(last, left, (left.astype(jnp.float32) * ratio).astype(jnp.int32))
    return masked & (counts > 0)[:, None], counts, left


def plan(
    forward: Forward, program: BlockProgram, request: BlockRequest, state: BlockState
) -> tuple[BlockState, Array, Array]:
    """Bring every row to its next step that transfers something, or to its end, without any forward pass.

    Returns:
      The state, positions that each row wants bool ``[B, S]``, and how many it commits by schedule int32 ``[B]``.
    """

    def rows(
        canvas: Array,
        commit_steps: Array,
        block: Array,
        step_in_block: Array,
        steps_until_refresh: Array,
        previous_block_stale: Array,
        done: Array,
        lengths: Array,
        first: Array,
        seeds: Array,
        ratios: Array,
        block_length: Array,
        steps_per_block: Array,
        refresh_blocks: Array,
        stop_tokens: Array,
    ) -> tuple[Array, ...]:
        common = (lengths, first, seeds, ratios, block_length, steps_per_block)
        mask_token = forward.config.mask_token_id
        places = jnp.arange(canvas.shape[1])
        generated = (places >= first[:, None]) & (places < lengths[:, None])
        # An end token that everything before it is committed ends the row.
        open_before = jnp.cumsum((canvas == mask_token) & generated, axis=1)
        ends = (canvas[..., None] == stop_tokens[:, None]).any(axis=-1) & (commit_steps >= 0) & (open_before == 0)
        done = done | ends.any(axis=1)

        def move(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            block, step_in_block, steps_until_refresh, previous_block_stale, done, _ = carry
            _, counts, left = _transfer_counts(program, mask_token, common, canvas, block, step_in_block)
            over = (left == 0) | (step_in_block >= steps_per_block)
            idle = ~over & (counts == 0)
            entering = over & ~done
            block = jnp.where(entering, block + 1, block)
            # A block that had no masks was not computed: what lies before it cannot be caught up with in one window.
            due = (step_in_block == 0) | ((refresh_blocks > 0) & (block % jnp.maximum(refresh_blocks, 1) == 0))
            step_in_block = jnp.where(
                done, step_in_block, jnp.where(over, 0, jnp.where(idle, step_in_block + 1, step_in_block))
            )
            steps_until_refresh = jnp.where(entering & due, 0, steps_until_refresh)
            previous_block_stale = jnp.where(entering, 1, previous_block_stale)
            done = done | (first + block * block_length >= lengths)
            return block, step_in_block, steps_until_refresh, previous_block_stale, done, (over | idle) & ~done

        start: tuple[Array, ...] = (
            block,
            step_in_block,
            steps_until_refresh,
            previous_block_stale,
            done,
            jnp.ones_like(done),
        )
        block, step_in_block, steps_until_refresh, previous_block_stale, done, _ = jax.lax.while_loop(
            lambda carry: carry[-1].any(), move, start
        )
        wanted, counts, _ = _transfer_counts(program, mask_token, common, canvas, block, step_in_block)
        return (
            block,
            step_in_block,
            steps_until_refresh,
            previous_block_stale,
            done,
            wanted & ~done[:, None],
            jnp.where(done, 0, counts),
        )

    block, step_in_block, steps_until_refresh, previous_block_stale, done, wanted, counts = forward.on_rows(
        rows,
        *(getattr(state, name) for name in _ROW_STATE),
        *(getattr(request, name) for name in _ROW_REQUEST),
    )
    return (
        replace(
            state,
            block=block,
            step_in_block=step_in_block,
            steps_until_refresh=steps_until_refresh,
            previous_block_stale=previous_block_stale,
            done=done,
        ),
        wanted,
        counts,
    )
