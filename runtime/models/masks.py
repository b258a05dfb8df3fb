"""Which keys a query attends to, said as data and read by every attention implementation.

Dimension letters: S query positions, T key positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

AttentionKind = Literal["bidirectional", "causal", "block_causal"]
MAX_BLOCK_LENGTH = 1 << 16


@dataclass(frozen=True)
class AttentionMask:
    """The visibility rule of a model. Hashable, so that it can be static in a compiled program.

    Attributes:
      kind: ``bidirectional``, every key; ``causal``, no later key; ``block_causal``, no key of a later block.
      block_length: positions of one block where ``kind`` is ``block_causal``, counted from position 0; else unused.
    """

    kind: AttentionKind
    block_length: int = 0

    def __post_init__(self) -> None:
        """Check that a block-causal mask has blocks."""
        if self.kind == "block_causal" and self.block_length < 1:
            raise ValueError(f"a block-causal mask needs a block length of at least 1, not {self.block_length}")

    @property
    def depends_on_position(self) -> bool:
        """Whether some query does not attend to every key."""
        return self.kind != "bidirectional"

    def visible(self, queries: Any, keys: Any) -> Any:
        """Whether each query attends to each key.

        Args:
          queries: absolute positions, an array of NumPy or JAX.
          keys: absolute positions that broadcast against ``queries``.

        Returns:
          A bool array of the broadcast shape.

        Raises:
          ValueError: a bidirectional mask, where there is nothing to compute.
        """
        if self.kind == "causal":
            return keys <= queries
        if self.kind == "block_causal":
            return keys // self.block_length <= queries // self.block_length
        raise ValueError("a bidirectional mask hides nothing; ask depends_on_position first")

    def visible_share(self, length: int) -> float:
        """Share of all pairs of ``length`` queries and as many keys that is visible, to leading order."""
        if self.kind == "bidirectional":
            return 1.0
        if self.kind == "causal":
            return 0.5
        return min(1.0, 0.5 + self.block_length / (2 * length))
