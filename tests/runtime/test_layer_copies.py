"""Programs read each layer's weights in place: neither the optimized HLO nor the memory has a copy of a layer.

Nor has it a copy of the KV cache of a layer, and position tables are computed once for all layers.

The tests of GPU programs are slow, and need JAX's CUDA plugin (``pip install -e '.[cuda]'``) but no GPU:
``pytest -m programs tests/runtime/test_layer_copies.py``.
"""

from __future__ import annotations

import functools
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from runtime import DiffusionConfig, SamplingConfig
from runtime.execution.programs import (
    abstract_decode,
    abstract_denoise,
    compiler_options,
    lower_decode,
    lower_denoise,
    lower_prefill,
)
from runtime.execution.specialization import decode_program, denoise_program
from runtime.models.attention import Implementation
from runtime.models.config import ModelConfig
from runtime.models.families import model_layout
from runtime.models.forward import Forward
from runtime.planner.presets import preset
from sharding.aot import aot_devices, missing_compiler
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology
from tests.compilation import AS_RELEASED

needs_cuda = pytest.mark.skipif(missing_compiler("gpu") is not None, reason="JAX's CUDA plugin is not installed")
needs_gpu = pytest.mark.skipif(
    missing_compiler("gpu") is not None or not Path("/dev/nvidia0").exists(),
    reason="needs an NVIDIA GPU and JAX's CUDA plugin",
)

pytestmark = pytest.mark.programs

PROGRAMS = ("denoise step", "block step", "prefill", "decode")
# Canvas and head chunk are so small that no activation is as large as a weight.
S, CHUNK = 320, 32
# Operations that allocate no memory, or that only call other computations.
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "opt-barrier", "while", "conditional", "call"}


_SMALL = {"num_layers": 3, "vocab_size": 640}


def model(program: str, sizes: dict[str, int]) -> ModelConfig:
    """Three layers, and a vocabulary so small that only weights are as large as a weight."""
    found = preset("qwen2.5-7b" if program in ("prefill", "decode") else "diffucoder-7b")
    mask = -1 if program in ("prefill", "decode") else 1
    return replace(found, mask_token_id=mask, pad_token_id=0, end_token_ids=(), **_SMALL | sizes)


def lowered(
    program: str,
    devices: list[Any],
    dtype: str,
    quantization: str,
    sizes: dict[str, int],
    scan: bool | None = None,
    chunk: int = CHUNK,
    attention: Implementation = "xla",
) -> tuple[Any, jax.stages.Lowered]:
    """A layout and one of its programs, for one row on one device."""
    layout = model_layout(model(program, sizes), MeshSpec(), devices[:1], quantization, scan)
    forward, weights = Forward(layout, attention), layout.abstract_weights(jnp.dtype(dtype))
    if program in ("prefill", "decode"):
        decoding = decode_program(SamplingConfig(64, temperature=0.7), layout.config.vocab_size)
        arguments = (weights, *abstract_decode(layout, 1, S, dtype))
        if program == "decode":
            return layout, lower_decode(forward, decoding, *arguments)
        return layout, lower_prefill(forward, decoding, S, *arguments)
    cached = program == "block step"
    config = DiffusionConfig(64, cache="dual" if cached else "none", block_length=32 if cached else None)
    denoising = denoise_program(config, layout.config, dtype, chunk=chunk, width=S, span=64)
    state = abstract_denoise(layout, 1, S, 64, dtype if cached else None)
    return layout, lower_denoise(forward, denoising, weights, *state)


