"""Memory of one device, by the tensors that are alive when most of it is in use.

What is resident (weights, cache, tokens) follows from the declarations. What a forward pass adds at its peak is either
the arrays that a layer says it holds (:class:`runtime.models.costs.LayerCost`) or those of one chunk of the head. Which
of them the compilers for TPU and GPU keep was learnt from the live ranges of compiled programs;
``tests/runtime/planner`` holds the sum to 5 % of what they report.

Dimension letters: B rows of a device, S positions of a device, T keys, P positions of one head chunk on a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from runtime.models.costs import LiveArrays
from runtime.models.declarations import ModelLayout
from runtime.models.kv_cache import cache_bytes_per_device
from runtime.models.xla_attention import query_block

_FLOAT = 4
# Numbers that lie side by side in a register of a TPU.
_LANES = 128
_LESS_CACHE = "fewer rows, a larger sequence axis, int8"
_FEWER_POSITIONS = "fewer rows, a larger data or sequence axis"
_FEWER_CHANNELS = "a larger tensor axis, or fewer rows"


@dataclass(frozen=True)
class Tensor:
    """Something that takes memory: its name, the bytes of it on one device, and what would make it smaller."""

    name: str
    bytes: int
    smaller_by: str


# Arrays alike: name, how many, bytes of one, what would make them smaller.
_Arrays = tuple[str, int, int, str]


@dataclass(frozen=True)
class Memory:
    """Memory of one device.

    Attributes:
      resident: what is there all the time.
      peak: what a pass adds when it needs most.
    """

    resident: tuple[Tensor, ...]
    peak: tuple[Tensor, ...]

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return sum(tensor.bytes for tensor in (*self.resident, *self.peak))

    @property
    def largest(self) -> list[Tensor]:
        """All of it, the largest first."""
        return sorted((*self.resident, *self.peak), key=lambda tensor: -tensor.bytes)


@dataclass(frozen=True)
class PassShape:
    """What one forward pass computes on one device.

    Attributes:
      rows: B.
      positions: S.
      keys: T, that each position attends to.
      head: P, of each row.
      attention: implementation; ``xla`` holds scores, see :mod:`runtime.models.xla_attention`.
    """

    rows: int
    positions: int
    keys: int
    head: int
    attention: str


@dataclass(frozen=True)
class Device:
    """What a device's memory depends on.

    Attributes:
      platform: compilers differ.
      fast_memory_bytes: on-chip memory that a TPU's compiler keeps arrays in; 0 for none.
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
    """Memory that a generation needs on one device; ``layout`` needs no mesh.

    Args:
      layout: the model on its mesh.
      dtype: of weights and activations.
      device: what runs it.
      rows: on the device.
      canvas: whole length of a row.
      passes: the kinds of forward passes that the generation is made of.
      cache_dtype: of keys and values that are kept; None where none are.
    """
    wider = "bfloat16" if jnp.dtype(dtype).itemsize > 2 else "int8"
    resident = [Tensor("weights", layout.bytes_per_device(dtype), f"a larger tensor axis, or {wider}")]
    if cache_dtype is not None:
        kept = cache_bytes_per_device(layout, rows * layout.spec.data, canvas, cache_dtype)
        resident.append(Tensor("cache of keys and values", kept, _LESS_CACHE))
        resident += _cache_laid_out_anew(kept, layout.config.head_dim, device)
    # Canvas and the step that set each position, going in and coming out.
    resident.append(Tensor("tokens", 4 * rows * canvas * 4, "fewer rows"))
    item = jnp.dtype(dtype).itemsize
    stages = [stage(layout, item, device, one) for one in passes for stage in (_layer, _head)]
    return Memory(tuple(resident), max(stages, key=lambda stage: sum(tensor.bytes for tensor in stage)))


