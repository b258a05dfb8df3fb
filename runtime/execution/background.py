"""Compilation of programs in a background thread, while the devices run other programs."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

# Python's thread switch interval once a compiler thread has started; the default is ten times as long.
_SWITCH_SECONDS = 0.0005


@dataclass(frozen=True)
class Compiled:
    """The result of one compile task.

    Attributes:
      name: name of the task.
      seconds: time that it took.
      fingerprint: hash of the compiled programs, as the task returned it; None if the task failed.
      error: why the task failed; empty if it did not.
    """

    name: str
    seconds: float
    fingerprint: str | None
    error: str = ""


class BackgroundCompiler:
    """Runs compile tasks one after another in a background thread.

    Attributes:
      done: results of the finished tasks, in order.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self.done: list[Compiled] = []
        self._tasks: queue.SimpleQueue[tuple[str, Callable[[], str], threading.Event] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="compiler", daemon=True)
        self._thread.start()

    def put(self, name: str, task: Callable[[], str]) -> threading.Event:
        """Queue a task, which compiles programs and returns their fingerprint.

        Returns:
          An event that is set when the task is done or has failed.
        """
        finished = threading.Event()
        self._tasks.put((name, task, finished))
        return finished

    @property
    def running(self) -> bool:
        """Whether the thread has not ended yet. It cannot be ended while a task is in C++ code."""
        return self._thread.is_alive()

    def stop(self, timeout: float) -> None:
        """Start no more tasks, and wait up to ``timeout`` seconds for the current one; see :attr:`running`."""
        self._stopped.set()
        self._tasks.put(None)
        self._thread.join(timeout)

    def _work(self) -> None:
        # Tracing holds Python's GIL. With a shorter switch interval, the thread that runs rows gets it sooner.
        sys.setswitchinterval(_SWITCH_SECONDS)
        while (given := self._tasks.get()) is not None and not self._stopped.is_set():
            name, task, finished = given
            start = time.perf_counter()
            fingerprint, error = None, ""
            try:
                fingerprint = task()
            except Exception as failure:  # a failed task is reported, and the other tasks continue
                error = f"{type(failure).__name__}: {failure}"
            self.done.append(Compiled(name, time.perf_counter() - start, fingerprint, error))
            finished.set()
