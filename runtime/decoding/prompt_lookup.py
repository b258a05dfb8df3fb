"""Prompt lookup: drafts that repeat a row's own tokens, and how many of them a pass accepts.

A pass computes a row's last token and K draft tokens, and so the logits of the next K + 1 positions. Each position's
token is drawn as without drafts, with the random bits of its row and position. As long as the draft at a position
equals the token that was drawn for it, the logits of the next position belong to the row's own text, and its token
counts too. Drafts that are wrong cost time, but never change a token.

The drafts are the tokens that followed the last earlier occurrence of the row's last tokens, as in LLMA (Yang et al.,
2023, arXiv 2304.04487), whose references are other texts.

Dimension letters: B batch, T cache length, K drafts, E stop tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

# Most tokens at the end of a row that an earlier occurrence is compared with. Fewer count if there is none of as many.
LONGEST_MATCH = 3


def look_up(count: int, tokens: Array, lengths: Array) -> Array:
    """Guess the next tokens of every row: those that followed the last earlier occurrence of its last tokens.

    The longest match of up to :data:`LONGEST_MATCH` tokens decides, and the last one of that length. Where the tokens
    that followed reach the end of the row, they start over, so a row that repeats itself goes on doing so. A row
    without any match repeats its last token: the pass has positions for it anyway.

    Args:
      count: K, number of tokens to guess.
      tokens: int32 ``[B, T]``, start-aligned rows.
      lengths: int32 ``[B]``, number of tokens of each row, at least 1.

    Returns:
      int32 ``[B, K]``.
    """
    places, last = jnp.arange(tokens.shape[1]), lengths[:, None] - 1
    same, matched = jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.int32)
    for back in range(LONGEST_MATCH):
        own = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)
        same &= (jnp.roll(tokens, back, axis=1) == own) & (places >= back) & (last >= back)
        matched += same
    ranks = jnp.where(places < last, matched * tokens.shape[1] + places, -1)
    distance = jnp.maximum(last - jnp.argmax(ranks, axis=1)[:, None], 1)
    return jnp.take_along_axis(tokens, last + 1 - distance + jnp.arange(count) % distance, axis=1)


def accept(drafts: Array, drawn: Array, goes_on: Array) -> Array:
    """Return which of the positions of a pass have the logits of the row's own text: bool ``[B, K + 1]``.

    Args:
      drafts: int32 ``[B, K]``.
      drawn: int32 ``[B, K + 1]``, the token drawn for each position.
      goes_on: bool ``[B, K]``, whether the row may go on after each of the first K positions.
    """
    accepted = jnp.cumprod((drafts == drawn[:, :-1]) & goes_on, axis=1, dtype=jnp.int32)
    return jnp.pad(accepted > 0, ((0, 0), (1, 0)), constant_values=True)
