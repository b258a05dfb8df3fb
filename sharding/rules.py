"""Partition rules: the mapping from logical axes to mesh axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from sharding.errors import MeshError
from sharding.heads import HeadLayout

MeshAxes = tuple[str, ...]
# One dimension of an array: a logical axis, several logical axes merged (major first), or None if it is not sharded.
Dimension = str | tuple[str, ...] | None


@dataclass(frozen=True)
class PartitionRules:
    """The mesh axes that shard each logical axis; an empty tuple means replicated.

    Using a logical axis that has no rule here is an error.

    Attributes:
      batch: rows of a batch.
      canvas: positions of whole rows.
      residual: positions of the residual stream, which may be sharded over the tensor axis as well.
      length: positions of the KV cache.
      layers: stacked layers.
      embed: the hidden size.
      kv_heads, queries_per_kv, head_dim: KV heads, query heads per KV head, and the elements of a head.
      qkv: the three parts of a fused projection to queries, keys and values.
      positions: learned position embeddings, and positions of per-row arrays such as the canvas in the state of the
        decoding loop.
      mlp: the intermediate size of the MLP.
      vocab: the vocabulary.
      steps, stop_tokens, seed_words, entries, drafts: second axes of per-row request and state arrays.
    """

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
    entries: MeshAxes = ()
    drafts: MeshAxes = ()

    @classmethod
    def for_heads(cls, heads: HeadLayout) -> PartitionRules:
        """Return the rules for a head layout. Query heads that cannot be divided are replicated over ``group``."""
        return cls() if heads.shards_group else cls(queries_per_kv=())

    def mesh_axes(self, dimension: Dimension) -> MeshAxes:
        """Return the mesh axes that shard a dimension, major first.

        Raises:
          MeshError: a logical axis has no rule.
        """
        if dimension is None:
            return ()
        names = (dimension,) if isinstance(dimension, str) else dimension
        for name in names:
            if not hasattr(self, name):
                raise MeshError(f'no partition rule for the logical axis "{name}"')
        return tuple(axis for name in names for axis in getattr(self, name))

    def spec(self, *dimensions: Dimension) -> PartitionSpec:
        """Return the partition spec of an array with these dimensions.

        Raises:
          MeshError: two dimensions would be sharded over the same mesh axis, or a logical axis has no rule.
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
        """Return the number of shards of a dimension on a mesh whose axes have these sizes."""
        count = 1
        for axis in self.mesh_axes(dimension):
            count *= sizes[axis]
        return count
