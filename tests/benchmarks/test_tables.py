"""Tables of records: the contents of their cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import summary
from benchmarks.autoregressive import autoregressive_table
from benchmarks.suite.passes import BATCHING, GRID, grid_name
from benchmarks.suite.tables import suite_tables
from benchmarks.summary import machine_of, measured_table
from benchmarks.torch_tables import comparison_table

NOTES = ["other processes kept the machine busy", "weights stored as bfloat16"]


@pytest.mark.parametrize("uncached", [True, False])
def test_rows_of_the_autoregressive_table(uncached: bool) -> None:
    def row(cached: bool, mean: float) -> dict[str, Any]:
        rate = {"mean": mean, "deviation": 0.24}
        sizes = {"weight_bytes": 124_400_000, "cache_bytes": 4_700_000}
        return {"variant": "int8", "new_tokens": 15, "cached": cached, "tokens_per_second": rate, **sizes}

    record = {
        "kind": "measured",
        "settings": {"prompt": 16, "batch": 1, "trials": 5, "cores": 2},
        "machine": {"processor": "Some CPU"},
        "notes": [],
        "results": [row(True, 30.04), *[row(False, 12.0)][: int(uncached)]],
    }
    lines = autoregressive_table(record).splitlines()
    assert lines[2] == f"| int8 | 15 | 30.0 ± 0.2 | {'12.0 ± 0.2 | 2.5x' if uncached else ' | '} | 124.4 | 4.7 |"
    assert lines[-1] == "Measured: prompt of 16, batch 1, 5 trials, 2 CPU cores, Some CPU."


@pytest.mark.parametrize("make", [autoregressive_table, comparison_table, suite_tables])
def test_a_table_says_what_its_record_notes(make: Any) -> None:
    record: dict[str, Any] = {
        "kind": "measured",
        "command": "python -m benchmarks.a",
        "settings": {
            "prompt": 16, "batch": 1, "trials": 5, "cores": 2, "dtype": "float32", "model": "a", "parameters": 1,
            "mesh": "data=1",
        },
        "versions": {"jax": "1", "torch": "2", "transformers": "3"},
        "machine": {"processor": "Some CPU", "platform": "cpu", "device_kind": "cpu", "device_count": 1, "cores": 2},
        "results": {"rows": [], "acceptance": []} if make is suite_tables else {},
        "notes": NOTES,
    }  # fmt: skip
    line = "Note: other processes kept the machine busy; weights stored as bfloat16."
    assert line in make(record).splitlines()
    assert "Note:" not in make(record | {"notes": []})


def test_the_summary_beside_pytorch() -> None:
    def row(model: str, cores: int, ratio: float, **more: Any) -> dict[str, Any]:
        return {
            "model": model, "cores": cores, "times_as_fast": {"median": ratio}, "share_of_equal_new_tokens": 1.0,
            **more,
        }  # fmt: skip

    sampled = {"samples": {"agree": True}}
    results = {
        "generate": [
            row("demo", 1, 1.5, **sampled), row("demo", 1, 1.9, **sampled), row("demo", 2, 9.0, **sampled),
            row("mid-size", 1, 1.2, **sampled), {"model": "demo", "cores": 1, "out_of_memory": "too large"},
        ],
        "autoregressive": [row("mid-size", 1, 1.1), row("mid-size", 1, 0.9, share_of_equal_new_tokens=0.9)],
    }  # fmt: skip
    machine = {"platform": "cpu", "cores": 2, "processor": "Some(R) CPU"}
    record = {"command": "python -m benchmarks.compare_torch", "results": results, "machine": machine}
    table = measured_table(lambda name: record if name == "compare_torch" else None)
    command = "`python -m benchmarks.compare_torch`"
    assert table.splitlines()[2:] == [
        "| speed beside PyTorch on one core, masked diffusion | demo 1.5x to 1.9x, mid-size 1.2x to 1.2x; "
        f"same greedy tokens | 2 cores, Some CPU | {command} |",
        "| speed beside PyTorch on one core, cached decoding | mid-size 0.9x to 1.1x | 2 cores, Some CPU "
        f"| {command} |",
    ]
    on_gpu = {"machine": {"platform": "gpu", "device_count": 1, "device_kind": "NVIDIA H200"}}
    assert machine_of(on_gpu) == "1 x H200"


def grid_row(length: int, batch: int, efficiency: float) -> dict[str, Any]:
    """A row of the suite's grid of lengths and batches."""
    numbers = {"mean": 2.0, "deviation": 0.1, "minimum": 1.9, "maximum": 2.1, "trials": 2, "not_run": None}
    facts = {"mfu": 0.5, "efficiency": efficiency}
    return {"section": GRID, "name": grid_name(length, batch), "unit": "ms", "facts": facts, **numbers}


