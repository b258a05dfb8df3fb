"""Choosing tokens for canvas positions. The output head runs on chunks of the positions that need a token.
Dimension letters: B batch, S canvas, P positions of one head chunk, D embed, V vocab.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from runtime.decoding.sampling import TOKEN_STREAM, TRANSFER_STREAM, choose_tokens, log_probabilities, position_keys
from runtime.decoding.state import DenoiseProgram, DenoiseRequest
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.transformer import pick_positions, project_logits

Array = jax.Array


@flax.struct.dataclass
class Choices:
    """Tokens chosen for canvas positions: arrays ``[B, S]``, or ``[B, P]`` for one head chunk.

    Attributes:
      tokens: int32.
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
      request: seeds, temperature, top_p and top_k.
      step: int32 ``[B]``, each row's own step number, from which its random bits derive.
      logits: float32 ``[B, P, V]``.
      positions: int32 ``[B, P]``.
    """
    keys = position_keys(request.seeds, step, TOKEN_STREAM, positions)
    tokens, confidences = choose_tokens(
        forward, program.sampling, logits, keys, request.temperature, request.top_p, request.top_k
    )
    if program.algorithm == "random" and program.parallel == "none":
        draws = position_keys(request.seeds, step, TRANSFER_STREAM, positions)
        confidences = jax.vmap(jax.vmap(jax.random.uniform))(draws)
    return Choices(tokens, confidences, log_probabilities(logits, tokens) if program.log_probabilities else None)


def confidence_ranks(confidences: Array) -> Array:
    """Rank positions by confidence: 0 is the highest, ties go to the lower position. ``[B, S]`` -> int32 ``[B, S]``."""
    ranking = jnp.argsort(confidences, axis=1, stable=True, descending=True)
    return jnp.argsort(ranking, axis=1, stable=True).astype(jnp.int32)


def guide(logits: Array, unconditional: Array, scale: Array) -> Array:
    """Apply classifier-free guidance (Ho & Salimans, 2022) to logits ``[B, P, V]``.

    Logits move away from ``unconditional``, the logits without the prompt. Rows whose ``scale`` float32 ``[B]`` is 0
    keep their logits.
    """
    weight = scale[:, None, None]
    # Padding of the vocabulary is -inf in both arrays, and the difference would be NaN.
    guided = jnp.where(jnp.isfinite(unconditional), unconditional + (weight + 1) * (logits - unconditional), -jnp.inf)
    return jnp.where(weight > 0, guided, logits)


def _logits_at(
    forward: Forward,
    weights: Weights,
    request: DenoiseRequest,
    hidden: Array,
    unconditional: Array | None,
    outputs: Array,
) -> Array:
    """Compute logits ``[B, P, V]`` at positions int32 ``[B, P]``, with guidance if ``unconditional`` is given."""
    logits = project_logits(forward, weights, pick_positions(forward, hidden, outputs))
    if unconditional is None:
        return logits
    without = project_logits(forward, weights, pick_positions(forward, unconditional, outputs))
    return guide(logits, without, request.cfg_scale)


def _place(positions: Array, *values: Array) -> tuple[Array, ...]:
    """Write the second half of ``values``, each ``[B, P]``, at ``positions`` into the first half, each ``[B, S]``."""
    row, half = jnp.arange(positions.shape[0])[:, None], len(values) // 2
    return tuple(old.at[row, positions].set(new) for old, new in zip(values[:half], values[half:], strict=True))


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

    The head runs only on the wanted positions, in chunks of ``program.chunk`` positions per row.

    Args:
      forward: layout and attention of the model.
      program: settings that are compiled in.
      weights: the model's weights; only the output head is used.
      request: seeds, temperature, top_p and top_k.
      step: int32 ``[B]``, each row's own step number, from which its random bits derive.
      hidden: activations ``[B, S, D]``.
      wanted: bool ``[B, S]``, positions that need a token.
      offset: int32 ``[B]``, canvas position of the first of each row's S positions; None means 0.
      unconditional: activations of the canvas without its prompt, for classifier-free guidance; otherwise None.

    Returns:
      Choices ``[B, S]``.
    """
    width = wanted.shape[1]

    def choose_at(positions: Array) -> Choices:
        # No output precedes a row's first position, so that position reads its own output.
        outputs = jnp.maximum(positions - forward.config.family.prediction_offset, 0)
        logits = _logits_at(forward, weights, request, hidden, unconditional, outputs)
        places = positions if offset is None else positions + offset[:, None]
        return choose(forward, program, request, step, logits, places)

    if program.chunk >= width:
        return choose_at(jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), wanted.shape))
    # For each row: the wanted positions in ascending order, then the others.
    order = forward.on_rows(lambda wanted: jnp.argsort(~wanted, axis=1, stable=True).astype(jnp.int32), wanted)
    chunks = (wanted.sum(axis=1).max() + program.chunk - 1) // program.chunk

    def body(chunk: Array, filled: Choices) -> Choices:
        # If the chunk does not divide the canvas, the last chunk starts earlier and repeats a few positions.
        start = jnp.minimum(chunk * program.chunk, width - program.chunk)
        positions = forward.on_rows(
            lambda order, start: jax.lax.dynamic_slice_in_dim(order, start, program.chunk, axis=1), order, start
        )
        chosen = choose_at(positions)
        placed = forward.on_rows(_place, positions, *jax.tree.leaves(filled), *jax.tree.leaves(chosen))
        return jax.tree.unflatten(jax.tree.structure(filled), placed)

    nothing = Choices(
        jnp.zeros(wanted.shape, jnp.int32),
        jnp.full(wanted.shape, -jnp.inf, jnp.float32),
        jnp.zeros(wanted.shape, jnp.float32) if program.log_probabilities else None,
    )
    return jax.lax.fori_loop(0, chunks, body, nothing)
