"""Who waits for a slot, and whose turn it is: first come first served for each owner, owners in turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Waiting(Generic[Item]):
    """A queue that is fair among owners. Not for several threads at a time."""

    def __init__(self) -> None:
        self._queues: OrderedDict[Hashable, deque[Item]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, owner: Hashable, item: Item) -> None:
        """To the end of the owner's queue; an owner who had none comes after all others."""
        self._queues.setdefault(owner, deque()).append(item)

    def take(self) -> Item | None:
        """The next one; its owner comes last then. None where nobody waits."""
        if not self._queues:
            return None
        owner, queue = next(iter(self._queues.items()))
        item = queue.popleft()
        self._queues.move_to_end(owner)
        if not queue:
            del self._queues[owner]
        return item

    def drop(self, unwanted: Callable[[Item], bool]) -> list[Item]:
        """Take out those that are not wanted any more."""
        found: list[Item] = []
        for owner, queue in list(self._queues.items()):
            found += filter(unwanted, queue)
            kept = deque(item for item in queue if not unwanted(item))
            if kept:
                self._queues[owner] = kept
            else:
                del self._queues[owner]
        return found
