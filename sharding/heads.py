"""How attention heads are divided over the tensor axis.

Grouped-query models have few KV heads (4 in Qwen2.5-7B), each with an odd number of query heads (7), so tensor
parallelism over whole KV heads is limited to 4 chips. To go further, the tensor axis is split in two: ``kv`` shards the
KV heads, and ``group`` shards the query heads *inside* each KV group, padded to a multiple of ``group``. Keys, values
and their cache are sharded over ``kv`` only, and replicated over ``group``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class HeadLayout:
    """How attention heads are divided over a tensor axis of size ``kv * group``.

    Attributes:
      num_kv_heads: number of KV heads.
      queries_per_kv: number of query heads that share a KV head.
      kv: number of shards of the KV heads.
      group: number of shards of the query heads within each KV group.
    """

    num_kv_heads: int
    queries_per_kv: int
    kv: int
    group: int

    @classmethod
    def for_tensor(cls, num_heads: int, num_kv_heads: int, tensor: int) -> HeadLayout:
        """Divide ``num_heads`` query heads and ``num_kv_heads`` KV heads over a tensor axis of size ``tensor``.

        ``kv`` is the greatest common divisor of ``num_kv_heads`` and ``tensor``; ``group`` is ``tensor / kv``.
        """
        kv = math.gcd(num_kv_heads, tensor)
        return cls(num_kv_heads, num_heads // num_kv_heads, kv, tensor // kv)

    @property
    def shards_group(self) -> bool:
        """Whether query heads are sharded over the mesh axis ``group``; otherwise they are replicated over it.

        Even with padding, sharding needs no more work or memory per device than replication. With a single query head
        per KV head, there is nothing to shard.
        """
        return self.queries_per_kv > 1 or self.group == 1

    @property
    def padded_queries_per_kv(self) -> int:
        """Query heads per KV head on the devices: padded with zero heads to a multiple of ``group``."""
        if not self.shards_group:
            return self.queries_per_kv
        return math.ceil(self.queries_per_kv / self.group) * self.group