def _cache_laid_out_anew(kept: int, head_dim: int, device: Device) -> tuple[Tensor, ...]:
    """What a TPU's compiler adds to a cache of narrow heads: it keeps positions side by side, and a loop of windows
    works on copies of keys and values, with heads side by side and padded to the width of a register.

    Args:
      kept: bytes of the cache.
      head_dim: numbers of a head.
      device: what runs it.
    """
    if device.platform != "tpu" or head_dim % _LANES == 0:
        return ()
    padded = kept // 2 * math.ceil(head_dim / _LANES) * _LANES // head_dim
    return _outside_fast_memory([("copy of the cache for narrow heads", 2, padded, _LESS_CACHE)], device)


def _live(arrays: Iterable[LiveArrays], positions: int, item: int, smaller_by: str) -> list[_Arrays]:
    """Arrays of a layer for so many positions of a device, in numbers of ``item`` bytes."""
    return [(one.name, one.count, positions * one.numbers_per_position * item, smaller_by) for one in arrays]


def _bytes(arrays: Iterable[_Arrays]) -> int:
    return sum(count * size for _, count, size, _ in arrays)


def _layer(layout: ModelLayout, item: int, device: Device, shape: PassShape) -> tuple[Tensor, ...]:
    """What is alive in the MLP of a layer, or in attention where scores are held."""
    cost, positions = layout.layer_cost, shape.rows * shape.positions
    residual = positions * layout.size_per_device("embed") * item

    def residuals(count: int) -> _Arrays:
        return ("residual and norms", count, residual, _FEWER_POSITIONS)

    mlp = _live(cost.live_in_mlp, positions, item, _FEWER_CHANNELS)
    reduced = layout.spec.tensor > 1 and bool(cost.tensor_collectives)
    if device.platform == "tpu":
        if reduced and residual > device.fast_memory_bytes:
            # Too large to be reduced on the chip: another residual, beside the operands that are not on the chip.
            arrays = [residuals(3), *(one for one in mlp if one[2] > device.fast_memory_bytes)]
            if not device.fast_memory_bytes:
                arrays += _live(cost.live_in_attention, positions, item, _FEWER_POSITIONS)
        elif _bytes(mlp) >= residual:
            # The compiler holds either the operands of the MLP or, after it, residuals alone.
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


def _scores(layout: ModelLayout, item: int, device: Device, shape: PassShape) -> list[_Arrays]:
    """What XLA attention holds: all scores, or those of one block and the arrays that it loops over."""
    heads, positions = layout.query_heads_per_device, shape.rows * shape.positions
    block = query_block(device.platform, shape.rows, heads, shape.positions, shape.keys)
    if block is None:
        count, arrays = positions * heads, []
    else:
        count = block * layout.size_per_device("queries_per_kv")
        arrays = _live(layout.layer_cost.live_in_attention, positions, item, _FEWER_POSITIONS)
    return [("attention scores", 1, count * shape.keys * (_FLOAT + item), _FEWER_POSITIONS), *arrays]


def _head(layout: ModelLayout, item: int, device: Device, shape: PassShape) -> tuple[Tensor, ...]:
    """What is alive while tokens are chosen from one chunk of logits."""
    logits = shape.rows * shape.head * layout.size_per_device("vocab") * _FLOAT
    residual = shape.rows * shape.positions * layout.size_per_device("embed") * item
    # XLA on CPU keeps products and their quotients that the other compilers fuse into what reads them.
    count = 4 if device.platform == "cpu" else 2
    return _outside_fast_memory(
        [
            ("logits of one head chunk", count, logits, _FEWER_CHANNELS),
            ("residual and norms", 1, residual, _FEWER_POSITIONS),
        ],
        device,
    )


def _outside_fast_memory(arrays: list[_Arrays], device: Device) -> tuple[Tensor, ...]:
    """What a TPU's compiler leaves in HBM: the arrays that together exceed on-chip memory, largest first."""
    room, left = device.fast_memory_bytes, []
    for name, count, size, smaller_by in sorted(arrays, key=lambda array: array[2]):
        inside = min(count, room // max(1, size))
        room -= inside * size
        left.append(Tensor(name, (count - inside) * size, smaller_by))
    return tuple(left)
