"""Choosing tokens for canvas positions. The output head runs on chunks of the positions that need a token.

The rows of a ``data`` shard share their chunks, so a row with few masks does not compute as many positions as the row
with the most.

Dimension letters: B batch, S canvas, R rows of a ``data`` shard, P positions of a chunk divided by R, D embed, V vocab.
Arrays of a chunk are ``[B, P]``, and their positions belong to any rows of the same shard.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from runtime.decoding.loop_parameters import row_names
from runtime.decoding.parameters import DiffusionConfig
from runtime.decoding.sampling import (
    TOKEN_STREAM,
    TRANSFER_STREAM,
    choose_tokens,
    log_probabilities,
    mark_non_finite,
    position_keys,
)
from runtime.decoding.state import DenoiseProgram, DenoiseRequest, DenoiseState
from runtime.decoding.variable_length import without_expansion
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.transformer import pick_positions, project_logits

Array = jax.Array

# Request fields that the choice of a token may depend on. They are gathered for each position of a chunk, except those
# that the program does not read.
_PER_ROW = ("seeds", "expand_budget", "steps_per_block", *row_names(DiffusionConfig))

# Bits per digit of the fixed-point numbers that rules add up. The sum of half a million entropies of the largest
# vocabulary fits into an int32.
_DIGIT_BITS = 8


@flax.struct.dataclass
class Choices:
    """Tokens chosen for canvas positions: arrays ``[B, S]``, or ``[B, P]`` for one chunk.

    Attributes:
      tokens: int32, -1 at positions whose logits are not finite.
      confidences: float32, -inf at positions that needed no token.
      log_probabilities: float32, log-probabilities of the tokens under the model, without temperature and filters, or
        None.
    """

    tokens: Array
    confidences: Array
    log_probabilities: Array | None = None


def choose(
    forward: Forward, program: DenoiseProgram, request: DenoiseRequest, step: Array, logits: Array, positions: Array
) -> Choices:
    """Choose a token for each position from its logits.

    Args:
      forward: the model.
      program: settings that are compiled in.
      request: seeds and run-time parameters, each with one value per row or per position.
      step: int32 ``[B]`` or ``[B, P]``, each row's own step number, from which its random bits derive.
      logits: float32 ``[B, P, V]``, marked by :func:`runtime.decoding.sampling.mark_non_finite`.
      positions: int32 ``[B, P]``.
    """
    keys = position_keys(request.seeds, step, TOKEN_STREAM, positions)
    allowed = logits
    if program.variable_length:
        allowed = without_expansion(forward.config, logits, request.expand_budget)
    temperature = request.temperature
    if program.first_alone:
        # Fast-dLLM v2 takes the most probable token for the first position of a block. If that is the mask token, the
        # position is predicted again, and then drawn: the most probable token would stay the same.
        first_step = step % request.steps_per_block == 0
        if temperature.ndim == 1:
            first_step, temperature = first_step[:, None], temperature[:, None]
        begins = (positions > 0) & (positions % forward.config.attention_block_length == 0)
        temperature = jnp.where(begins & first_step, 0.0, temperature)
    tokens, confidences = choose_tokens(
        forward, program.sampling, allowed, keys, temperature, request.top_p, request.top_k
    )
    if program.algorithm == "random" and program.parallel == "none":
        draws = position_keys(request.seeds, step, TRANSFER_STREAM, positions)
        confidences = jax.vmap(jax.vmap(jax.random.uniform))(draws)
    return Choices(tokens, confidences, log_probabilities(logits, tokens) if program.log_probabilities else None)


def confidence_ranks(confidences: Array) -> Array:
    """Rank positions by confidence: 0 is the highest, ties go to the lower position. ``[B, S]`` -> int32 ``[B, S]``."""
    ranking = jnp.argsort(confidences, axis=1, stable=True, descending=True)
    return jnp.argsort(ranking, axis=1, stable=True).astype(jnp.int32)


def sums_by_rank(values: Array, ranks: Array, *, before: bool = False) -> Array:
    """Sum, for every position, its value and those of all positions with a lower rank: ``[B, S]`` -> ``[B, S]``.

    Values are summed as fixed-point numbers, so that a sum does not depend on the width of the canvas, for which
    compilers choose the order of additions.

    Args:
      values: float32, not negative; 0 at positions that do not count.
      ranks: int32, a permutation of the positions of each row.
      before: leave out the position's own value.
    """
    base = float(1 << _DIGIT_BITS)
    first = jnp.floor(values * base)
    rest = (values * base - first) * base
    second = jnp.floor(rest)
    third = jnp.round((rest - second) * base)
    order = jnp.argsort(ranks, axis=1)

    def summed(digit: Array) -> Array:
        ordered = jnp.take_along_axis(digit.astype(jnp.int32), order, axis=1)
        sums = jnp.cumsum(ordered, axis=1) - (ordered if before else 0)
        return jnp.take_along_axis(sums, ranks, axis=1).astype(jnp.float32)

    return summed(first) / base + (summed(second) / base**2 + summed(third) / base**3)


def guide(logits: Array, unconditional: Array, scale: Array) -> Array:
    """Apply classifier-free guidance (Ho & Salimans, 2022) to logits ``[B, P, V]``.

    Logits move away from ``unconditional``, the logits without the prompt. Rows or positions whose ``scale``, float32
    ``[B]`` or ``[B, P]``, is 0 keep their logits. Both arrays, and the result, are marked by
    :func:`runtime.decoding.sampling.mark_non_finite`.
    """
    weight = scale.reshape(*scale.shape, *(1,) * (logits.ndim - scale.ndim))
    guided = unconditional + (weight + 1) * (logits - unconditional)
    # Padding of the vocabulary is -inf in both arrays, so its difference is NaN, like that of two marked logits.
    otherwise = jnp.where(unconditional == -jnp.inf, -jnp.inf, jnp.inf)
    return jnp.where(weight > 0, jnp.where(jnp.isfinite(guided), guided, otherwise), logits)


def without_prompt(forward: Forward, request: DenoiseRequest, state: DenoiseState) -> Array:
    """Return canvases ``[B, S]`` in which the mask token replaces every token of the prompt and of the suffix.

    Tokens that filled masks inside a prompt are kept.
    """
    places = jnp.arange(state.canvas.shape[1])
    given = (places < request.prompts[:, None]) | (places >= request.ends[:, None])
    return jnp.where(given & (state.commit_steps < 0), forward.config.mask_token_id, state.canvas)


@flax.struct.dataclass
class _Chunk:
    """The positions of one chunk, on which the output head runs at once.

    Attributes:
      rows: int32 ``[B, P]``, index of each position's row within its shard.
      positions: int32 ``[B, P]``, canvas positions.
      targets: int32 ``[B, P]``, indices into the shard's R * S positions; R * S where the chunk has no position.
      values: arrays ``[B, P, ...]`` with the step, the offset and the fields ``_PER_ROW`` of each position's row.
    """

    rows: Array
    positions: Array
    targets: Array
    values: Any


def _in_order(wanted: Array) -> tuple[Array, Array, Array]:
    """Sort the positions of each row of a shard, with those that need a token first.

    Returns:
      For each row, the wanted positions in ascending order, then the others: int32 ``[R, S]``; the number of wanted
      positions up to and including each row: int32 ``[R]``; and their total, int32 ``[1]``.
    """
    order = jnp.argsort(~wanted, axis=1, stable=True).astype(jnp.int32)
    ends = jnp.cumsum(wanted.sum(axis=1, dtype=jnp.int32), dtype=jnp.int32)
    return order, ends, ends[-1:]


def _cut_chunk(size: int, order: Array, ends: Array, values: Any, number: Array) -> _Chunk:
    """Return chunk ``number`` of a shard: its next R * ``size`` wanted positions, taken row by row."""
    count, width = order.shape
    numbers = (number * count + jnp.arange(count, dtype=jnp.int32)[:, None]) * size + jnp.arange(size, dtype=jnp.int32)
    rows = (numbers[..., None] >= ends).sum(axis=-1, dtype=jnp.int32)
    there, rows = rows < count, jnp.minimum(rows, count - 1)
    before = jnp.where(rows > 0, ends[rows - 1], 0)
    positions = order[rows, jnp.clip(numbers - before, 0, width - 1)]
    targets = jnp.where(there, rows * width + positions, count * width)
    return _Chunk(rows, positions, targets, jax.tree.map(lambda value: value[rows], values))


def _place(targets: Array, *values: Array) -> tuple[Array, ...]:
    """Write the second half of ``values``, each ``[R, P]``, at ``targets`` into the first half, each ``[R, S]``."""
    half = len(values) // 2
    return tuple(
        old.reshape(-1).at[targets].set(new, mode="drop").reshape(old.shape)
        for old, new in zip(values[:half], values[half:], strict=True)
    )


def _project(forward: Forward, weights: Weights, picked: Array) -> Array:
    return mark_non_finite(project_logits(forward, weights, picked), forward.config.vocab_size)


def choose_on_canvas(
    forward: Forward,
    program: DenoiseProgram,
    weights: Weights,
    request: DenoiseRequest,
    step: Array,
    hidden: Array,
    wanted: Array,
    offset: Array | None = None,
    unconditional: Array | None = None,
) -> Choices:
    """Choose a token for every wanted position.

    The head runs only on the wanted positions. A chunk has R * ``program.chunk`` of them, of any rows of its shard.

    Args:
      forward: layout and attention of the model.
      program: settings that are compiled in.
      weights: the model's weights; only the output head is used.
      request: seeds and run-time parameters, each with one value per row.
      step: int32 ``[B]``, each row's own step number, from which its random bits derive.
      hidden: activations ``[B, S, D]``.
      wanted: bool ``[B, S]``, positions that need a token.
      offset: int32 ``[B]``, canvas position of the first of each row's S positions; None means 0.
      unconditional: activations of the canvas without its prompt, for classifier-free guidance; otherwise None.

    Returns:
      Choices ``[B, S]``.
    """
    width, offset = wanted.shape[1], jnp.zeros(len(wanted), jnp.int32) if offset is None else offset

    def choose_at(positions: Array, rows: Array | None, step: Array, offset: Array, **values: Array) -> Choices:
        # No output precedes a row's first position, so that position reads its own output.
        outputs, own = jnp.maximum(positions - forward.config.family.prediction_offset, 0), replace(request, **values)
        logits = _project(forward, weights, pick_positions(forward, hidden, outputs, rows))
        if unconditional is not None:
            without = _project(forward, weights, pick_positions(forward, unconditional, outputs, rows))
            logits = guide(logits, without, own.cfg_scale)
        return choose(forward, program, own, step, logits, positions + offset)

    if program.chunk >= width:
        positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), wanted.shape)
        return choose_at(positions, None, step, offset[:, None])
    values = {"step": step, "offset": offset, **{name: getattr(request, name) for name in _PER_ROW}}
    order, ends, totals = forward.on_rows(_in_order, wanted)
    size = program.chunk * (len(wanted) // len(totals))  # positions of a chunk

    def body(number: Array, filled: Choices) -> Choices:
        chunk = forward.on_rows(partial(_cut_chunk, program.chunk), order, ends, values, number)
        chosen = choose_at(chunk.positions, chunk.rows, **chunk.values)
        placed = forward.on_rows(_place, chunk.targets, *jax.tree.leaves(filled), *jax.tree.leaves(chosen))
        return jax.tree.unflatten(jax.tree.structure(filled), placed)

    nothing = Choices(
        jnp.zeros(wanted.shape, jnp.int32),
        jnp.full(wanted.shape, -jnp.inf, jnp.float32),
        jnp.zeros(wanted.shape, jnp.float32) if program.log_probabilities else None,
    )
    return jax.lax.fori_loop(0, (totals.max() + size - 1) // size, body, nothing)
