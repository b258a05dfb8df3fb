"""Placing weights that are already arrays onto a mesh, for example from a training loop that samples rollouts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from runtime.models.declarations import ModelLayout
from runtime.models.leaves import WeightLeaf
from runtime.models.quantization import Quantized
from sharding.errors import InputError
from sharding.settings import own_settings


@own_settings()
def place_weights(layout: ModelLayout, weights: Any, dtype: Any) -> Any:
    """Place a tree of arrays onto a layout's mesh as the model's weights.

    Floating-point arrays are cast to ``dtype``, and quantized if the layout is quantized. Arrays that already have the
    right dtype and sharding are used without a copy. Arrays of NumPy are copied, so that the caller may change them.

    Args:
      layout: the model on its mesh.
      weights: a tree like :meth:`ModelLayout.abstract_weights`, with the layout's shapes, padding included. The arrays
        may be on the host or on any device.
      dtype: dtype of weights that are not quantized.

    Raises:
      InputError: the tree has another structure, or a leaf is no array, or has another shape or kind of dtype. Nothing
        has been placed in that case.
    """
    try:
        have = layout.named(weights)
        extra = len(jax.tree.leaves(weights)) - len(jax.tree.leaves(layout.build(lambda leaf: have[leaf.name])))
    except (AttributeError, IndexError, TypeError):
        form = "stacked layers" if layout.scan_layers else "a tuple of layers"
        raise InputError(
            f"weights: expected a checkpoint, or a {layout.weights_class.__name__} pytree with {form}"
        ) from None
    if extra:
        raise InputError(f"weights: the tree has {extra} more arrays than the model")
    wanted = layout.abstract_weights(dtype)
    want = layout.named(wanted)

    def parts(leaf: WeightLeaf) -> list[tuple[Any, jax.ShapeDtypeStruct]]:
        new, old = have[leaf.name], want[leaf.name]
        if isinstance(new, Quantized) and isinstance(old, Quantized):
            return [(new.values, old.values), (new.scales, old.scales)]
        if isinstance(old, Quantized):
            # The array is placed with the sharding of the quantized values, and quantized on the devices.
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
    if not isinstance(dtype, np.dtype):  # such as a tensor of torch
        raise InputError(
            f"weights: {name} is {type(new).__module__}.{type(new).__name__}; expected an array of NumPy or JAX"
        )
    is_cast = all(jnp.issubdtype(one, jnp.floating) for one in (dtype, old.dtype))
    if shape != old.shape or not (is_cast or dtype == old.dtype):
        raise InputError(f"weights: {name} is {dtype} {list(shape)}; expected {old.dtype} {list(old.shape)}")


def _put(new: Any, old: jax.ShapeDtypeStruct) -> jax.Array:
    if isinstance(new, jax.Array):
        return jax.device_put(new if new.dtype == old.dtype else new.astype(old.dtype), old.sharding)
    # A copy, because a CPU device may use the host's buffer, and other devices read it later.
    return jax.device_put(np.array(new, old.dtype, order="C"), old.sharding)
