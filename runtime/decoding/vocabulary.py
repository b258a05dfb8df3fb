"""Reductions over a sharded vocabulary, with the same bits on every mesh.

Dimension letters: V vocab, ``...`` leading axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from runtime.models.declarations import VOCAB_BLOCKS

Array = jax.Array


def _blocks(values: Array) -> Array:
    """Split the vocabulary into blocks that lie within one shard: ``[..., V]`` -> ``[..., blocks, V / blocks]``."""
    return values.reshape(*values.shape[:-1], math.gcd(values.shape[-1], VOCAB_BLOCKS), -1)


def vocab_sums(*values: Array) -> list[Array]:
    """Sum each of several int32 arrays ``[..., V]`` over the vocabulary."""

    def in_blocks(*values: Array) -> list[Array]:
        def add(left: Sequence[Array], right: Sequence[Array]) -> tuple[Array, ...]:
            return tuple(one + other for one, other in zip(left, right, strict=True))

        blocks, zeros = [_blocks(value) for value in values], [jnp.int32(0)] * len(values)
        partial = jax.lax.reduce(blocks, zeros, add, dimensions=(blocks[0].ndim - 1,))
        return list(jnp.stack(partial).sum(axis=-1))

    def separately(*values: Array) -> list[Array]:
        return [value.sum(axis=-1) for value in values]

    # XLA on CPU and GPU is faster if one pass over a block computes all sums, and a second one adds the blocks. XLA on
    # TPU fuses plain sums, and would copy the arrays to split them into blocks. Integer sums are the same either way.
    return jax.lax.platform_dependent(*values, cpu=in_blocks, cuda=in_blocks, default=separately)


def vocab_sum(values: Array) -> Array:
    """Sum numbers from 0 to 1 over the vocabulary, with the same bits on every mesh: ``[..., V]`` -> ``[...]``.

    Each number is split into three digits of a fixed-point representation, and each digit is summed as an integer. For
    vocabularies up to 2^18 a digit has 12 bits, so the error per term is at most 2^-37.
    """
    bits = min(12, 30 - (values.shape[-1] - 1).bit_length())
    base = float(1 << bits)
    first = jnp.floor(values * base)
    rest = (values * base - first) * base
    second = jnp.floor(rest)
    third = jnp.round((rest - second) * base)
    sums = vocab_sums(*(digit.astype(jnp.int32) for digit in (first, second, third)))
    high, middle, low = (total.astype(jnp.float32) for total in sums)
    # Add the smallest digits first, so that each addition rounds only once.
    return high / base + (middle / base**2 + low / base**3)


def vocab_argmax(values: Array) -> tuple[Array, Array]:
    """Return the maximum over the vocabulary and its lowest index: ``[..., V]`` -> ``[...]``, int32 ``[...]``."""
    best = values.max(axis=-1)
    ids = jnp.arange(values.shape[-1], dtype=jnp.int32)
    index = jnp.where(values == best[..., None], ids, values.shape[-1]).min(axis=-1)
    return best, index


def pick(values: Array, index: Array) -> Array:
    """Return ``values[..., index]`` without gathering a sharded vocabulary: ``[..., V]``, ``[...]`` -> ``[...]``."""
    ids = jnp.arange(values.shape[-1], dtype=jnp.int32)
    return jnp.where(ids == index[..., None], values, -jnp.inf).max(axis=-1)
