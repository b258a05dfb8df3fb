"""A thread that compiles while rows run."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

# Between two turns of threads in the interpreter; Python's own are ten times as long.
_SWITCH_SECONDS = 0.0005


@dataclass(frozen=True)
class Compiled:
    """One thing that was compiled.

    Attributes:
      name: of it.
      seconds: that it took.
      fingerprint: of what was compiled, None where that failed.
      error: why it failed.
    """

    name: str
    seconds: float
    fingerprint: str | None
    error: str = ""


class BackgroundCompiler:
    """Compiles what it is given, one after another, in a thread of its own.

    Attributes:
      done: what has been compiled so far, in that order.
    """

    def __init__(self) -> None:
        """Start to wait."""
        self.done: list[Compiled] = []
        self._tasks: queue.SimpleQueue[tuple[str, Callable[[], str], threading.Event] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="compiler", daemon=True)
        self._thread.start()

    def put(self, name: str, task: Callable[[], str]) -> threading.Event:
        """Compile this too, after what was given before; ``task`` returns the fingerprint.

        Returns:
          What is set when it is done, or has failed.
        """
        finished = threading.Event()
        self._tasks.put((name, task, finished))
        return finished

    def stop(self, patience: float) -> None:
        """Begin nothing new, and wait so many seconds for what is being compiled."""
        self._stopped.set()
        self._tasks.put(None)
        self._thread.join(patience)

    def _work(self) -> None:
        # Tracing holds the interpreter: whoever runs rows meanwhile shall not wait long for each turn.
        sys.setswitchinterval(_SWITCH_SECONDS)
        while (given := self._tasks.get()) is not None and not self._stopped.is_set():
            name, task, finished = given
            start = time.perf_counter()
            fingerprint, error = None, ""
            try:
                fingerprint = task()
            except Exception as failure:  # what cannot be compiled is left out; the rest goes on
                error = f"{type(failure).__name__}: {failure}"
            self.done.append(Compiled(name, time.perf_counter() - start, fingerprint, error))
            finished.set()
