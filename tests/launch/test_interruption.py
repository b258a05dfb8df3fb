"""Ctrl-C and SIGTERM while a command does not react: its process ends within its own limit."""

from __future__ import annotations

import os
import queue
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from launch.hosts import host
from launch.process import interruption

# What the guides promise for `generate`, on one host and on several.
LIMIT = 5.0

# A function in C that waits for itself: meanwhile, Python runs no handler of a signal.
HANGS_IN_C = """
import ctypes
def hang():
    lock = ctypes.CDLL(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(64)
    lock(mutex), lock(mutex)
"""


@pytest.mark.parametrize(
    ("number", "hosts", "code"), [(signal.SIGINT, 1, 130), (signal.SIGTERM, 1, 42), (signal.SIGTERM, 2, 42)]
)
def test_a_generation_that_hangs_is_ended(number: signal.Signals, hosts: int, code: int) -> None:
    """If a step takes too long, the last canvas is printed and the process ends, on host 0 of several too."""
    program = f"""{HANGS_IN_C}if True:
        import os, signal, threading
        from launch.process import interruption, startup
        interruption.SECONDS_TO_STOP = 1.3
        startup.this_host().count = {hosts}
        def show(rows):
            print([list(row) for row in rows])
            return 4
        with startup.this_host(), interruption.Interruption(2, show) as found:
            tests = found.stop_tests([None, None])
            assert [test((1, 2), False) for test in tests] == [None, None]
            found.report(lambda done, total: None)(3, 9)
            startup.this_host().mark()  # work is in flight, so SIGTERM lets it end
            threading.Timer(0.2, os.kill, (os.getpid(), signal.{number.name})).start()
            hang()
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert done.stdout == "[[1, 2], [1, 2]]\n"
    said = (
        f"stopped by {number.name} in a long step after 3 of 9 steps: 4 tokens of text before the first open position"
    )
    assert re.search(rf"^{said} in \d+\.\d\d s$", done.stderr, re.M)


def test_ctrl_c_while_weights_load_in_c() -> None:
    """There is no text yet. The process ends even if the main thread does not return to Python."""
    program = f"""{HANGS_IN_C}if True:
        import os, signal, threading
        from launch.hosts import host
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        host.SECONDS_TO_STOP = 1.3
        with host.Host() as alone:
            alone.mark()
            alone.end_within(0)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            hang()
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "interrupted\n"


def test_a_generation_that_hangs_ends_even_if_its_text_cannot_be_printed() -> None:
    program = """if True:
        import signal, time
        from launch.process import interruption, startup
        interruption.SECONDS_TO_STOP = 1.3
        def show(rows):
            raise BrokenPipeError
        with startup.this_host(), interruption.Interruption(1, show) as found:
            found.stop_tests([None])[0]((1, 2), False)
            startup.this_host().mark()
            signal.raise_signal(signal.SIGINT)
            time.sleep(60)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130, done.stderr


class Clock:
    """A clock that goes on only while a thread waits, so that a deadline of seconds takes no time.

    Attributes:
      now: its time.
      exits: exit codes of the process, each with its time.
    """

    def __init__(self) -> None:
        self.now = 100.0
        self.exits: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        time.sleep(0.001)  # the thread goes on to wait after the exit, which is none here

    def exit(self, code: int) -> None:
        self.exits.put((code, self.now))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 42)])
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_generation_has_five_seconds_to_stop(
    number: signal.Signals, code: int, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host 0 prints and exits in time after a signal on any host, which arrives just after it has looked for one."""
    clock, told = Clock(), list[float]()
    first = SimpleNamespace(process_index=0, count=hosts, interrupted=False, any_terminated=False)
    first.end_within = lambda *arguments, **more: None

    def sleep(seconds: float) -> None:
        if clock.now > 107 and not told:
            told.append(clock.now)
            first.interrupted, first.any_terminated = number == signal.SIGINT, True
        clock.wait(seconds)

    monkeypatch.setattr(interruption, "this_host", lambda: first)
    monkeypatch.setattr(interruption, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    monkeypatch.setattr(interruption, "os", SimpleNamespace(**vars(os) | {"_exit": clock.exit}))
    with interruption.Interruption(1, lambda rows: 0):
        found, ended = clock.exits.get(timeout=60)
    assert found == code
    assert interruption.SECONDS_TO_FINISH < ended - told[0] <= LIMIT


@pytest.fixture
def deaf() -> Iterator[None]:
    """Python's handler of Ctrl-C does not interrupt this process, as if its main thread were in code in C."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("deaf")
def test_a_process_without_text_has_five_seconds_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, while weights load or programs compile."""
    clock = Clock()
    waits: list[float] = []

    def wait(pipes: list[int], writers: list[int], errors: list[int], seconds: float) -> Any:
        """Wait for the signal, and after the exit for the end of the test; between these, all waits are in vain."""
        if not waits or not clock.exits.empty():
            waits.append(seconds)
            return select.select(pipes, [], [])
        clock.wait(seconds)
        return [], [], []

    monkeypatch.setattr(host, "select", SimpleNamespace(select=wait))
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(host, "os", SimpleNamespace(**vars(os) | {"_exit": clock.exit}))
    with host.Host() as alone:
        alone.mark()
        alone.end_within(0)
        begun = clock.now
        signal.raise_signal(signal.SIGINT)
        deadline = time.monotonic() + 60
        while clock.exits.empty():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    code, ended = clock.exits.get()
    assert code == 130
    assert 0 < ended - begun <= LIMIT


# Python drops what a callback of its garbage collector raises, and JAX has such a callback.
SIGNAL_IN_A_CALLBACK = """if True:
    import gc, os, signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    def interrupt():
        gc.callbacks.append(lambda phase, info: (gc.callbacks.clear(), signal.raise_signal(signal.SIGINT)))
        gc.collect()
"""


@pytest.mark.parametrize(
    "program",
    [
        """
    import importlib
    from launch import main
    importlib.import_module = lambda name: interrupt()
    sys.argv = ["diffumesh", "generate"]
    main.run()
""",
        """
    import time
    from launch.process import interruption, startup
    with startup.this_host() as alone:
        interrupt()
        while not alone.interrupted:
            time.sleep(0.01)
        try:
            with interruption.Interruption(1, len):
                print("generating")
        except KeyboardInterrupt:
            sys.exit(130)
""",
    ],
    ids=["while modules are imported", "before a generation"],
)
def test_a_ctrl_c_that_python_drops(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNAL_IN_A_CALLBACK + program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 130, done.stderr
    assert done.stdout == ""
