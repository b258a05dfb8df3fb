"""Lines of progress for logs and pipes, which cannot show a bar."""

from __future__ import annotations

import threading
import time

import pytest

from checkpoints import CheckpointError, CheckpointFolder, open_folder
from launch import generate
from launch.folders import models
from launch.process import startup


def test_a_pipe_hears_how_far_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is printed even while no step is reported, for example during compilation."""
    monkeypatch.setattr(startup, "SECONDS_BETWEEN_LINES", 0.02)
    found = ""
    with startup.progress_bar("steps") as report:
        for done, line in ((None, "steps: 0:00:0"), (0, "steps: 0 of 9, "), (3, "steps: 3 of 9, ")):
            if done is not None:
                report(done, 9)
            end = time.monotonic() + 30
            while line not in found and time.monotonic() < end:
                found += capsys.readouterr().err
            assert line in found
    assert "left" in found


@pytest.mark.parametrize("flag", ["checkpoint", "draft_checkpoint"])
def test_a_pipe_hears_of_a_download(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "SECONDS_BETWEEN_LINES", 0.02)
    found, line = "", "opening someone/model: 0:00:0"

    def download(place: str, **options: object) -> CheckpointFolder:
        nonlocal found
        if place != "someone/model":
            return open_folder(place)
        end = time.monotonic() + 30
        while line not in found and time.monotonic() < end:
            found += capsys.readouterr().err
        raise CheckpointError("the connection broke")

    monkeypatch.setattr(models, "open_folder", download)
    with pytest.raises(SystemExit) as stopped:
        generate.run(["generate", "--prompt=def f(x):", f"--{flag}=someone/model"])
    assert line in found
    assert (stopped.value.code, "the connection broke" in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize("picture", [[], ["--watch"]])
def test_a_pipe_hears_of_a_generation(
    picture: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no terminal to draw the canvas on."""
    monkeypatch.setattr(startup, "SECONDS_BETWEEN_LINES", 0.0)
    arguments = ["--mesh=tensor=1", "--compile_cache=", "--max_new_tokens=4"]
    generate.run(["generate", "--prompt=def f(x):", *arguments, *picture])
    said = capsys.readouterr()
    assert "compiling and decoding, steps: " in said.err
    assert said.out.startswith("def f(x):")


def test_the_first_line_of_a_phase_counts_the_time_since_the_last_of_another(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(startup.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(startup.ProgressLines, "latest", 100.0)
    waits = []

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            now[0] += timeout
            return len(waits) % 3 == 0

    monkeypatch.setattr(startup.threading, "Event", Event)
    monkeypatch.setattr(startup, "say", lambda line: None)
    for title in ("loading", "compiling"):
        startup.ProgressLines(title, False).speak()
        now[0] -= 3.0  # the phase ended 3 seconds before its next line
    assert waits == [9.0, 9.0, 9.0, 3.0, 9.0, 9.0]
