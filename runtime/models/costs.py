"""The cost of one layer of a model, as its family states it. The planner and the memory estimate read it.

All counts are for one device of a mesh, padding included. Sizes are numbers of array elements, which the planner and
the memory estimate multiply by the bytes of the dtype in use.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LiveArrays:
    """Activation arrays of equal size that a layer holds in memory at the same time.

    Attributes:
      name: what the arrays are, for the table of a device's memory.
      count: number of arrays.
      numbers_per_position: size of one array, per position.
    """

    name: str
    count: int
    numbers_per_position: int


@dataclass(frozen=True)
class LayerCollective:
    """Collectives of one size that a layer runs over the tensor axis.

    Attributes:
      kind: name of the HLO operation, such as ``all-reduce`` or ``all-to-all``.
      numbers_per_position: size of the array, per position.
      times: how many times the layer runs it per forward pass.
      what: a description of the data that the collective moves.
    """

    kind: str
    numbers_per_position: int
    times: int
    what: str


@dataclass(frozen=True)
class LayerCost:
    """Work of one layer on one device.

    Costs that depend on the attention implementation are not included: scores, gathered keys and values, and the
    fraction of query-key pairs that the attention mask leaves visible.

    Attributes:
      flops_per_position: floating-point operations of the layer's matrix products, per position.
      attention_flops_per_pair: floating-point operations of attention, per visible pair of a query and a key position.
      activations_per_position: activation elements read from and written to device memory, per position.
      live_in_attention: arrays in memory between the projections and attention, without the residual.
      live_in_mlp: arrays in memory during the MLP, or the family's equivalent, without the residual.
      tensor_collectives: collectives over the tensor axis, if it has more than one device.
    """

    flops_per_position: float
    attention_flops_per_pair: float
    activations_per_position: float
    live_in_attention: tuple[LiveArrays, ...]
    live_in_mlp: tuple[LiveArrays, ...]
    tensor_collectives: tuple[LayerCollective, ...]
