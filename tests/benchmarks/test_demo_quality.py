"""Figures of the demo's quality, computed from completions whose quality is known."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import demo_quality
from benchmarks.demo_quality import complete, read_held_out, task_figures, wilson_interval
from runtime import Completion, DiffusionConfig, Engine
from sharding.errors import InputError


def completion(text: str) -> Completion:
    return cast(Completion, SimpleNamespace(text=text, finish_reason="stop", masks_left=0))


def test_wilson_interval() -> None:
    assert wilson_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    low, high = wilson_interval(0, 50)
    assert low == pytest.approx(0, abs=1e-12)
    assert high == pytest.approx(0.0714, abs=1e-4)


def test_tasks_pass_by_their_tests() -> None:
    task = {"name": "inc", "prompt": "def inc(x):", "tests": ["assert inc(1) == 2"], "spec": "maps/a", "style": "none"}
    texts = ["\n    return x + 1", "\n    return x", "\n    return y", "\n    return (", ""]
    found = task_figures([{**task, "name": f"inc{i}"} for i in range(5)], [completion(text) for text in texts])
    assert found["passed"] == 1
    assert found["passed_rate"] == 0.2
    assert found["passed_rate_95"] == [round(bound, 4) for bound in wilson_interval(1, 5)]
    assert found["outcomes"] == {"syntax": 2, "passed": 1, "wrong": 1, "error": 1}
    assert found["passed_by_style"] == {"none": [1, 5]}
    assert found["passed_by_family"] == {"maps": [1, 5]}
    assert found["failed"] == ["inc1", "inc2", "inc3", "inc4"]


def test_completions_stand_in_the_order_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], Any]] = []

    class Echo:
        def generate(self, prompts: list[str], config: DiffusionConfig) -> list[Completion]:
            asked.append((prompts, config.seed))
            return [completion(prompt) for prompt in prompts]

    monkeypatch.setattr(demo_quality, "BATCH", 2)
    rows = [{"prompt": prompt} for prompt in ("ccc", "a", "bbbb", "dd", "e")]
    found = complete(cast(Engine, Echo()), rows, DiffusionConfig(), 7)
    assert [one.text for one in found] == [row["prompt"] for row in rows]
    assert [prompts for prompts, _ in asked] == [["a", "e"], ["dd", "ccc"], ["bbbb"]]
    assert len({seed for _, seed in asked}) == 3


def test_sets_are_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "plain_tasks.jsonl").write_text(json.dumps({"prompt": "def f():"}) + "\n")
    assert read_held_out(tmp_path, "plain_tasks.jsonl") == [{"prompt": "def f():"}]
    with pytest.raises(InputError, match=r"held_out\.jsonl"):
        read_held_out(tmp_path)


def test_every_set_is_in_the_folder_of_the_demo() -> None:
    for name in demo_quality.SETS.values():
        assert read_held_out(Path("checkpoints/demo"), name)