def materialised(text: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Operation, shape and line of every array that an operation other than a matrix product writes to memory."""
    inside = set(re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", text)) - set(
        re.findall(r" call\(.*to_apply=%?([\w.\-]+)", text)
    )
    computation = ""
    for line in text.splitlines():
        opened = re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
        if opened:
            computation = opened[1]
        found = re.match(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", line)
        if not found or computation in inside or found[2] in FREE or "gemm" in line or found[2] == "dot":
            continue
        for sizes in re.findall(r"\w+\[([\d,]+)\]", found[1]):
            yield found[2], tuple(map(int, sizes.split(","))), line.strip()


def matrices(layout: Any) -> set[int]:
    """Size of each matrix of one layer, as a count of numbers."""
    sizes = {
        leaf.name.rsplit(".", 1)[-1]: math.prod(
            layout.padded_dimensions[axis] for axis in leaf.axes if axis != "layers"
        )
        for leaf in layout.leaves
        if leaf.layers and leaf.contracted
    }
    assert len(set(sizes.values())) >= 3, "keys, queries and the MLP"
    # XLA can write the matrices of queries, keys and values side by side.
    return {*sizes.values(), sizes["q_proj"] + sizes["k_proj"] + sizes["v_proj"]}


def copies(layout: Any, text: str) -> list[str]:
    """Arrays written to memory that are as large as a matrix of a layer, or of all layers."""
    numbers = matrices(layout)
    numbers |= {layout.config.num_layers * size for size in numbers}
    return [line for _, shape, line in materialised(text) if math.prod(shape) in numbers]


CPU = {"hidden_size": 256, "intermediate_size": 1536, "num_heads": 8, "num_kv_heads": 2, "head_dim": 32}


@functools.cache
def compiled_here(program: str, dtype: str, quantization: str, scan: bool | None = None) -> tuple[Any, Any]:
    layout, lowering = lowered(program, jax.devices(), dtype, quantization, CPU, scan)
    return layout, lowering.compile(compiler_options=(compiler_options(layout, dtype) or {}) | AS_RELEASED)


@pytest.mark.parametrize("program", ["block step", "decode"])
def test_cpu_programs_copy_no_weights(program: str) -> None:
    layout, found = compiled_here(program, "float32", "none")
    assert not copies(layout, found.as_text())
    layout, scanned = compiled_here(program, "float32", "none", scan=True)
    assert len(copies(layout, scanned.as_text())) >= 3, "the parser does not see a copy"
    if program == "decode":  # without activations of whole rows
        matrix = 4 * CPU["hidden_size"] * CPU["intermediate_size"]
        assert found.memory_analysis().temp_size_in_bytes < matrix < scanned.memory_analysis().temp_size_in_bytes


def test_cpu_block_steps_compute_rotary_tables_once() -> None:
    text = compiled_here("block step", "float32", "none")[1].as_text()
    # One table for the refreshes and windows of all layers.
    assert [len(re.findall(rf" {function}\(", text)) for function in ("cosine", "sine")] == [1, 1]


@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", "none"), ("float32", "int8")])
def test_cpu_programs_widen_a_layer_at_a_time(dtype: str, quantization: str) -> None:
    """In addition to the memory of the float32 program, less than one layer's weights in float32 are needed."""
    _, plain = compiled_here("block step", "float32", "none")
    layout, found = compiled_here("block step", dtype, quantization)
    layer = sum(4 * math.prod(leaf.padded_shape) for leaf in layout.leaves if leaf.layers == (0,))
    widened = found.memory_analysis().temp_size_in_bytes - plain.memory_analysis().temp_size_in_bytes
    assert widened < layer


def gpu_options(layout: Any) -> dict[str, str | bool | int]:
    return (compiler_options(layout, jnp.bfloat16) or {}) | AS_RELEASED


# The layers of the 7.6B model.
GPU = {"hidden_size": 3584, "intermediate_size": 18944, "num_heads": 28, "num_kv_heads": 4, "head_dim": 128}


# Without a GPU, XLA cannot measure which kernel for a product is the fastest, and takes its own. On an H200 it takes
# those of cuBLAS for products of many positions; whatever they read has to be in memory.
CUBLAS = {"xla_gpu_enable_triton_gemm": False}


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(
    ("program", "attention"), [*((program, "xla") for program in PROGRAMS), ("denoise step", "cudnn")]
)
def test_gpu_programs_copy_no_weights(program: str, attention: Implementation, quantization: str) -> None:
    devices = aot_devices(parse_topology("1xh200"))
    layout, lowering = lowered(program, devices, "bfloat16", quantization, GPU, attention=attention)
    found = lowering.compile(compiler_options=gpu_options(layout))
    assert not copies(layout, found.as_text())
    # Less than the smallest MLP matrix, in addition to activations if whole rows run.
    activations = 0 if program == "decode" else 8 * S * GPU["intermediate_size"]
    assert found.memory_analysis().temp_size_in_bytes < GPU["hidden_size"] * GPU["intermediate_size"] // 4 + activations


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize(("program", "attention"), [("prefill", "xla"), ("denoise step", "cudnn")])
def test_gpu_programs_with_library_products_copy_no_weights(program: str, attention: Implementation) -> None:
    devices = aot_devices(parse_topology("1xh200"))
    layout, lowering = lowered(program, devices, "bfloat16", "none", GPU, attention=attention)
    assert not copies(layout, lowering.compile(compiler_options=gpu_options(layout) | CUBLAS).as_text())
    merging = lowering.compile(compiler_options=AS_RELEASED | CUBLAS).as_text()
    assert len(copies(layout, merging)) >= layout.config.num_layers, "the parser does not see the merged weights"


def run_on_gpu(module: str) -> None:
    """Run a module in a process of its own, because this one simulates devices on CPU."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    subprocess.run([sys.executable, "-m", module], env=environment, check=True, timeout=600)


@needs_gpu
@pytest.mark.slow
def test_programs_for_the_gpu_here_copy_no_weights() -> None:
    run_on_gpu("tests.runtime.gpu_copies")


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("program", ["decode", "prefill", "block step"])
def test_gpu_programs_copy_scaled_int4_weights_of_one_layer_at_most(program: str) -> None:
    layout, lowering = lowered(program, aot_devices(parse_topology("1xh200")), "bfloat16", "int4", GPU)
    found = lowering.compile(compiler_options=gpu_options(layout))
    if program == "decode":
        assert not copies(layout, found.as_text())
    matrix = 2 * GPU["hidden_size"] * GPU["intermediate_size"]
    scaled = 0.1 * matrix if program == "decode" else 2.5 * matrix
    assert found.memory_analysis().temp_size_in_bytes < scaled


@needs_cuda
@pytest.mark.slow
def test_gpu_programs_that_scan_copy_each_layer() -> None:
    """The tests above do detect the copies in a program whose layers are stacked."""
    layout, lowering = lowered("decode", aot_devices(parse_topology("1xh200")), "bfloat16", "none", GPU, scan=True)
    found = lowering.compile(compiler_options=gpu_options(layout))
    assert len(copies(layout, found.as_text())) >= 3
    assert found.memory_analysis().temp_size_in_bytes > GPU["hidden_size"] * GPU["intermediate_size"]


@needs_cuda
@pytest.mark.slow
def test_gpu_block_steps_update_the_cache_in_place() -> None:
    layout, lowering = lowered("block step", aot_devices(parse_topology("1xh200")), "bfloat16", "none", GPU)
    text = lowering.compile(compiler_options=gpu_options(layout)).as_text() or ""
    cache = (1, 1, layout.config.num_kv_heads, S, layout.config.head_dim)
    assert f"bf16[{','.join(map(str, cache))}]" in text, "the parser does not see the cache"
    assert not [line for operation, shape, line in materialised(text) if shape == cache]


@functools.cache
def compiled_for_tpu(quantization: str) -> tuple[Any, Any]:
    """The program that decodes one row on a v5e chip; with so many layers that no whole stack fits on the chip."""
    sizes = GPU | {"num_layers": 28, "vocab_size": 152064}
    layout, lowering = lowered("decode", aot_devices(parse_topology("v5e:1x1")), "bfloat16", quantization, sizes)
    return layout, lowering.compile(compiler_options=compiler_options(layout, jnp.bfloat16))


@pytest.mark.parametrize(("quantization", "numbers"), [("none", "bf16"), ("int8", "s8"), ("int4", "s4")])
def test_a_tpu_decodes_without_a_copy_of_any_matrix(quantization: str, numbers: str) -> None:
    """Products read a layer from the stack: no slice is copied, neither to HBM nor to on-chip memory."""
    layout, found = compiled_for_tpu(quantization)
    assert f"{numbers}[28,3584,3584]" in found.as_text(), "the parser does not see the output projections"
    assert not copies(layout, found.as_text())
    # Less than the smallest matrix of a layer, that of the keys.
    assert found.memory_analysis().temp_size_in_bytes < min(matrices(layout))


def test_a_tpu_program_with_int4_takes_the_planned_bytes() -> None:
    sizes = []
    for quantization in ("int8", "int4"):
        layout, found = compiled_for_tpu(quantization)
        weights = layout.bytes_per_device("bfloat16")
        assert weights < found.memory_analysis().argument_size_in_bytes < 1.01 * weights  # and a small cache
        tables = sum(layout.leaf_bytes_per_device(leaf, "bfloat16") for leaf in layout.leaves if "vocab" in leaf.axes)
        sizes.append(weights - tables)
    assert sizes[0] > 1.7 * sizes[1]


def test_a_tpu_decodes_one_row_in_int8_without_a_copy_of_the_embedding() -> None:
    layout, found = compiled_for_tpu("int8")
    assert found.memory_analysis().temp_size_in_bytes < math.prod(layout.embedding.padded_shape) // 10
