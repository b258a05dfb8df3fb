"""Estimates follow from declared weights and from what a layer says it costs."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.planner.estimate import Estimate, estimate
from runtime.planner.presets import preset
from runtime.planner.workload import Workload
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology


def planned(model: str, topology: str, mesh: str, **workload: Any) -> Estimate:
    return estimate(Workload(preset(model), **workload), parse_topology(topology), MeshSpec.parse(mesh))


# Each phase: floating-point operations, bytes of device memory, bytes of collectives, of one device.
PINNED: list[tuple[str, str, str, dict[str, Any], int, dict[str, int], dict[str, tuple[float, float, float]]]] = [
    (
        "diffucoder-7b",
        "v5e:2x4",
        "tensor=8",
        {"batch": 8},
        1_994_646_528,
        {"logits of one head chunk": 38_928_384, "residual and norms": 0},
        {"denoise step": (7189237691765.459, 15981859309.929413, 1673927595.6705883)},
    ),
    (
        "diffucoder-7b",
        "v5e:2x4",
        "data=2,sequence=2,tensor=2",
        {"batch": 8, "cache": "dual"},
        7_645_213_696,
        {"gate and up": 0, "residual and norms": 0},
        {
            "refresh": (1705636265984, 8534832128, 119510156),
            "block step": (940129935360, 8302908416, 67633644),
        },
    ),
    (
        "diffucoder-7b",
        "8xh100",
        "data=4,tensor=2",
        {"batch": 64, "quantization": "int8"},
        4_434_430_976,
        {"gate and up": 310_378_496, "residual and norms": 176_160_768, "weights of the layer": 135_790_592},
        {"denoise step": (55560825751624.28, 101700766334.49411, 3318448280.564706)},
    ),
    (
        "qwen2.5-7b",
        "v4:2x2x1",
        "tensor=4",
        {"batch": 16, "prompt": 1024, "new_tokens": 1024},
        4_706_220_032,
        {"gate and up": 310_378_496, "residual and norms": 117_440_512},
        {
            "prefill": (54308970168320, 68509415424, 6694113984),
            "decode": (59858075648, 4097538048, 6542016),
        },
    ),
    (
        "qwen2.5-7b",
        "v5e:2x4",
        "sequence=2,tensor=4",
        {"batch": 8, "quantization": "int8"},
        1_936_016_384,
        {"gate and up": 0, "residual and norms": 0},
        {
            "prefill": (3356758114304, 5843977216, 444135776),
            "decode": (28490391552, 1845781504, 3656320),
        },
    ),
    (
        "gpt2",
        "1xh100",
        "data=1",
        {"batch": 4, "dtype": "float32"},
        689_825_792,
        {"gate and up": 25_165_824, "residual and norms": 6_291_456, "weights of the layer": 9_437_184},
        {"prefill": (179332448256, 2017511424, 0), "decode": (1065000960, 663865344, 0)},
    ),
]


@pytest.mark.parametrize(("model", "topology", "mesh", "workload", "total", "peak", "phases"), PINNED)
def test_estimates_of_the_first_families(
    model: str,
    topology: str,
    mesh: str,
    workload: dict[str, Any],
    total: int,
    peak: dict[str, int],
    phases: dict[str, tuple[float, float, float]],
) -> None:
    """Numbers of the formulas that were fitted to compiled programs and measured times; a change has to be meant."""
    found = planned(model, topology, mesh, **workload)
    assert found.memory.total == total
    assert {tensor.name: tensor.bytes for tensor in found.memory.peak} == peak
    assert {one.phase.name for one in found.phases} == phases.keys()
    for one in found.phases:
        numbers = one.flops, one.hbm_bytes, one.collective_bytes
        assert numbers == pytest.approx(phases[one.phase.name], rel=1e-12)
