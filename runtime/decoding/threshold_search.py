"""The threshold of top-p and top-k: the lowest logit to keep, found without sorting the vocabulary.

Logits are compared as integers in the same order. The search finds the threshold from the highest bit down, a few bits
per pass over the vocabulary. Its sums are sums of integers, so the threshold is the same on every mesh.

Dimension letters: B batch, V vocab, ``...`` leading axes.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from runtime.decoding.vocabulary import vocab_sums

Array = jax.Array

# One pass over the vocabulary finds this many bits of a threshold, by comparing against 7 candidates.
BITS_PER_PASS = 3
# Where comparisons cost more than passes, one pass finds 2 bits with 3 candidates; see :func:`bits_per_pass`.
_FEWER_BITS_PER_PASS = 2


def ordered_integers(values: Array, dtype: Any) -> Array:
    """Map float32 values rounded to ``dtype`` to int32 values in the same order.

    For a 16-bit ``dtype`` only the high 16 bits of the result are used.
    """
    # Turn -0.0 into 0.0. The compiler would remove an addition of 0.0, so this uses a comparison.
    values = jnp.where(values == 0.0, 0.0, values).astype(dtype)
    bits = jnp.dtype(dtype).itemsize * 8
    return _flip_negative(jax.lax.bitcast_convert_type(values, f"int{bits}")).astype(jnp.int32) << (32 - bits)


def from_ordered_integers(keys: Array, dtype: Any) -> Array:
    """Invert :func:`ordered_integers`."""
    bits = jnp.dtype(dtype).itemsize * 8
    narrow = (keys >> (32 - bits)).astype(f"int{bits}")
    return jax.lax.bitcast_convert_type(_flip_negative(narrow), dtype).astype(jnp.float32)


def _flip_negative(bits: Array) -> Array:
    # The bits of a negative float grow with its magnitude, so they are flipped to grow with its value.
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def bits_per_pass(device_kind: str, devices: int) -> int:
    """Return how many bits of a threshold one pass over the vocabulary finds.

    Three bits take 11 passes for 32 bits and 6 for 16, and 77 or 42 comparisons of each logit. Two bits take 16 and 8
    passes, but only 48 and 24 comparisons. They are faster on a single CPU device and on TPU v4, whose cores have half
    the vector units of later TPUs: by the schedules of compiled programs, comparisons take longer there than reading
    the logits, both in decode, where the logits are on-chip, and in denoise steps, where they are not.

    Args:
      device_kind: JAX's name for the devices.
      devices: number of devices.
    """
    few = device_kind == "TPU v4" or (device_kind == "cpu" and devices == 1)
    return _FEWER_BITS_PER_PASS if few else BITS_PER_PASS


def threshold_passes(dtype: Any, bits: int) -> int:
    """Return the passes over the vocabulary in a search with ``bits`` per pass, for logits rounded to ``dtype``."""
    return math.ceil(8 * jnp.dtype(dtype).itemsize / bits)


def threshold_candidates(dtype: Any, bits: int) -> int:
    """Return how many candidates all passes of that search try. Each takes two sums: a probability mass and a count."""
    return threshold_passes(dtype, bits) * ((1 << bits) - 1)


def find_threshold(
    keys: Array, masses: Array, allowed: Array, top_k: Array, dtype: Any, bits: int, *, unroll: bool
) -> Array:
    """Find the lowest key to keep: a key whose mass above is at most ``allowed``, with fewer than ``top_k`` keys above.

    Args:
      keys: int32 ``[..., V]``, the logits by :func:`ordered_integers`.
      masses: int32 ``[..., V]``, the probabilities in fixed point.
      allowed: int32, broadcast against ``[...]``: the mass that may lie strictly above a key.
      top_k: int32, broadcast against ``[...]``.
      dtype: the precision to which the logits have been rounded.
      bits: bits of the threshold that one pass finds.
      unroll: let the passes follow one another without a loop. On GPU, this saves about two kernels in each pass: XLA
        computes its candidates inside its reduction, instead of in kernels of their own.

    Returns:
      int32 ``[...]``.
    """
    width, passes = jnp.dtype(dtype).itemsize * 8, threshold_passes(dtype, bits)

    def search(number: Array, lowest: Array) -> Array:
        """Extend ``lowest``, the threshold's known high bits as uint32, by the bits that one pass finds."""
        shift = jnp.uint32(32 - width) + bits * (passes - 1 - number).astype(jnp.uint32)
        digits = [jnp.uint32(digit) for digit in range(1, 1 << bits)]
        candidates = [_signed(lowest + (digit << shift) - 1)[..., None] for digit in digits]
        # Each candidate is compared twice: XLA on TPU would write a comparison that two sums share to memory.
        masses_above = [jnp.where(keys <= candidate, 0, masses) for candidate in candidates]
        counts_above = [(keys > candidate).astype(jnp.int32) for candidate in candidates]
        sums = vocab_sums(*masses_above, *counts_above)
        missed = [
            ~((mass <= allowed) & (count < top_k))
            for mass, count in zip(sums[: len(digits)], sums[len(digits) :], strict=True)
        ]
        # The first pass may have fewer bits left; digits that do not fit into them are ignored.
        bits_left = jnp.minimum(32 - shift, bits)
        exist = [digit >> bits_left == 0 for digit in digits]
        digit = sum((one & there).astype(jnp.uint32) for one, there in zip(missed, exist, strict=True))
        return lowest + (digit << shift)

    with jax.named_scope("threshold_search"):
        start = jnp.zeros(keys.shape[:-1], jnp.uint32)
        return _signed(jax.lax.fori_loop(0, passes, search, start, unroll=unroll or None))


def _signed(ordered: Array) -> Array:
    """Map uint32 to int32 in the same order."""
    return jax.lax.bitcast_convert_type(ordered ^ jnp.uint32(1 << 31), jnp.int32)
