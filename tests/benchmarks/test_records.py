"""Timing and records, which all benchmarks share."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import records
from benchmarks.records import LEAST_REPEATS, build_record, load_notes, time_alternating
from benchmarks.suite.sheet import Sheet
from launch.process import environment

RESULTS = Path(records.__file__).parent / "results"


def test_calls_take_turns_and_each_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    host = SimpleNamespace(mark=lambda: told.append("mark"))
    monkeypatch.setattr("benchmarks.records.this_host", lambda: host)
    calls = {name: lambda name=name: told.append(name) for name in "ab"}
    timings = time_alternating(calls, 2, warmup=1)
    # A command without progress is ended after half an hour.
    assert told == ["a", "mark", "b", "mark"] * 3
    assert [len(timing.each) for timing in timings.values()] == [2, 2]


@pytest.mark.parametrize(("seconds", "turns"), [(None, 6), (100.0, 6), (4.5, 5), (0.0, LEAST_REPEATS)])
def test_a_limit_of_time_leaves_several_calls(
    seconds: float | None, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("benchmarks.records.time", SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: 0))

    def call() -> None:
        now[0] += 1.0

    # Calls before the timed ones do not count.
    assert time_alternating({"a": call}, 6, warmup=3, seconds=seconds)["a"].repeats == turns
    assert time_alternating({"a": call}, 2, warmup=0, seconds=0.0)["a"].repeats == 2


def test_a_row_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    host = SimpleNamespace(mark=lambda: told.append("mark"))
    monkeypatch.setattr("benchmarks.suite.sheet.this_host", lambda: host)
    Sheet(trials=2, row_seconds=1.0, budget=None).tried(lambda: told.append("work"))
    assert told == ["mark", "work"]


def test_pytorch_is_spoken_of_only_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (2.7, 0.0, 0.0))
    assert load_notes() == ["other processes kept the machine busy before this run (load average 2.7)"]
    assert "PyTorch" in load_notes(torch_cores=2)[0]
    assert "PyTorch" not in load_notes(torch_cores=1)[0]
    monkeypatch.setattr("os.getloadavg", lambda: (0.4, 0.0, 0.0))
    assert not load_notes(torch_cores=2)


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_a_record_names_the_compilers_that_are_there(monkeypatch: pytest.MonkeyPatch, cuda: str) -> None:
    there = {"jax": "1", "libtpu": "2", f"nvidia-cudnn-cu{cuda}": "3"}
    there |= {f"jax-cuda{cuda}-{name}": "4" for name in ("plugin", "pjrt")}
    monkeypatch.setattr(records, "package_version", there.get)
    versions = build_record("a", kind="estimated", settings={}, results={})["versions"]
    assert versions.pop("python")
    assert versions == there


def test_a_record_names_the_driver_and_the_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = tmp_path / "version"
    monkeypatch.setattr(environment, "NVIDIA_DRIVER", version)
    device = SimpleNamespace(platform="gpu", device_kind="H200", client=SimpleNamespace(platform_version="cuda 13000"))
    made = build_record("a", kind="measured", settings={}, results={}, devices=[device])["machine"]
    assert (made["driver"], made["runtime"]) == (None, "cuda 13000")
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC 13.2\n")
    assert build_record("a", kind="measured", settings={}, results={})["machine"]["driver"] == "580.65.06"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("model name\t: An A\ncpu family\t: 25\nmodel\t\t: 17\n\nmodel\t: 18\n", ("An A", "cpu family 25, model 17")),
        ("processor\t: 0\nCPU part\t: 0xd0c\n", ("aarch64", None)),
        (None, ("aarch64", None)),
    ],
)  # fmt: skip
def test_a_record_has_the_generation_of_the_processor(
    text: str | None, found: tuple[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(records, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.processor", str)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    made = build_record("a", kind="measured", settings={}, results={})["machine"]
    assert (made["processor"], made["processor_generation"]) == found


def test_a_copy_without_the_history_names_its_commit(tmp_path: Path) -> None:
    (tmp_path / ".commit").write_text("0123abcd\n")
    assert records.repository_commit(tmp_path) == "0123abcd"


def test_every_record_names_a_commit_of_this_repository() -> None:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=RESULTS, capture_output=True, text=True, check=False)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("not a clone with its whole history")
    made = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.rglob("*.json"))}
    known = {
        commit: git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0
        for commit in {record["commit"] for record in made.values()}
    }
    lost = {path.name for path, record in made.items() if not known[record["commit"]]}
    assert not lost, "their commits are not in this repository: measure again on a commit that is"


def test_no_record_was_measured_with_uncommitted_changes() -> None:
    made = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.rglob("*.json"))}
    assert not {path.name for path, record in made.items() if record["uncommitted_changes"]}, "measure again"


def test_what_ran_on_simulated_devices_is_not_called_measured() -> None:
    kinds = {"cpu", "gpu", "tpu", None}
    for path in sorted(RESULTS.rglob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        machine = record["machine"]
        assert machine["platform"] in kinds, path
        assert record["kind"] in ("measured", "simulated devices", "estimated"), path
        simulated = machine["platform"] == "cpu" and machine["device_count"] > 1
        if simulated or path.parent.name == "simulated":
            assert record["kind"] == "simulated devices", path
        if path.parent.name in ("estimated", "plans"):
            assert record["kind"] == "estimated", path
        if record["benchmark"] == "full_checkpoint":  # a child process restores it onto several devices
            assert record["results"]["restore"]["kind"] == "simulated devices"
