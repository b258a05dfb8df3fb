"""Attention masks as data: which keys a query attends to. Every attention implementation reads them.

Dimension letters: S query positions, T key positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

AttentionKind = Literal["bidirectional", "causal", "block_causal"]
MAX_BLOCK_LENGTH = 1 << 16


@dataclass(frozen=True)
class AttentionMask:
    """The attention mask of a model. It is hashable, so that it can be a static argument of a compiled program.

    Attributes:
      kind: a query attends to every key (``bidirectional``), to no later key (``causal``), or to no key in a later
        block (``block_causal``).
      block_length: positions per block of a ``block_causal`` mask, counted from position 0; unused for other kinds.
    """

    kind: AttentionKind
    block_length: int = 0

    def __post_init__(self) -> None:
        """Check the block length of a block-causal mask."""
        if self.kind == "block_causal" and self.block_length < 1:
            raise ValueError(f"a block-causal mask requires a block length of at least 1, not {self.block_length}")

    @property
    def depends_on_position(self) -> bool:
        """Whether the mask hides any key from any query."""
        return self.kind != "bidirectional"

    def visible(self, queries: Any, keys: Any) -> Any:
        """Compute which keys each query attends to.

        Args:
          queries: absolute positions, a NumPy or JAX array.
          keys: absolute positions that broadcast against ``queries``.

        Returns:
          A bool array of the broadcast shape.

        Raises:
          ValueError: the mask is bidirectional, so there is nothing to compute.
        """
        if self.kind == "causal":
            return keys <= queries
        if self.kind == "block_causal":
            # Keys are compared as they are. If queries and keys were both divided, the compiler would divide the same
            # positions once, sharded like the queries, and gather them over sequence in every layer.
            return keys < (queries // self.block_length + 1) * self.block_length
        raise ValueError("a bidirectional mask hides no keys; check depends_on_position first")

    def visible_share(self, length: int) -> float:
        """Return the visible fraction of all pairs of ``length`` queries and ``length`` keys, to leading order."""
        if self.kind == "bidirectional":
            return 1.0
        if self.kind == "causal":
            return 0.5
        return min(1.0, 0.5 + self.block_length / (2 * length))
