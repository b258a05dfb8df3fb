"""The comparison of memory with PyTorch, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import torch_memory
from benchmarks.torch_cases import PARTS
from benchmarks.torch_tables import memory_table
from checkpoints import parse_json_object
from launch.process.startup import run_launcher

pytest.importorskip("torch")

TINY = [
    "--layers=2", "--hidden_size=64", "--intermediate_size=128", "--heads=4", "--kv_heads=2", "--head_dim=16",
    "--vocab_size=512", "--batch=1,2", "--canvas=16,32", "--steps=4", "--new_tokens=4", "--prompt=8",
    "--random=mid-size",
]  # fmt: skip


def run(*arguments: str) -> None:
    run_launcher(torch_memory.main, torch_memory.define_flags, "", ["torch_memory", *TINY, *arguments])


@pytest.mark.parametrize("library", ["jax", "torch"])
@pytest.mark.parametrize("part", PARTS[:3])
def test_a_process_prints_its_peaks(part: str, library: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"--parts={part}", f"--library={library}")
    peaks = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < peaks["before_bytes"] <= peaks["first_call_bytes"] <= peaks["peak_bytes"] < 64 << 30


def test_a_process_per_case_and_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    peaks = {"--library=jax": 5_000_000, "--backend=default": 4_000_000, "--backend=onednn": 3_000_000}

    def process(module: str, arguments: list[str], read: bool) -> str:
        assert (module, read) == ("torch_memory", True)
        started.append(arguments)
        return f'other output\n{{"before_bytes": 1000000, "peak_bytes": {peaks[arguments[-1]]}}}\n'

    monkeypatch.setattr(torch_memory, "run_process", process)
    run("--parts=generate,gpt2", f"--output_dir={tmp_path}")
    for arguments in started:
        assert "--hidden_size=64" in arguments
        assert not any(argument.startswith("--output_dir") for argument in arguments)
    parts = [[one for one in arguments if one.startswith("--parts=")] for arguments in started]
    assert parts == [["--parts=generate"]] * 3 + [["--parts=gpt2"]] * 3
    record: dict[str, Any] = parse_json_object((tmp_path / "torch_memory.json").read_bytes())
    text = memory_table(record)
    assert "| generate | mid-size | batch 2, canvas 32, new tokens 16, steps 4 | 4 | 2 (onednn) | 2.00 |" in text
    assert "| gpt2 | gpt2 | batch 2, prompt 8, new tokens 4 | 4 | 2 (onednn) | 2.00 |" in text
    run("--parts=generate", "--dtype=bfloat16", f"--output_dir={tmp_path}")
    assert [arguments[-1] for arguments in started[6:]] == ["--backend=default", "--library=jax"]


def test_one_process_runs_one_case(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--library=torch", "--parts=forward,generate")
    assert ended.value.code == 2
    assert "the flags give 2 cases; give one part and one model" in capsys.readouterr().err
