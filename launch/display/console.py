"""Consoles for tables."""

from __future__ import annotations

import sys

from rich.console import Console


class PipedConsole(Console):
    """Standard output, where a pipe gets whole lines.

    If nobody reads the pipe any more, printing raises BrokenPipeError, as everywhere else, and the command ends with 0.
    """

    def __init__(self, width: int) -> None:
        """Create a console as wide as the terminal, or with lines of ``width`` characters if there is none."""
        super().__init__(width=None if sys.stdout.isatty() else width)

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled; rich would end the process with 1."""
        raise
