"""The planner's estimates for GPUs agree with the passes that were measured on one H200."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.planner.estimate import estimate_workload
from runtime.planner.presets import preset
from runtime.planner.workload import Workload
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
_HALF: dict[str, Any] = {"prompt": 256, "new_tokens": 256}
_SUITE: dict[str, Any] = {"prompt": 192, "new_tokens": 64, "steps": 16, "cache": "dual"}


def planned_ms(name: str, chunks: float | None = None, **workload: Any) -> float:
    model = "qwen2.5-7b" if name == "decode" else "diffucoder-7b"
    estimate = estimate_workload(
        Workload(preset(model), **workload), parse_topology("1xh200"), MeshSpec.parse("data=1")
    )
    phase = next(one.phase for one in estimate.phases if one.phase.name == name)
    return 1e3 * estimate.estimate_phase(phase if chunks is None else replace(phase, chunks=chunks)).seconds


def measured_passes() -> dict[str, float]:
    record = json.loads((RESULTS / "gpu_passes.json").read_text())
    return {row["pass"]: row["new"]["timing"]["median"] for row in record["results"]}


def measured_in_suite(name: str) -> float:
    rows = json.loads((RESULTS / "suite_h200.json").read_text())["results"]["rows"]
    (row,) = [row for row in rows if row["name"] == name]
    return float(row["facts"]["median"])


def test_passes_that_the_constants_are_fitted_to() -> None:
    measured = measured_passes()
    # At most 128 positions are masked.
    assert planned_ms("denoise step", 1, **_HALF) == pytest.approx(measured["denoise step"], rel=0.1)
    assert planned_ms("block step", cache="dual", **_HALF) == pytest.approx(measured["block step"], rel=0.1)
    assert planned_ms("decode", **_HALF) == pytest.approx(measured["decode"], rel=0.1)
    for quantization in ("int8", "int4"):
        planned = planned_ms("decode", quantization=quantization, **_HALF)
        assert planned == pytest.approx(measured[f"{quantization} decode"], rel=0.1)


@pytest.mark.parametrize("rows", [1, 8])
def test_denoise_steps_of_the_suite(rows: int) -> None:
    measured = measured_in_suite(f"batch {rows}, canvas 512")
    assert planned_ms("denoise step", batch=rows, steps=8, **_HALF) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("rows", [1, 16])
def test_block_steps_of_the_suite(rows: int) -> None:
    measured = measured_in_suite(f"batch {rows}, canvas 256, blocks of 32")
    assert planned_ms("block step", batch=rows, **_SUITE) == pytest.approx(measured, rel=0.15)
