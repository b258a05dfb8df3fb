"""Choosing tokens for positions of the canvas: the head, run on chunks of the positions that matter.

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
    """The tokens that were chosen for positions of the canvas, ``[B, S]`` each or ``[B, P]`` of a chunk.

    Attributes:
      tokens: int32.
      confidences: float32, -inf where no token was wanted.
      log_probabilities: float32, of the tokens under the model itself (no temperature, no filter), or None.
    """

    tokens: Array
    confidences: Array
    log_probabilities: Array | None = None


def choose(
    forward: Forward, program: DenoiseProgram, request: DenoiseRequest, step: Array, logits: Array, positions: Array
) -> Choices:
    """Choose a token for each of these positions from their logits.

    Args:
      forward: the model.
      program: what is compiled in.
      request: seeds, temperature, top_p and top_k.
      step: int32 ``[B]``, the row's own step, to which its random bits belong.
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
    """Rank of every position by confidence, 0 for the highest, ties to the lowest position: ``[B, S]`` -> int32."""
    ranking = jnp.argsort(confidences, axis=1, stable=True, descending=True)
    return jnp.argsort(ranking, axis=1, stable=True).astype(jnp.int32)


def guide(logits: Array, unconditional: Array, scale: Array) -> Array:
    """Classifier-free guidance (Ho & Salimans, 2022): logits ``[B, P, V]`` moved away from those without the prompt.

    A row whose ``scale`` float32 ``[B]`` is 0 keeps its logits.
    """
    weight = scale[:, None, None]
    # The vocabulary's padding is at -inf in both.
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
    """Logits ``[B, P, V]`` at positions int32 ``[B, P]``, guided where there are ``unconditional`` activations."""
    logits = project_logits(forward, weights, pick_positions(forward, hidden, outputs))
    if unconditional is None:
        return logits
    without = project_logits(forward, weights, pick_positions(forward, unconditional, outputs))
    return guide(logits, without, request.cfg_scale)


def _place(positions: Array, *values: Array) -> tuple[Array, ...]:
    """Arrays ``[B, S]``, the first half of ``values``, with the other half ``[B, P]`` at ``positions``."""
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
    """Choose a token for every wanted position, running the head on those alone, ``program.chunk`` a row at a time.

    Args:
      forward: layout and attention.
      program: what is compiled in.
      weights: the model; only its head is used.
      request: seeds, temperature, top_p and top_k.
      step: int32 ``[B]``, the row's own step, to which its random bits belong.
      hidden: ``[B, S, D]``.
      wanted: bool ``[B, S]``.
      offset: int32 ``[B]``, position of the canvas at which each row's S positions start; None for 0.
      unconditional: like ``hidden``, of the canvas without its prompt, for classifier-free guidance.

    Returns:
      Choices ``[B, S]``.
    """
    width = wanted.shape[1]

    def choose_at(positions: Array) -> Choices:
        # The first position of a row has no output before it, and reads its own.
        outputs = jnp.maximum(positions - forward.config.family.prediction_offset, 0)
        logits = _logits_at(forward, weights, request, hidden, unconditional, outputs)
        places = positions if offset is None else positions + offset[:, None]
        return choose(forward, program, request, step, logits, places)

    if program.chunk >= width:
        return choose_at(jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), wanted.shape))
    # Per row the wanted positions, ascending, then the others.
    order = forward.on_rows(lambda wanted: jnp.argsort(~wanted, axis=1, stable=True).astype(jnp.int32), wanted)
    chunks = (wanted.sum(axis=1).max() + program.chunk - 1) // program.chunk

    def body(chunk: Array, filled: Choices) -> Choices:
        # The last chunk of a canvas that the chunk does not divide starts earlier and repeats a few positions.
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
