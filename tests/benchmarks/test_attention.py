"""The benchmark of attention in blocks: a run with tiny sizes, its goals and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import attention
from benchmarks.models import SIZES, model_config
from benchmarks.report import fill_tables
from launch.process.startup import run_launcher

TINY = ["--random=demo", "--heads=2", "--kv_heads=1", "--head_dim=8", "--hidden_size=16", "--repeats=2"]


def run(*arguments: str) -> None:
    run_launcher(attention.main, attention.define_flags, "", ["attention", *TINY, *arguments])


def test_a_small_run(tmp_path: Path) -> None:
    # Of 2 heads, 512 x 512 scores are 2 MB, and 1024 x 1024 are 8 MB.
    run("--batch=1", "--canvas=512,1024", f"--output_dir={tmp_path}")
    record = json.loads((tmp_path / "attention.json").read_text())
    short, long = record["results"]
    assert short["agrees"]
    assert long["agrees"]
    assert (short["chosen_block"], long["chosen_block"]) == (None, 256)
    assert short["choice_times_as_fast"] == 1.0
    assert long["choice_times_as_fast"] == long["blocks_times_as_fast"]["median"]
    assert len(long["at_once_ms"]["each"]) == 2
    table = fill_tables("<!-- table: attention.json -->\n<!-- end of table -->\n", tmp_path)
    assert table.count("\n| demo | 1 |") == 2
    assert "| blocks of 256 |" in table
    assert "Outputs of the two ways are at most" in table


def test_the_two_ways_are_different_programs() -> None:
    sizes = SIZES["demo"] | {"heads": 2, "kv_heads": 1, "head_dim": 8, "hidden_size": 16}
    compiled = attention.Attention.compile(model_config(sizes, "float32"), "float32", 2, 600)
    loops = {way: program.as_text().count("while(") for way, program in compiled.programs.items()}
    assert loops["at once"] == 0
    assert loops["in blocks"] > 0


@pytest.mark.parametrize(
    ("canvas", "block", "faster", "goal", "met"),
    [
        (128, None, 0.5, ">= 0.97", True),
        (128, 64, 0.97, ">= 0.97", True),
        (128, 64, 0.96, ">= 0.97", False),
        (256, 256, 1.01, "> 1", True),
        (256, 256, 1.0, "> 1", False),
        # All at once is no faster than itself.
        (256, None, 1.5, "> 1", False),
    ],
)
def test_goals(canvas: int, block: int | None, faster: float, goal: str, met: bool) -> None:
    judged = attention.judge(canvas, block, faster)
    assert (judged["goal"], judged["met"]) == (goal, met)


@pytest.mark.parametrize(
    ("argument", "says"), [("--canvas=0", "positive integers"), ("--random=x", "some of"), ("--dtype=int8", "dtype")]
)
def test_mistakes(argument: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(argument)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err
