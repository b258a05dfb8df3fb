"""The grid of buckets: limited in number, with room for every row; and packing at the lowest price."""

from __future__ import annotations

import copy
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from runtime.decoding.parameters import DiffusionConfig
from runtime.execution.buckets import Bucket, Grid, PassCost, ladder, make_grid, pack
from runtime.execution.pool_shape import pool_grid
from runtime.execution.runner import canvas_bucket
from runtime.models.families import model_layout
from runtime.models.forward import residual_unit
from runtime.planner.presets import preset
from sharding.mesh import MeshSpec
from sharding.topology import chip_of
from tests import golden_cases

CPU, GPU = PassCost(0.0, 64.0), PassCost(206.0, 50.0)
WINDOWS = PassCost(206.0, 50.0, 32, 1 / 32)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 24, 100])
@pytest.mark.parametrize("cost", [CPU, GPU, WINDOWS])
@pytest.mark.parametrize(("slots", "canvas", "data"), [(8, 512, 1), (16, 2048, 2), (1, 64, 1), (12, 640, 4)])
def test_a_grid_is_bounded_and_has_room_for_every_row(
    slots: int, canvas: int, data: int, cost: PassCost, limit: int
) -> None:
    grid = make_grid(slots, canvas, cost, data=data, step=64, limit=limit)
    assert len(set(grid.buckets)) == len(grid.buckets) <= limit
    assert grid.buckets[0] == Bucket(data, canvas), "every row fits into the first compiled bucket"
    for bucket in grid.buckets:
        assert bucket.rows % data == 0
        assert bucket.rows <= slots
        assert bucket.width <= canvas
    assert grid.width_for(1) == min(bucket.width for bucket in grid.buckets)


def test_widths_are_fine_at_the_small_end() -> None:
    widths = ladder(512, 32, 0.25)
    assert widths[:8] == list(range(32, 257, 32))
    assert widths[-1] == 512
    assert all(wide <= 1.25 * narrow + 32 for narrow, wide in itertools.pairwise(widths))
    assert ladder(100, 64, 0.25) == [64, 100]


def test_widths_are_rounded_up_to_a_unit_where_this_costs_little() -> None:
    plain, rounded = (ladder(8192, 128, 0.25, unit) for unit in (1, 256))
    assert [width for width in plain if width % 256] == [128, 384, 640, 896, 1920, 3456, 4224, 5248, 6528, 8064]
    assert [width for width in rounded if width % 256] == [128, 384, 640, 896, 1920], "a unit more is over 5 %"
    assert {3584, 4352, 5376, 6656} < set(rounded)
    assert rounded == sorted(set(rounded))
    assert rounded[-1] == 8192
    assert all(any(width <= own < 1.05 * width for own in rounded) for width in plain)


