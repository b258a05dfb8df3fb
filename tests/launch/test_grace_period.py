"""A process that receives SIGTERM ends within its grace period, even if something hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
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
    ("command", "more"),
    [
        ("generate", ["--prompt=x"]),
        ("batch", ["--input={folder}/in.jsonl", "--output_dir={folder}/out"]),
        ("serve", ["--port=0", "--grace=0.2"]),
    ],
)
def test_weights_that_never_load(command: str, more: list[str], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "1", "prompt": "x"}\n')
    common = ["--devices=1", "--max_new_tokens=4", f"--compile_cache={tmp_path / 'compiled'}"]
    arguments = [command, *(one.format(folder=tmp_path) for one in more), *common]
    assert "did not end within 0 s after SIGTERM" in ended(LOADS.format(command=command, arguments=arguments))
