"""Choosing tokens and measuring confidence over a sharded vocabulary.

Nothing here gathers or sorts the vocabulary: every quantity is a reduction over it. Sums are taken over integers, whose
result does not depend on the order of addition, so confidences are bit-identical on any number of chips. The filters
(top-k, top-p) do not sort either: they search for a threshold (:mod:`runtime.decoding.threshold_search`).

Dimension letters: B batch, P positions of one chunk of the output head (sharded like the canvas), V vocab, ``...``
leading axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from runtime.decoding.threshold_search import (
    BITS_PER_PASS,
    bits_per_pass,
    find_threshold,
    from_ordered_integers,
    ordered_integers,
)
from runtime.decoding.vocabulary import pick, vocab_argmax, vocab_sum, vocab_sums
from runtime.models.forward import Forward

Array = jax.Array
Values = TypeVar("Values")

# Four algorithms of Dream, then two of LLaDA. ``Family.algorithms`` has those that the family's original code has.
ALGORITHMS = ("origin", "maskgit_plus", "topk_margin", "entropy", "low_confidence", "random")
# The algorithms that choose positions by the model's confidence.
CONFIDENCE_ALGORITHMS = ("maskgit_plus", "topk_margin", "entropy", "low_confidence")

# Independent streams of random bits within a row and step: one to draw tokens, one to draw positions.
TOKEN_STREAM, TRANSFER_STREAM = 0, 1

# For top_p, probabilities are summed as integers in units of 2^-30, so that the order of addition does not matter.
_FIXED_POINT = float(1 << 30)
# On a single CPU device, random bits are generated for this many positions at a time.
_NOISY_POSITIONS = 4
_ENTROPY_EPSILON = 1e-10


@dataclass(frozen=True)
class SamplingRule:
    """Sampling settings that are compiled into the program. Temperature, top-p and top-k are run-time arguments.

    Attributes:
      confidence: the confidence measure, one of ``ALGORITHMS`` (``origin`` and ``random`` do not use confidence).
      sampled: sample in rows whose temperature is above 0. If False, every row takes the most probable token.
      filtered: apply top-p and top-k.
      top_k_first: apply top-k before top-p, with a search for each.
      suppress_mask: never choose the mask token.
      confidence_dtype: dtype in which logits are filtered and ranked, such as ``float32`` or the model's dtype.
      greedy: take the most probable token also in rows whose temperature is above 0. Their confidences are those of the
        distribution at that temperature.
      replace_mask: choose the best other token where the mask token is the best one. Unlike with ``suppress_mask``, the
        mask token keeps its share of the probability.
    """

    confidence: str
    sampled: bool
    filtered: bool
    suppress_mask: bool
    confidence_dtype: str
    top_k_first: bool = False
    greedy: bool = False
    replace_mask: bool = False

    @property
    def searches(self) -> int:
        """Number of searches for a threshold."""
        return self.filtered * (1 + self.top_k_first)


def _per_row(value: Array, ndim: int) -> Array:
    """Reshape a scalar, ``[B]`` or ``[B, P]`` to broadcast against ``[B, P, ...]`` of ``ndim`` dimensions."""
    return value if value.ndim == 0 else value.reshape(*value.shape, *(1,) * (ndim - value.ndim))


def filter_logits(
    logits: Array,
    top_p: Array,
    top_k: Array,
    dtype: Any = jnp.float32,
    bits: int = BITS_PER_PASS,
    for_gpu: bool = False,
    top_k_first_of: int | None = None,
) -> Array:
    """Apply top-p and top-k: find the lowest logit to keep, and set all lower ones to -inf.

    Top-p keeps a token if the probability mass strictly above it is at most ``top_p``, so the token that crosses the
    threshold is kept. Top-k keeps a token if fewer than ``top_k`` tokens are strictly above it, so ties with the k-th
    token are kept. Both conditions are monotone in the logit, so together they amount to one threshold. The search
    finds it from the highest bit down, a few bits per pass over the vocabulary; see :func:`bits_per_pass`. The
    threshold does not depend on their number.

    Dream's code applies top-p to the whole distribution. With ``top_k_first_of``, top-p counts only the mass that top-k
    keeps, as in transformers: a search finds the threshold of top-k, and another one that of both.

    Args:
      logits: float32 ``[..., V]``, already divided by the temperature.
      top_p: float32 scalar or ``[B]``; 1 turns the filter off.
      top_k: int32 scalar or ``[B]``; the vocabulary size or more turns the filter off.
      dtype: the precision to which ``logits`` have been rounded.
      bits: bits of the threshold that one pass finds.
      for_gpu: compile for a GPU: without a loop, see :func:`find_threshold`, and with fewer arrays, see
        :func:`_recompute`.
      top_k_first_of: size of the vocabulary, to apply top-k first; None to apply top-p first.

    Returns:
      float32 ``[..., V]``.
    """
    top_p, top_k = (_per_row(value, logits.ndim - 1) for value in (top_p, top_k))
    # To save memory, only the keys and the masses stay alive over the vocabulary; logits are recomputed from the keys.
    keys = jax.lax.optimization_barrier(ordered_integers(logits, dtype))
    keys, sums = _recompute((keys, _softmax_sums(from_ordered_integers(keys, dtype))), for_gpu)
    logits = from_ordered_integers(keys, dtype)
    masses = jnp.round(_softmax(logits, sums, dtype) * _FIXED_POINT).astype(jnp.int32)
    # The sum of rounded probabilities may exceed 1 by a few units, so top_p = 1 is handled separately.
    most, allowed = jnp.int32(jnp.iinfo(jnp.int32).max), jnp.round(top_p * _FIXED_POINT)
    if top_k_first_of is not None:
        lowest = find_threshold(keys, masses, most, top_k, dtype, bits, unroll=for_gpu)
        kept = vocab_sums(jnp.where(keys >= lowest[..., None], masses, 0))[0]
        # Without top-k, exactly as in programs that search once.
        allowed = jnp.where(top_k < top_k_first_of, jnp.round(top_p * kept), allowed)
    allowed = jnp.where(top_p >= 1.0, most, allowed.astype(jnp.int32))
    threshold = find_threshold(keys, masses, allowed, top_k, dtype, bits, unroll=for_gpu)
    return jnp.where(keys >= threshold[..., None], logits, -jnp.inf)


def _recompute(values: Values, for_gpu: bool) -> Values:
    """Return values that are used together with an array over the vocabulary from which they were computed.

    On GPU, they come through a barrier. Otherwise, XLA keeps what it computed from the array on the way to the values,
    a second array over the vocabulary, for the next computation that could use it.
    """
    return jax.lax.optimization_barrier(values) if for_gpu else values


def _softmax_sums(logits: Array, top: Array | None = None) -> tuple[Array, Array]:
    """Return the largest logit, and the sum of ``exp(logits - largest)``: ``[..., V]`` -> ``[..., 1]`` each.

    Args:
      logits: float32 ``[..., V]``.
      top: the largest logit ``[...]``, if it is known.
    """
    largest = logits.max(axis=-1, keepdims=True) if top is None else top[..., None]
    return largest, vocab_sum(jnp.exp(logits - largest))[..., None]


def _softmax(logits: Array, sums: tuple[Array, Array], dtype: Any) -> Array:
    top, total = sums
    return _round(jnp.exp(logits - top) / total, dtype)


def _round(values: Array, dtype: Any) -> Array:
    """Round float32 values to the precision of ``dtype``; the result is still float32."""
    if jnp.dtype(dtype) == jnp.float32:
        return values
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(values, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def position_keys(seeds: Array, step: Array, stream: int, positions: Array) -> Array:
    """Derive PRNG keys ``[B, P]`` from (row seed, step, stream, position).

    The keys do not depend on the mesh, the batch, or the row's index in it.

    Args:
      seeds: uint32 ``[B, 2]``, each row's PRNG key data, or ``[B, P, 2]``, that of each position's row.
      step: int32, a scalar for all rows, ``[B]`` or ``[B, P]``.
      stream: ``TOKEN_STREAM`` or ``TRANSFER_STREAM``.
      positions: int32 ``[B, P]``.
    """

    def key(seed: Array, step: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), step), stream)

    # One key per row, or one per position.
    seeds = seeds.reshape(len(seeds), -1, 2)
    steps = jnp.broadcast_to(step if step.ndim == 2 else step.reshape(-1, 1), seeds.shape[:2])
    keys = jnp.broadcast_to(jax.vmap(jax.vmap(key))(seeds, steps), positions.shape)
    return jax.vmap(jax.vmap(jax.random.fold_in))(keys, positions)


def draw_per_position(draw: Callable[..., Array], seeds: Array, step: Array, canvas: Array) -> Array:
    """Draw one float32 per canvas position ``[B, S]``; ``draw`` is ``jax.random.uniform`` or ``jax.random.gumbel``."""
    positions = jnp.broadcast_to(jnp.arange(canvas.shape[1], dtype=jnp.int32), canvas.shape)
    keys = position_keys(seeds, step, TRANSFER_STREAM, positions)
    return jax.vmap(jax.vmap(lambda key: draw(key, (), jnp.float32)))(keys)


def gumbel_noise(keys: Array, vocab: int) -> Array:
    """Draw Gumbel noise ``[..., V]`` from keys ``[...]``. The noise of a token id does not depend on padding of V."""
    flat = keys.reshape(-1)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(flat)
    return noise.reshape(*keys.shape, vocab)


def _draw(forward: Forward, logits: Array, keys: Array) -> Array:
    """Sample a token for each position from logits ``[..., V]`` and keys ``[...]``, by the Gumbel-max method."""

    def draw(logits: Array, keys: Array) -> Array:
        return vocab_argmax(logits + gumbel_noise(keys, logits.shape[-1]))[1]

    few = math.gcd(keys.size, _NOISY_POSITIONS)
    if not forward.is_single_cpu or keys.size == few:
        return draw(logits, keys)
    # XLA on CPU writes the PRNG counters to memory. For a few positions at a time they stay in the processor's caches.
    groups = logits.reshape(-1, few, logits.shape[-1]), keys.reshape(-1, few)
    return jax.lax.map(lambda group: draw(*group), groups).reshape(keys.shape)


def _confidence(rule: SamplingRule, probabilities: Array, largest: Array, best: Array) -> Array:
    """Compute the confidence ``[B, P]`` in the most probable token ``best``, whose probability is ``largest``."""
    dtype = jnp.dtype(rule.confidence_dtype)
    if rule.confidence == "entropy":
        terms = _round(probabilities * _round(jnp.log(probabilities + _ENTROPY_EPSILON), dtype), dtype)
        # Terms lie between -1/e and 0, except for the effect of the epsilon, which the clipping removes.
        return _round(-vocab_sum(jnp.clip(-terms, 0.0, 1.0)), dtype)
    if rule.confidence == "topk_margin":
        others = jnp.arange(probabilities.shape[-1]) != best[..., None]
        second = jnp.where(others, probabilities, 0.0).max(axis=-1)
        return _round(largest - second, dtype)
    return largest


def mark_non_finite(logits: Array, vocab_size: int) -> Array:
    """Replace NaN and infinities by +inf: ``[..., V]``. Padding of the vocabulary (``vocab_size`` and up) is unchanged.

    A maximum over the vocabulary is then +inf if and only if a logit is not finite. The maximum that a choice of tokens
    computes anyway therefore finds them, without another pass or collective. NaN itself would not do: libraries for
    collectives differ in whether a maximum keeps it.
    """
    wrong = ~jnp.isfinite(logits)
    if logits.shape[-1] > vocab_size:
        wrong &= jnp.arange(logits.shape[-1]) < vocab_size
    return jnp.where(wrong, jnp.inf, logits)


def _without_mask(forward: Forward, logits: Array) -> Array:
    """Set the mask token's entry to -inf, unless it marks logits that are not finite: ``[..., V]``."""
    ids = jnp.arange(logits.shape[-1])
    return jnp.where((ids == forward.config.mask_token_id) & (logits < jnp.inf), -jnp.inf, logits)


