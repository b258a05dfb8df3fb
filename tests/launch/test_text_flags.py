"""Texts from the command line that are not valid UTF-8: refused before devices start, not in the first answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checkpoints import DEMO
from launch import batch, serve
from tests.launch.mistakes import refusal

# What Python makes of the byte 0xff in an argument
BROKEN = os.fsdecode(b"m\xff")


@pytest.fixture(autouse=True)
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise AssertionError("devices were started")

    for command in (batch, serve):
        monkeypatch.setattr(command, "start_devices", fail)


def run_batch(tmp_path: Path, *arguments: str) -> None:
    (tmp_path / "input.jsonl").write_text('{"id": "1", "prompt": "a"}\n')
    batch.run(["batch", f"--input={tmp_path / 'input.jsonl'}", f"--output_dir={tmp_path / 'output'}", *arguments])


def test_the_name_of_a_served_model(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, lambda: serve.run(["serve", "--port=0", f"--served_model_name={BROKEN}"]))
    assert r"--served_model_name='m\udcff' is not valid UTF-8" in said


def test_a_stop_string(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, lambda: run_batch(tmp_path, "--stop=a", f"--stop={BROKEN}"))
    assert r"--stop='m\udcff' is not valid UTF-8" in said


def test_the_folder_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokenizers library cannot open such a path, and an answer cannot contain such a name."""
    folder = tmp_path / BROKEN
    try:
        folder.symlink_to(DEMO)
    except OSError:
        pytest.skip("names of this file system must be valid UTF-8")
    said = refusal(capsys, lambda: run_batch(tmp_path, f"--checkpoint={folder}"))
    assert "the folder's path is not valid UTF-8; rename the folder, or pass a link" in said
