"""The suite on a tiny model, its tables, and the tables of the README."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import report, scaling
from benchmarks.records import NotRunError, Timing, time_alternating
from benchmarks.serve import __main__ as serve
from benchmarks.suite import __main__ as suite
from benchmarks.suite import acceptance, subject
from benchmarks.suite.generation import GENERATIONS
from benchmarks.suite.parity import source_tensor
from benchmarks.suite.sheet import Sheet
from benchmarks.suite.tables import suite_tables
from checkpoints import DEMO, open_folder
from checkpoints.opening import open_tensors
from launch.process.startup import EXIT_RESTART, run_launcher
from runtime import Engine
from sharding.errors import InputError

ROOT = Path(__file__).parents[2]
# One layer, on one of the simulated devices
TINY = [
    "--random=mid-size", "--layers=2", "--hidden_size=64", "--intermediate_size=128", "--heads=4", "--kv_heads=2",
    "--head_dim=16", "--vocab_size=512",
]  # fmt: skip
SMALL = [
    "--mesh=data=1", "--lengths=128", "--batches=1,2", "--steps=1x64", "--trials=2", "--matmul_size=128",
    "--copy_bytes=65536",
]  # fmt: skip


def run(*arguments: str) -> None:
    run_launcher(suite.main, suite.define_flags, "", ["suite", *arguments])


def times_of_an_idle_machine(
    calls: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 2
) -> dict[str, Timing]:
    """Run every call, but report the same time for each, so that a busy machine does not matter."""
    time_alternating(calls, repeats, warmup)
    seconds = {"whole": 1.0, "others": 0.1}
    return {name: Timing.of([seconds[name] * (1 + turn / 10) for turn in range(repeats)], [0.0]) for name in calls}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("suite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.suite.generation.DECODE_BATCHES", (1,))
        # Fewer steps and rows than in a record
        patch.setattr("benchmarks.suite.generation.GENERATIONS", (GENERATIONS[0], ("16 tokens, 16 steps", 1, 16, 16)))
        patch.setattr("benchmarks.suite.passes.BLOCK_BATCHES", (1, 2))
        patch.setattr("benchmarks.timed_passes.time_alternating", times_of_an_idle_machine)
        patch.setattr(suite, "measure_compilation", lambda sheet, values: None)  # starts processes, which is slow
        run(
            *TINY, *SMALL, f"--output_dir={folder}", f"--dump_hlo={folder / 'hlo'}", f"--profile_dir={folder / 'trace'}"
        )
    (path,) = folder.glob("suite_*.json")
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert list((folder / "hlo").rglob("*.hlo.txt"))
    assert list((folder / "trace").rglob("*.xplane.pb"))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def rows(record: dict[str, Any], section: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in record["results"]["rows"] if row["section"] == section}


def test_every_row_is_filled_or_says_why_not(record: dict[str, Any]) -> None:
    sections = {row["section"] for row in record["results"]["rows"]}
    assert sections == {
        "start", "memory", "ceilings", "forward", "forward over lengths and batches", "sequence lengths",
        "denoise step", "block step", "generation", "batches", "autoregressive", "CPU", "tokenizer", "transfer",
    }  # fmt: skip
    for row in record["results"]["rows"]:
        if row["not_run"] is None:
            assert row["minimum"] <= row["mean"] <= row["maximum"], row
            assert row["deviation"] >= 0
        else:
            assert row["not_run"]
            assert row["mean"] is None
    assert "no tokenizer" in rows(record, "tokenizer")["first call"]["not_run"]
    assert "CPU itself" in next(iter(rows(record, "CPU").values()))["not_run"]
    assert "host's memory" in rows(record, "transfer")["host to device"]["not_run"]


def test_nothing_is_compiled_while_it_is_timed(record: dict[str, Any]) -> None:
    timed = [row for row in record["results"]["rows"] if "compiled_when_timed" in row["facts"]]
    assert len(timed) == 2 + 2 + 2
    assert all(row["facts"]["compiled_when_timed"] == 0 for row in timed)
    lengths = rows(record, "sequence lengths")
    assert lengths["another length of a known bucket"]["facts"]["programs_compiled"] == 0
    assert lengths["a length of a new bucket"]["facts"]["programs_compiled"] == 1
    first = lengths["first run, 128 tokens"]
    assert first["facts"]["programs_compiled"] == 1
    assert first["mean"] > 1e3 * first["facts"]["compile_seconds"] > 0


def test_a_row_of_a_step_is_of_one_step(record: dict[str, Any]) -> None:
    row = rows(record, "denoise step")["batch 1, canvas 64"]
    assert row["minimum"] <= row["facts"]["median"] <= row["maximum"]
    assert row["facts"]["canvas_tokens_per_second"] == pytest.approx(64 / (row["facts"]["median"] / 1e3), rel=1e-3)
    assert "predicted_ms" not in row["facts"]  # the planner does not know this processor
    found = rows(record, "block step")
    assert list(found) == [f"batch {batch}, canvas 256, blocks of 32" for batch in (1, 2)]
    for row in found.values():
        assert row["not_run"] is None
        assert row["facts"]["mfu"] > 0
        assert row["facts"]["mbu"] > 0


def test_a_start_is_tried_several_times(record: dict[str, Any]) -> None:
    row = rows(record, "start")["parameters, made on the devices"]
    assert row["trials"] == 3
    assert row["minimum"] < row["mean"] < row["maximum"]
    assert row["minimum"] <= row["facts"]["first"] + 1e-3
    assert "the first " in suite_tables(record)


def test_trials_and_memory_are_those_that_were_asked_for(record: dict[str, Any]) -> None:
    assert rows(record, "autoregressive")["decode step, batch 1"]["trials"] == 2
    assert list(rows(record, "memory"))[::2] == [
        f"host, {when}" for when in ("before the weights", "with the weights", "during the runs", "after the runs")
    ]


def test_what_a_generation_is_made_of(record: dict[str, Any]) -> None:
    found = rows(record, "generation")
    assert found["50 tokens, 25 steps"]["facts"]["forwards"] == 25
    assert found["50 tokens, 25 steps"]["facts"]["tokens_per_forward"] == 2.0
    assert found["16 tokens, 16 steps"]["facts"]["forwards"] <= 16
    assert rows(record, "batches")["best batch"]["facts"]["batch"] in (1, 2)


def test_the_acceptance_list(record: dict[str, Any]) -> None:
    ticked = {item["what"]: item["ticked"] for item in record["results"]["acceptance"]}
    assert len(ticked) == 6
    assert ticked["loads without error"]
    assert ticked["at least 10 times the CPU"] is None
    assert ticked["text is coherent: at least 50% of plain functions pass their tests"] is None
    efficiency = rows(record, "forward over lengths and batches")["128 tokens, batch 2"]["facts"]["efficiency"]
    batching = record["results"]["acceptance"][2]
    assert batching["ticked"] == (efficiency > 1)
    assert f"128 tokens: {efficiency:.2f} at batch 2" in batching["why"]
    parity = record["results"]["acceptance"][4]
    assert parity["ticked"], parity
    assert len(parity["details"]["shares"]) == 2


def test_tables(record: dict[str, Any]) -> None:
    text = suite_tables(record)
    assert "| generation | 50 tokens, 25 steps |" in text
    assert "- [x] loads without error" in text
    assert "| 128 |" in text


def test_parity_notices_a_wrong_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks.suite import parity

    def wrong(leaf: Any, number: int, array: Any) -> Any:
        found = source_tensor(leaf, number, array)
        return found * 1.01 if leaf.name.endswith("o_proj") else found

    engine = Engine.load(DEMO, mesh="data=1")
    assert parity.layer_parity(engine)["smallest_share"] > 0.999
    monkeypatch.setattr(parity, "source_tensor", wrong)
    assert parity.layer_parity(engine)["smallest_share"] < 0.9


def test_layers_of_a_given_folder_and_tolerance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"--parity={DEMO}", "--device=cpu", "--mesh=data=1", f"--output_dir={tmp_path}"]
    run(*arguments, "--tolerance=1e-3")
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "parity_demo.json").read_text())["results"]["parity"]
    assert found["tolerance"] == 1e-3
    assert found["smallest_share"] == 1.0
    assert said.count("100.0000% of the outputs within 0.001 of PyTorch's\n") == found["layers"] > 1
    with pytest.raises(SystemExit) as caught:
        run(*arguments, "--tolerance=1e-9")
    assert caught.value.code == 1
    assert "more than 95% are expected" in capsys.readouterr().out


def test_weights_go_back_to_what_the_checkpoint_has() -> None:
    engine = Engine.load(DEMO, mesh="tensor=4")  # heads are padded there
    stored = open_tensors(open_folder(DEMO))
    named = engine.layout.named(engine.weights)
    for leaf in engine.layout.leaves:
        for number, source in zip(leaf.layers, leaf.sources, strict=False):
            found = source_tensor(leaf, number, np.asarray(named[leaf.name]))
            np.testing.assert_array_equal(found, stored[source].whole().astype(np.float32))


def test_a_sheet_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    sheet = Sheet(trials=5, row_seconds=10.0, budget=None)
    sheet.measure("a", "slow", lambda: lambda: None, seconds=6.0)
    sheet.measure("a", "fewer", lambda: lambda: None, seconds=3.0)

    def out_of_memory() -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: 5 GB")

    def refused() -> Any:
        raise NotRunError("no")

    def broken() -> Any:
        raise RuntimeError("a bug")

    sheet.measure("a", "large", out_of_memory)
    sheet.measure("a", "refused", refused)
    sheet.measure("a", "broken", broken)
    whys = {row.name: row.not_run for row in sheet.rows}
    assert "--row_seconds" in str(whys["slow"])
    assert whys["fewer"] is None
    assert sheet.rows[1].trials == 2
    assert "out of memory" in str(whys["large"])
    assert whys["refused"] == "no"
    assert whys["broken"] == "failed: RuntimeError: a bug"
    assert sheet.failures == 1  # ends the run with an error
    assert sheet.tried(lambda: 3) == 3
    assert sheet.trials(0.0) == 5
    assert sheet.trials(2.6) == 2
    with pytest.raises(NotRunError, match="row_seconds"):
        sheet.trials(6.0)
    spent = Sheet(trials=2, row_seconds=1.0, budget=1e-9)
    spent.measure("a", "late", lambda: lambda: None)
    assert "budget" in str(spent.rows[0].not_run)


def test_an_item_that_cannot_be_checked_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(error: Exception) -> Any:
        def check(*arguments: Any) -> Any:
            raise error

        return check

    sheet = Sheet(trials=2, row_seconds=1.0, budget=None)
    engine = SimpleNamespace(layout=SimpleNamespace(parameter_count=1))
    found = SimpleNamespace(sheet=sheet, engine=engine, devices=[None], values=SimpleNamespace(attention="auto"))
    errors: tuple[tuple[Exception, str, int], ...] = (
        (InputError("pip install transformers"), "not run: pip install transformers", 0),
        (RuntimeError("RESOURCE_EXHAUSTED: 5 GB"), "not run: out of memory: RESOURCE_EXHAUSTED: 5 GB", 0),
        (ValueError("a bug"), "not run: failed: ValueError: a bug", 1),
    )
    for error, why, failures in errors:
        sheet.failures = 0
        monkeypatch.setattr(acceptance, "layer_parity", raising(error))
        monkeypatch.setattr(acceptance, "coherence", lambda subject: {"passed": 2, "tasks": 4})
        items = acceptance.acceptance(found)  # type: ignore[arg-type]
        assert (items[4]["ticked"], items[4]["why"], sheet.failures) == (None, why, failures)
        assert items[5]["ticked"]


def test_a_run_that_is_cut_short_leaves_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = SimpleNamespace(devices=np.array(jax.devices()[:1]))
    layout = SimpleNamespace(parameter_count=1, spec="data=1", mesh=mesh)
    engine = SimpleNamespace(layout=layout, dtype="float32", notes=[])

    def roofline_of(sheet: Sheet, *rest: Any) -> None:
        sheet.value("forward", "measured until then", 1.0, "ms")
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "measure_compilation", lambda sheet, values: None)
    monkeypatch.setattr(suite, "load", lambda sheet, values, devices: engine)
    monkeypatch.setattr(suite, "roofline_of", roofline_of)
    with pytest.raises(SystemExit):
        run(*TINY, f"--output_dir={tmp_path}")
    (path,) = tmp_path.glob("suite_*_cut_short.json")
    found = json.loads(path.read_text())
    assert "measured until then" in rows(found, "forward")
    assert any("cut short by KeyboardInterrupt" in note for note in found["notes"])
    assert "measured until then" in suite_tables(found)


@pytest.mark.parametrize(
    ("error", "code"), [(InputError("config.json is no JSON"), 2), (RuntimeError("a bug"), EXIT_RESTART)]
)
def test_a_model_that_does_not_load_is_said_in_the_list(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(suite, "measure_compilation", lambda sheet, values: None)
    monkeypatch.setattr(suite, "load", load)
    good = tmp_path / "suite_cpu.json"
    good.write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        run(*TINY, f"--output_dir={tmp_path}")
    assert caught.value.code == code
    assert good.read_text(encoding="utf-8") == "{}"
    found = json.loads((tmp_path / "suite_cpu_cut_short.json").read_text())
    items = found["results"]["acceptance"]
    assert [item["ticked"] for item in items] == [False, None, None, None, None, None]
    assert str(error) in items[0]["why"]
    assert "not loaded" in suite_tables(found)
    assert "- [ ] loads without error: " in suite_tables(found)
    assert "suite_cpu.json is not replaced" in capsys.readouterr().out


@pytest.mark.parametrize("module", [suite, scaling])
def test_several_hosts_are_refused(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.records.this_host", lambda: SimpleNamespace(count=2))
    with pytest.raises(SystemExit) as caught:
        run_launcher(module.main, module.define_flags, "", ["benchmark"])
    assert caught.value.code == 2
    assert "2 hosts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "flag", "says"),
    [
        (suite, "--output_dir={file}", "is not a folder"),
        (scaling, "--output_dir={file}/below", "is not a folder"),
        (scaling, "--record=a/b", "a name, no path"),
        (suite, "--dump_hlo={file}", "that is a file"),
        (serve, "--plot={folder}", "is a folder"),
        (report, "--plots={file}", "is not a folder"),
        (report, "--output={file}/below", "is not a folder"),
    ],
)
def test_what_could_not_be_written_is_said_before_the_work(
    module: Any, flag: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as caught:
        run_launcher(
            module.main, module.define_flags, "", ["benchmark", flag.format(file=tmp_path / "file", folder=tmp_path)]
        )
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--random=mid-size", "--checkpoint=x"], "cannot be combined"),
        (["--random=mid-size", "--parity=x"], "--parity names the model"),
        (["--parity=/nowhere/at/all", "--device=cpu"], "/nowhere/at/all"),
        (["--layers=2"], "--layers requires --random"),
        (["--lengths=a"], "expected positive integers"),
        (["--steps=8"], "such as 8x1024"),
        (["--random=none"], "--random"),
        (["--profile_dir=/nowhere/at/all"], "no such folder"),
    ],
)
def test_what_is_wrong_is_said_with_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_a_command_of_the_same_subject() -> None:
    from absl import flags

    values = flags.FlagValues()
    subject.define_subject_flags(values)
    values(["suite", "--random=mid-size", "--layers=3", "--mesh=tensor=2"])
    assert subject.command("a.module", values, "--more=1")[1:] == [
        "-m", "a.module", "--device=auto", "--random=mid-size", "--mesh=tensor=2", "--attention=auto", "--layers=3",
        "--more=1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("document", "tables"), [("README.md", 2), ("benchmarks/README.md", 22), ("checkpoints/demo/README.md", 1)]
)
def test_the_tables_of_documents_are_those_of_their_records(document: str, tables: int) -> None:
    path = ROOT / document
    text = path.read_text(encoding="utf-8")
    assert text.count("<!-- end of table -->") == tables
    assert report.fill_tables(text, path.parent) == text, f"python -m benchmarks.report --readme={document}"
    for table in re.findall(r"<!-- (?:table|summary): .*?<!-- end of table -->", text, re.DOTALL):
        last = table.splitlines()[-2]
        assert re.match(r"(Record of commit `[0-9a-f]{7}`. )?Not shown: \w|\(no record yet", last), (
            "below each table: what it does not show"
        )


def test_the_scaling_tables_are_those_of_their_records() -> None:
    folder = ROOT / "benchmarks" / "results" / "scaling"
    made = "\n".join(report.table(*one) for one in report.read_groups(folder).items())
    assert (folder / "tables.md").read_text(encoding="utf-8") == made + "\n"
    assert made.count("\nNot shown: ") == made.count("### ")


def test_a_table_is_replaced_and_the_rest_stays(tmp_path: Path, record: dict[str, Any]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(record), encoding="utf-8")
    text = "before\n<!-- table: a.json -->\nold\n<!-- end of table -->\nafter\n"
    filled = report.fill_tables(text, tmp_path)
    assert filled.startswith("before\n<!-- table: a.json -->\n`mid-size`")
    assert filled.endswith("<!-- end of table -->\nafter\n")
    assert report.fill_tables(filled, tmp_path) == filled


@pytest.mark.slow
def test_a_second_start_finds_the_compiled_programs(capsys: pytest.CaptureFixture[str]) -> None:
    from absl import flags

    from benchmarks.suite.start import measure_compilation

    values = flags.FlagValues()
    subject.define_subject_flags(values)
    values(["suite", *TINY, "--device=cpu"])
    sheet = Sheet(trials=2, row_seconds=60.0, budget=None)
    measure_compilation(sheet, values)
    found = {row.name: row for row in sheet.rows}
    assert [row.not_run for row in sheet.rows] == [None] * 4, sheet.rows
    assert found["compilation, cold"].facts["programs"] == found["compilation, warm cache"].facts["programs"] == 1
    assert found["first token after the weights, cold"].mean
