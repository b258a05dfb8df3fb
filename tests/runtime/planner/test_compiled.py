"""The analytical estimates agree with the compilers: memory within 5 %, bytes of every collective exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.planner.compiled import collectives_agree, compile_workload, is_out_of_memory
from runtime.planner.estimate import estimate_workload
from runtime.planner.presets import preset
from runtime.planner.traffic import bytes_by_axis
from runtime.planner.workload import Workload
from sharding.aot import aot_devices, missing_compiler
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology

needs_cuda = pytest.mark.skipif(missing_compiler("gpu") is not None, reason="JAX's CUDA plugin is not installed")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm", True),
        ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory", True),
        ("UNIMPLEMENTED: this layout in device memory", False),
    ],
)
def test_errors_of_memory(text: str, expected: bool) -> None:
    assert is_out_of_memory(RuntimeError(text)) == expected


# topology, mesh, rows, canvas
TPU = [
    ("v5e:2x4", "data=2,sequence=2,tensor=2", 4, 512),
]
TPU_GRID = [
    ("v5p:2x2x2", "sequence=8", 1, 2048),
    ("v5e:4x4", "tensor=16", 16, 512),
    ("v5e:2x4", "tensor=8", 16, 2048),
    ("v5e:2x4", "tensor=8", 1, 512),
    ("v5e:2x4", "data=2,tensor=4", 16, 2048),
    ("v5e:2x4", "sequence=2,tensor=4", 16, 2048),
    ("v5e:2x4", "sequence=2,tensor=4", 1, 2048),
    ("v4:2x2x1", "tensor=4", 16, 512),
    ("v4:2x2x1", "data=4", 16, 512),
    ("v4:2x2x1", "data=2,tensor=2", 16, 2048),
    ("v4:2x2x1", "sequence=4", 1, 2048),
    ("v5e:4x4", "data=2,sequence=2,tensor=4", 16, 2048),
    ("v5p:2x2x2", "tensor=8", 1, 2048),
    ("v5p:2x2x2", "sequence=2,tensor=4", 1, 2048),
    ("v5p:2x2x2", "data=8", 16, 512),
    ("v6e:2x4", "tensor=8", 16, 512),
    ("v6e:2x4", "data=4,tensor=2", 16, 2048),
    ("2xv5e:16x16", "data=64,tensor=8", 128, 512),
    ("2xv5e:2x4", "data=2,tensor=8", 16, 512),
    # Residuals larger than on-chip memory, with many and with few other arrays.
    ("v5e:2x4", "tensor=8", 128, 512),
    ("v5e:4x4", "tensor=16", 64, 512),
    ("v5p:4x4x4", "tensor=64", 128, 512),
    ("2xv5e:16x16", "data=2,tensor=256", 256, 512),
]
GPU = [
    ("8xh200", "tensor=8", 16, 512),
    ("8xh200", "tensor=8", 16, 2048),
    ("8xh200", "sequence=8", 1, 2048),
    ("8xh200", "data=8", 64, 1024),
    ("8xh200", "data=2,sequence=2,tensor=2", 16, 1024),
    ("8xh100", "sequence=2,tensor=4", 16, 2048),
    ("2x8xh200", "data=2,tensor=8", 16, 512),
    ("2x8xh200", "tensor=16", 16, 512),
    ("1xa100", "data=1", 4, 512),
]

# model, cache, topology, mesh, rows
CACHED_TPU = [
    ("qwen2.5-7b", "none", "v5e:2x4", "tensor=8", 8),
    ("qwen2.5-7b", "none", "v5e:2x4", "data=2,sequence=2,tensor=2", 8),
    ("qwen2.5-7b", "none", "v4:2x2x1", "sequence=4", 16),
    ("qwen2.5-7b", "none", "2xv5e:2x4", "data=4,tensor=4", 16),
    ("qwen3-8b", "none", "v5e:2x4", "tensor=8", 8),
    ("qwen3-8b", "none", "v5e:2x4", "data=2,sequence=2,tensor=2", 8),
    ("qwen3-0.6b", "none", "v5e:2x4", "data=2,tensor=4", 8),
    ("diffucoder-7b", "dual", "v5e:2x4", "tensor=8", 8),
    ("diffucoder-7b", "dual", "v5e:2x4", "data=2,sequence=2,tensor=2", 8),
    ("diffucoder-7b", "dual", "v5e:2x4", "data=2,tensor=4", 32),
    ("diffucoder-7b", "prefix", "v5e:2x4", "tensor=8", 8),
    ("diffucoder-7b", "prefix", "v5e:2x4", "data=2,sequence=2,tensor=2", 8),
]
CACHED_GPU = [
    ("qwen3-8b", "none", "8xh100", "data=2,sequence=2,tensor=2", 8),
    ("qwen2.5-7b", "none", "8xh100", "tensor=8", 8),
    ("qwen2.5-7b", "none", "8xh100", "data=2,sequence=2,tensor=2", 8),
    ("diffucoder-7b", "dual", "8xh100", "data=2,sequence=2,tensor=2", 8),
    ("diffucoder-7b", "dual", "8xh100", "data=2,tensor=4", 32),
]

# Others: GPT-2 with narrow heads, int8, int4 and float32 weights, and a prefix cache with windows of one width.
ONE_WINDOW = Workload(preset("diffucoder-7b"), batch=8, cache="prefix", block_length=256)
OTHERS = [
    (
        Workload(preset("gpt2"), "float32", batch=2, prompt=128, new_tokens=128, steps=128),
        "v5e:2x2",
        "tensor=4",
    ),
]
OTHERS_GRID = [
    (Workload(preset("gpt2"), "bfloat16", batch=64), "v5e:2x4", "data=2,sequence=2,tensor=2"),
    (Workload(preset("diffucoder-7b"), batch=8, quantization="int8"), "v5e:2x4", "data=2,sequence=2,tensor=2"),
    (Workload(preset("qwen2.5-7b"), batch=8, quantization="int8"), "v5e:2x4", "tensor=8"),
    (Workload(preset("diffucoder-7b"), batch=8, quantization="int4"), "v5e:2x4", "data=2,sequence=2,tensor=2"),
    (Workload(preset("qwen2.5-7b"), batch=8, quantization="int4"), "v5e:2x4", "tensor=8"),
    (Workload(preset("qwen2.5-7b"), "float16", batch=8, quantization="int8"), "v5e:2x4", "tensor=8"),
    (Workload(preset("diffucoder-7b"), "float32", batch=8), "v5p:2x2x2", "data=2,sequence=2,tensor=2"),
    (ONE_WINDOW, "v5e:2x4", "tensor=8"),
    (ONE_WINDOW, "v5e:2x4", "data=2,sequence=2,tensor=2"),
]
OTHERS_GPU = [
    (Workload(preset("gpt2"), "float32", batch=8), "4xh100", "tensor=4"),
    (Workload(preset("gpt2"), "bfloat16", batch=64), "8xh100", "data=2,sequence=2,tensor=2"),
    (Workload(preset("diffucoder-7b"), batch=8, quantization="int8"), "8xh100", "data=2,sequence=2,tensor=2"),
    (Workload(preset("qwen2.5-7b"), batch=8, quantization="int8"), "8xh100", "tensor=8"),
    (Workload(preset("diffucoder-7b"), batch=8, quantization="int4"), "8xh100", "data=2,sequence=2,tensor=2"),
    (Workload(preset("qwen2.5-7b"), batch=8, quantization="int4"), "8xh100", "tensor=8"),
    (Workload(preset("diffucoder-7b"), "float32", batch=8), "8xh200", "data=2,sequence=2,tensor=2"),
    (ONE_WINDOW, "8xh100", "data=2,sequence=2,tensor=2"),
]

# Models with full or block-causal attention, at their published sizes; 32 and 8 KV heads, and 28 query heads over 4.
FAMILIES = {
    "llada": Workload(preset("llada-8b"), batch=8),
    "llada dual": Workload(preset("llada-8b"), batch=8, cache="dual"),
    "sdar": Workload(preset("sdar-8b"), batch=8, cache="exact", block_length=4),
    "fast_dllm_v2": Workload(preset("fast_dllm_v2-7b"), batch=8, cache="exact"),
    "dreamon": Workload(preset("dreamon-7b"), batch=8),
}
FAMILIES_TPU = [("v5e:2x4", "tensor=8"), ("v5e:2x4", "data=2,sequence=2,tensor=2"), ("v4:2x2x1", "tensor=4")]
FAMILIES_GPU = [("8xh100", "tensor=8"), ("8xh100", "data=2,sequence=2,tensor=2")]


def check(workload: Workload, text: str, mesh: str) -> None:
    topology = parse_topology(text)
    found = estimate_workload(workload, topology, MeshSpec.parse(mesh))
    compiled = compile_workload(found.workload, found.spec, aot_devices(topology))
    most = max(one.memory_bytes for one in compiled)
    assert found.memory.total == pytest.approx(most, rel=0.05)
    passes = {one.phase.name: one for one in found.phases}
    assert [name for one in compiled for name in one.passes] == list(passes)
    assert any(one.collectives for one in compiled) or found.spec.size == 1
    for one in compiled:
        for name in one.passes:
            if name == "block step" and len(workload.windows(found.layout, topology.chip.platform)) > 1:
                continue  # the program has windows of several widths, a pass runs one
            moved = one.bytes_by_axis(found.layout, passes[name].phase)
            assert collectives_agree(passes[name], one, found.layout), (name, moved, passes[name].collectives)


# topology, mesh, rows, canvas, drafts
DRAFTED = [
    ("v5e:2x4", "tensor=8", 4, 512, 3),
    ("v5e:2x4", "data=2,sequence=2,tensor=2", 4, 512, 3),
    ("v5p:2x2x2", "data=8", 16, 512, 7),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", DRAFTED)
def test_memory_with_drafts_is_what_the_tpu_compiler_says(case: tuple[str, str, int, int, int]) -> None:
    text, mesh, rows, canvas, drafts = case
    half, topology = canvas // 2, parse_topology(text)
    workload = Workload(
        preset("diffucoder-7b"), batch=rows, prompt=half, new_tokens=half, steps=half, draft_steps=drafts
    )
    found = estimate_workload(workload, topology, MeshSpec.parse(mesh))
    (compiled,) = compile_workload(workload, found.spec, aot_devices(topology))
    assert found.memory.total == pytest.approx(compiled.memory_bytes, rel=0.05)
    # Layers move what they move for as many rows; the head and its choices depend on how many steps a pass makes.
    plain = estimate_workload(replace(workload, batch=rows * (1 + drafts), draft_steps=0), topology, found.spec)
    layers = [one for one in plain.phases[0].collectives if "per layer" in one.what]
    assert layers == [one for one in found.phases[0].collectives if "per layer" in one.what]
    assert found.phases[0].seconds < 1.5 * plain.phases[0].seconds


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "rows", "drafts"), [("data=8", 1, 7), ("data=4,sequence=2", 2, 1)])
def test_drafts_over_the_data_axis_are_what_the_tpu_compiler_says(mesh: str, rows: int, drafts: int) -> None:
    topology = parse_topology("v5p:2x2x2")
    workload = Workload(preset("diffucoder-7b"), batch=rows, draft_steps=drafts, draft_axis="data")
    found = estimate_workload(workload, topology, MeshSpec.parse(mesh))
    (compiled,) = compile_workload(workload, found.spec, aot_devices(topology))
    assert found.memory.total == pytest.approx(compiled.memory_bytes, rel=0.05)
    (phase,) = found.phases
    moved, estimated = compiled.bytes_by_axis(found.layout, phase.phase), bytes_by_axis(phase.collectives)
    assert moved["all-reduce", ("data",)] == estimated["all-reduce", ("data",)]
    # A device computes as many canvases as it would of a single row without drafts.
    plain = estimate_workload(replace(workload, draft_steps=0, batch=found.spec.data), topology, found.spec)
    assert phase.phase.computed == plain.phases[0].phase.rows == 1
    assert phase.seconds < 1.4 * plain.phases[0].seconds


def check_canvas(text: str, mesh: str, rows: int, canvas: int) -> None:
    half = canvas // 2
    check(Workload(preset("diffucoder-7b"), batch=rows, prompt=half, new_tokens=half, steps=half), text, mesh)


def check_cached(model: str, cache: str, text: str, mesh: str, rows: int) -> None:
    check(Workload(preset(model), batch=rows, cache=cache), text, mesh)


@pytest.mark.parametrize("case", TPU)
def test_estimates_are_what_the_tpu_compiler_says(case: tuple[str, str, int, int]) -> None:
    check_canvas(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", TPU_GRID)
def test_estimates_are_what_the_tpu_compiler_says_on_a_grid(case: tuple[str, str, int, int]) -> None:
    check_canvas(*case)


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("case", GPU)
def test_estimates_are_what_the_gpu_compiler_says(case: tuple[str, str, int, int]) -> None:
    check_canvas(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CACHED_TPU)
def test_cached_passes_are_what_the_tpu_compiler_says(case: tuple[str, str, str, str, int]) -> None:
    check_cached(*case)


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("case", CACHED_GPU)
def test_cached_passes_are_what_the_gpu_compiler_says(case: tuple[str, str, str, str, int]) -> None:
    check_cached(*case)


@pytest.mark.parametrize("case", OTHERS)
def test_other_models_are_what_the_tpu_compiler_says(case: tuple[Workload, str, str]) -> None:
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS_GRID)
def test_other_models_are_what_the_tpu_compiler_says_on_a_grid(case: tuple[Workload, str, str]) -> None:
    check(*case)


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS_GPU)
def test_other_models_are_what_the_gpu_compiler_says(case: tuple[Workload, str, str]) -> None:
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES_TPU, ids="/".join)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_what_the_tpu_compiler_says(name: str, case: tuple[str, str]) -> None:
    check(FAMILIES[name], *case)


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES_GPU, ids="/".join)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_what_the_gpu_compiler_says(name: str, case: tuple[str, str]) -> None:
    check(FAMILIES[name], *case)
