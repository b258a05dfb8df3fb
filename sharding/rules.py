"""Partition rules: which mesh axes a logical axis is sharded over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from sharding.errors import MeshError
from sharding.heads import HeadLayout

MeshAxes = tuple[str, ...]
# One dimension of an array: a logical axis, several merged into one dimension (major first), or None (not sharded).
Dimension = str | tuple[str, ...] | None


@dataclass(frozen=True)
class PartitionRules:
    """Logical axis -> mesh axes. A logical axis that is not named here is an error, not a replicated dimension."""

    batch: MeshAxes = ("data",)
    canvas: MeshAxes = ("sequence",)
    residual: MeshAxes = ("sequence",)
    length: MeshAxes = ("sequence",)
    layers: MeshAxes = ()
    embed: MeshAxes = ()
    kv_heads: MeshAxes = ("kv",)
    queries_per_kv: MeshAxes = ("group",)
    head_dim: MeshAxes = ()
    qkv: MeshAxes = ()
    positions: MeshAxes = ()
    mlp: MeshAxes = ("kv", "group")
    vocab: MeshAxes = ("kv", "group")
    steps: MeshAxes = ()
    stop_tokens: MeshAxes = ()
    seed_words: MeshAxes = ()

    @classmethod
    def for_heads(cls, heads: HeadLayout) -> PartitionRules:
        """The rules for a head layout: query heads are replicated over ``group`` where there are too few of them."""
        return cls() if heads.shards_group else cls(queries_per_kv=())

    def mesh_axes(self, dimension: Dimension) -> MeshAxes:
        """Mesh axes of one dimension, major first.

        Raises:
          MeshError: a logical axis without a rule.
        """
        if dimension is None:
            return ()
        names = (dimension,) if isinstance(dimension, str) else dimension
        for name in names:
            if not hasattr(self, name):
                raise MeshError(f'no partition rule for the logical axis "{name}"')
        return tuple(axis for name in names for axis in getattr(self, name))

    def spec(self, *dimensions: Dimension) -> PartitionSpec:
        """The partition spec of an array with these dimensions.

        Raises:
          MeshError: two dimensions want the same mesh axis, or a logical axis has no rule.
        """
        taken: dict[str, Dimension] = {}
        entries: list[str | MeshAxes | None] = []
        for dimension in dimensions:
            axes = self.mesh_axes(dimension)
            for axis in axes:
                if axis in taken:
                    raise MeshError(
                        f'dimensions "{taken[axis]}" and "{dimension}" of one array are both sharded over mesh axis '
                        f'"{axis}"'
                    )
                taken[axis] = dimension
            entries.append(axes[0] if len(axes) == 1 else axes or None)
        return PartitionSpec(*entries)

    def shards(self, dimension: Dimension, sizes: Mapping[str, int]) -> int:
        """Into how many shards a dimension is cut on a mesh whose axes have these sizes."""
        count = 1
        for axis in self.mesh_axes(dimension):
            count *= sizes[axis]
        return count
