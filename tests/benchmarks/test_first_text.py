"""Time from the shell to the text of `diffumesh generate`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import first_text
from benchmarks.first_text import GOALS, Run, first_text_table, measure, run
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
        assert command[1:4] == ["-m", "launch.generate", "--prompt=def f():"]
        cache = Path(command[-1].removeprefix("--compile_cache="))
        was_filled = cache.exists()
        cache.mkdir(exist_ok=True)
        filled.append(was_filled)
        return Run(1.0 if was_filled else 9.0, 10.0, "def f():")

    monkeypatch.setattr(first_text, "run", generate)
    found = measure("def f():", 2)
    # The first run fills the cache and is not timed.
    assert filled == [False, False, True, False, True]
    assert found["same_text"]
    assert found["warm"]["text"]["each"] == [1.0, 1.0]
    assert [found[kind]["met"] for kind in GOALS] == [False, True]
    record = {
        "kind": "measured", "command": "python -m benchmarks.first_text", "settings": {"trials": 2},
        "machine": {"cores": 2, "processor": "Some CPU"}, "results": found, "notes": [],
    }  # fmt: skip
    lines = first_text_table(record).splitlines()
    assert lines[2] == "| cold | 9.00 (9.00 to 9.00) | 10.00 (10.00 to 10.00) | 3 | NO |"
    assert "All runs printed the same text." in lines[-1]
