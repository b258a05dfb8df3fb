"""Rows of the suite that need another machine or many starts, tested without them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from absl import flags

from benchmarks import timed_passes
from benchmarks.records import NotRunError, Timing
from benchmarks.roofline import Roofline
from benchmarks.suite import acceptance, generation, passes, plots, start, text
from benchmarks.suite.sheet import Measurement, Sheet
from benchmarks.suite.subject import Subject, define_subject_flags, open_engine
from benchmarks.timed_passes import time_pass
from checkpoints import DEMO
from runtime import Engine
from runtime.planner.estimate import estimate_workload
from runtime.planner.workload import Workload
from sharding.mesh import MeshSpec
from sharding.topology import CHIPS, Topology
from tests.figures import assert_texts_are_apart, captured

TINY = [
    "--random=mid-size", "--layers=2", "--hidden_size=64", "--intermediate_size=128", "--heads=4", "--kv_heads=2",
    "--head_dim=16", "--vocab_size=512",
]  # fmt: skip


def values_of(*arguments: str) -> flags.FlagValues:
    values = flags.FlagValues()
    define_subject_flags(values)
    values(["suite", *arguments])
    return values


def subject_of(sheet: Sheet) -> Subject:
    values = values_of(*TINY)
    return Subject(values, sheet, open_engine(values, jax.devices("cpu")[:1], "data=1"), Roofline(1e12, 1e11))


def sheet_of() -> Sheet:
    return Sheet(trials=2, row_seconds=60.0, budget=None)


def timings_of(**milliseconds: list[float]) -> dict[str, Timing]:
    return {name: Timing.of([one / 1e3 for one in each], [0.0]) for name, each in milliseconds.items()}


def test_a_pass_is_what_is_left_over_the_passes_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"whole": 10, "others": 2}
    requests: Any = {name: SimpleNamespace(forwards=count) for name, count in taken.items()}
    engine: Any = SimpleNamespace(generate_tokens=lambda ids, config: SimpleNamespace(stats=config))
    milliseconds = {"whole": [80.0, 100.0], "others": [16.0, 20.0]}

    def timed(calls: Any, repeats: int, warmup: int) -> dict[str, Timing]:
        for call in calls.values():
            call()
        return timings_of(**{name: milliseconds[name] for name in calls})

    monkeypatch.setattr(timed_passes, "time_alternating", timed)
    ids = np.zeros((1, 1), np.int32)
    found = time_pass(engine, ids, requests, 2)
    assert (found.passes, found.timing.each) == (8, (8.0, 10.0))
    alone = time_pass(engine, ids, {"whole": requests["whole"]}, 2)
    assert (alone.passes, alone.timing.each) == (10, (8.0, 10.0))
    milliseconds["others"] = [16.0, 100.0]
    with pytest.raises(NotRunError, match="too busy"):
        time_pass(engine, ids, requests, 2)


def test_masks_of_a_block_while_it_is_stepped_through() -> None:
    # Two blocks of four after a prompt of two. The passes of one commit 2, 1, 1 tokens, those of the other 3, 1.
    steps = np.array([[-1, -1, 0, 1, 0, 2, 3, 3, 4, 3]])
    # Each refresh has 4 masks; the following steps have 2 and 1, and 1.
    assert passes.masked_in_blocks(SimpleNamespace(commit_steps=steps), 2, 4) == pytest.approx((2 + 1 + 1) / 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "times", "ticked"), [(0.4, 20.0, True), pytest.param(0.1, 5.0, False, marks=pytest.mark.slow)]
)
def test_an_accelerator_is_compared_with_the_cpu(
    seconds: float, times: float, ticked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheet = sheet_of()
    cpu = subject_of(sheet)
    accelerator: Any = SimpleNamespace(platform="gpu", config=cpu.engine.config)
    name = generation.GENERATIONS[0][0]
    sheet.values("generation", name, [250.0], "ms", {"forwards": 25})  # 10 ms per pass

    def timed(calls: Any, repeats: int, warmup: int) -> dict[str, Timing]:
        ((title, call),) = calls.items()
        call()
        return {title: Timing.of([seconds], [0.0])}

    monkeypatch.setattr(generation, "time_alternating", timed)
    monkeypatch.setattr(generation, "MATMUL_SIZE", {"cpu": 64})
    monkeypatch.setattr(generation, "COPY_BYTES", {"cpu": 65536})
    generation.measure_cpu(replace(cpu, engine=accelerator))
    row = sheet.find("a pass of " + name)
    assert row is not None, sheet.rows
    assert row.mean == 1e3 * seconds / 2  # of two passes
    assert row.facts["accelerator_ms"] == 10.0
    assert row.facts["times_as_fast"] == times
    monkeypatch.setattr(acceptance, "layer_parity", lambda *_: {"smallest_share": 1, "tolerance": 0, "layers": 1})
    monkeypatch.setattr(acceptance, "coherence", lambda subject: {"passed": 1, "tasks": 1})
    item = acceptance.acceptance(cpu)[3]
    assert (item["ticked"], item["why"]) == (ticked, f"{times} times as fast")


def test_a_step_that_is_predicted_stands_beside_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # A known chip with lower rates, on which a tiny model takes measurable time.
    topology = Topology(replace(CHIPS["h100"], flops=1e9, memory_bandwidth=1e7), (1,))
    monkeypatch.setattr(passes, "topology_of", lambda devices: topology)
    sheet = sheet_of()
    subject = subject_of(sheet)
    passes.measure_steps(subject, [(2, 64)])
    row = sheet.find("batch 2, canvas 64")
    assert row is not None, sheet.rows
    workload = Workload(subject.engine.config, "float32", 2, 32, 32, 8)
    (phase,) = estimate_workload(workload, topology, MeshSpec()).phases
    assert row.facts["predicted_ms"] == round(1e3 * phase.seconds, 3) > 1
    assert row.mean


@pytest.mark.parametrize(("weight_bytes", "trials"), [(1 << 20, 3), (1 << 34, 1)])
def test_compilation_is_tried_with_a_new_cache_each_time(
    weight_bytes: int, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[str] = []

    def started(arguments: list[str]) -> dict[str, Any]:
        caches.append(arguments[-1].removeprefix("--compile_cache="))
        assert Path(caches[-1]).is_dir()
        seconds = float(len(caches))
        return {
            "weight_bytes": weight_bytes,
            "programs": 1,
            "compile_seconds": seconds,
            "first_token_seconds": 10 * seconds,
        }

    monkeypatch.setattr(start, "start_process", started)
    sheet = sheet_of()
    start.measure_compilation(sheet, values_of(*TINY))
    assert [caches.count(cache) for cache in dict.fromkeys(caches)] == [2] * trials
    cold, warm = sheet.find("compilation, cold"), sheet.find("compilation, warm cache")
    first = sheet.find("first token after the weights, warm cache")
    assert cold is not None
    assert warm is not None
    assert first is not None
    assert (cold.trials, cold.minimum, cold.maximum) == (trials, 1.0, 2.0 * trials - 1)
    assert (warm.mean, first.mean) == (trials + 1.0, 10 * (trials + 1.0))
    assert ("one_trial" in cold.facts) == (trials == 1)


def test_a_start_that_fails_is_said_in_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(arguments: list[str]) -> dict[str, Any]:
        raise NotRunError("a child process ended with 1: why")

    monkeypatch.setattr(start, "start_process", started)
    sheet = sheet_of()
    start.measure_compilation(sheet, values_of(*TINY))
    assert [row.not_run for row in sheet.rows] == ["a child process ended with 1: why"] * 4


def test_a_small_checkpoint_is_converted_several_times() -> None:
    sheet = sheet_of()
    start.measure_files(sheet, values_of(f"--checkpoint={DEMO}"))
    row = sheet.find("conversion to a canonical checkpoint")
    assert row is not None, sheet.rows
    assert row.trials == 3
    assert "one_trial" not in row.facts


def grid_row(canvas: int, batch: int, efficiency: float) -> Measurement:
    facts = {"efficiency": efficiency, "tokens_per_second": 100.0 * efficiency}
    return Measurement(passes.GRID, passes.grid_name(canvas, batch), mean=1.0, trials=2, facts=facts)


@pytest.mark.parametrize(("times", "ticked"), [(1.3, True), (1.004, False), (0.9, False)])
def test_batching_is_judged_by_every_length_of_the_grid(
    times: float, ticked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheet = sheet_of()
    sheet.value(generation.BATCHES, "best batch", 9e9, "tokens/s", {"batch": 8, "times_batch_1": 8.0})
    sheet.rows += [grid_row(*one) for one in ((512, 1, 1.0), (512, 2, 0.8), (128, 1, 1.0), (128, 2, 3.0))]
    sheet.rows.append(grid_row(512, 4, times))
    sheet.leave_out(passes.GRID, passes.grid_name(512, 8), "no memory")
    assert passes.best_of_grid(sheet.rows) == {128: (3.0, 2), 512: (times, 4)}
    monkeypatch.setattr(acceptance, "layer_parity", lambda *_: {"smallest_share": 1, "tolerance": 0, "layers": 1})
    item = acceptance.acceptance(replace(subject_of(sheet)))[2]
    assert item["ticked"] is ticked
    assert item["why"].startswith(f"{1 + ticked} of 2 lengths; ")
    assert item["why"].endswith(f"128 tokens: 3.00 at batch 2; 512 tokens: {times:.2f} at batch 4")


@pytest.mark.parametrize(("body", "passed"), [("\n    return number % 2 == 0\n", 1), ("\n    return True\n", 0)])
def test_coherent_text_is_functions_that_pass(body: str, passed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (task,) = (one for one in text.read_held_out(DEMO, "plain_tasks.jsonl") if one["name"] == "is_even")
    monkeypatch.setattr(text, "read_held_out", lambda folder, name: [task])
    given: list[Any] = []

    def generate(prompts: list[str], config: Any, stop: Any) -> list[Any]:
        given.append((prompts, stop))
        return [SimpleNamespace(text=body)]

    engine: Any = SimpleNamespace(config=Engine.load(DEMO, mesh="data=1").config, generate=generate)
    subject: Any = SimpleNamespace(
        values=SimpleNamespace(random=None), engine=engine, sheet=sheet_of(), expected_seconds=lambda *_: 1.0
    )
    found = text.coherence(subject)
    assert (found["tasks"], found["passed"]) == (1, passed)
    assert found["outcomes"] == {"is_even": "passed" if passed else "wrong"}
    assert given[0][0] == ["def is_even(number):"]
    subject.expected_seconds = lambda *_: 100.0
    with pytest.raises(NotRunError, match="row_seconds"):
        text.coherence(subject)


def test_copies_between_host_and_device() -> None:
    sheet = sheet_of()
    start.measure_transfers(sheet, jax.devices("cpu")[0], "gpu")
    for name in ("host to device", "device to host"):
        row = sheet.find(name)
        assert row is not None, sheet.rows
        assert row.trials == 2
        assert row.mean
        assert row.facts["gigabytes_per_second"] == round((1 << 26) / row.mean / 1e6, 2)


def test_nothing_is_drawn_of_a_record_without_batches(tmp_path: Path) -> None:
    record = {"kind": "measured", "settings": {"model": "a"}, "results": {"rows": []}}
    assert not plots.plot_batches(record, tmp_path / "a.png")
    rows = [asdict(row) for row in (grid_row(128, 1, 1.0), grid_row(128, 2, 1.5))]
    assert plots.plot_batches(record | {"results": {"rows": rows}}, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_names_of_lines_do_not_overlap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = captured(monkeypatch)
    record = json.loads(Path("benchmarks/results/suite_cpu.json").read_text())
    assert plots.plot_batches(record, tmp_path / "a.png")
    # Lines with the same ends
    rows = [grid_row(canvas, batch, 1.0) for canvas in (128, 256, 512) for batch in (1, 2)]
    assert plots.plot_batches(record | {"results": {"rows": [asdict(row) for row in rows]}}, tmp_path / "a.png")
    for figure, lengths in zip(figures, ([128, 256, 512, 1024, 2048], [128, 256, 512]), strict=True):
        assert_texts_are_apart(figure)
        names = [text.get_text() for text in figure.axes[-1].texts]
        assert names == [f"{length} positions" for length in lengths]
