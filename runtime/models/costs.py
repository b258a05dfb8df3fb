"""What one layer of a model costs: stated by the layer's family, read by the planner and by the memory estimate.

All counts are for one device of a mesh, padding included. They count numbers; whoever reads them multiplies by the
bytes of the dtype in use.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LiveArrays:
    """Activations of one size that a layer holds at the same time.

    Attributes:
      name: what they are, for the table of a device's memory.
      count: how many there are.
      numbers_per_position: size of one of them for one position.
    """

    name: str
    count: int
    numbers_per_position: int


@dataclass(frozen=True)
class LayerCollective:
    """Collectives of one size that a layer runs over the tensor axis.

    Attributes:
      kind: HLO's name, such as ``all-reduce`` or ``all-to-all``.
      numbers_per_position: size of the array for one position.
      times: how often the layer runs it in one forward pass.
      what: what is moved.
    """

    kind: str
    numbers_per_position: int
    times: int
    what: str


@dataclass(frozen=True)
class LayerCost:
    """Work of one layer on one device of a layout.

    What depends on the attention implementation and not on the layer (scores, gathered keys and values, the share of
    pairs that the attention mask leaves) is not part of it.

    Attributes:
      flops_per_position: floating-point operations of the layer's weights for one position.
      attention_flops_per_pair: those of attention for one query position and one key position that it sees.
      activations_per_position: activations read and written in device memory for one position.
      live_in_attention: what is alive between the projections and attention, without the residual.
      live_in_mlp: what is alive in the MLP or what stands in its place, without the residual.
      tensor_collectives: what is moved over the tensor axis, where that has more than one device.
    """

    flops_per_position: float
    attention_flops_per_pair: float
    activations_per_position: float
    live_in_attention: tuple[LiveArrays, ...]
    live_in_mlp: tuple[LiveArrays, ...]
    tensor_collectives: tuple[LayerCollective, ...]