def choose_tokens(
    forward: Forward,
    rule: SamplingRule,
    logits: Array,
    keys: Array,
    temperature: Array,
    top_p: Array,
    top_k: Array,
) -> tuple[Array, Array]:
    """Choose a token for each position and compute the model's confidence in it.

    The order of operations is that of Dream's code: temperature, top-p, top-k, softmax, then a draw or the most
    probable token; with ``rule.top_k_first``, top-k comes before top-p. Confidence is measured on the distribution
    after temperature and filters: ``maskgit_plus`` is the chosen token's probability, ``topk_margin`` is the difference
    between the two largest probabilities, and ``entropy`` is the negative entropy. ``low_confidence`` is the chosen
    token's probability before temperature and filters.

    Args:
      forward: the model, for its mask token and for the sharding of positions.
      rule: settings that are compiled in.
      logits: float32 ``[B, P, V]``, marked by :func:`mark_non_finite`; padding of the vocabulary is -inf.
      keys: typed PRNG keys ``[B, P]``, one per position.
      temperature: float32 scalar, ``[B]`` or ``[B, P]``, used if ``rule.sampled``; 0 takes the most probable token.
      top_p: float32 scalar, ``[B]`` or ``[B, P]``, used if ``rule.filtered``; 1 turns it off.
      top_k: int32 scalar, ``[B]`` or ``[B, P]``, used if ``rule.filtered``; the vocabulary size or more turns it off.

    Returns:
      Tokens int32 ``[B, P]``, -1 where a logit is not finite, and confidences float32 ``[B, P]``.
    """
    if logits.shape[1] > 1:
        return _choose_tokens(forward, rule, ("batch", "canvas"), logits, keys, temperature, top_p, top_k)
    # The rows of a [B, V] array fill the registers of a TPU. Of a [B, 1, V] array, the compiler puts only one row into
    # a register, which has room for eight.
    settings = (value[:, 0] if value.ndim == 2 else value for value in (temperature, top_p, top_k))
    chosen = _choose_tokens(forward, rule, ("batch",), logits[:, 0], keys[:, 0], *settings)
    return chosen[0][:, None], chosen[1][:, None]


