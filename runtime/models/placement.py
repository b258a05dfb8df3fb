"""Weights that are arrays already, put onto a mesh: what a training loop hands to the engine that samples from it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from runtime.models.declarations import ModelLayout, WeightLeaf
from runtime.models.quantization import Quantized
from sharding.errors import InputError


def place_weights(layout: ModelLayout, weights: Any, dtype: Any) -> Any:
    """A tree of arrays, wherever they are, as weights on a layout's mesh.

    Floating-point arrays are cast, and made integers and scales where the layout keeps such. Arrays that lie where they
    are to be are taken as they are.

    Args:
      layout: the model on its mesh.
      weights: a tree as :meth:`ModelLayout.abstract_weights` describes it, with that layout's shapes, padding included.
      dtype: of weights that are not quantized.

    Raises:
      InputError: not such a tree, or an array of another shape or kind; nothing has been placed then.
    """
    try:
        have = layout.named(weights)
        extra = len(jax.tree.leaves(weights)) - len(jax.tree.leaves(layout.build(lambda leaf: have[leaf.name])))
    except (AttributeError, IndexError, TypeError):
        form = "stacked layers" if layout.scan_layers else "a tuple of layers"
        raise InputError(
            f"weights: expected a checkpoint or a tree of {layout.weights_class.__name__} with {form}"
        ) from None
    if extra:
        raise InputError(f"weights: {extra} arrays more than the model has")
    wanted = layout.abstract_weights(dtype)
    want = layout.named(wanted)

    def parts(leaf: WeightLeaf) -> list[tuple[Any, jax.ShapeDtypeStruct]]:
        new, old = have[leaf.name], want[leaf.name]
        if isinstance(new, Quantized) and isinstance(old, Quantized):
            return [(new.values, old.values), (new.scales, old.scales)]
        if isinstance(old, Quantized):
            # Placed as it would be kept, and quantized there.
            old = jax.ShapeDtypeStruct(leaf.padded_shape, dtype, sharding=old.values.sharding)
        return [(new, old)]

    for leaf in layout.leaves:
        for new, old in parts(leaf):
            _check(leaf.name, new, old)

    def make(leaf: WeightLeaf) -> Any:
        placed = [_put(new, old) for new, old in parts(leaf)]
        return Quantized(*placed) if len(placed) == 2 else layout.quantizer(leaf)(placed[0])

    return layout.build(make)


def _check(name: str, new: Any, old: jax.ShapeDtypeStruct) -> None:
    dtype, shape = getattr(new, "dtype", None), getattr(new, "shape", None)
    if dtype is None or shape is None:
        raise InputError(f"weights: {name} is {type(new).__name__}; expected {old.dtype} {list(old.shape)}")
    is_cast = all(jnp.issubdtype(one, jnp.floating) for one in (dtype, old.dtype))
    if shape != old.shape or not (is_cast or dtype == old.dtype):
        raise InputError(f"weights: {name} is {dtype} {list(shape)}; expected {old.dtype} {list(old.shape)}")


def _put(new: Any, old: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(new if new.dtype == old.dtype else new.astype(old.dtype), old.sharding)
