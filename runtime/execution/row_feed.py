"""The order in which rows that are all known in advance get slots, and how many of them run at a time."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Sequence

from runtime.execution.requests import RequestHandle, RowFinished
from runtime.execution.scheduler import Scheduler
from runtime.execution.selection import RowClass

# Number of rows that are queued together. There may be millions of rows, and queueing all of them takes seconds.
QUEUED_ROWS = 4096


class RowFeed:
    """Queues rows in a scheduler class by class, a part of them at a time.

    While a class has unfinished rows, as many rows run as its bucket holds. Once all its rows have started, rows of the
    next class take its free slots.
    """

    def __init__(
        self, classes: Sequence[RowClass], handle: Callable[[Sequence[int]], RequestHandle], skip: Collection[int] = ()
    ) -> None:
        """Create a feed of all rows except ``skip``; ``handle`` makes the handle of the rows with these numbers."""
        rows = [[number for number in one.rows if number not in skip] for one in classes]
        self._handle = handle
        self._numbers = list(itertools.chain(*rows))
        self._ends = list(itertools.accumulate(map(len, rows)))
        self._left = list(map(len, rows))
        self._sizes = [one.bucket.rows for one in classes]
        self._queued, self._starts = 0, dict[RequestHandle, int]()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._numbers)

    @property
    def most_rows(self) -> int:
        """How many rows may run at a time now."""
        return next((size for size, left in zip(self._sizes, self._left, strict=True) if left), self._sizes[-1])

    def top_up(self, scheduler: Scheduler, least: int) -> None:
        """Queue further rows until at least ``least`` are waiting, or none is left."""
        while scheduler.waiting < least and self._queued < len(self._numbers):
            start, self._queued = self._queued, min(len(self._numbers), self._queued + QUEUED_ROWS)
            handle = self._handle(self._numbers[start : self._queued])
            self._starts[handle] = start
            scheduler.add(handle)

    def finish(self, event: RowFinished) -> int:
        """Take note that a row is done, and return its number."""
        place = self._starts[event.handle] + event.index
        self._left[bisect.bisect_right(self._ends, place)] -= 1
        return self._numbers[place]
