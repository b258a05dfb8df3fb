"""Programs with a cache, compiled ahead of time for TPU: the cache is updated in place and never gathered."""

from __future__ import annotations

import functools
import re
from bisect import insort
from collections import defaultdict
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from runtime import DiffusionConfig, SamplingConfig
from runtime.execution.programs import abstract_decode, abstract_denoise, lower_decode, lower_denoise, lower_prefill
from runtime.execution.specialization import decode_program, denoise_program
from runtime.models.families import model_layout
from runtime.models.forward import Forward, residual_over_tensor
from runtime.models.kv_cache import cache_bytes_per_device
from runtime.models.qwen2 import QWEN2
from runtime.planner.hlo import read_collectives
from runtime.planner.presets import preset
from sharding.aot import aot_devices
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology
from tests.runtime.test_tpu_programs import DIFFUCODER

pytestmark = pytest.mark.programs

QWEN = replace(DIFFUCODER, family=QWEN2, mask_token_id=-1)
# So large that the compiler does not keep the cache in vector memory; blocks are short, so windows are small.
B, T, BLOCK, SPAN = 64, 1024, 16, 64

CASES = [
    ("decode", "tensor=8", "bfloat16"),
    pytest.param("decode", "tensor=8", "int8", marks=pytest.mark.slow),
    ("decode", "data=2,sequence=2,tensor=2", "int8"),
    pytest.param("prefill", "tensor=8", "bfloat16", marks=pytest.mark.slow),
    pytest.param("prefill", "sequence=2,tensor=4", "bfloat16", marks=pytest.mark.slow),
    ("dual", "tensor=8", "bfloat16"),
    pytest.param("dual", "tensor=8", "int8", marks=pytest.mark.slow),
    pytest.param("dual", "sequence=2,tensor=2", "bfloat16", marks=pytest.mark.slow),
    pytest.param("prefix", "data=2,tensor=4", "bfloat16", marks=pytest.mark.slow),
    pytest.param("dual once", "tensor=8", "bfloat16", marks=pytest.mark.slow),
    pytest.param("dual drafts", "tensor=8", "bfloat16", marks=pytest.mark.slow),
    pytest.param("dual drafts", "data=2,tensor=2", "int8", marks=pytest.mark.slow),
    pytest.param("dual part", "tensor=8", "bfloat16", marks=pytest.mark.slow),
    pytest.param("dual part", "sequence=2,tensor=2", "bfloat16", marks=pytest.mark.slow),
]


