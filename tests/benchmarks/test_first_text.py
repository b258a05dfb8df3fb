"""Time from the shell to the text of `diffumesh generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import launch
from benchmarks import first_text
from benchmarks.first_text import GOALS, Run, console_command, first_text_table, measure, run
from sharding.errors import InputError


def test_the_first_byte_and_the_end_are_timed() -> None:
    script = "import sys, time; print('a', flush=True); time.sleep(0.3); print('b')"
    made = run([sys.executable, "-c", script])
    assert made.text == "a\nb\n"
    assert made.end_seconds - made.text_seconds >= 0.2


@pytest.mark.parametrize("script", ["raise SystemExit('no such model')", "pass"])
def test_a_command_that_fails_or_prints_nothing(script: str) -> None:
    with pytest.raises(InputError, match="no such model" if "raise" in script else "exit code 0"):
        run([sys.executable, "-c", script])


def test_cold_runs_have_empty_caches_and_warm_ones_a_filled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = []

    def generate(command: list[str]) -> Run:
        assert command[:3] == ["/bin/diffumesh", "generate", "--prompt=def f():"]
        cache = Path(command[-1].removeprefix("--compile_cache="))
        was_filled = cache.exists()
        cache.mkdir(exist_ok=True)
        filled.append(was_filled)
        return Run(1.0 if was_filled else 9.0, 10.0, "def f():")

    monkeypatch.setattr(first_text, "run", generate)
    monkeypatch.setattr(first_text, "console_command", lambda: "/bin/diffumesh")
    found = measure("def f():", 2)
    # The first run fills the cache and is not timed.
    assert filled == [False, False, True, False, True]
    assert found["same_text"]
    assert found["warm"]["text"]["each"] == [1.0, 1.0]
    assert [found[kind]["met"] for kind in GOALS] == [False, True]
    record: dict[str, Any] = {
        "kind": "measured", "command": "python -m benchmarks.first_text",
        "settings": {"trials": 2, "timed": "diffumesh generate"},
        "machine": {"cores": 2, "processor": "Some CPU"}, "results": found, "notes": [],
    }  # fmt: skip
    lines = first_text_table(record).splitlines()
    assert lines[2] == "| cold | 9.00 (9.00 to 9.00) | 10.00 (10.00 to 10.00) | 3 | NO |"
    assert "All runs printed the same text." in lines[-1]
    assert "2 runs of `diffumesh generate` each" in lines[-1]


def test_the_installed_command_runs_this_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A console command's first entry of Python's path is its own folder.
    script = tmp_path / "script.py"
    script.write_text("import launch; print(launch.__file__)")
    monkeypatch.chdir(tmp_path)
    assert Path(run([sys.executable, str(script)]).text.strip()) == Path(launch.__file__)
    monkeypatch.setattr(first_text.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(InputError, match="pip install -e"):
        console_command()
    (tmp_path / "diffumesh").touch(0o755)
    assert console_command() == str(tmp_path / "diffumesh")
