"""Leaves of the weights pytree: sizes, axes and sources of a weight, of its integers and of its scales."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from runtime.models.quantization import VALUES_PER_BYTE
from sharding.rules import PartitionRules

# int4 weights that share a scale, at most. A float32 scale for 64 weights adds half a bit to each.
_GROUP = 64
# A matrix whose groups would be smaller than this stays int8: with a scale for 8 weights, int4 takes as many bytes.
_SMALLEST_GROUP = 16
# Groups are so small that an axis which the mesh shards consists of a multiple of this many groups if its size allows.
_SHARDS_OF_GROUPS = 8


def int4_group(axis: str, size: int) -> int | None:
    """Return how many int4 weights along a contracted logical axis share a scale; None if int4 does not pay off.

    This depends on the model alone, so that integers and scales are the same on every mesh.
    """
    shards = math.gcd(size, _SHARDS_OF_GROUPS) if PartitionRules().mesh_axes(axis) else 1
    group = math.gcd(size // shards, _GROUP)
    return group if group >= _SMALLEST_GROUP else None


@dataclass(frozen=True)
class WeightLeaf:
    """One leaf of the weights pytree: a declaration together with its sizes in a layout.

    Attributes:
      name: dotted path, such as ``layers.q_proj`` for stacked layers or ``layers.3.q_proj`` for a single layer.
      number: index of the declaration, counted from 0; the same for all layers.
      layers: numbers of the layers that the leaf holds; empty for a weight outside the layers.
      axes: logical axes; the first is ``layers`` if the leaf is stacked.
      shape: unpadded shape.
      padded_shape: shape on the devices.
      sources: names of the source tensors: one per layer if the leaf is stacked, otherwise one.
      source_shape: shape of each source tensor.
      source_axes, initializer, contracted: see :class:`runtime.models.declarations.WeightDeclaration`.
      integers: dtype of the integers that stand for the weight, ``int8`` or ``int4``, or ``uint8`` for the bytes that a
        checkpoint stores of int4; empty for a weight in full precision.
    """

    name: str
    number: int
    layers: tuple[int, ...]
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    sources: tuple[str, ...]
    source_axes: tuple[tuple[str, ...], ...]
    source_shape: tuple[int, ...]
    initializer: str
    contracted: tuple[str, ...]
    integers: str = ""

    @property
    def quantized(self) -> bool:
        """Whether the devices hold the leaf as integers and scales."""
        return bool(self.integers)

    @property
    def sizes(self) -> dict[str, int]:
        """Unpadded size of each logical axis."""
        return dict(zip(self.axes, self.shape, strict=True))

    @property
    def is_stacked(self) -> bool:
        """Whether the leaf holds stacked layers, with ``layers`` as its leading axis."""
        return self.axes[0] == "layers"

    @property
    def contracted_dimensions(self) -> tuple[int, ...]:
        """Dimensions of the source tensor that a matrix product with the weight sums over."""
        return tuple(place for place, merge in enumerate(self.source_axes) if merge[0] in self.contracted)

    @property
    def group(self) -> int | None:
        """Number of int4 weights along the last contracted axis that share a scale; None for other dtypes."""
        return int4_group(self.contracted[-1], self.sizes[self.contracted[-1]]) if self.integers == "int4" else None

    @property
    def scale_axes(self) -> tuple[str, ...]:
        """Axes of the scales: those of the output channels; of int4 also the contracted ones, before the channels."""
        channels = tuple(axis for axis in self.axes if axis not in self.contracted)
        if self.group is None:
            return channels
        return (*channels[: self.is_stacked], *self.contracted, *channels[self.is_stacked :])

    @property
    def scales(self) -> WeightLeaf:
        """The scales of a quantized weight, described as a separate leaf with one source per source of the weight."""
        axes, group = self.scale_axes, self.group
        whole = self if group is None else self._divided(group)
        kept = [place for place, merge in enumerate(self.source_axes) if merge[0] in axes]
        padded = dict(zip(whole.axes, whole.padded_shape, strict=True))
        return replace(
            whole,
            name=f"{self.name}.scales",
            axes=axes,
            shape=tuple(whole.sizes[axis] for axis in axes),
            padded_shape=tuple(padded[axis] for axis in axes),
            sources=tuple(f"{source}.scales" for source in self.sources),
            source_axes=tuple(self.source_axes[place] for place in kept),
            source_shape=tuple(whole.source_shape[place] for place in kept),
            initializer="ones",
            contracted=(),
            integers="",
        )

    @property
    def stored(self) -> tuple[WeightLeaf, ...]:
        """What a checkpoint of this quantization stores: the leaf, or its integers and its scales.

        Of int4, two integers along the last contracted axis are one byte, see
        :func:`runtime.models.quantization.pack_int4`.
        """
        if not self.quantized:
            return (self,)
        packed = self if self.group is None else replace(self._divided(VALUES_PER_BYTE), integers="uint8")
        return packed, self.scales

    def _divided(self, count: int) -> WeightLeaf:
        """Return the leaf with ``count`` elements along the last contracted axis joined to one."""
        last = self.contracted[-1]

        def divided(axes: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(size // count if axis == last else size for axis, size in zip(axes, sizes, strict=True))

        return replace(
            self,
            shape=divided(self.axes, self.shape),
            padded_shape=divided(self.axes, self.padded_shape),
            source_shape=divided(tuple(merge[-1] for merge in self.source_axes), self.source_shape),
        )
