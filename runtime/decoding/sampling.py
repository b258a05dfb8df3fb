"""Choosing tokens and measuring confidence over a sharded vocabulary.

Nothing here gathers or sorts the vocabulary: every quantity is a reduction over it. Sums are of integers, which have no
order, so that a saturated confidence does not depend on how many chips computed it; filters (top-k, top-p) search for a
threshold by bisection instead of sorting.

Dimension letters: B batch, P positions of one head chunk (sharded like the canvas), V vocab, ``...`` any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from runtime.models.config import ModelConfig
from runtime.models.declarations import VOCAB_BLOCKS

Array = jax.Array

# Dream's four, then LLaDA's two; a family's record says which of them are its own.
ALGORITHMS = ("origin", "maskgit_plus", "topk_margin", "entropy", "low_confidence", "random")
# Those that choose positions by the model's confidence.
CONFIDENCE_ALGORITHMS = ("maskgit_plus", "topk_margin", "entropy", "low_confidence")

# Streams of random bits of one row and step; a position's own bits follow from its number.
TOKEN_STREAM, TRANSFER_STREAM = 0, 1

# Probabilities are summed against top_p as integers of this unit: integer sums have no order.
_FIXED_POINT = float(1 << 30)
_ENTROPY_EPSILON = 1e-10


@dataclass(frozen=True)
class SamplingRule:
    """The parts of sampling that change the compiled program. Numbers are run-time arguments.

    Attributes:
      confidence: how a chosen token is ranked, one of ``ALGORITHMS`` (``origin`` and ``random`` need none).
      sampled: draw from the distribution where the temperature is above 0, else take the most probable token
        everywhere.
      filtered: apply top-p and top-k.
      suppress_mask: never choose the mask token.
      confidence_dtype: dtype in which logits are filtered and ranked, ``float32`` or the model's.
    """

    confidence: str
    sampled: bool
    filtered: bool
    suppress_mask: bool
    confidence_dtype: str


def _blocks(values: Array) -> Array:
    """The vocabulary in blocks that no shard cuts: ``[..., V]`` -> ``[..., blocks, V / blocks]``."""
    return values.reshape(*values.shape[:-1], math.gcd(values.shape[-1], VOCAB_BLOCKS), -1)


def _vocab_sums(*values: Array) -> list[Array]:
    """Sums over the vocabulary of several int32 ``[..., V]``."""

    def one_pass(*values: Array) -> list[Array]:
        zeros = (jnp.int32(0),) * len(values)

        def add(left: Sequence[Array], right: Sequence[Array]) -> tuple[Array, ...]:
            return tuple(one + other for one, other in zip(left, right, strict=True))

        blocks = [_blocks(value) for value in values]
        partial = jax.lax.reduce(blocks, list(zeros), add, dimensions=(blocks[0].ndim - 1,))
        return [part.sum(axis=-1) for part in partial]

    def separately(*values: Array) -> list[Array]:
        return [value.sum(axis=-1) for value in values]

    # XLA on CPU is many times as fast with all sums in one pass over a block; elsewhere plain sums fuse, and blocks
    # would be copies in memory. Integers add up to the same either way.
    return jax.lax.platform_dependent(*values, cpu=one_pass, default=separately)


def vocab_sum(values: Array) -> Array:
    """Sum over the vocabulary of numbers from 0 to 1, to the bit the same on every mesh: ``[..., V]`` -> ``[...]``.

    Each number is split into three digits of a fixed-point representation, and integers are summed: three digits of 12
    bits for vocabularies up to 2^18, so that the error of a term is at most 2^-37.
    """
    bits = min(12, 30 - (values.shape[-1] - 1).bit_length())
    base = float(1 << bits)
    first = jnp.floor(values * base)
    rest = (values * base - first) * base
    second = jnp.floor(rest)
    third = jnp.round((rest - second) * base)
    sums = _vocab_sums(*(digit.astype(jnp.int32) for digit in (first, second, third)))
    high, middle, low = (total.astype(jnp.float32) for total in sums)
    # The smallest first: each larger one absorbs the sum so far with one rounding.
    return high / base + (middle / base**2 + low / base**3)


def vocab_argmax(values: Array) -> tuple[Array, Array]:
    """Maximum and its lowest index over the vocabulary: ``[..., V]`` -> ``[...]``, ``[...]`` int32."""
    best = values.max(axis=-1)
    ids = jnp.arange(values.shape[-1], dtype=jnp.int32)
    index = jnp.where(values == best[..., None], ids, values.shape[-1]).min(axis=-1)
    return best, index


def pick(values: Array, index: Array) -> Array:
    """``values[..., index]`` over a sharded vocabulary, as a masked maximum: ``[..., V]``, ``[...]`` -> ``[...]``."""
    ids = jnp.arange(values.shape[-1], dtype=jnp.int32)
    return jnp.where(ids == index[..., None], values, -jnp.inf).max(axis=-1)


def _ordered_integers(values: Array) -> Array:
    """float32 -> int32 with the same order."""
    # One zero of two; the compiler would take away an addition of 0.0.
    values = jnp.where(values == 0.0, 0.0, values)
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _of_rows(value: Array, ndim: int) -> Array:
    """A number for all rows, or one each ``[B]``, as it broadcasts against ``[B, ...]`` of ``ndim`` dimensions."""
    return value if value.ndim == 0 else value.reshape(-1, *(1,) * (ndim - 1))


def filter_logits(logits: Array, probabilities: Array, top_p: Array, top_k: Array) -> Array:
    """Top-p, then top-k, by one bisection for the lowest logit to keep; the rest become -inf.

    A token is kept by top-p when the mass strictly above it is at most ``top_p`` (so the token that crosses the
    threshold stays), by top-k when fewer than ``top_k`` are strictly above it (so ties at the k-th stay). Both are
    monotone in the logit, so the two together are one threshold, found bit by bit.

    Args:
      logits: float32 ``[..., V]``, tempered.
      probabilities: float32 ``[..., V]``, softmax of ``logits``.
      top_p: float32 scalar or ``[B]``, 1 for none.
      top_k: int32 scalar or ``[B]``, at least the vocabulary for none.

    Returns:
      float32 ``[..., V]``.
    """
    top_p, top_k = (_of_rows(value, logits.ndim - 1) for value in (top_p, top_k))
    keys = _ordered_integers(logits)
    masses = jnp.round(probabilities * _FIXED_POINT).astype(jnp.int32)
    # A sum of rounded probabilities may pass 1 by a few units; top_p = 1 keeps everything all the same.
    allowed = jnp.where(top_p >= 1.0, jnp.iinfo(jnp.int32).max, jnp.round(top_p * _FIXED_POINT)).astype(jnp.int32)

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # low is not enough, high is
        middle = (low & high) + ((low ^ high) >> 1)
        above = keys > middle[..., None]
        mass, count = _vocab_sums(jnp.where(above, masses, 0), above.astype(jnp.int32))
        enough = (mass <= allowed) & (count < top_k)
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    high = keys.max(axis=-1)
    low = jnp.full_like(high, _ordered_integers(jnp.float32(-jnp.inf)) - 1)
    _, threshold = jax.lax.fori_loop(0, 32, halve, (low, high))
    return jnp.where(keys >= threshold[..., None], logits, -jnp.inf)


def _softmax(logits: Array, dtype: Any) -> Array:
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    return _round(weights / vocab_sum(weights)[..., None], dtype)


def _round(values: Array, dtype: Any) -> Array:
    """Round float32 to the precision of ``dtype``, staying float32."""
    if jnp.dtype(dtype) == jnp.float32:
        return values
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(values, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def position_keys(seeds: Array, step: Array, stream: int, positions: Array) -> Array:
    """Keys ``[B, P]`` of (row seed, step, stream, position): the same wherever and with whatever a row is run.

    Args:
      seeds: uint32 ``[B, 2]``, key data of each row.
      step: int32, one for all rows or ``[B]``.
      stream: what the bits are for.
      positions: int32 ``[B, P]``.
    """

    def row(seed: Array, step: Array, places: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(seed), step), stream)
        return jax.vmap(lambda place: jax.random.fold_in(key, place))(places)

    return jax.vmap(row)(seeds, jnp.broadcast_to(step, seeds.shape[:1]), positions)


def draw_per_position(draw: Callable[..., Array], seeds: Array, step: Array, canvas: Array) -> Array:
    """One float32 for every position of a canvas ``[B, S]`` by ``jax.random.uniform`` or ``jax.random.gumbel``."""
    positions = jnp.broadcast_to(jnp.arange(canvas.shape[1], dtype=jnp.int32), canvas.shape)
    keys = position_keys(seeds, step, TRANSFER_STREAM, positions)
    return jax.vmap(jax.vmap(lambda key: draw(key, (), jnp.float32)))(keys)


def gumbel_noise(keys: Array, vocab: int) -> Array:
    """Gumbel noise ``[..., V]`` of keys ``[...]``: a token's noise depends on its key and id, not on padding."""
    flat = keys.reshape(-1)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(flat)
    return noise.reshape(*keys.shape, vocab)