def _choose_tokens(
    forward: Forward,
    rule: SamplingRule,
    dimensions: tuple[str, ...],
    logits: Array,
    keys: Array,
    temperature: Array,
    top_p: Array,
    top_k: Array,
) -> tuple[Array, Array]:
    """Choose tokens from ``[B, P, V]`` or ``[B, V]``; ``dimensions`` are the logical dimensions of the results."""
    dtype = jnp.dtype(rule.confidence_dtype)
    with jax.named_scope("choose_tokens"):
        logits = _round(logits, dtype)
        if rule.suppress_mask:
            logits = _without_mask(forward, logits)
        plain = logits
        temperature = _per_row(temperature, logits.ndim)
        warm = temperature > 0
        if rule.sampled:
            logits = _round(logits / jnp.where(warm, temperature, 1.0), dtype)
        if rule.filtered:
            first = forward.config.vocab_size if rule.top_k_first else None
            bits = bits_per_pass(*forward.devices)
            logits = filter_logits(logits, top_p, top_k, dtype, bits, forward.is_gpu, first)
        sums, largest, tokens, confidence = _most_probable(forward, rule, logits)
        if rule.replace_mask:
            if rule.filtered or ranks_probabilities(rule):
                # A filter may leave only the mask token, and other probabilities may be rounded to 0. The best other
                # token is then that of all logits.
                best = vocab_argmax(_without_mask(forward, _where_chosen(plain, tokens)))[1]
                tokens = jnp.where(largest > 0, tokens, best)
            warm, logits = warm & (largest > 0)[..., None], _without_mask(forward, logits)
        if rule.sampled and not rule.greedy:
            # Compute the confidence before the noise, so that the two do not occupy memory over the vocabulary at the
            # same time.
            logits, confidence = jax.lax.optimization_barrier((logits, confidence))
            is_warm = jnp.broadcast_to(warm, (*keys.shape, 1))[..., 0]
            # Without this constraint, the compiler gathers both candidate tokens on every shard and selects there.
            tokens = forward.constrain(jnp.where(is_warm, _draw(forward, logits, keys), tokens), *dimensions)
            if rule.confidence not in ("entropy", "topk_margin"):
                confidence = _softmax(pick(logits, tokens)[..., None], sums, dtype)[..., 0]
        if rule.confidence == "low_confidence" and (rule.sampled or rule.filtered):
            confidence = _probability(_where_chosen(plain, tokens), tokens, dtype)
        # Without this constraint, the compiler gathers the comparison's result too.
        return forward.constrain(jnp.where(jnp.isfinite(sums[0][..., 0]), tokens, -1), *dimensions), confidence


