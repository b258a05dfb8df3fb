from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from absl import flags

from benchmarks import report, scaling
from launch.startup import run_launcher
from runtime.decoding.config import DiffusionConfig
from runtime.planner.compiled import CompiledPhase, compile_workload
from runtime.planner.hlo import read_collectives
from runtime.runs.block_diffusion import block_schedule
from sharding.topology import CHIPS, machine_of

SIZES = [
    "--layers=1", "--hidden_size=64", "--intermediate_size=128", "--heads=4", "--kv_heads=2", "--head_dim=16",
    "--vocab_size=512",
]  # fmt: skip


def run(module: object, *arguments: str) -> None:
    run_launcher(module.main, module.define_flags, "", ["benchmark", *arguments])  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def estimated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("estimated")
    run(scaling, "--estimate=v5p", f"--output_dir={folder}")
    return folder


def test_the_estimated_table_goes_to_256_chips(estimated: Path) -> None:
    groups = report.read_groups(estimated)
    assert {key[0] for key in groups} == {"estimated"}
    assert {key[1] for key in groups} == set(scaling.PASSES)
    strong = groups["estimated", "denoise step", "strong", "v5p"]
    assert [point["devices"] for point in strong] == [4, 8, 16, 32, 64, 128, 256]
    assert all(0 < point["efficiency"] <= 1.01 for point in strong)
    assert len({point["batch"] for point in strong}) == 1
    weak = groups["estimated", "denoise step", "weak", "v5p"]
    assert {point["batch"] // point["devices"] for point in weak} == {scaling.ESTIMATED_ROWS["weak"]}


def test_tables_and_plots(estimated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run(report, f"--folder={estimated}", f"--plots={tmp_path}")
    out = capsys.readouterr().out
    assert "### denoise step, strong scaling, v5p (estimated)" in out
    assert "| 256 |" in out
    assert len(list(tmp_path.glob("*.svg"))) == 2 * len(scaling.PASSES)


@pytest.mark.parametrize("what", ["", "no record", "not json"])
def test_a_folder_without_records(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if what == "not json":
        (tmp_path / "a.json").write_text("[1", encoding="utf-8")
    folder = tmp_path / ("" if what else "missing")
    with pytest.raises(SystemExit) as caught:
        run(report, f"--folder={folder}")
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_machines_as_they_are_rented() -> None:
    names = [
        str(machine_of(CHIPS[chip], count)) for chip, count in (("v5e", 2), ("v5e", 8), ("v5p", 256), ("h200", 16))
    ]
    assert names == ["None", "v5e:2x4", "v5p:4x8x8", "2x8xh200"]


@pytest.fixture(scope="module")
def values() -> flags.FlagValues:
    found = flags.FlagValues()
    scaling.define_flags(found)
    found(["scaling", *SIZES])
    return found


@pytest.mark.parametrize("canvas", [128, 90, 20])
def test_all_refreshes_are_among_the_others(canvas: int, values: flags.FlagValues) -> None:
    workload = scaling.workload_of(values, "block step", 2, canvas)
    requests = scaling.timed_requests(workload, "block step")
    whole, others = requests["whole"], requests["others"]
    assert isinstance(whole, DiffusionConfig)
    assert isinstance(others, DiffusionConfig)
    length = min(32, canvas // 2)
    assert block_schedule(whole, canvas) == (length, values.steps)
    assert block_schedule(others, canvas) == (length, 1)
    assert others == whole.replace(steps=others.steps)


def test_no_program_comes_from_a_cache(values: flags.FlagValues) -> None:
    assert values.compile_cache == ""


def test_estimates_say_their_dtype(estimated: Path) -> None:
    assert {json.loads(path.read_text())["settings"]["dtype"] for path in estimated.glob("*.json")} == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("what", scaling.PASSES)
def test_what_is_described_is_what_is_timed(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[CompiledPhase] = []

    def compiled(*arguments: Any) -> list[CompiledPhase]:
        found = compile_workload(*arguments)
        described.append(next(one for one in found if what in one.passes))
        return found

    monkeypatch.setattr(scaling, "start_devices", lambda values: None)  # 16 are simulated already
    monkeypatch.setattr(scaling, "compile_workload", compiled)
    monkeypatch.setattr(scaling, "MODES", ("strong",))
    run(scaling, *SIZES, "--counts=2", "--axes=tensor", f"--passes={what}", "--batch=2", "--canvas=64", "--repeats=1",
        f"--output_dir={tmp_path}", f"--dump_hlo={tmp_path / 'hlo'}")  # fmt: skip
    (program,) = described
    timed = [read_collectives(path.read_text()) for path in (tmp_path / "hlo").rglob("*.hlo.txt")]
    assert list(program.collectives) in timed
    (record,) = tmp_path.glob("*.json")
    passes = {"denoise step": 8, "block step": 7, "prefill": 1, "decode": 31}
    assert json.loads(record.read_text())["results"]["passes"] == passes[what]


@pytest.mark.slow
def test_simulated_devices_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "start_devices", lambda values: None)  # 16 are simulated already
    monkeypatch.setattr(sys, "argv", ["scaling"])
    run(scaling, *SIZES, "--counts=1,2", "--passes=denoise step", "--batch=2", "--repeats=1",
        f"--output_dir={tmp_path}")  # fmt: skip
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(records) == 3 * 2 * 2
    assert {record["kind"] for record in records} == {"simulated devices"}
    points = [record["results"] for record in records if record["results"]["mode"] == "strong"]
    assert all(point["same_tokens_as_on_the_first"] for point in points)
    moved = {(point["axis"], point["devices"]): point["collective_bytes_of_a_pass"] for point in points}
    assert moved["tensor", 1] == 0
    assert moved["tensor", 2] > moved["sequence", 2] > moved["data", 2] > 0