def choose_tokens(
    config: ModelConfig,
    rule: SamplingRule,
    logits: Array,
    keys: Array,
    temperature: Array,
    top_p: Array,
    top_k: Array,
) -> tuple[Array, Array]:
    """Choose a token for each position and say how confident the model is of it.

    The order is the original's: temperature, top-p, top-k, softmax, then a draw or the most probable token.
    Confidence is that of the tempered and filtered distribution: ``maskgit_plus`` the chosen token's probability,
    ``topk_margin`` the gap between the two most probable tokens, ``entropy`` the negative entropy. ``low_confidence``
    is the chosen token's probability before temperature and filters.

    Args:
      config: the model, for its mask token.
      rule: what is compiled in.
      logits: float32 ``[B, P, V]``, padding of the vocabulary at -inf.
      keys: typed PRNG keys ``[B, P]``, one per position.
      temperature: float32 scalar or ``[B]``, read when ``rule.sampled``; 0 takes the most probable token.
      top_p: float32 scalar or ``[B]``, read when ``rule.filtered``; 1 for none.
      top_k: int32 scalar or ``[B]``, read when ``rule.filtered``; the vocabulary's size or more for none.

    Returns:
      Tokens int32 ``[B, P]`` and confidences float32 ``[B, P]``.
    """
    dtype = jnp.dtype(rule.confidence_dtype)
    with jax.named_scope("choose_tokens"):
        logits = _round(logits, dtype)
        if rule.suppress_mask:
            ids = jnp.arange(logits.shape[-1])
            logits = jnp.where(ids == config.mask_token_id, -jnp.inf, logits)
        plain = logits
        temperature = _of_rows(temperature, logits.ndim)
        warm = temperature > 0
        if rule.sampled:
            logits = _round(logits / jnp.where(warm, temperature, 1.0), dtype)
        if rule.filtered:
            logits = filter_logits(logits, _softmax(logits, dtype), top_p, top_k)
        probabilities = _softmax(logits, dtype)
        if rule.sampled:
            noisy = logits + gumbel_noise(keys, logits.shape[-1])
            _, tokens = vocab_argmax(jnp.where(warm, noisy, probabilities))
        else:
            _, tokens = vocab_argmax(probabilities)
        if rule.confidence == "entropy":
            terms = _round(probabilities * _round(jnp.log(probabilities + _ENTROPY_EPSILON), dtype), dtype)
            # Terms lie between -1/e and 0, but for the epsilon.
            confidence = _round(-vocab_sum(jnp.clip(-terms, 0.0, 1.0)), dtype)
        elif rule.confidence == "topk_margin":
            first, best = vocab_argmax(probabilities)
            others = jnp.arange(probabilities.shape[-1]) != best[..., None]
            second = jnp.where(others, probabilities, 0.0).max(axis=-1)
            confidence = _round(first - second, dtype)
        elif rule.confidence == "low_confidence" and (rule.sampled or rule.filtered):
            confidence = pick(_softmax(plain, dtype), tokens)
        elif rule.sampled:
            confidence = pick(probabilities, tokens)
        else:
            confidence = probabilities.max(axis=-1)
        return tokens, confidence


def log_probabilities(logits: Array, targets: Array) -> Array:
    """Log-probabilities of given tokens: float32 logits ``[B, P, V]``, targets ``[B, P]`` -> float32 ``[B, P]``."""
    with jax.named_scope("log_probabilities"):
        top = logits.max(axis=-1)
        total = vocab_sum(jnp.exp(logits - top[..., None]))
        return pick(logits, targets) - top - jnp.log(total)
