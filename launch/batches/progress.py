"""The progress of a batch, as lines on standard error."""

from __future__ import annotations

import time

from launch.process.startup import say
from runtime import SchedulerStats

SECONDS_BETWEEN_REPORTS = 10.0


class ProgressReport:
    """Prints the progress of a batch on standard error."""

    def __init__(self, stats: SchedulerStats, rows: int) -> None:
        """Report on ``rows`` rows, from the counters of their scheduler."""
        self._stats, self._rows = stats, rows
        self._start = self._last = time.monotonic()

    def print_if_due(self) -> None:
        """Print the progress if ``SECONDS_BETWEEN_REPORTS`` seconds have passed since the last line."""
        if time.monotonic() - self._last >= SECONDS_BETWEEN_REPORTS:
            self.print()

    def print(self) -> None:
        """Print one line: rows and tokens, both also per second, the share of busy slots, and the time left."""
        self._last = time.monotonic()
        stats, seconds = self._stats, max(self._last - self._start, 1e-9)
        left = self._rows - stats.rows
        remaining = ""
        if left and stats.rows:
            minutes, rest = divmod(round(seconds / stats.rows * left), 60)
            remaining = f", about {minutes // 60}:{minutes % 60:02}:{rest:02} left"
        say(
            f"{stats.rows}/{self._rows} rows, {stats.rows / seconds:.2f} rows/s, "
            f"{stats.tokens / seconds:.1f} tokens/s, slots {100 * stats.utilisation:.0f}% busy{remaining}"
        )
