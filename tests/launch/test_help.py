"""``--help`` shows the flags that people need first, ``--helpfull`` all of them, in every command."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys

import pytest
from absl import flags

from launch.main import LAUNCHERS

MOST_FLAGS = 13
# absl's own, which it adds to the help of all flags.
_SPECIAL = {"flagfile", "undefok"}


def shown(capsys: pytest.CaptureFixture[str], command: str, flag: str) -> tuple[list[str], str]:
    """Run a command with a help flag. Returns the names of the flags that it shows, in order, and what it prints."""
    with contextlib.suppress(SystemExit):  # `local` exits with the code of its processes
        importlib.import_module(f"launch.{command}").run([f"diffumesh {command}", flag])
    text = capsys.readouterr().out
    return re.findall(r"^  --(?:\[no\])?(\w+):", text, re.MULTILINE), text


@pytest.mark.parametrize("command", LAUNCHERS)
def test_help_is_short_and_helpfull_is_full(capsys: pytest.CaptureFixture[str], command: str) -> None:
    values = flags.FlagValues()
    importlib.import_module(f"launch.{command}").define_flags(values)
    first, text = shown(capsys, command, "--help")
    every, _ = shown(capsys, command, "--helpfull")
    assert set(every) - _SPECIAL == set(values)
    assert set(first) <= set(every)
    assert len(first) == len(set(first)) <= MOST_FLAGS
    assert "Not available" not in text
    if not set(values) <= set(first):
        assert text.endswith(f"\n{len(values) - len(first)} more flags: --helpfull\n")


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("generate", {"prompt", "prompt_file", "chat", "checkpoint", "mesh", "max_new_tokens", "temperature", "watch"}),
        ("batch", {"input", "output_dir", "checkpoint", "mesh", "max_new_tokens"}),
        ("serve", {"checkpoint", "mesh", "host", "port", "api_key_file", "canvas", "slots"}),
        ("convert", {"source", "output", "overwrite", "dtype", "quantize"}),
        ("export", {"checkpoint", "output", "overwrite"}),
        ("plan", {"model", "checkpoint", "topology", "mesh", "batch", "prompt", "new_tokens", "price_per_chip_hour"}),
        ("doctor", {"checkpoint", "mesh", "devices"}),
    ],
)
def test_help_shows_what_is_needed_first(capsys: pytest.CaptureFixture[str], command: str, needed: set[str]) -> None:
    first, text = shown(capsys, command, "--help")
    assert needed <= set(first)
    assert f"  diffumesh {command} --" in text, "an example"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["models", "--help"], ["models", "--version"]])
def test_help_that_nobody_reads_to_the_end(arguments: list[str]) -> None:
    """As with `diffumesh --help | head`, whose pipe is closed early."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "launch.main", *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