@pytest.mark.parametrize(("platform", "divides"), [("tpu", True), ("gpu", False)])
def test_long_widths_of_a_pool_on_tpu_divide_over_the_tensor_axis(platform: str, divides: bool) -> None:
    runner = copy.copy(golden_cases.engine("sequence=2,tensor=8").runner)
    runner.platform = platform
    grid = pool_grid(runner, DiffusionConfig(), 8192, 1)
    unit = residual_unit(runner.layout)
    assert unit == 256
    assert all(bucket.width % unit == 0 for bucket in grid.buckets if bucket.width > 20 * unit // 2) == divides


@pytest.mark.parametrize("sequence", [1, 2, 3, 4])
@pytest.mark.parametrize("tensor", [2, 4, 8, 16, 32])
def test_a_canvas_divides_over_the_tensor_axis_unless_this_costs_over_an_eighth(sequence: int, tensor: int) -> None:
    layout = model_layout(preset("diffucoder-7b"), MeshSpec(sequence=sequence, tensor=tensor))
    unit = residual_unit(layout)
    widths = {canvas_bucket(length, layout, "tpu") for length in range(1, 16385, 31)}
    assert any(width % unit == 0 for width in widths)
    assert all(math.ceil(width / unit) * unit >= 1.125 * width for width in widths if width % unit)


def test_an_accelerator_of_unknown_type_is_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its passes read the weights, and its programs take long to compile: few buckets, and large batches."""
    runner = golden_cases.engine().runner
    costs = {}
    for kind in ("cpu", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3"):
        device = SimpleNamespace(platform="cpu" if kind == "cpu" else "gpu", device_kind=kind)
        monkeypatch.setattr("runtime.execution.runner.chip_of", lambda _, device=device: chip_of(device))
        costs[kind] = runner.pass_floor()[0], runner.compile_positions()
    cpu, unknown, known = costs.values()
    assert cpu[0] == 0 < unknown[0]
    assert 0.1 * known[1] < unknown[1]
    assert unknown[1] > 100 * cpu[1]


def test_widths_that_somebody_wants_are_the_only_ones() -> None:
    grid = make_grid(8, 128, CPU, data=1, step=32, widths=[64, 128])
    assert {bucket.width for bucket in grid.buckets} == {64, 128}


def test_what_is_compiled_first_helps_most() -> None:
    order = make_grid(8, 512, CPU, data=1, step=32).buckets
    assert [bucket.rows for bucket in order] == sorted(bucket.rows for bucket in order)
    first = sorted(bucket.width for bucket in order[:4])
    gaps = np.diff([0, *first])
    assert max(gaps) < 512 * 0.7, "four programs cover all lengths closely"


def _cheapest(lengths: list[int], grid: Grid) -> float:
    """The lowest price, found by trying all ways to distribute sorted rows over buckets."""
    if not lengths:
        return 0.0
    best = float("inf")
    for bucket in grid.buckets:
        if bucket.width >= lengths[0]:
            best = min(best, grid.cost(bucket) + _cheapest(lengths[bucket.rows :], grid))
    return best


@pytest.mark.parametrize("cost", [CPU, GPU, WINDOWS])
def test_rows_are_packed_at_the_lowest_price(cost: PassCost) -> None:
    grid = make_grid(8, 256, cost, data=1, step=64)
    random = np.random.default_rng(0)
    for count in range(6):
        lengths = sorted((int(length) for length in random.integers(1, 257, count)), reverse=True)
        found = pack(lengths, grid.buckets, cost)
        assert sum(rows for _, rows in found) == count
        first = 0
        for bucket, rows in found:
            assert rows <= bucket.rows
            assert lengths[first] <= bucket.width
            first += rows
        assert sum(cost(bucket) for bucket, _ in found) == pytest.approx(_cheapest(lengths, grid))


def test_of_equal_prices_the_smallest_bucket_is_chosen() -> None:
    """With an exact cache, buckets whose passes have fewer positions than the floor all cost the same."""
    cost = PassCost(240.0, 60.0, 4)
    found = pack([450, 90, 90, 90], [Bucket(20, 512), Bucket(4, 512)], cost)
    assert found == [(Bucket(4, 512), 4)]


def test_a_chunk_of_a_prompt_takes_as_long_as_on_one_shard() -> None:
    """The unit of cost is a position that all shards share, but one ``data`` shard reads a chunk alone."""
    assert PassCost(206.0, 50.0).of_prompt(1000, 512) == 2 * (50 + 512)
    assert PassCost(206.0, 50.0, prompt_position=4).of_prompt(1000, 512) == 2 * (50 + 4 * 512)
    assert PassCost(9000.0, 50.0, prompt_position=4).of_prompt(1000, 512) == 2 * (50 + 9000), "the weights are read"


def test_where_weights_are_what_takes_time_short_rows_share_a_pass() -> None:
    rows = [60] * 8
    on_gpu = pack(rows, make_grid(8, 512, GPU, data=1, step=64).buckets, GPU)
    assert [bucket.rows for bucket, _ in on_gpu] == [4, 4], "enough work for the devices"
