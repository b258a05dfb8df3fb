from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from absl import flags

from benchmarks import report, scaling
from benchmarks.scaling_plots import plot_scaling
from launch.process.startup import run_launcher
from runtime.decoding.block_schedule import block_schedule
from runtime.decoding.parameters import DiffusionConfig
from runtime.planner.compiled import CompiledPhase, compile_workload
from runtime.planner.estimate import rank
from runtime.planner.hlo import read_collectives
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


@pytest.mark.parametrize("what", scaling.PASSES)
def test_an_estimate_is_of_its_own_pass_on_the_mesh_that_is_fastest_for_it(what: str, estimated: Path) -> None:
    topology = machine_of(CHIPS["v5p"], 16)
    assert topology is not None
    workload = scaling.estimated_workload(what, "bfloat16", scaling.ESTIMATED_ROWS["strong"])
    seconds = {str(one.spec): scaling.phase_of(what, one).seconds for one in rank(workload, topology)[0]}
    (point,) = (
        point
        for point in report.read_groups(estimated)["estimated", what, "strong", "v5p"]
        if point["devices"] == topology.num_devices
    )
    assert point["ms"]["median"] == round(1e3 * min(seconds.values()), 4)
    assert seconds[point["mesh"]] == min(seconds.values())
    assert point["canvas"] == scaling.ESTIMATED_CANVAS
    if what in ("denoise step", "prefill"):
        assert point["positions"] == point["canvas"]


