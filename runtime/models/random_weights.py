"""Random weights on a mesh, for benchmarks and tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from runtime.models.declarations import ModelLayout
from sharding.settings import own_settings


@own_settings()
def random_weights(layout: ModelLayout, seed: int, dtype: Any, scale: float = 0.02) -> Any:
    """Create random weights that are the same on every mesh.

    Matrices are normal with standard deviation ``scale``; padding is zero. Each device creates only its own shards, so
    no device ever holds all weights.
    """
    made = {}
    for leaf in layout.leaves:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), leaf.number)
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.array(leaf.layers or (0,)))
        make = _maker(leaf.shape, leaf.padded_shape, leaf.initializer, dtype, layout.sharding(*leaf.axes))
        made[leaf.name] = layout.quantizer(leaf)(make(keys if leaf.is_stacked else keys[0], scale))
    return layout.build(lambda leaf: made[leaf.name])


# Cached, so that the layers of a model share one program.
@functools.lru_cache(256)
def _maker(
    shape: tuple[int, ...], padded_shape: tuple[int, ...], initializer: str, dtype: Any, sharding: NamedSharding
) -> Callable[..., jax.Array]:
    """Return a function of a PRNG key (or one key per stacked layer) and a standard deviation."""

    def make(keys: jax.Array, scale: jax.Array) -> jax.Array:
        if initializer == "normal":
            layer = partial(jax.random.normal, shape=shape[keys.ndim :], dtype=jnp.float32)
            values = scale * (jax.vmap(layer)(keys) if keys.ndim else layer(keys))
        else:
            values = jnp.full(shape, 1.0 if initializer == "ones" else 0.0, jnp.float32)
        padding = [(0, padded - size) for size, padded in zip(shape, padded_shape, strict=True)]
        return jnp.pad(values, padding).astype(dtype)

    return jax.jit(make, out_shardings=sharding)
