"""A process that receives SIGTERM ends within its grace period, even if something hangs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

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


LOADS = """
import time
from launch import {command}
from launch.process import startup
startup.SECONDS_TO_END = 0.5
{command}._ENDING_SECONDS = 0.3
def load(*arguments, **more):
    print("begun", flush=True)
    time.sleep(600)
{command}.load_engine = load
{command}.run({arguments})
"""


def ended(code: str) -> str:
    """Run a program, send SIGTERM once it has printed ``begun``, and return its standard error."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 42
    return err


@pytest.mark.parametrize("work", ["time.sleep(600)", "threading.Lock().acquire() and threading.Event().wait()"])
def test_what_hangs_is_ended(work: str) -> None:
    err = ended(HANGS.format(seconds=0.5, work=work))
    assert "did not end within 0 s after SIGTERM; a restart may help" in err
    assert "Thread" in err, "the stacks"


@pytest.mark.parametrize(
    ("command", "more", "said"),
    [
        # It has no text to print yet.
        ("generate", ["--prompt=x"], "stopped at once by SIGTERM before any work was in flight"),
        ("batch", ["--input={folder}/in.jsonl", "--output_dir={folder}/out"], "did not end within 0 s after SIGTERM"),
        ("serve", ["--port=0", "--grace=0.2"], "did not end within 0 s after SIGTERM"),
    ],
)
def test_weights_that_never_load(command: str, more: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "1", "prompt": "x"}\n')
    common = ["--devices=1", "--max_new_tokens=4", f"--compile_cache={tmp_path / 'compiled'}"]
    arguments = [command, *(one.format(folder=tmp_path) for one in more), *common]
    assert said in ended(LOADS.format(command=command, arguments=arguments))


@pytest.mark.slow
def test_a_long_generation_prints_what_there_is() -> None:
    """It would take minutes. It stops within 5 seconds; a busy machine may take longer to end the process."""
    command = [sys.executable, "-m", "launch.generate", "--mesh=tensor=1"]
    command += ["--prompt=def is_even(number):\n", "--max_new_tokens=1900", "--noearly_stop"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        killer = threading.Timer(180, process.kill)
        killer.start()
        try:
            until_said(process, r"steps: [1-9]\d* of 1900")
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            until_said(process, "stopped by SIGTERM")
            stopped = time.monotonic() - begun
            out, err = process.communicate(timeout=60)
            ended = time.monotonic() - begun
        finally:
            killer.cancel()
            process.kill()
    assert process.returncode == 42, err
    assert out.startswith("def is_even(number):\n")
    assert stopped <= 5  # printing begins after 4, and a busy machine needs some time for it
    assert ended < 20


def until_said(process: subprocess.Popen[str], pattern: str) -> None:
    """Read standard error up to the line that contains a pattern."""
    assert process.stderr is not None
    said: list[str] = []
    while not said or not re.search(pattern, said[-1]):
        said.append(process.stderr.readline())
        assert said[-1], "".join(said)
