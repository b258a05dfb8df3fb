"""Passes on a GPU: which generations are timed, what a trace shows, and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkouts import check_checkout, checkouts
from benchmarks.gpu_passes import __main__ as gpu_passes
from benchmarks.gpu_passes.__main__ import PASSES, gpu_passes_table, measure
from benchmarks.gpu_passes.traces import Kernel, busy_seconds, read_trace, summarize
from benchmarks.models import CAUSAL, DIFFUSION, checkpoint_config
from benchmarks.schedule import TARGETS
from sharding.errors import InputError

CHILD = Path(gpu_passes.__file__).with_name("pass_generations.py")
SIZES = {
    "layers": 1, "hidden_size": 32, "intermediate_size": 64, "heads": 2, "kv_heads": 1, "head_dim": 16,
    "vocab_size": 64,
}  # fmt: skip
MODELS = {
    "diffusion": {"config": checkpoint_config(SIZES, "float32", DIFFUSION), "dtype": "float32", "quantize": "none"},
    "causal": {"config": checkpoint_config(SIZES, "float32", CAUSAL), "dtype": "float32", "quantize": "none"},
}


def test_conditions_are_those_of_the_schedule() -> None:
    for one in PASSES:
        target, whole = TARGETS[one.target], one.generations(512)["whole"]
        assert target.phase == one.name.removeprefix(f"{one.model} ")
        assert whole["prompt"] + whole["new_tokens"] == target.workload["prompt"] + target.workload["new_tokens"]
        assert whole["rows"] == target.workload["batch"]
        assert (whole["block_length"] is not None) == (target.workload.get("cache") == "dual")
        expected = one.model if one.model.startswith("int") else "none"
        assert target.workload.get("quantization", "none") == expected
    assert PASSES[0].generations(512)["whole"]["new_tokens"] == 128


def test_overlapping_kernels_count_once() -> None:
    kernels = [Kernel("a", 0, 4e9), Kernel("b", 1e9, 2e9), Kernel("c", 3e9, 6e9), Kernel("d", 10e9, 11e9)]
    assert busy_seconds(kernels) == 7.0


def test_passes_of_other_kinds_are_subtracted() -> None:
    others = [Kernel("gemm_fusion_dot.7", 0, 3e6)]
    whole = [Kernel("gemm_fusion_dot.7", 0, 3e6), Kernel("gemm_fusion_dot_12", 4e6, 6e6), Kernel("add_3", 6e6, 7e6)]
    found = summarize(whole, others, passes=2)
    assert (found["busy_ms"], found["kernels"]) == (1.5, 1.0)
    assert found["largest"] == [
        {"name": "gemm_fusion_dot", "ms": 1.0, "kernels": 0.5},
        {"name": "add", "ms": 0.5, "kernels": 0.5},
    ]


def test_a_folder_without_a_gpu_in_its_trace(tmp_path: Path) -> None:
    assert read_trace(tmp_path) == []


def test_a_small_model_is_timed_and_its_programs_are_written(tmp_path: Path) -> None:
    chosen = {one.name: one for one in PASSES}
    with checkouts(CHILD, {"new": None}, [json.dumps(MODELS)], {}) as both:
        block = measure(both, chosen["block step"], 128, 2, tmp_path, str(tmp_path / "hlo"))["new"]
        decode = measure(both, chosen["decode"], 128, 2, tmp_path, None)["new"]
    # 64 new tokens in blocks of 32, each of which begins with a refresh; steps that would commit nothing are skipped.
    assert 50 < block["passes"] <= 62
    assert decode["passes"] == 63, "the first token comes from the prefill"
    for found in (block, decode):
        assert len(found["timing"].each) == 2
        assert found["compile_seconds"] > 0
        assert "gpu" not in found
    assert [path for path in (tmp_path / "hlo").rglob("*.hlo") if "HloModule" in path.read_text()]


def test_the_table_has_measured_and_modelled_times() -> None:
    timing = {"median": 12.0, "minimum": 11.0, "maximum": 13.0}
    gpu = {"busy_ms": 10.5, "kernels": 500.2, "largest": [{"name": "dot", "ms": 9.0, "kernels": 84.0}]}
    modelled: dict[str, Any] = {"now": {"ms": 10.0, "kernels": 521}, "goal_ms": 12.5}
    record = {
        "kind": "measured", "versions": {"jax": "0.10"}, "machine": {"device_kind": "A GPU"}, "notes": [],
        "settings": {"model": "m", "dtype": "bfloat16", "canvas": 512, "trials": 3, "old_commit": "0123456789"},
        "results": [
            {
                "pass": "denoise step", "modelled": modelled, "old": {"timing": timing},
                "new": {"timing": timing, "gpu": gpu},
            }
        ],
    }  # fmt: skip
    lines = gpu_passes_table(record).splitlines()
    assert lines[2].startswith("| denoise step | old | 12.00 (11.00 to 13.00) |")
    assert lines[3] == (
        "| denoise step | new | 12.00 (11.00 to 13.00) | 10.00 | 1.20 | 12.5 | 10.50 | 500 (521) | `dot` 9.0 |"
    )
    assert "`0123456`" in lines[-1]


def test_another_checkout_is_one_of_this_project(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--old=.*not the root of a checkout"):
        check_checkout("old", str(tmp_path))