def ranks_probabilities(rule: SamplingRule) -> bool:
    """Return whether the most probable token is found among probabilities, not logits.

    Probabilities rounded to 16 bits tie where their logits differ, and the original code breaks such ties. Float32
    probabilities are needed for the confidences that all of them determine; otherwise the logits take fewer passes over
    the vocabulary.
    """
    return jnp.dtype(rule.confidence_dtype) != jnp.float32 or rule.confidence in ("entropy", "topk_margin")


def _most_probable(
    forward: Forward, rule: SamplingRule, logits: Array
) -> tuple[tuple[Array, Array], Array, Array, Array]:
    """Find the most probable token of each position; with ``rule.replace_mask``, the best one other than the mask.

    Args:
      forward: the model, for its mask token.
      rule: settings that are compiled in.
      logits: float32 ``[B, P, V]``, after temperature and filters.

    Returns:
      The largest logit of all tokens and the sum of exponentials, see :func:`_softmax_sums`; the token's probability
      ``[B, P]``, the token ``[B, P]``, and the confidence in it ``[B, P]``.
    """

    def candidates(values: Array) -> Array:
        return _without_mask(forward, values) if rule.replace_mask else values

    dtype = jnp.dtype(rule.confidence_dtype)
    if ranks_probabilities(rule):
        sums = _recompute(_softmax_sums(logits), forward.is_gpu)
        largest, tokens = vocab_argmax(candidates(_softmax(logits, sums, dtype)))
        sums = _recompute(sums, forward.is_gpu)
        return sums, largest, tokens, _confidence(rule, _softmax(logits, sums, dtype), largest, tokens)
    best, tokens = vocab_argmax(candidates(logits))
    sums = _softmax_sums(_where_chosen(logits, tokens), None if rule.replace_mask else best)
    largest = _softmax(best[..., None], sums, dtype)[..., 0]
    return sums, largest, tokens, largest


