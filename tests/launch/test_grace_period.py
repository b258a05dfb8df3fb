"""A process that receives SIGTERM ends within its grace period, even if something hangs."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

HANGS = """
import threading, time
from launch.hosts.host import Host
with Host() as host:
    host.mark()
    host.end_within({seconds})
    threading.Thread(target=time.sleep, args=(600,)).start()  # the end of Python would wait for it
    print("begun", flush=True)
    {work}
"""


@pytest.mark.parametrize("work", ["time.sleep(600)", "threading.Lock().acquire() and threading.Event().wait()"])
def test_what_hangs_is_ended(work: str) -> None:
    command = [sys.executable, "-c", HANGS.format(seconds=0.5, work=work)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 42
    assert "not ended within 0 s after SIGTERM; a restart may help" in err
    assert "Thread" in err, "the stacks"