def test_an_estimate_supports_passes_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(scaling, "--estimate=v5p", "--passes=prefill", "--counts=16,8,8", f"--output_dir={tmp_path}")
    points = [json.loads(path.read_text())["results"] for path in sorted(tmp_path.glob("*.json"))]
    assert [(point["pass"], point["mode"], point["devices"]) for point in points] == [
        ("prefill", mode, count) for mode in ("strong", "weak") for count in (8, 16)
    ]
    assert [point["speedup"] for point in points][::2] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--axes=tensor", "--batch=2", "--canvas=64"], "--axes, --batch, --canvas cannot be combined with --estimate"),
        (["--steps=4", "--repeats=1"], "--steps, --repeats cannot be combined"),
        (["--random=mid-size", "--layers=2"], "--random, --layers cannot be combined"),
        (["--devices=2", "--profile_dir=/tmp/a", "--dump_hlo=/tmp/a"], "--devices, --profile_dir, --dump_hlo cannot"),
        (["--counts=4,7"], "there is no v5p machine of size 7"),
        (["--counts=1000000000"], "there is no v5p machine of size 1000000000"),
        (["--counts=x"], "positive integers"),
        (["--passes=forward"], "expected some of denoise step"),
    ],
)
def test_what_an_estimate_cannot_honour_is_refused(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(scaling, "--estimate=v5p", f"--output_dir={tmp_path}", *arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def point_of(**changes: Any) -> dict[str, Any]:
    numbers = {"speedup": 1.0, "efficiency": 1.0, "collective_bytes_of_a_pass": 0, "memory_bytes_per_device": 1e9}
    times = {"median": 1.0, "minimum": 1.0, "maximum": 1.0}
    shape = {"devices": 4, "mesh": "data=1,sequence=1,tensor=4", "batch": 8, "canvas": 64}
    return {**shape, **numbers, "ms": times, "command": "python -m a", "notes": []} | changes


def test_a_table_says_what_its_numbers_are_relative_to() -> None:
    estimated = ("estimated", "decode", "weak", "v5p")
    text = report.table(estimated, [point_of(notes=["b does not fit"]), point_of(notes=["b does not fit", "c too"])])
    assert "\nB does not fit. C too. Speed-up and efficiency are relative to 4 devices, the first row.\n" in text
    assert "above 1 where weights are sharded" not in text
    alone = report.table(estimated, [point_of(devices=1)])
    assert alone.endswith(
        "`python -m a`\n\nNot shown: measured times: these come from a roofline model, and memory is not the "
        "compiler's.\n"
    )
    above = [point_of(devices=1), point_of(efficiency=1.3)]
    assert "above 1 where weights are sharded" in report.table(estimated, above)
    rows = [point_of(devices=1), point_of(efficiency=1.3, mesh="data=4,sequence=1,tensor=1")]
    assert "above 1 where weights are sharded" not in report.table(estimated, rows)
    text = report.table(("simulated devices", "decode", "weak", "tensor"), above)
    assert "say nothing about speed" in text
    assert "above 1 where weights are sharded" not in text
    compared = [point_of(same_tokens_as_on_the_first=same) for same in (True, False)]
    rows_of = report.table(estimated, compared).splitlines()[4:6]
    assert [line.split("|")[-2] for line in rows_of] == [" yes ", " no "]


def test_an_estimate_that_does_not_fit_is_named_in_the_next(tmp_path: Path) -> None:
    run(scaling, "--estimate=v5e", "--passes=denoise step", "--counts=1,4", f"--output_dir={tmp_path}")
    (path,) = tmp_path.glob("*_strong_*.json")
    assert json.loads(path.read_text())["notes"] == ["left out: v5e:1x1, which the generation does not fit"]


def test_estimates_say_where_they_begin_and_why(estimated: Path) -> None:
    notes = json.loads((estimated / "scaling_denoise_step_strong_v5p_004.json").read_text())["notes"]
    assert notes == ["there is no v5p machine of size 1", "there is no v5p machine of size 2"]


def test_simulated_devices_have_no_speed_ups(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    groups = report.read_groups(Path(report.__file__).parent / "results" / "scaling" / "simulated")
    for path in plot_scaling(groups, tmp_path):
        text = path.read_text(encoding="utf-8")
        assert "MB moved per pass" in text
        # Of each pass, two panels name every line; matplotlib writes texts as comments.
        for axis in ("data", "sequence", "tensor"):
            assert text.count(f"<!-- {axis} -->") == 8
        assert "speed" not in text
    for group, points in groups.items():
        assert "speed-up" not in report.table(group, points)


def test_tables_and_plots(estimated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run(report, f"--folder={estimated}", f"--plots={tmp_path}")
    out = capsys.readouterr().out
    assert "### denoise step, strong scaling, v5p (estimated)" in out
    assert "| 256 |" in out
    assert {path.name for path in tmp_path.glob("*.svg")} == {"estimated_strong.svg", "estimated_weak.svg"}


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
def test_the_compiled_program_is_the_timed_one(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[CompiledPhase] = []

    def compiled(*arguments: Any) -> list[CompiledPhase]:
        found = compile_workload(*arguments)
        phases.append(next(one for one in found if what in one.passes))
        return found

    monkeypatch.setattr(scaling, "start_devices", lambda values: None)  # 16 are simulated already
    monkeypatch.setattr(scaling, "compile_workload", compiled)
    monkeypatch.setattr(scaling, "MODES", ("strong",))
    run(scaling, *SIZES, "--counts=2", "--axes=tensor", f"--passes={what}", "--batch=2", "--canvas=64", "--repeats=1",
        f"--output_dir={tmp_path}", f"--dump_hlo={tmp_path / 'hlo'}")  # fmt: skip
    (program,) = phases
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
    weak = [record["results"] for record in records if record["results"]["mode"] == "weak"]
    compared = {(point["axis"], point["devices"]): point.get("same_tokens_as_on_the_first") for point in weak}
    # Points with more rows start with the rows of the first point; longer rows are different.
    assert compared == {
        (axis, count): None if (axis, count) == ("sequence", 2) else True for axis in scaling.AXES for count in (1, 2)
    }
    moved = {(point["axis"], point["devices"]): point["collective_bytes_of_a_pass"] for point in points}
    assert moved["tensor", 1] == 0
    assert moved["tensor", 2] > moved["sequence", 2] > moved["data", 2] > 0
