"""Timing, as every benchmark does it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.records import time_alternating
from benchmarks.suite.sheet import Sheet


def test_calls_take_turns_and_each_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    host = SimpleNamespace(mark=lambda: told.append("mark"))
    monkeypatch.setattr("benchmarks.records.this_host", lambda: host)
    calls = {name: lambda name=name: told.append(name) for name in "ab"}
    timings = time_alternating(calls, 2, warmup=1)
    # Without a sign of progress a launcher gives up after half an hour.
    assert told == ["a", "mark", "b", "mark"] * 3
    assert [len(timing.each) for timing in timings.values()] == [2, 2]


def test_a_row_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    host = SimpleNamespace(mark=lambda: told.append("mark"))
    monkeypatch.setattr("benchmarks.suite.sheet.this_host", lambda: host)
    Sheet(trials=2, row_seconds=1.0, budget=None).tried(lambda: told.append("work"))
    assert told == ["mark", "work"]