def _probability(logits: Array, tokens: Array, dtype: Any) -> Array:
    """Compute the probability of one token per position: logits ``[B, P, V]``, tokens ``[B, P]`` -> ``[B, P]``."""
    return _softmax(pick(logits, tokens)[..., None], _softmax_sums(logits), dtype)[..., 0]


def _where_chosen(logits: Array, tokens: Array) -> Array:
    """Return the logits, with 0 at positions where no token was chosen.

    Because the result depends on the choice, collectives that follow cannot overlap with those of the search for the
    threshold: XLA's CPU runtime would start them in order, but run them concurrently, in an order that differs between
    hosts.
    """
    return jnp.where((tokens < 0)[..., None], 0.0, logits)


def log_probabilities(logits: Array, targets: Array) -> Array:
    """Compute log-probabilities of tokens: logits float32 ``[B, P, V]``, targets ``[B, P]`` -> float32 ``[B, P]``.

    The result has no meaning where the target is -1, and is not finite where a logit is +inf, see
    :func:`mark_non_finite`.
    """
    with jax.named_scope("log_probabilities"):
        logits = _where_chosen(logits, targets)
        top = logits.max(axis=-1)
        total = vocab_sum(jnp.exp(logits - top[..., None]))
        return pick(logits, targets) - top - jnp.log(total)
