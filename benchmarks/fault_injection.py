"""Fault injection: run ``launch.generate`` with a fault on one host, for :mod:`benchmarks.faults` and tests.

python -m benchmarks.fault_injection --fault=kill --fault_host=1 ...the flags of launch.generate

The fault happens between two reports of progress. Immediately before it, the process prints ``FAULT <seconds since
1970>`` to standard error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

from absl import flags

from launch import generate
from launch.display import canvas_view
from launch.process.startup import Report, progress_bar, run_launcher, this_host

_PIECES_BEFORE = 3


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _lose() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)  # kills the supervisor too, as if the machine had failed


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _freeze() -> None:
    os.kill(os.getppid(), signal.SIGSTOP)  # the supervisor, which then reports nothing


def _raise() -> None:
    raise RuntimeError("the disk is on fire")


def _sleep() -> None:
    time.sleep(3600)


def _terminate() -> None:
    os.kill(os.getppid() if this_host().count > 1 else os.getpid(), signal.SIGTERM)
    time.sleep(0.5)


def _interrupt() -> None:
    os.kill(os.getppid() if this_host().count > 1 else os.getpid(), signal.SIGINT)
    time.sleep(0.5)


def _terminate_twice() -> None:
    _terminate()
    _terminate()
    time.sleep(3600)


FAULTS: dict[str, Callable[[], None]] = {
    "kill": _kill,
    "lose": _lose,
    "stop": _stop,
    "freeze": _freeze,
    "abort": os.abort,
    "exception": _raise,
    "stuck": _sleep,
    "drain": _terminate,
    "end": _terminate_twice,
    "interrupt": _interrupt,
}


def define_flags(values: flags.FlagValues) -> None:
    """Define the flags of this command."""
    generate.define_flags(values)
    flags.DEFINE_enum("fault", None, list(FAULTS), "Fault to inject.", flag_values=values)
    flags.DEFINE_integer("fault_host", 0, "Host on which to inject it.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Run ``launch.generate`` with the fault."""

    @contextlib.contextmanager
    def with_fault(title: str, *, of_bytes: bool = False) -> Iterator[Report]:
        pieces = 0
        with progress_bar(title, of_bytes=of_bytes) as report:

            def reported(done: int, total: int) -> None:
                nonlocal pieces
                report(done, total)
                pieces += not of_bytes
                if values.fault and pieces == _PIECES_BEFORE and this_host().process_index == values.fault_host:
                    print(f"FAULT {time.time()}", file=sys.stderr, flush=True)
                    FAULTS[values.fault]()

            yield reported

    canvas_view.progress_bar = with_fault
    generate.main(values)
    if this_host().draining():
        print(f"DRAINED {this_host().process_index}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
