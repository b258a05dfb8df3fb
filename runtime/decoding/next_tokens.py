"""Drawing the next tokens of autoregressive rows, by a model or its draft model, with the bits of row and position.

Dimension letters: B batch, P positions, D embed, V vocab.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from runtime.decoding.decode_state import DecodeProgram, DecodeRequest
from runtime.decoding.sampling import TOKEN_STREAM, choose_tokens, mark_non_finite, position_keys
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.transformer import project_logits

Array = jax.Array


def draw_tokens(
    forward: Forward,
    program: DecodeProgram,
    weights: Weights,
    request: DecodeRequest,
    hidden: Array,
    places: Array,
) -> tuple[Array, Array]:
    """Draw the tokens of some positions of every row.

    Args:
      forward: layout of the model that draws.
      program: compiled settings.
      weights: the weights of that model.
      request: run-time arguments.
      hidden: activations ``[B, P, D]`` that predict the positions.
      places: int32 ``[B, P]``, the positions.

    Returns:
      Logits float32 ``[B, P, V]``, and tokens int32 ``[B, P]``, -1 where the logits are not finite.
    """
    logits = mark_non_finite(project_logits(forward.window, weights, hidden), forward.config.vocab_size)
    seeds = jnp.broadcast_to(request.seeds[:, None], (*places.shape, request.seeds.shape[1]))
    keys = position_keys(seeds, places - request.prompts[:, None], TOKEN_STREAM, places)
    rule = request.temperature, request.top_p, request.top_k
    drawn, _ = choose_tokens(forward.window, program.sampling, logits, keys, *rule)
    return logits, drawn
