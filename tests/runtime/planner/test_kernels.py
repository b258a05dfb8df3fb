"""Terms of the planner's times. The schedules of compiled programs judge their sum, see tests/benchmarks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.planner.estimate import PhaseEstimate, estimate_workload
from runtime.planner.kernels import LAUNCH_SECONDS, padded, product_seconds, splash_seconds
from runtime.planner.presets import preset
from runtime.planner.workload import Workload
from sharding.mesh import MeshSpec
from sharding.topology import CHIPS, parse_topology


def test_windows_fill_whole_registers() -> None:
    assert [padded(positions) for positions in (1, 8, 33)] == [1, 8, 40]


def test_products_of_two_cores_have_windows_of_eight_registers() -> None:
    seconds = {
        chip: [product_seconds(CHIPS[chip], 1e12, 1e14, 1024, columns, False) for columns in (40 * 128, 37 * 128)]
        for chip in ("v5p", "v5e")
    }
    whole, partly = seconds["v5p"]
    assert partly / whole == pytest.approx(40 / 37)
    assert seconds["v5e"][0] == seconds["v5e"][1]


def test_few_rows_wait_for_weights() -> None:
    few, many = (product_seconds(CHIPS["v5e"], rows * 1e9, 1e14, rows, 4096, False) / rows for rows in (24, 24_000_000))
    assert few / many == pytest.approx(2)


def test_short_rows_use_splash_attention_less_well() -> None:
    """The work per query does not depend on the number of keys."""
    chip, queries, per_pair = CHIPS["v5e"], 1e6, 4.0 * 128
    short, long = (splash_seconds(chip, queries * keys * per_pair, queries) / keys for keys in (512, 8192))
    assert 1.5 < short / long < 1.8


def phase(topology: str, mesh: MeshSpec, workload: Workload) -> PhaseEstimate:
    return estimate_workload(workload, parse_topology(topology), mesh).main_phase


def test_only_gpus_wait_for_launches() -> None:
    workload = Workload(preset("qwen2.5-7b"))
    names = {
        topology: [stage.name for stage in phase(topology, MeshSpec(), workload).stages]
        for topology in ("1xh100", "v5e:1x1")
    }
    assert [*names["v5e:1x1"], "launches"] == names["1xh100"]
    launches = phase("1xh100", MeshSpec(), workload).stages[-1]
    shallow = phase("1xh100", MeshSpec(), replace(workload, config=replace(workload.config, num_layers=1))).stages[-1]
    assert launches.hbm_bytes == launches.flops == 0
    assert (launches.seconds - shallow.seconds) / (workload.config.num_layers - 1) == pytest.approx(19 * LAUNCH_SECONDS)


def test_products_in_pieces_wait_for_a_copy_of_the_weights() -> None:
    """On ``tensor=8`` with 2048 positions or more; below, and on ``tensor=4``, products are whole."""
    workload = Workload(preset("diffucoder-7b"), batch=8)
    rate = {
        (tensor, batch): layers.flops / layers.compute_seconds / CHIPS["v5e"].flops
        for tensor, batch in ((8, 2), (8, 8), (4, 8))
        for layers in [
            phase("v5e:2x4", MeshSpec(data=8 // tensor, tensor=tensor), replace(workload, batch=batch)).stages[0]
        ]
    }
    assert rate[8, 8] < 0.85 < 0.93 < rate[8, 2] < rate[4, 8]
