"""How a forward pass runs: on which layout, with which attention, and what its parts share.

Dimension letters: B batch, S sequence, D embed, K kv heads, G query heads per KV head, H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from runtime.models.config import ModelConfig
from runtime.models.declarations import ModelLayout
from runtime.models.quantization import Matrix, einsum

Array = jax.Array

QUERY_HEADS = ("kv_heads", "queries_per_kv", "head_dim")
KV_HEADS = ("kv_heads", "head_dim")

# Positions up to which a product is bound by its weights.
_FEW_POSITIONS = 64


# Positions of a device from which on, and up to which, a residual over the tensor axis was faster by the schedules of
# TPU programs: for fewer the compiler copies weights to overlap them, and more do not fit the chip's own memory.
_OVERLAPPED_POSITIONS = range(2048, 16384 + 1)
# Rows of a packed TPU register.
_PACKED_ROWS = 16


def residual_over_tensor(layout: ModelLayout, platform: str, rows: int, positions: int) -> bool:
    """Whether the residual of a pass lies over the tensor axis too, its positions divided (Korthikanti et al., 2022).

    The sums after attention and after the MLP are then reduce-scatters, the norms run on a part of the positions, and
    all-gathers bring them together before the next product. TPU compilers run both beside the products.

    Args:
      layout: the model on its mesh.
      platform: of its devices; the other compilers overlap nothing here.
      rows: of all shards of ``data``.
      positions: of each row, computed together.
    """
    spec = layout.spec
    if platform != "tpu" or spec.tensor == 1 or positions % (spec.sequence * spec.tensor * _PACKED_ROWS):
        return False
    return rows * positions // (spec.data * spec.sequence) in _OVERLAPPED_POSITIONS


@dataclass(frozen=True)
class Forward:
    """How a forward pass runs: on which layout, with which attention. Static to the compiled program."""

    layout: ModelLayout
    attention: str = "xla"

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return self.layout.config

    @property
    def window(self) -> Forward:
        """The same for a few positions of each row, which every shard of ``sequence`` computes whole."""
        rules = replace(self.layout.rules, canvas=(), residual=())
        return replace(self, layout=replace(self.layout, rules=rules), attention="xla")

    def with_blocks(self, length: int) -> Forward:
        """The same with blocks of this many positions in block-causal attention; 0 for the model's own."""
        if length in (0, self.config.attention_block_length):
            return self
        config = replace(self.config, attention_block_length=length)
        return replace(self, layout=replace(self.layout, config=config))

    @property
    def alone_on_cpu(self) -> bool:
        """Whether a single CPU device runs it, on which some loops are faster and no array is cut."""
        mesh = self.layout.mesh
        return mesh is not None and mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"

    def for_rows(self, rows: int, positions: int) -> Forward:
        """The same for whole rows ``[rows, positions]``: see :func:`residual_over_tensor`."""
        layout = self.layout
        platform = None if layout.mesh is None else layout.mesh.devices.flat[0].platform
        if platform is None or not residual_over_tensor(layout, platform, rows, positions):
            return self
        rules = replace(layout.rules, residual=("sequence", "kv", "group"))
        return replace(self, layout=replace(layout, rules=rules))

    def constrain(self, array: Array, *dimensions: str | tuple[str, ...] | None) -> Array:
        """Pin the sharding of an activation by its logical dimensions."""
        layout = self.layout
        if layout.mesh is None or layout.mesh.size == 1:
            return array
        return jax.lax.with_sharding_constraint(array, NamedSharding(layout.mesh, layout.rules.spec(*dimensions)))

    def einsum(self, expression: str, left: Array, right: Matrix) -> Array:
        """A product of activations and a weight; see :func:`runtime.models.quantization.einsum`."""
        # On CPU, XLA transposes a weight of several output dimensions before every product, and writes an int8 weight
        # out in float32, which for a few positions cost more than the product. TPU and GPU do neither. A block, and
        # the dimensions that are one, would have to lie within a shard.
        alone = self.alone_on_cpu
        few = math.prod(left.shape[:-1]) <= _FEW_POSITIONS
        return einsum(expression, left, right, as_matrix=alone, in_blocks=alone and few)

    def on_rows(self, function: Callable[..., Any], *arrays: Any, whole: Sequence[Array] = ()) -> Any:
        """Call ``function`` on whole rows: each device has the rows of its part of ``data``, and nothing moves.

        This is for what is kept per position, small and needed everywhere: the compiler would spread it over
        ``sequence`` and then sort and scatter across devices.

        Args:
          function: of arrays ``[B, ...]`` and scalars, or trees of them, to a tree of arrays ``[B, ...]``.
          arrays: its arguments.
          whole: its last arguments, tables that have no rows.
        """
        layout = self.layout
        if layout.mesh is None or layout.mesh.size == 1:
            return function(*arrays, *whole)
        rows = layout.rules.spec("batch")
        of_arrays = jax.tree.map(lambda array: rows if array.ndim else PartitionSpec(), arrays)
        specs = (*of_arrays, *[PartitionSpec()] * len(whole))
        call = jax.shard_map(function, mesh=layout.mesh, in_specs=specs, out_specs=rows, check_vma=False)
        return call(*arrays, *whole)
