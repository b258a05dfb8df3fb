"""What one layer of a model costs, as the planner reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerCost:
    """Work of one layer on one device of a layout, padding included. Counts are of numbers, not of bytes.

    Attributes:
      flops_per_position: floating-point operations of the layer's matrices for one position.
      attention_flops_per_pair: those of attention for one query position and one key position.
      activations_per_position: activations read and written in memory for one position.
      residual_all_reduces: all-reduces of a position's residual over the tensor axis.
    """

    flops_per_position: float
    attention_flops_per_pair: float
    activations_per_position: float
    residual_all_reduces: int
