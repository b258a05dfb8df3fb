from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import report, scaling
from launch.startup import run_launcher
from sharding.topology import CHIPS, machine_of


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


@pytest.mark.slow
def test_simulated_devices_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--layers=1", "--hidden_size=64", "--intermediate_size=128", "--heads=4", "--kv_heads=2", "--head_dim=16"]
    monkeypatch.setattr(scaling, "start_devices", lambda values: None)  # 16 are simulated already
    monkeypatch.setattr(sys, "argv", ["scaling"])
    run(scaling, *sizes, "--vocab_size=512", "--counts=1,2", "--passes=denoise step", "--batch=2", "--repeats=1",
        f"--output_dir={tmp_path}")  # fmt: skip
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(records) == 3 * 2 * 2
    assert {record["kind"] for record in records} == {"simulated devices"}
    points = [record["results"] for record in records if record["results"]["mode"] == "strong"]
    assert all(point["same_tokens_as_on_the_first"] for point in points)
    moved = {(point["axis"], point["devices"]): point["collective_bytes_of_a_pass"] for point in points}
    assert moved["tensor", 1] == 0
    assert moved["tensor", 2] > moved["sequence", 2] > moved["data", 2] > 0
