"""Lowering of the programs that make a KV cache, and that copy single rows out of one and into one.

Dimension letters: B batch, T cache length.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from runtime.models.cache_rows import put_row, row_spec, take_row
from runtime.models.declarations import ModelLayout
from runtime.models.kv_cache import Cache, abstract_cache

Array = jax.Array


def lower_empty_cache(layout: ModelLayout, batch: int, length: int, dtype: Any) -> jax.stages.Lowered:
    """Lower the creation of an empty cache; see :func:`runtime.models.kv_cache.abstract_cache` for the arguments."""
    shapes = abstract_cache(layout, batch, length, dtype)

    def make() -> Cache:
        made: Cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return made

    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes)).lower()


def lower_take_row(layout: ModelLayout, length: int, cache: Cache, row: Array) -> jax.stages.Lowered:
    """Lower the copy of one row, ``length`` positions long; see :func:`runtime.models.cache_rows.take_row`."""

    def take(cache: Cache, row: Array) -> Array:
        return take_row(layout, cache, row, length)

    return jax.jit(take, out_shardings=_on_layout(layout, row_spec(layout))).lower(cache, row)


def lower_put_row(layout: ModelLayout, cache: Cache, row: Array, taken: Array) -> jax.stages.Lowered:
    """Lower the insertion of a copied row into a cache, in place; see :func:`runtime.models.cache_rows.put_row`."""

    def place(cache: Cache, row: Array, taken: Array) -> Cache:
        return put_row(layout, cache, row, taken)

    out = jax.tree.map(lambda leaf: leaf.sharding, cache)
    return jax.jit(place, out_shardings=out, donate_argnums=0).lower(cache, row, taken)


def abstract_taken_row(layout: ModelLayout, length: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """Return the result of the program of :func:`lower_take_row` as ``ShapeDtypeStruct``."""
    cache = abstract_cache(layout, layout.spec.data, length, dtype)
    row = jax.ShapeDtypeStruct((), jnp.int32)
    taken = jax.eval_shape(lambda cache, row: take_row(layout, cache, row, length), cache, row)
    return jax.ShapeDtypeStruct(taken.shape, taken.dtype, sharding=_on_layout(layout, row_spec(layout)))


def _on_layout(layout: ModelLayout, spec: jax.sharding.PartitionSpec) -> jax.sharding.NamedSharding:
    assert layout.mesh is not None, "programs run on a mesh"
    return jax.sharding.NamedSharding(layout.mesh, spec)
