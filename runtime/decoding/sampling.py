"""Choosing tokens and measuring confidence over a sharded vocabulary.

Nothing here gathers or sorts the vocabulary: every quantity is a reduction over it. Sums are of integers, which have no
order, so that a saturated confidence does not depend on how many chips computed it; filters (top-k, top-p) search for a
threshold, a few bits a pass, instead of sorting.

Dimension letters: B batch, P positions of one head chunk (sharded like the canvas), V vocab, ``...`` any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from runtime.models.declarations import VOCAB_BLOCKS
from runtime.models.forward import Forward

Array = jax.Array

# Dream's four, then LLaDA's two; a family's record says which of them are its own.
ALGORITHMS = ("origin", "maskgit_plus", "topk_margin", "entropy", "low_confidence", "random")
# Those that choose positions by the model's confidence.
CONFIDENCE_ALGORITHMS = ("maskgit_plus", "topk_margin", "entropy", "low_confidence")

# Streams of random bits of one row and step; a position's own bits follow from its number.
TOKEN_STREAM, TRANSFER_STREAM = 0, 1

# Probabilities are summed against top_p as integers of this unit: integer sums have no order.
_FIXED_POINT = float(1 << 30)
# Bits of a threshold that one pass over the vocabulary finds, by sums above 7 candidates.
_BITS_A_PASS = 3
# Integer sums of a pass, of masses and of counts.
SUMS_OF_A_PASS = 2 * ((1 << _BITS_A_PASS) - 1)
# Positions that a CPU alone makes random bits for at a time.
_NOISY_POSITIONS = 4
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
      greedy: take the most probable token also where the temperature is above 0, which confidences then follow.
    """

    confidence: str
    sampled: bool
    filtered: bool
    suppress_mask: bool
    confidence_dtype: str
    greedy: bool = False


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


def _ordered_integers(values: Array, dtype: Any) -> Array:
    """float32 of the precision of ``dtype`` -> int32 with the same order; 16-bit ones differ in the high half alone."""
    # One zero of two; the compiler would take away an addition of 0.0.
    values = jnp.where(values == 0.0, 0.0, values).astype(dtype)
    bits = jnp.dtype(dtype).itemsize * 8
    return _flip_negative(jax.lax.bitcast_convert_type(values, f"int{bits}")).astype(jnp.int32) << (32 - bits)


def _of_ordered_integers(keys: Array, dtype: Any) -> Array:
    """The inverse of :func:`_ordered_integers`."""
    bits = jnp.dtype(dtype).itemsize * 8
    narrow = (keys >> (32 - bits)).astype(f"int{bits}")
    return jax.lax.bitcast_convert_type(_flip_negative(narrow), dtype).astype(jnp.float32)


def _flip_negative(bits: Array) -> Array:
    # The magnitude of a negative number grows downwards.
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _of_rows(value: Array, ndim: int) -> Array:
    """A number for all rows, or one each ``[B]``, as it broadcasts against ``[B, ...]`` of ``ndim`` dimensions."""
    return value if value.ndim == 0 else value.reshape(-1, *(1,) * (ndim - 1))


def threshold_passes(dtype: Any) -> int:
    """Passes over the vocabulary that find the threshold of logits of the precision of ``dtype``."""
    return math.ceil(8 * jnp.dtype(dtype).itemsize / _BITS_A_PASS)


def filter_logits(logits: Array, top_p: Array, top_k: Array, dtype: Any = jnp.float32) -> Array:
    """Top-p, then top-k, by one search for the lowest logit to keep; the rest become -inf.

    A token is kept by top-p when the mass strictly above it is at most ``top_p`` (so the token that crosses the
    threshold stays), by top-k when fewer than ``top_k`` are strictly above it (so ties at the k-th stay). Both are
    monotone in the logit, so the two together are one threshold. It is found from its highest bit down, three bits in
    each pass over the vocabulary: 11 passes for 32 bits, 6 for 16.

    Args:
      logits: float32 ``[..., V]``, tempered.
      top_p: float32 scalar or ``[B]``, 1 for none.
      top_k: int32 scalar or ``[B]``, at least the vocabulary for none.
      dtype: to whose precision ``logits`` are rounded.

    Returns:
      float32 ``[..., V]``.
    """
    top_p, top_k = (_of_rows(value, logits.ndim - 1) for value in (top_p, top_k))
    # Keys and masses are all that is kept of the vocabulary: the logits are read from their keys from here on.
    keys = jax.lax.optimization_barrier(_ordered_integers(logits, dtype))
    logits = _of_ordered_integers(keys, dtype)
    masses = jnp.round(_softmax(logits, _softmax_sums(logits), dtype) * _FIXED_POINT).astype(jnp.int32)
    # A sum of rounded probabilities may pass 1 by a few units; top_p = 1 keeps everything all the same.
    allowed = jnp.where(top_p >= 1.0, jnp.iinfo(jnp.int32).max, jnp.round(top_p * _FIXED_POINT)).astype(jnp.int32)
    bits = jnp.dtype(dtype).itemsize * 8
    passes = threshold_passes(dtype)

    def search(number: Array, lowest: Array) -> Array:
        """Of the threshold, as uint32: from bits above ``shift + 3`` to those above ``shift``."""
        shift = jnp.uint32(32 - bits) + _BITS_A_PASS * (passes - 1 - number).astype(jnp.uint32)
        digits = [jnp.uint32(digit) for digit in range(1, 1 << _BITS_A_PASS)]
        candidates = [_signed(lowest + (digit << shift) - 1)[..., None] for digit in digits]
        # Two comparisons of each: XLA on TPU would write one that two sums share to memory.
        masses_above = [jnp.where(keys <= candidate, 0, masses) for candidate in candidates]
        counts_above = [(keys > candidate).astype(jnp.int32) for candidate in candidates]
        sums = _vocab_sums(*masses_above, *counts_above)
        missed = [
            ~((mass <= allowed) & (count < top_k))
            for mass, count in zip(sums[: len(digits)], sums[len(digits) :], strict=True)
        ]
        # The first pass may have fewer than three bits left: higher digits do not exist.
        bits_left = jnp.minimum(32 - shift, _BITS_A_PASS)
        exist = [digit >> bits_left == 0 for digit in digits]
        digit = sum((one & there).astype(jnp.uint32) for one, there in zip(missed, exist, strict=True))
        return lowest + (digit << shift)

    threshold = _signed(jax.lax.fori_loop(0, passes, search, jnp.zeros(logits.shape[:-1], jnp.uint32)))
    return jnp.where(keys >= threshold[..., None], logits, -jnp.inf)


