"""The policy of continuous batching: the order of an owner's waiting rows, and how long each bucket runs in a step.

``move_gain`` says when a move pays; :mod:`runtime.execution.assignment` decides which rows move. Owners get free slots
in turn (:mod:`runtime.execution.fair_queue`), and ``Scheduler.expire`` aborts requests after their deadline. Decisions
are pure, so every host makes the same, and no token of a row depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.execution.requests import ScheduledRow

# The canvas of a new row is fetched after each of its first iterations, at most this many, until a token has been seen.
_FIRST_FETCHES = 2


@dataclass(frozen=True)
class BucketStatus:
    """What is known of an open bucket before a step.

    Attributes:
      received: seconds of device time that each of its rows has received.
      seconds: estimated duration of an iteration; 0 if unknown.
      new: whether it has a row whose first token is awaited.
      until_end: iterations until so many rows end that others change; ``max_iterations`` if none do.
    """

    received: float
    seconds: float
    new: bool
    until_end: int


@dataclass(frozen=True)
class SchedulerPolicy:
    """Decides what a step does.

    Attributes:
      max_iterations: maximum number of iterations of a bucket per step.
      step_seconds: approximate duration of a step. None runs ``max_iterations`` of every bucket.
      first_tokens: whether to report the first token of every row, even of rows that are not streamed.
      chunks: prompt chunks that each ``data`` shard of a bucket reads per step, so that a long prompt does not delay
        the bucket's other rows; None for no limit.
      move_gain: rows move only if a pass over all rows gets cheaper by at least this fraction.
      most_rows: maximum number of rows of a pool that run at a time; None for all its slots.
    """

    max_iterations: int = 16
    step_seconds: float | None = 0.05
    first_tokens: bool = True
    chunks: int | None = 1
    move_gain: float = 0.1
    most_rows: int | None = None

    def rank(self, row: ScheduledRow, seconds: float) -> float:
        """Return when a row would end that starts on arrival and runs alone, for an estimated number of seconds.

        Low ranks come first, so a short row does not wait for a long one that arrived just before it.
        """
        return row.handle.arrived + (seconds if self.step_seconds else 0.0)

    def awaits_first_token(self, row: ScheduledRow) -> bool:
        """Return whether the next iteration may show the first token of a new row, and somebody waits for it."""
        new = not row.unread and not row.prefix and row.iterations < _FIRST_FETCHES
        return new and (row.handle.stream or self.first_tokens)

    def iterations(self, buckets: Mapping[tuple[int, int], BucketStatus]) -> dict[tuple[int, int], int]:
        """Return how many iterations each bucket runs in the next step. One that is left out does not run.

        Buckets whose rows have received the least device time come first, so a long row gets as much time as a short
        one. A bucket with a new row comes before all others, unless its rows are ahead of others by more than a step:
        new rows must not keep others waiting. Each runs for its share of the step, but stops when a row ends, and
        while a row is new, after one iteration.
        """
        most = {key: min(self.max_iterations, 1 if one.new else one.until_end) for key, one in buckets.items()}
        if self.step_seconds is None:
            return most
        left, found = self.step_seconds, dict[tuple[int, int], int]()
        latest = left + min((one.received for one in buckets.values()), default=0.0)
        turns = sorted((not one.new or one.received > latest, one.received, key) for key, one in buckets.items())
        for place, (_, _, key) in enumerate(turns):
            seconds = buckets[key].seconds
            if found and (seconds > left or not seconds):
                break
            share = left / (len(turns) - place)
            found[key] = max(1, min(most[key], int(share / seconds))) if seconds else 1
            left -= found[key] * seconds
        return found
