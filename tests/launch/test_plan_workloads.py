"""The workload that the flags of ``plan`` describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch import plan
from runtime import DiffusionConfig
from runtime.execution.rows import published_config
from runtime.planner.presets import PRESETS, preset


def workload(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    plan.run(["plan", "--compile=0", "--topology=v5e-8", "--json", *arguments])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["workload"]
    return found


@pytest.mark.parametrize(
    ("model", "cache", "new", "steps", "block"),
    [("diffucoder-7b", "dual", 16, 16, 32), ("sdar-8b", "exact", 3, 4, 4), ("llada-8b", "none", 44, 64, 32)],
)
def test_new_tokens_that_do_not_fill_a_block(
    model: str, cache: str, new: int, steps: int, block: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """They take as many steps as in a run with the published settings."""
    found = workload(capsys, f"--model={model}", f"--cache={cache}", f"--new_tokens={new}")
    assert (found["steps"], found["block_length"]) == (steps, block)
    published = published_config(preset(model), "", max_new_tokens=new, cache=cache)
    assert isinstance(published, DiffusionConfig)
    assert published.steps == steps


def test_blocks_of_a_checkpoints_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of such a checkpoint has these blocks too, see ``test_the_block_length_in_a_name``."""
    folder = tmp_path / "SDAR-8B-Chat-b32"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PRESETS["sdar-8b"]))
    found = workload(capsys, f"--checkpoint={folder}", "--cache=exact", "--new_tokens=40")
    assert (found["steps"], found["block_length"]) == (64, 32)


@pytest.mark.parametrize("model", ["sdar-8b", "fast_dllm_v2-7b", "diffucoder-7b", "llada-8b"])
def test_the_cache_is_that_of_a_run(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published = published_config(preset(model), "")
    assert isinstance(published, DiffusionConfig)
    expected = "exact" if preset(model).attention_block_length else "none"
    assert published.cache == expected
    assert workload(capsys, f"--model={model}")["cache"] == expected
    (tmp_path / "config.json").write_text(json.dumps(PRESETS[model]))
    assert workload(capsys, f"--checkpoint={tmp_path}")["cache"] == expected
    assert workload(capsys, f"--model={model}", "--cache=none")["cache"] == "none"


def test_drafts_are_part_of_the_workload(capsys: pytest.CaptureFixture[str]) -> None:
    """Two plans with different drafts looked alike."""
    plain = workload(capsys, "--model=diffucoder-7b")
    assert (plain["draft_steps"], plain["draft_axis"], plain["draft_model"]) == (0, "none", None)
    steps = workload(capsys, "--model=diffucoder-7b", "--draft_steps=3", "--draft_axis=data", "--batch=8")
    assert (steps["draft_steps"], steps["draft_axis"]) == (3, "data")
    model = workload(capsys, "--model=qwen3-8b", "--draft_model=qwen3-0.6b", "--quantize=int8")["draft_model"]
    assert model == {"parameters": 596_049_920, "quantization": "int8"}
