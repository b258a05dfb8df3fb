"""Statistics of the scheduler: rows, passes, and how many of the computed positions were useful."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SchedulerStats:
    """Statistics of the scheduler.

    Attributes:
      rows: number of finished rows.
      tokens: number of tokens committed in finished rows, up to the rows' ends.
      forwards: number of forward passes, prefills included.
      accepted_steps: steps of finished rows that drafts allowed, see :class:`runtime.execution.result.DraftStats`.
      slot_iterations: iterations times slots, summed over all buckets.
      busy_iterations: iterations of finished and aborted rows, summed over the rows. Where iterations may go on after a
        row's end (offline), those of a finished row in which it committed a token.
      in_flight_iterations: iterations of the rows that are still in slots.
      computed_positions: iterations times positions of all canvases, summed over all buckets.
      busy_positions: busy iterations times positions of the row's canvases, without those beyond its bucket.
      in_flight_positions: the same for all iterations of the rows that are still in slots.
      moves: number of times that a row moved from one slot to another.
    """

    rows: int = 0
    tokens: int = 0
    forwards: int = 0
    accepted_steps: int = 0
    slot_iterations: int = 0
    busy_iterations: int = 0
    in_flight_iterations: int = 0
    computed_positions: int = 0
    busy_positions: int = 0
    in_flight_positions: int = 0
    moves: int = 0

    @property
    def utilisation(self) -> float:
        """Fraction of slot iterations that were useful; 1 if there were none."""
        busy = self.busy_iterations + self.in_flight_iterations
        return busy / self.slot_iterations if self.slot_iterations else 1.0

    @property
    def useful_positions(self) -> int:
        """Number of computed positions that belong to active rows, without padding."""
        return self.busy_positions + self.in_flight_positions

    @property
    def useful_share(self) -> float:
        """Fraction of the computed positions that are useful; 1 if there were none."""
        return self.useful_positions / self.computed_positions if self.computed_positions else 1.0
