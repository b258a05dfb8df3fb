"""A queue that is fair among owners: first come first served for each owner, owners in turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """A round-robin queue over the owners of its items. Not thread-safe."""

    def __init__(self) -> None:
        self._queues: OrderedDict[Hashable, deque[Item]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, owner: Hashable, item: Item) -> None:
        """Append an item to its owner's queue; an owner without one is served after all the others."""
        self._queues.setdefault(owner, deque()).append(item)

    def pop(self) -> Item | None:
        """Take the next item, after which its owner is served last. None if the queue is empty."""
        if not self._queues:
            return None
        owner, queue = next(iter(self._queues.items()))
        item = queue.popleft()
        self._queues.move_to_end(owner)
        if not queue:
            del self._queues[owner]
        return item

    def remove(self, unwanted: Callable[[Item], bool]) -> list[Item]:
        """Remove every item for which ``unwanted`` is true, and return them. Owners keep their turns."""
        removed: list[Item] = []
        for owner, queue in list(self._queues.items()):
            removed += filter(unwanted, queue)
            kept = deque(item for item in queue if not unwanted(item))
            if kept:
                self._queues[owner] = kept
            else:
                del self._queues[owner]
        return removed
