"""A draft model: a smaller model with the same vocabulary, whose tokens are the drafts of a pass.

The draft model has its own weights and its own KV cache, on the devices of the model. For each draft, it draws a token
with the random bits that the model will use at that position (:mod:`runtime.decoding.next_tokens`), so a draft is right
where both distributions lead to the same token. The model then checks all drafts in one pass, as with
:mod:`runtime.decoding.prompt_lookup`: the drafts decide how many passes there are, and never which token is next.

Each pass of the draft model computes the last two tokens of a row. The newest of them has no keys and values yet. The
other one has none either if the previous pass accepted all drafts, because the last draft was not computed then. In all
other cases, its keys and values are replaced by the same ones.

Dimension letters: B batch, R prompts, P prompt width, C prompt chunk, D embed, K drafts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from runtime.decoding.decode_state import DecodeProgram, DecodeRequest, DecodeState
from runtime.decoding.next_tokens import draw_tokens
from runtime.models.cached import fill_rows, run_window
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.kv_cache import Cache
from runtime.models.transformer import pick_positions

Array = jax.Array


def _known(model: Forward, tokens: Array) -> Array:
    """Replace tokens that a model's vocabulary lacks: its matrices may be padded to another number of tokens."""
    return jnp.clip(tokens, 0, model.config.vocab_size - 1)


def _after(tokens: Array, last: Array, lengths: Array) -> Array:
    """Return tokens ``[R, P]`` that wait for an activation of the draft model, ``[R, 1, D]``, without being changed.

    Because they depend on it, the collectives of the model's pass cannot overlap with those of the draft model's: XLA's
    CPU runtime would run both concurrently, in an order that differs between hosts.
    """
    return jnp.where((lengths < 0)[:, None], last[..., 0].astype(tokens.dtype), tokens)


def read_prompts(
    program: DecodeProgram, weights: Weights, state: DecodeState, tokens: Array, lengths: Array, first: Array
) -> tuple[Array, Cache]:
    """Fill the draft model's cache from whole prompts; see :func:`runtime.models.cached.fill_rows`.

    Args:
      program: compiled settings, with a draft model.
      weights: the draft model's weights.
      state: the loop state.
      tokens, lengths, first: prompts int32 ``[R, P]``, their lengths ``[R]``, and where they belong.

    Returns:
      The tokens, for the model's own pass, and the draft model's cache.
    """
    model, copies = program.draft, program.samples
    assert model is not None
    hidden, cache = fill_rows(model, weights, state.draft_cache, _known(model, tokens), lengths, first, copies)
    last = pick_positions(model, hidden, lengths[:, None] - 1, whole=True)
    return _after(tokens, last, lengths), cache


def read_prompt_chunk(
    program: DecodeProgram,
    weights: Weights,
    state: DecodeState,
    tokens: Array,
    start: Array,
    length: Array,
    stop: Array,
    row: Array,
) -> tuple[Array, Cache]:
    """Add a chunk of a prompt to the draft model's cache; see :func:`runtime.models.cached.run_window`.

    Args:
      program: compiled settings, with a draft model.
      weights: the draft model's weights.
      state: the loop state.
      tokens: int32 ``[data, C]``, the chunk of each ``data`` shard.
      start, length, stop, row: int32 ``[data]``, the chunk's first position, the length of its prompt, the position
        after its last, and its row.

    Returns:
      The tokens, for the model's own pass, and the draft model's cache.
    """
    model = program.draft
    assert model is not None
    stop = jnp.minimum(stop, model.config.max_positions)
    hidden, cache = run_window(model, weights, state.draft_cache, _known(model, tokens), start, length, stop, row)
    return _after(tokens, hidden[:, :1], length), cache


def _last(hidden: Array, window: Array, index: Array) -> tuple[Array, Array]:
    """Return activations ``[B, 1, D]`` and token ``[B, 1]`` at an index ``[B]`` of each window.

    The index is that of the newest token: 1, or 0 in a row of a single token.
    """
    index = index[:, None]
    return jnp.take_along_axis(hidden, index[..., None], axis=1), jnp.take_along_axis(window, index, axis=1)


def draft_tokens(
    forward: Forward, program: DecodeProgram, weights: Weights, request: DecodeRequest, state: DecodeState
) -> tuple[Array, Cache]:
    """Draw the next tokens of every row from the draft model.

    Args:
      forward: layout of the model that will check the drafts.
      program: compiled settings, with a draft model.
      weights: the draft model's weights.
      request: run-time arguments.
      state: the loop state.

    Returns:
      Drafts int32 ``[B, K]``, and the draft model's cache.
    """
    model = program.draft
    assert model is not None
    # The draft model may have fewer positions. Nothing is written beyond them, and drafts there are arbitrary.
    ends = jnp.minimum(request.ends, model.config.max_positions)

    def first(tokens: Array, lengths: Array) -> Array:
        places = jnp.maximum(lengths - 2, 0)[:, None] + jnp.arange(2)
        return jnp.take_along_axis(tokens, jnp.minimum(places, tokens.shape[1] - 1), axis=1)

    def step(carry: tuple[Cache, Array], number: Array) -> tuple[tuple[Cache, Array], Array]:
        cache, window = carry
        lengths = state.lengths + number
        starts = jnp.maximum(lengths - 2, 0)
        hidden, cache = run_window(
            model, weights, cache, _known(model, window), starts, jnp.minimum(lengths, ends), ends
        )
        last, newest = model.on_rows(_last, hidden, window, lengths - 1 - starts)
        _, drawn = draw_tokens(model, program, weights, request, last, lengths[:, None])
        # A token that the model lacks, or logits that are not finite, make a draft that is wrong.
        drawn = _known(forward, drawn)
        return (cache, jnp.concatenate([newest, drawn], axis=1)), drawn[:, 0]

    with jax.named_scope("draft_tokens"):
        window = forward.on_rows(first, state.tokens, state.lengths)
        numbers = jnp.arange(program.drafts, dtype=jnp.int32)
        (cache, _), drafts = jax.lax.scan(step, (state.draft_cache, window), numbers)
    return forward.constrain(drafts.T, "batch", None), cache
