"""The context of a forward pass: the model's layout, the attention implementation, and helpers that layers share.

Dimension letters: B batch, S sequence, D embed, K kv heads, G query heads per KV head, H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from runtime.models.config import ModelConfig
from runtime.models.declarations import ModelLayout
from runtime.models.products import einsum
from runtime.models.quantization import Matrix
from sharding.mesh import has_reduce_scatter

Array = jax.Array

QUERY_HEADS = ("kv_heads", "queries_per_kv", "head_dim")
KV_HEADS = ("kv_heads", "head_dim")

# Up to this many positions, reading the weights dominates the time of a matrix product.
_FEW_POSITIONS = 64


# Range of positions per device in which sharding the residual over the tensor axis is faster, according to the
# schedules of compiled TPU programs. Below it, the compiler copies weights in order to overlap the collectives. Above
# it, the arrays do not fit into on-chip memory.
_OVERLAPPED_POSITIONS = range(2048, 16384 + 1)
# A TPU register packs this many rows of a 16-bit dtype.
_PACKED_ROWS = 16


def residual_unit(layout: ModelLayout) -> int:
    """Return the number of which a row's positions are a multiple if :func:`residual_over_tensor` can divide them."""
    return layout.spec.sequence * layout.spec.tensor * _PACKED_ROWS


def residual_over_tensor(layout: ModelLayout, devices: np.ndarray, rows: int, positions: int) -> bool:
    """Return whether to shard the positions of the residual over the tensor axis too (Korthikanti et al., 2022).

    With this sharding, the sums after attention and after the MLP are reduce-scatters, the norms run on a part of the
    positions, and all-gathers restore all positions before the next product. The TPU compiler overlaps these
    collectives with the products; other compilers do not, so the answer is False for other platforms. It is False too
    where the compiler has no reduce-scatter: there the sums remain all-reduces, and all-gathers would come on top.

    Args:
      layout: the model on its mesh.
      devices: the mesh's devices ``[data, sequence, kv, group]``, or a :class:`sharding.topology.Place` for each.
      rows: number of rows in all ``data`` shards together.
      positions: positions of each row that are computed together.
    """
    spec = layout.spec
    tpu = devices.flat[0].platform == "tpu"
    if not tpu or spec.tensor == 1 or positions % residual_unit(layout):
        return False
    overlapped = rows * positions // (spec.data * spec.sequence) in _OVERLAPPED_POSITIONS
    return overlapped and has_reduce_scatter(devices)


@dataclass(frozen=True)
class Forward:
    """The layout and the attention implementation of a forward pass. It is a static argument of compiled programs."""

    layout: ModelLayout
    attention: str = "xla"

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.layout.config

    @property
    def window(self) -> Forward:
        """The context for windows: a few positions of each row, all computed by every ``sequence`` shard."""
        rules = replace(self.layout.rules, canvas=(), residual=())
        return replace(self, layout=replace(self.layout, rules=rules), attention="xla")

    @property
    def over_data(self) -> Forward:
        """The context for a batch that is divided over ``data``, where the rows themselves are on all of its shards."""
        return replace(self, layout=replace(self.layout, rules=replace(self.layout.rules, batch=("data",))))

    def with_blocks(self, length: int) -> Forward:
        """Return this context with blocks of ``length`` positions in block-causal attention; 0 keeps the model's."""
        if length in (0, self.config.attention_block_length):
            return self
        config = replace(self.config, attention_block_length=length)
        return replace(self, layout=replace(self.layout, config=config))

    @property
    def devices(self) -> tuple[str, int]:
        """JAX's name for the devices of the mesh, and their number; an empty name without a mesh."""
        mesh = self.layout.mesh
        return ("", 1) if mesh is None else (mesh.devices.flat[0].device_kind, mesh.size)

    @property
    def is_gpu(self) -> bool:
        """Whether the mesh consists of GPUs."""
        mesh = self.layout.mesh
        return mesh is not None and mesh.devices.flat[0].platform in ("gpu", "cuda")

    @property
    def is_single_cpu(self) -> bool:
        """Whether the mesh is a single CPU device, for which some operations are written as faster loops."""
        mesh = self.layout.mesh
        return mesh is not None and mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"

    def for_rows(self, rows: int, positions: int) -> Forward:
        """Return the context for whole rows ``[rows, positions]``; see :func:`residual_over_tensor`."""
        layout = self.layout
        if layout.mesh is None or not residual_over_tensor(layout, layout.mesh.devices, rows, positions):
            return self
        rules = replace(layout.rules, residual=("sequence", "kv", "group"))
        return replace(self, layout=replace(layout, rules=rules))

    def constrain(self, array: Array, *dimensions: str | tuple[str, ...] | None) -> Array:
        """Constrain the sharding of an activation, given its logical dimensions."""
        layout = self.layout
        if layout.mesh is None or layout.mesh.size == 1:
            return array
        return jax.lax.with_sharding_constraint(array, NamedSharding(layout.mesh, layout.rules.spec(*dimensions)))

    def einsum(self, expression: str, left: Array, right: Matrix, summed: str | tuple[str, ...] = "embed") -> Array:
        """Multiply activations by a weight; see :func:`runtime.models.products.einsum`.

        ``summed`` are the logical dimensions of the axis that the product sums over.
        """
        # XLA on CPU transposes a weight with several output dimensions before every product, makes a float32 copy of a
        # quantized weight, and packs a float32 weight anew. For a few positions, all of this costs more than the
        # product itself. TPU and GPU do none of it.
        # This is limited to a single device because blocks and merged dimensions must not cross shards.
        alone = self.is_single_cpu
        positions, rules, sizes = math.prod(left.shape[:-1]), self.layout.rules, self.layout.mesh_axis_sizes
        return einsum(
            expression,
            left,
            right,
            as_matrix=alone,
            few=alone and positions <= _FEW_POSITIONS,
            rows=max(1, positions // (rules.shards("batch", sizes) * rules.shards("canvas", sizes))),
            shards=rules.shards(summed, sizes),
            on_tpu=self.layout.mesh is not None and self.layout.mesh.devices.flat[0].platform == "tpu",
        )

    def on_rows(self, function: Callable[..., Any], *arrays: Any, whole: Sequence[Array] = ()) -> Any:
        """Call ``function`` on each device with the whole rows of the device's ``data`` shard, without communication.

        Use this for small per-position arrays, such as the canvas, that every device needs. The compiler would
        otherwise shard them over ``sequence``, and then sort and scatter across devices.

        Args:
          function: maps arrays ``[B, ...]`` and scalars, or trees of them, to a tree of arrays ``[B, ...]``.
          arrays: its first arguments, sharded by row.
          whole: its last arguments: tables without a row axis, which every device gets whole.
        """
        layout = self.layout
        if layout.mesh is None or layout.mesh.size == 1:
            return function(*arrays, *whole)
        rows = layout.rules.spec("batch")
        of_arrays = jax.tree.map(lambda array: rows if array.ndim else PartitionSpec(), arrays)
        specs = (*of_arrays, *[PartitionSpec()] * len(whole))
        call = jax.shard_map(function, mesh=layout.mesh, in_specs=specs, out_specs=rows, check_vma=False)
        return call(*arrays, *whole)
