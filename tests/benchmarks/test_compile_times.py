"""Compile times of the 7.6B program: the record of a trial on CPU, and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compile_times
from benchmarks.compile_times import TARGETS, compile_times_table
from launch.process.startup import run_launcher
from sharding import aot

RECORD = Path(compile_times.__file__).with_name("results") / "compile_times.json"


def run(*arguments: str) -> None:
    run_launcher(compile_times.main, compile_times.define_flags, "", ["compile_times", *arguments])


def test_each_program_is_compiled_in_each_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, bool]] = []

    def compile_once(devices: list[Any], scan: bool) -> float:
        compiled.append((devices[0].platform, scan))
        return 2.0 if scan else 6.0 + len(compiled)

    monkeypatch.setattr(compile_times, "compile_once", compile_once)
    run("--targets=cpu", "--trials=2", f"--output_dir={tmp_path}")
    assert compiled == [("cpu", False), ("cpu", True)] * 2
    record = json.loads((tmp_path / "compile_times.json").read_text())
    assert "| cpu | 8.0 (7.0 to 9.0) | 2.0 (2.0 to 2.0) |" in compile_times_table(record)


def test_without_a_compiler_no_record_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aot, "missing_compiler", lambda platform: "pip install it" if platform == "gpu" else None)
    monkeypatch.setattr(compile_times, "compile_once", lambda *_: pytest.fail("compiled before compilers are found"))
    with pytest.raises(SystemExit) as caught:
        run(f"--output_dir={tmp_path}")
    assert caught.value.code == 2
    assert "compiling for 1xh200 requires a compiler that is not installed: pip install it" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_program_of_the_whole_model_is_compiled(tmp_path: Path) -> None:
    run("--targets=cpu", "--trials=1", f"--output_dir={tmp_path}")
    found = json.loads((tmp_path / "compile_times.json").read_text())["results"]["cpu"]
    assert found["unrolled"]["median"] > found["scanned"]["median"] > 100


def test_layers_that_are_unrolled_compile_within_a_minute() -> None:
    """Otherwise groups of layers would have to be scanned."""
    results = json.loads(RECORD.read_text())["results"]
    assert set(results) == set(TARGETS)
    assert all(found["unrolled"]["maximum"] < 60e3 for found in results.values())
