"""Ctrl-C and SIGTERM during a generation: its rows end where they are, so that what there is can be printed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from launch.hosts.faults import EXIT_INTERRUPTED, EXIT_RESTART
from launch.process.startup import Report, this_host
from runtime import StopTest

# A generation that was asked to stop lasts no longer than this.
SECONDS_TO_STOP = 5.0
# After SIGTERM rows may go on for so long: a short generation is finished, and ends as if nothing had happened.
SECONDS_TO_FINISH = 2.5
_SECONDS_BETWEEN_LOOKS = 0.1


class Interruption:
    """Ends the rows of a generation when somebody asks for it; a context manager around the generation.

    Rows end where their stop tests are asked, every few steps. Where a step takes too long for that, what the last look
    saw is shown and the process ended.

    Attributes:
      signal: what was heard; None while nothing was.
      cut_short: whether rows were ended for it.
    """

    def __init__(self, rows: int, show: Callable[[Sequence[Sequence[int]]], None]) -> None:
        """Take the number of rows, and what prints their new tokens where the generation itself cannot."""
        self.signal: signal.Signals | None = None
        self._show = show
        self._latest: list[Sequence[int]] = [() for _ in range(rows)]
        self.cut_short = self._over = False
        self._heard = 0.0
        self._before: Any = None

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread() and this_host().count == 1:
            self._before = signal.signal(signal.SIGINT, self._hear)
            threading.Thread(target=self._watch, name="interruption", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    @property
    def exit_code(self) -> int:
        """Of a process that was stopped so: as a shell has it for Ctrl-C, and one that asks for a restart otherwise."""
        return EXIT_INTERRUPTED if self.signal == signal.SIGINT else EXIT_RESTART

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self._note(signal.Signals(number))
        print("stopping: what there is follows; a second Ctrl-C stops at once", file=sys.stderr, flush=True)

    def _note(self, heard: signal.Signals) -> None:
        self.signal, self._heard = heard, time.monotonic()

    def _watch(self) -> None:
        """Show what there is and end the process, where the generation does not end in time."""
        while not self._over:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            if self.signal is None and this_host().draining():
                self._note(signal.SIGTERM)
            if self.signal is None or time.monotonic() - self._heard < SECONDS_TO_STOP - 1 or self._over:
                continue
            if any(self._latest):
                self._show(self._latest)
            sys.stdout.flush()
            when = "in a long step" if any(self._latest) else "before there was anything"
            print(f"stopped by {self.signal.name} {when}", file=sys.stderr, flush=True)
            os._exit(self.exit_code)

    def stop_tests(self, tests: Sequence[StopTest | None]) -> list[StopTest | None]:
        """The rows' stop tests, which end every row once the generation is to stop."""

        def watched(row: int, test: StopTest | None) -> StopTest:
            def is_over(tokens: Sequence[int], whole: bool) -> int | None:
                self._latest[row] = tokens
                found = test(tokens, whole) if test is not None else None
                return len(tokens) if found is None and self.cut_short else found

            return is_over

        return [watched(row, test) for row, test in enumerate(tests)]

    def report(self, progress: Report) -> Report:
        """A progress report that also asks, on all hosts alike, whether to stop."""

        def ask(done: int, total: int) -> None:
            progress(done, total)
            if this_host().draining() and self.signal is None:
                self._note(signal.SIGTERM)
            if self.signal == signal.SIGTERM:
                # The first host's clock decides for all.
                self.cut_short = bool(
                    this_host().gather("interruption", time.monotonic() - self._heard > SECONDS_TO_FINISH)[0]
                )
            elif self.signal is not None:
                self.cut_short = True

        return ask