def suite_record(rows: list[dict[str, Any]], acceptance: list[dict[str, Any]], notes: list[str]) -> dict[str, Any]:
    return {
        "kind": "measured",
        "command": "python -m benchmarks.suite",
        "settings": {"model": "a", "parameters": 1, "dtype": "float32", "mesh": "data=1"},
        "versions": {},
        "machine": {"processor": "Some CPU", "platform": "cpu", "device_kind": "cpu", "device_count": 1, "cores": 2},
        "results": {"rows": rows, "acceptance": acceptance},
        "notes": notes,
    }


def test_the_grid_of_a_run_that_was_cut_short_in_it() -> None:
    rows = [grid_row(*one, 1.0) for one in ((128, 1), (128, 2), (256, 1))]
    lines = suite_tables(suite_record(rows, [], ["cut short by KeyboardInterrupt"])).splitlines()
    assert "| 128 | 2 ± 0.1, 1.00, 50% | 2 ± 0.1, 1.00, 50% |" in lines
    assert "| 256 | 2 ± 0.1, 1.00, 50% | not run |" in lines
    assert lines[-1] == "Note: cut short by KeyboardInterrupt."


def test_batching_is_judged_by_every_length_in_earlier_records_too() -> None:
    item = {"what": "batching speeds up forward passes of the shortest length", "ticked": True, "why": "not run: why"}
    record = suite_record([grid_row(128, 2, 1.5), grid_row(256, 2, 0.9)], [item], [])
    assert suite_tables(record).splitlines()[-1] == (
        "- [ ] batching speeds up forward passes of every length: 1 of 2 lengths; tokens per second relative to "
        "batch 1: 128 tokens: 1.50 at batch 2; 256 tokens: 0.90 at batch 2"
    )
    record["results"] = {"rows": [], "acceptance": [item | {"ticked": None}]}
    assert suite_tables(record).splitlines()[-1] == f"- [ ] {BATCHING}: not run: why"


def test_the_guides_have_figures_of_the_records() -> None:
    """Sentences outside the generated tables."""
    folder = Path(summary.__file__).parent
    guide = " ".join((folder / "README.md").read_text("utf-8").split())

    def results(name: str) -> Any:
        return json.loads((folder / "results" / f"{name}.json").read_text())["results"]

    steps = {row["name"]: row["mean"] for row in results("suite_cpu")["rows"] if row["section"] == "denoise step"}
    times = steps["batch 8, canvas 512"] / steps["batch 1, canvas 512"]
    assert f"a step of 8 rows of 512 positions takes {times:.1f} times as long as a step of one" in guide
    rates = {
        (row["new_tokens"], row["cached"]): row["tokens_per_second"]["mean"]
        for row in results("autoregressive")
        if row["variant"] == "float32"
    }
    short, long = (rates[count, True] / rates[count, False] for count in (15, 128))
    assert f"in float32 it takes {short:.1f} times as long as a cached step at 31 positions" in guide
    assert f"and {long:.1f} times as long at 144" in guide
    checkpoints = (folder.parent / "checkpoints" / "README.md").read_text("utf-8")
    peak = results("full_checkpoint")["convert"]["peak_resident_bytes"] / 1e9
    assert f"it peaks at {peak:.1f} GB for DiffuCoder-7B" in checkpoints
