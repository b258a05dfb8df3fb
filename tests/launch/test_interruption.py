"""Ctrl-C and SIGTERM while a command does not react: its process ends within its own limit."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

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
