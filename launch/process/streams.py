"""The standard streams of a command: closed or full ones do not change how the command ends."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

from launch.hosts.messages import printable

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # in the order of their descriptors


class _Lossy(io.FileIO):
    """A file that discards what cannot be written."""

    def write(self, data: Any, /) -> int:
        """Write bytes, and claim that all are written if the file takes none."""
        with contextlib.suppress(OSError):
            if (written := super().write(data)) is not None:
                return written
        return memoryview(data).nbytes


def prepare_streams() -> None:
    """Open the null device in place of closed standard streams, and discard what standard error does not take.

    Standard output is UTF-8 in every locale, as JSON has to be, so that any text can be printed. Without the null
    device, a message that cannot be printed would replace the exit code, and the next file that is opened would get the
    descriptor of standard output, to which libraries in C++ write.
    """
    for descriptor, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle == descriptor:
                os.set_inheritable(handle, True)
            setattr(sys, name, os.fdopen(handle, mode, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    errors = sys.__stderr__
    if errors is not None and sys.stderr is errors:
        raw = _Lossy(errors.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=errors.encoding, errors="backslashreplace", line_buffering=True
        )


def tell(message: str) -> None:
    """Print a message on standard error, with the control characters of names and texts in it escaped."""
    print(printable(message), file=sys.stderr)


def flush_output() -> None:
    """Flush standard output, or discard what it cannot take."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()


def drop_output() -> None:
    """Discard the rest of standard output; otherwise Python would fail again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