def _signed(ordered: Array) -> Array:
    """uint32 -> int32 of the same order."""
    return jax.lax.bitcast_convert_type(ordered ^ jnp.uint32(1 << 31), jnp.int32)


def _softmax_sums(logits: Array) -> tuple[Array, Array]:
    """Largest logit, and sum of the exponentials of what lies below it: ``[..., V]`` -> ``[..., 1]`` each."""
    top = logits.max(axis=-1, keepdims=True)
    return top, vocab_sum(jnp.exp(logits - top))[..., None]


def _softmax(logits: Array, sums: tuple[Array, Array], dtype: Any) -> Array:
    top, total = sums
    return _round(jnp.exp(logits - top) / total, dtype)


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


def _draw(forward: Forward, logits: Array, keys: Array) -> Array:
    """A token for each position, with the probabilities of its logits ``[B, P, V]``: Gumbel noise, then the largest."""

    def draw(logits: Array, keys: Array) -> Array:
        return vocab_argmax(logits + gumbel_noise(keys, logits.shape[-1]))[1]

    few = math.gcd(keys.size, _NOISY_POSITIONS)
    if not forward.alone_on_cpu or keys.size == few:
        return draw(logits, keys)
    # XLA on CPU writes the counters of the random bits to memory: those of a few positions stay in its caches.
    groups = logits.reshape(-1, few, logits.shape[-1]), keys.reshape(-1, few)
    return jax.lax.map(lambda group: draw(*group), groups).reshape(keys.shape)


def _confidence(rule: SamplingRule, probabilities: Array, largest: Array, best: Array) -> Array:
    """Confidence ``[B, P]`` in the most probable token ``best``, of probability ``largest``, by the rule."""
    dtype = jnp.dtype(rule.confidence_dtype)
    if rule.confidence == "entropy":
        terms = _round(probabilities * _round(jnp.log(probabilities + _ENTROPY_EPSILON), dtype), dtype)
        # Terms lie between -1/e and 0, but for the epsilon.
        return _round(-vocab_sum(jnp.clip(-terms, 0.0, 1.0)), dtype)
    if rule.confidence == "topk_margin":
        others = jnp.arange(probabilities.shape[-1]) != best[..., None]
        second = jnp.where(others, probabilities, 0.0).max(axis=-1)
        return _round(largest - second, dtype)
    return largest


def choose_tokens(
    forward: Forward,
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
      forward: the model, for its mask token, and how positions are sharded.
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
            logits = jnp.where(ids == forward.config.mask_token_id, -jnp.inf, logits)
        plain = logits
        temperature = _of_rows(temperature, logits.ndim)
        warm = temperature > 0
        if rule.sampled:
            logits = _round(logits / jnp.where(warm, temperature, 1.0), dtype)
        if rule.filtered:
            logits = filter_logits(logits, top_p, top_k, dtype)
        sums = _softmax_sums(logits)
        probabilities = _softmax(logits, sums, dtype)
        largest, tokens = vocab_argmax(probabilities)
        confidence = _confidence(rule, probabilities, largest, tokens)
        if rule.sampled and not rule.greedy:
            # Noisy scores take the place of what the confidence needs of the vocabulary, not memory beside it.
            logits, confidence = jax.lax.optimization_barrier((logits, confidence))
            is_warm = jnp.broadcast_to(warm, (*keys.shape, 1))[..., 0]
            # Pinned: the compiler would bring both choices to every shard and choose there.
            tokens = forward.constrain(jnp.where(is_warm, _draw(forward, logits, keys), tokens), "batch", "canvas")
            if rule.confidence not in ("entropy", "topk_margin"):
                confidence = _softmax(pick(logits, tokens)[..., None], sums, dtype)[..., 0]
        if rule.confidence == "low_confidence" and (rule.sampled or rule.filtered):
            confidence = _softmax(pick(plain, tokens)[..., None], _softmax_sums(plain), dtype)[..., 0]
        return tokens, confidence


def log_probabilities(logits: Array, targets: Array) -> Array:
    """Log-probabilities of given tokens: float32 logits ``[B, P, V]``, targets ``[B, P]`` -> float32 ``[B, P]``."""
    with jax.named_scope("log_probabilities"):
        top = logits.max(axis=-1)
        total = vocab_sum(jnp.exp(logits - top[..., None]))
        return pick(logits, targets) - top - jnp.log(total)
