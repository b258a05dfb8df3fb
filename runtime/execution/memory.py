"""Estimate of a device's memory, listed by the tensors that are alive when memory use is highest.

Resident tensors (weights, cache, tokens) follow from the declarations. At its peak, a forward pass adds either the
arrays that a layer states it holds (:class:`runtime.models.costs.LayerCost`) or the arrays of one head chunk (the
positions whose logits are computed at a time). Which of these arrays the compilers keep in memory was determined from
the live ranges of compiled programs. Tests in ``tests/runtime/planner`` check that the sum is within 5 % of what the
compilers for TPU and GPU report.

Dimension letters, all per device: B rows, S positions, T keys, P positions of one head chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from runtime.models.costs import LiveArrays
from runtime.models.declarations import ModelLayout, shard_shape
from runtime.models.kv_cache import cache_bytes_per_device
from runtime.models.products import scales_sums
from runtime.models.splash_blocks import splash_running_sums
from runtime.models.xla_attention import query_block

_FLOAT = 4
_LESS_CACHE = "fewer rows, a larger sequence axis, an int8 cache"
_FEWER_POSITIONS = "fewer rows, a larger data or sequence axis"
_FEWER_CHANNELS = "a larger tensor axis, or fewer rows"


@dataclass(frozen=True)
class Tensor:
    """An entry of the memory table.

    Attributes:
      name: a short description, such as "weights".
      bytes: bytes on one device.
      smaller_by: a phrase that says how to make it smaller.
    """

    name: str
    bytes: int
    smaller_by: str


# Arrays of equal size: name, count, bytes of each, what would make them smaller.
_Arrays = tuple[str, int, int, str]


@dataclass(frozen=True)
class Memory:
    """The estimated memory use of one device, tensor by tensor.

    Attributes:
      resident: tensors that are in memory all the time.
      peak: tensors that a forward pass adds at its peak.
    """

    resident: tuple[Tensor, ...]
    peak: tuple[Tensor, ...]

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(tensor.bytes for tensor in (*self.resident, *self.peak))

    def beside(self, draft: Memory) -> Memory:
        """Return the memory of this model and its draft model, whose passes run one after the other."""
        resident = [replace(one, name=f"{one.name} (draft model)") for one in draft.resident if one.name != "tokens"]
        peaks = self.peak, draft.peak
        return Memory((*self.resident, *resident), max(peaks, key=lambda peak: sum(one.bytes for one in peak)))

    @property
    def largest(self) -> list[Tensor]:
        """All tensors, largest first."""
        return sorted((*self.resident, *self.peak), key=lambda tensor: -tensor.bytes)


@dataclass(frozen=True)
class PassShape:
    """The shape of one forward pass on one device.

    Attributes:
      rows: B.
      positions: S, positions per row.
      keys: T, keys that each position attends to.
      head: P, positions per row in one head chunk.
      attention: the implementation; ``xla`` keeps scores in memory, see :mod:`runtime.models.xla_attention`.
      canvases: canvases that are computed, see :mod:`runtime.decoding.drafts`; 0 for one of each row. With a KV cache,
        their windows are.
    """

    rows: int
    positions: int
    keys: int
    head: int
    attention: str
    canvases: int = 0

    @property
    def computed(self) -> int:
        """Number of canvases that are computed."""
        return self.canvases or self.rows


@dataclass(frozen=True)
class Device:
    """The properties of a device that the memory estimate depends on.

    Attributes:
      platform: JAX's name of the platform. Each platform's compiler keeps different arrays in memory.
      fast_memory_bytes: on-chip memory in which the TPU compiler keeps arrays; 0 for none.
    """

    platform: str
    fast_memory_bytes: int = 0


def memory_of_passes(
    layout: ModelLayout,
    dtype: Any,
    device: Device,
    rows: int,
    canvas: int,
    passes: Iterable[PassShape],
    cache_dtype: Any = None,
) -> Memory:
    """Estimate the memory that a generation needs on one device.

    Args:
      layout: the model's layout; it may be without a mesh.
      dtype: dtype of weights and activations.
      device: the device.
      rows: rows per device.
      canvas: S, positions per row before sharding over ``sequence``.
      passes: shapes of the forward passes that the generation consists of.
      cache_dtype: dtype of the KV cache; None without a cache.
    """
    resident = [Tensor("weights", layout.bytes_per_device(dtype), _fewer_weights(layout, dtype))]
    if cache_dtype is not None:
        kept = cache_bytes_per_device(layout, rows * layout.spec.data, canvas, cache_dtype, device.platform)
        resident.append(Tensor("cache of keys and values", kept, _LESS_CACHE))
    shapes = list(passes)
    drafted = [one for one in shapes if one.canvases and cache_dtype is not None]
    if drafted:
        kept = max(_windows_bytes(layout, one, cache_dtype) for one in drafted)
        resident.append(
            Tensor("keys and values of drafts", kept, "fewer rows or drafts, a smaller block, an int8 cache")
        )
    drafts = max(one.computed - one.rows for one in shapes)
    # The canvas, the drafts and the commit steps, all of them both as input and as output.
    resident.append(Tensor("tokens", 2 * (2 * rows + drafts) * canvas * 4, "fewer rows"))
    item = jnp.dtype(dtype).itemsize
    stages = [
        (*stage(layout, item, device, one), *_scaled_weights(layout, item, device, one, stage is _layer))
        for one in shapes
        for stage in (_layer, _head)
    ]
    return Memory(tuple(resident), max(stages, key=lambda stage: sum(tensor.bytes for tensor in stage)))


def _fewer_weights(layout: ModelLayout, dtype: Any) -> str:
    """Return what would make the weights smaller: the next smaller way to store them, if there is one."""
    unquantized = "bfloat16" if jnp.dtype(dtype).itemsize > 2 else "int8"
    smaller = {"none": unquantized, "int8": "int4"}.get(layout.quantization)
    return "a larger tensor axis" + (f", or {smaller}" if smaller else "")


def _windows_bytes(layout: ModelLayout, shape: PassShape, dtype: Any) -> int:
    """Return the bytes of keys and values of the windows of a pass, which every ``sequence`` shard has."""
    whole = replace(layout, mesh=None, rules=replace(layout.rules, length=(), batch=()))
    return cache_bytes_per_device(whole, shape.canvases, shape.positions, dtype)


def _live(arrays: Iterable[LiveArrays], positions: int, item: int, smaller_by: str) -> list[_Arrays]:
    """Return a layer's activation arrays for this many positions, with ``item`` bytes per element.

    Each entry is (name, count, bytes of each, what would make them smaller).
    """
    return [(one.name, one.count, positions * one.numbers_per_position * item, smaller_by) for one in arrays]


def _bytes(arrays: Iterable[_Arrays]) -> int:
    return sum(count * size for _, count, size, _ in arrays)


def _layer(layout: ModelLayout, item: int, device: Device, shape: PassShape) -> tuple[Tensor, ...]:
    """Return the arrays alive in a layer: in its MLP, or in attention if its scores need more memory."""
    cost, positions = layout.layer_cost, shape.computed * shape.positions
    residual = positions * layout.size_per_device("embed") * item

    def residuals(count: int) -> _Arrays:
        return ("residual and norms", count, residual, _FEWER_POSITIONS)

    mlp = _live(cost.live_in_mlp, positions, item, _FEWER_CHANNELS)
    reduced = layout.spec.tensor > 1 and bool(cost.tensor_collectives)
    if device.platform == "tpu":
        if reduced and residual > device.fast_memory_bytes:
            # The residual is too large to be reduced in on-chip memory: there is another copy of it, and those operands
            # of the MLP that do not fit on the chip.
            arrays = [residuals(3), *(one for one in mlp if one[2] > device.fast_memory_bytes)]
            if not device.fast_memory_bytes:
                arrays += _attention_operands(layout, item, shape)
        elif _bytes(mlp) >= residual:
            # The peak is in the MLP, with its operands, or after it, with residuals only.
            arrays = [residuals(2), *mlp]
        else:
            arrays = [residuals(3)]
    else:
        arrays = [residuals(3 if reduced else 2), *mlp]
    if shape.attention == "xla":
        attention = [residuals(2), *_scores(layout, item, device, shape)]
        if _bytes(attention[1:]) > _bytes(arrays):
            arrays = attention
    return _outside_fast_memory(arrays, device)


def _scaled_weights(
    layout: ModelLayout, item: int, device: Device, shape: PassShape, in_layer: bool
) -> tuple[Tensor, ...]:
    """Return what a pass with many rows holds of int4 weights in the activations' dtype.

    These are the scales of all layers, which compilers convert before their loops, and, off TPU, two scaled matrices of
    a layer (gate and up).
    """
    rows, on_tpu = shape.computed * shape.positions, device.platform == "tpu"
    scales, matrices = 0, [0]
    for leaf in layout.leaves:
        if leaf.group is None:
            continue
        sizes = dict(zip(leaf.scale_axes, shard_shape(leaf.scales, layout), strict=True))
        groups = math.prod(sizes[axis] for axis in leaf.contracted)
        if not scales_sums(rows, groups, leaf.group, on_tpu):
            scales += math.prod(sizes.values()) * item
            matrices.append(math.prod(shard_shape(leaf, layout)) // max(1, len(leaf.layers) * leaf.is_stacked) * item)
    if not scales:
        return ()
    found = [Tensor("scales of int4 weights", scales, "a larger tensor axis")]
    if in_layer and not on_tpu:
        found.append(Tensor("scaled int4 weights", 2 * max(matrices), "a larger tensor axis"))
    return tuple(found)


def _attention_operands(layout: ModelLayout, item: int, shape: PassShape) -> list[_Arrays]:
    """Return the arrays that attention reads and, for splash attention, its running sums."""
    arrays = _live(layout.layer_cost.live_in_attention, shape.computed * shape.positions, item, _FEWER_POSITIONS)
    if shape.attention == "splash":
        heads, head_dim = layout.size_per_device("kv_heads"), layout.config.head_dim
        size = splash_running_sums(shape.computed, heads, shape.positions, head_dim)
        arrays.append(("running sums of attention", 1, size, "fewer rows, a larger data axis"))
    return arrays


def _scores(layout: ModelLayout, item: int, device: Device, shape: PassShape) -> list[_Arrays]:
    """Return the arrays of XLA attention: all scores, or one block's scores and the arrays that all blocks read."""
    heads, positions = layout.query_heads_per_device, shape.computed * shape.positions
    per_kv = layout.size_per_device("queries_per_kv")
    block = query_block(device.platform, shape.computed, heads, per_kv, shape.positions, shape.keys)
    if block is None:
        count, arrays = positions * heads, []
    else:
        count = block * per_kv
        arrays = _live(layout.layer_cost.live_in_attention, positions, item, _FEWER_POSITIONS)
    return [("attention scores", 1, count * shape.keys * (_FLOAT + item), _FEWER_POSITIONS), *arrays]


