"""Ctrl-C and SIGTERM during a generation: rows end early, and the text so far is printed."""

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
from launch.hosts.host import SECONDS_TO_STOP
from launch.process.startup import SECONDS_TO_END, Report, this_host
from runtime import StopTest

# Seconds for which rows go on after SIGTERM, so that a short generation finishes normally.
SECONDS_TO_FINISH = 1.5
_SECONDS_BETWEEN_LOOKS = 0.1


class Interruption:
    """A context manager around a generation that ends its rows on Ctrl-C or SIGTERM.

    Before it, :func:`launch.process.startup.start_devices` is called with ``end_within=0``: there is no text to print.
    Rows end at their next stop test, which runs every few steps. After SIGTERM, they first have some seconds to finish.
    If a step takes too long for that, the tokens of the last stop test are printed and the process exits. On several
    hosts, the process of host 0 does so after a signal on any host, and its end ends the others.

    Attributes:
      signal: the signal received; None if there was none.
      cut_short: whether rows were ended early.
    """

    def __init__(self, rows: int, show: Callable[[Sequence[Sequence[int]]], int]) -> None:
        """Take the number of rows, and a function for a generation that is too slow to end.

        It is called with the new tokens of each row, prints their text and returns its number of tokens.
        """
        self.signal: signal.Signals | None = None
        self._show = show
        self._latest: list[Sequence[int]] = [() for _ in range(rows)]
        self.cut_short = self._over = False
        self._ending = threading.Lock()
        self._begun = self._heard = 0.0
        self._steps = "0 steps"
        self._before: Any = None

    def __enter__(self) -> Interruption:
        if this_host().count == 1 and this_host().interrupted:
            raise KeyboardInterrupt  # Python dropped the first one: it came in a callback of the garbage collector
        self._begun = time.monotonic()
        this_host().end_within(SECONDS_TO_END, interruptible=True)
        if threading.current_thread() is threading.main_thread() and this_host().process_index == 0:
            if this_host().count == 1:
                self._before = signal.signal(signal.SIGINT, self._hear)
            threading.Thread(target=self._watch, name="interruption", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._ending:  # while the other thread prints and exits, this one waits
            self._over = True
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    @property
    def exit_code(self) -> int:
        """The exit code after an interruption: 130 for Ctrl-C, 42 for SIGTERM."""
        return _exit_code(self.signal)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self._note(signal.Signals(number))
        print("stopping: the text so far follows; a second Ctrl-C stops at once", file=sys.stderr, flush=True)

    def _note(self, heard: signal.Signals) -> None:
        self.signal, self._heard = heard, self._heard or time.monotonic()

    def _watch(self) -> None:
        """Print the tokens so far and exit if the generation does not end in time.

        The main thread may be in code in C, so this does not rely on its signal handlers. On several hosts, ``signal``
        must change on all of them at the same report, so it is not set here.
        """
        heard: signal.Signals | None = None
        while not self._over:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            if heard is None:
                heard = self._received()
                self._heard = self._heard or (0.0 if heard is None else time.monotonic())
            if heard is None or time.monotonic() - self._heard < SECONDS_TO_STOP - 1 or self._over:
                continue
            with self._ending:
                if not self._over:
                    self._end(heard)

    def _received(self) -> signal.Signals | None:
        """Return the signal that ends the generation, on any host. None if there was none."""
        if this_host().interrupted:
            return signal.SIGINT
        return signal.SIGTERM if this_host().any_terminated else self.signal

    def _end(self, heard: signal.Signals) -> None:
        """Print the tokens so far, and exit even if that fails: the reader of a pipe may be gone."""
        try:
            said = f"after {self._steps}, before there was any text"
            if any(self._latest):
                tokens = self._show(self._latest)
                seconds = time.monotonic() - self._begun
                said = (
                    f"in a long step after {self._steps}: {tokens} tokens of text before the first open position in "
                    f"{seconds:.2f} s"
                )
            sys.stdout.flush()
            print(f"stopped by {heard.name} {said}", file=sys.stderr, flush=True)
        finally:
            os._exit(_exit_code(heard))

    def stop_tests(self, tests: Sequence[StopTest | None]) -> list[StopTest | None]:
        """Wrap the rows' stop tests, so that they end every row once the generation is interrupted."""

        def watched(row: int, test: StopTest | None) -> StopTest:
            def is_over(tokens: Sequence[int], whole: bool) -> int | None:
                self._latest[row] = tokens
                found = test(tokens, whole) if test is not None else None
                return len(tokens) if found is None and self.cut_short else found

            return is_over

        return [watched(row, test) for row, test in enumerate(tests)]

    def report(self, progress: Report) -> Report:
        """Wrap a progress report, so that all hosts together also check whether to stop."""

        def ask(done: int, total: int) -> None:
            progress(done, total)
            self._steps = f"{done} of {total} steps"
            if this_host().draining() and self.signal is None:
                interrupted = any(this_host().gather("interrupted", this_host().interrupted))
                self._note(signal.SIGINT if interrupted else signal.SIGTERM)
            if self.signal == signal.SIGTERM:
                # Host 0's clock decides for all hosts.
                self.cut_short = bool(
                    this_host().gather("interruption", time.monotonic() - self._heard > SECONDS_TO_FINISH)[0]
                )
            elif self.signal is not None:
                self.cut_short = True

        return ask


def _exit_code(heard: signal.Signals | None) -> int:
    return EXIT_INTERRUPTED if heard == signal.SIGINT else EXIT_RESTART
