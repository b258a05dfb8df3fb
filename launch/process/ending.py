"""The end of a process in which a thread is still in C++ code, such as a compiler that takes minutes.

While Python finalizes itself, a thread that returns from C++ to Python is ended, and C++ then aborts the process. The
process therefore exits before Python is finalized.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

from launch.process.streams import flush_output, prepare_streams

_busy: list[Callable[[], bool]] = []
_code: int | None = None


def begin_output() -> None:
    """Prepare the streams for a command, and forget what was registered before it."""
    global _code
    prepare_streams()
    _busy.clear()
    _code = None


def end_at_once_if(busy: Callable[[], bool]) -> None:
    """If ``busy`` returns true when the command has ended, end the process without finalization of Python.

    What is registered with :mod:`atexit` runs all the same.
    """
    _busy.append(busy)


def end_output() -> None:
    """Flush standard output at the end of a command, whose exception is being handled, if it has one."""
    global _code
    flush_output()
    if any(busy() for busy in _busy):
        error = sys.exc_info()[1]
        code = error.code if isinstance(error, SystemExit) else 0 if error is None else 1
        _code = code if isinstance(code, int) else 0 if code is None else 1


# Functions are called in reverse order, so this one, which is registered before any device is used, is called last.
@atexit.register
def _end() -> None:
    if _code is not None:
        flush_output()
        sys.stderr.flush()
        os._exit(_code)