def _head(layout: ModelLayout, item: int, device: Device, shape: PassShape) -> tuple[Tensor, ...]:
    """Return the arrays alive while tokens are chosen from one chunk of logits."""
    logits = shape.rows * shape.head * layout.size_per_device("vocab") * _FLOAT
    canvas = shape.positions * layout.size_per_device("embed") * item
    # XLA on CPU writes intermediate results to memory that the other compilers fuse into their consumers.
    count = 4 if device.platform == "cpu" else 2
    arrays: list[_Arrays] = [
        ("logits of one head chunk", count, logits, _FEWER_CHANNELS),
        ("residual and norms", 1, shape.computed * canvas, _FEWER_POSITIONS),
    ]
    if shape.canvases:
        arrays.append(("activations of one canvas", 1, shape.rows * canvas, _FEWER_POSITIONS))
    return _outside_fast_memory(arrays, device)


def _outside_fast_memory(arrays: list[_Arrays], device: Device) -> tuple[Tensor, ...]:
    """Return the arrays that stay in HBM; the TPU compiler keeps the smallest ones on the chip, as far as they fit."""
    room, left = device.fast_memory_bytes, []
    for name, count, size, smaller_by in sorted(arrays, key=lambda array: array[2]):
        inside = min(count, room // max(1, size))
        room -= inside * size
        left.append(Tensor(name, (count - inside) * size, smaller_by))
    return tuple(left)
