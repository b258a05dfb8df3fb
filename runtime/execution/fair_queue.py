"""A queue that is fair among owners: it serves owners in turn, and the items of an owner by rank, then by arrival."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """A round-robin queue over the owners of its items; ``in`` tells whether an owner has any. Not thread-safe."""

    def __init__(self) -> None:
        """Create an empty queue."""
        self._queues: OrderedDict[Hashable, list[tuple[float, int, Item]]] = OrderedDict()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._queues

    def push(self, owner: Hashable, item: Item, rank: float = 0.0) -> None:
        """Add an item after the owner's items of the same or a lower rank. A new owner is served after all others."""
        heapq.heappush(self._queues.setdefault(owner, []), (rank, next(self._numbers), item))

    def pop(self) -> Item | None:
        """Remove and return the next item; its owner is then served last. Returns None if the queue is empty."""
        if not self._queues:
            return None
        owner, queue = next(iter(self._queues.items()))
        _, _, item = heapq.heappop(queue)
        self._queues.move_to_end(owner)
        if not queue:
            del self._queues[owner]
        return item

    def items(self) -> list[Item]:
        """Return all items, in no particular order."""
        return [item for queue in self._queues.values() for _, _, item in queue]

    def remove(self, unwanted: Callable[[Item], bool]) -> list[Item]:
        """Remove all items for which ``unwanted`` is true, and return them. The order of owners does not change."""
        removed: list[Item] = []
        for owner, queue in list(self._queues.items()):
            removed += [item for _, _, item in queue if unwanted(item)]
            kept = [entry for entry in queue if not unwanted(entry[2])]
            heapq.heapify(kept)
            if kept:
                self._queues[owner] = kept
            else:
                del self._queues[owner]
        return removed