@functools.cache
def compiled(kind: str, mesh: str, cache_dtype: str) -> tuple[Any, Any]:
    diffusion = kind not in ("decode", "prefill")
    spec = MeshSpec.parse(mesh)
    layout = model_layout(DIFFUCODER if diffusion else QWEN, spec, aot_devices(parse_topology("v5e:2x4")))
    forward = Forward(layout, "xla" if spec.sequence > 1 or kind == "decode" else "splash")
    weights, vocab = layout.abstract_weights(jnp.bfloat16), layout.config.vocab_size
    if diffusion:
        cache, refresh_blocks = kind.split()[0], 0 if kind == "dual once" else 1
        config = DiffusionConfig(
            algorithm="maskgit_plus", cache=cache, parallel="threshold", refresh_blocks=refresh_blocks
        )
        config = config.replace(block_length=BLOCK, suffix_window=BLOCK if kind == "dual part" else None)
        # With more drafts, the scores of the longer windows take as much memory as a small cache.
        config = config.replace(draft_steps=1 if kind == "dual drafts" else 0)
        program = denoise_program(config, DIFFUCODER, "bfloat16", chunk=256, width=T, span=SPAN, parts=(T // 2,))
        lowered = lower_denoise(
            forward, program, weights, *abstract_denoise(layout, B, T, T, cache_dtype, drafts=program.drafts)
        )
    else:
        decoding = decode_program(SamplingConfig(temperature=0.7, top_p=0.9), vocab)
        arguments = (weights, *abstract_decode(layout, B, T, cache_dtype))
        if kind == "prefill":
            lowered = lower_prefill(forward, decoding, T // 2, *arguments)
        else:
            lowered = lower_decode(forward, decoding, *arguments)
    return layout, lowered.compile()


def of_shape(text: str, kinds: str, shape: tuple[int, ...]) -> list[str]:
    """Instructions of these kinds whose result is, or starts with, an array of this shape."""
    sizes = re.escape("[" + ",".join(map(str, shape)) + "]")
    return [line.strip() for line in text.splitlines() if re.search(rf"= \(?\w+{sizes}\S* .*?\b({kinds})\(", line)]


def without_relabelling(text: str) -> str:
    """A program without the fusions that only rename an array and use its memory.

    Rows of 128 integers have the same memory layout in tiles of 8 and of 32 rows, so such a fusion moves nothing.
    """
    names = set(re.findall(r"output_to_operand_aliasing=\{\{\}: \(0, \{\}\)\}, calls=%([\w.-]+)", text))
    computations = re.split(r"\n(?=\S)", text)
    return "\n".join(one for one in computations if not any(one.startswith(f"%{name} ") for name in names))


@pytest.mark.parametrize(("kind", "mesh", "cache_dtype"), CASES)
def test_the_cache_is_updated_in_place(kind: str, mesh: str, cache_dtype: str) -> None:
    layout, program = compiled(kind, mesh, cache_dtype)
    config, text = layout.config, without_relabelling(program.as_text())
    shard = (
        config.num_layers,
        B // layout.spec.data,
        config.num_kv_heads // layout.heads.kv,
        T // layout.spec.sequence,
        config.head_dim,
    )
    # Keys and values, and their scales.
    for shape in (shard, shard[:-1])[: 2 if cache_dtype == "int8" else 1]:
        assert of_shape(text, "parameter", shape), "the parser does not see the cache"
        assert not of_shape(text, "copy|copy-start|transpose", shape)
    memory = program.memory_analysis()
    size = cache_bytes_per_device(layout, B, T, jnp.dtype(cache_dtype))
    assert memory.alias_size_in_bytes >= size
    if kind != "prefill":  # temporaries are far from another cache, or another copy of any weight
        assert memory.temp_size_in_bytes < 0.5 * size


def test_logits_of_single_positions_share_registers() -> None:
    """In decode, the logits of eight rows fill a register; as ``[B, 1, V]``, a row would take one of its own."""
    layout, program = compiled("decode", "tensor=8", "bfloat16")
    text, vocab = program.as_text(), layout.size_per_device("vocab")
    assert re.search(rf"s32\[{B},{vocab}\]{{1,0:T\(8,128\)", text)
    assert not re.findall(rf"\w+\[{B},1,{vocab}\]{{2,1,0:T\(1,128\)", text)


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "int8"])
def test_a_cache_of_narrow_heads_is_laid_out_once(cache_dtype: str) -> None:
    """GPT-2's heads of 64 numbers are padded to 128, so programs read and write the cache as it is."""
    config = preset("gpt2")
    layout = model_layout(config, MeshSpec(), aot_devices(parse_topology("v5e:1x1")))
    decoding = decode_program(SamplingConfig(temperature=0.7, top_p=0.9), config.vocab_size)
    arguments = (layout.abstract_weights(jnp.bfloat16), *abstract_decode(layout, B, T, cache_dtype))
    program = lower_decode(Forward(layout), decoding, *arguments).compile()
    text = without_relabelling(program.as_text())
    shape = (config.num_layers, B, config.num_kv_heads, T, 128)
    assert of_shape(text, "parameter", shape), "the parser does not see the cache"
    assert not of_shape(text, "copy|copy-start|transpose", shape)
    memory, size = program.memory_analysis(), cache_bytes_per_device(layout, B, T, jnp.dtype(cache_dtype))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < 0.1 * size


@pytest.mark.parametrize(("kind", "mesh", "cache_dtype"), CASES)
def test_collectives_of_a_cached_layer(kind: str, mesh: str, cache_dtype: str) -> None:
    layout, program = compiled(kind, mesh, cache_dtype)
    text = program.as_text()
    assert not re.search(r" all-to-all(-start)?\(", text)
    # A refresh of a part computes one half of it on each device of the sequence axis. The outputs of the second half
    # move to the device that holds these positions of the canvas, once per refresh, outside the layers.
    half = T // 2 // layout.spec.sequence
    moved = rf"bf16\[1,{half},{layout.config.hidden_size}\].*/refresh/.*/pad\""
    expected_moves = [moved] if kind == "dual part" and layout.spec.sequence > 1 else []
    moves = [line for line in text.splitlines() if re.search(r" collective-permute(-start)?\(", line)]
    assert len(moves) == len(expected_moves)
    assert all(map(re.search, expected_moves, moves))
    vocab = layout.padded_vocab
    if layout.spec.tensor > 1:
        assert not re.search(rf"\[(\d+,)*{vocab}(,\d+)*\]", text), "gathered vocabulary"
    sizes, spec = layout.mesh_axis_sizes, layout.spec
    gathered: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    scattered: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for one in read_collectives(text):
        if one.kind in ("all-gather", "reduce-scatter"):
            found = gathered if one.kind == "all-gather" else scattered
            insort(found[one.axes(sizes)], (one.payload, one.repeats))
    # Only keys and values of whole rows are gathered over sequence, never the cache.
    rows = (B if kind in ("decode", "prefill") else spec.data) // spec.data
    limit = rows * T * layout.config.num_kv_heads // layout.heads.kv * layout.config.head_dim * 2
    over_sequence = gathered.pop(("sequence",), [])
    assert all(size <= limit for size, _ in over_sequence)
    assert not over_sequence or spec.sequence > 1
    # A prefill that shards the residual over the tensor axis gathers it before attention and the MLP of each layer, and
    # after the final norm; it scatters the sums before. It moves nothing else over that axis, and other programs gather
    # and scatter nothing.
    positions, layers = T // 2 // spec.sequence, layout.config.num_layers
    expected = {}
    if kind == "prefill" and residual_over_tensor(layout, layout.mesh.devices, B, T // 2):
        residual = rows * positions * layout.config.hidden_size * 2
        expected = {("kv",): [(residual, 1), (residual, layers), (residual, layers)]}
        assert len([size for size, repeats in over_sequence if repeats == layers]) == 2
    assert gathered == scattered == expected
