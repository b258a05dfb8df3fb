"""Estimates are derived from the declared weights and from the cost that a layer states."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import pytest

from runtime.models.config import Family, ModelConfig
from runtime.models.costs import LayerCollective, LayerCost, LiveArrays
from runtime.models.declarations import ModelLayout, layers_of, shard_shape
from runtime.models.families import model_layout
from runtime.models.forward import Forward
from runtime.models.layers import (
    dense_layer_cost,
    head_norm_scale,
    key_value_matrix,
    mlp_in_matrix,
    mlp_out_matrix,
    norm_scale,
    output_matrix,
    query_matrix,
)
from runtime.models.qwen2 import QWEN2, Qwen2Layer, Qwen2Weights
from runtime.models.transformer import hidden_states
from runtime.planner.estimate import Estimate, estimate_workload
from runtime.planner.hlo import read_collectives
from runtime.planner.presets import preset
from runtime.planner.workload import Workload
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology


def planned(model: str | ModelConfig, topology: str, mesh: str, **workload: Any) -> Estimate:
    config = preset(model) if isinstance(model, str) else model
    return estimate_workload(Workload(config, **workload), parse_topology(topology), MeshSpec.parse(mesh))


# Per phase and device: floating-point operations, bytes of device memory, bytes of collectives. If the residual is
# sharded over tensor, a reduce-scatter and an all-gather replace a sum, and both are counted.
PINNED: list[tuple[str, str, str, dict[str, Any], int, dict[str, int], dict[str, tuple[float, float, float]]]] = [
    (
        "diffucoder-7b",
        "v5e:2x4",
        "tensor=8",
        {"batch": 8},
        1_955_718_144,
        {"gate and up": 0, "residual and norms": 0},
        {"denoise step": (7189237691765.459, 16187034792.658825, 3347921907.952941)},
    ),
    (
        "diffucoder-7b",
        "v5e:2x4",
        "data=2,sequence=2,tensor=2",
        {"batch": 8, "cache": "dual"},
        7_645_213_696,
        {"gate and up": 0, "residual and norms": 0},
        {
            "refresh": (1705636265984, 8534832128, 119515980),
            "block step": (940129935360, 8302908416, 67681688),
        },
    ),
    (
        "diffucoder-7b",
        "8xh100",
        "data=4,tensor=2",
        {"batch": 64, "quantization": "int8"},
        4_298_640_384,
        {"gate and up": 310_378_496, "residual and norms": 176_160_768},
        {"denoise step": (55560825751624.28, 73138629342.87059, 3319289491.556863)},
    ),
    (
        "qwen2.5-7b",
        "v4:2x2x1",
        "tensor=4",
        {"batch": 16, "prompt": 1024, "new_tokens": 1024},
        4_706_220_032,
        {"gate and up": 310_378_496, "residual and norms": 117_440_512},
        {
            "prefill": (54308970168320, 68509415424, 13388225024),
            "decode": (59858075648, 4097538048, 6543872),
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
            "prefill": (3356758114304, 5843977216, 444138560),
            "decode": (28490391552, 1845781504, 3659104),
        },
    ),
    (
        "gpt2",
        "1xh100",
        "data=1",
        {"batch": 4, "dtype": "float32"},
        680_388_608,
        {"up and its activation": 25_165_824, "residual and norms": 6_291_456},
        {"prefill": (179332448256, 1715521536, 0), "decode": (1065000960, 662685696, 0)},
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
    """The numbers of the formulas fitted to compiled programs and measured times must change only on purpose."""
    found = planned(model, topology, mesh, **workload)
    assert found.memory.total == total
    assert {tensor.name: tensor.bytes for tensor in found.memory.peak} == peak
    assert {one.phase.name for one in found.phases} == phases.keys()
    for one in found.phases:
        numbers = one.flops, one.hbm_bytes, one.collective_bytes
        assert numbers == pytest.approx(phases[one.phase.name], rel=1e-12)


@pytest.mark.parametrize(
    ("model", "parameters", "tensor"), [("qwen3-0.6b", 596_049_920, 4), ("qwen3-8b", 8_190_735_360, 8)]
)
def test_a_plan_of_qwen3(model: str, parameters: int, tensor: int) -> None:
    one, sharded = (
        planned(model, "8xh100", mesh, batch=8) for mesh in ("data=8", f"data={8 // tensor},tensor={tensor}")
    )
    assert one.layout.parameter_count == parameters
    assert one.memory.total > one.layout.bytes_per_device("bfloat16") >= 2 * parameters
    assert one.fits
    assert sharded.memory.total < one.memory.total
    # A token uses every matrix once, including the head but not the embedding, and attends to its whole row.
    config, layout, decode = one.workload.config, one.layout, one.phases[1]
    matrices = sum(math.prod(leaf.shape) for leaf in layout.leaves if leaf.contracted and leaf.layers)
    matrices += math.prod(layout.head.padded_shape)
    heads, kept = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    assert decode.flops == pytest.approx(2 * matrices + 4 * heads * 512 * config.num_layers, rel=1e-3)
    assert decode.hbm_bytes == pytest.approx(2 * matrices + 2 * kept * 512 * config.num_layers, rel=1e-2)


@flax.struct.dataclass
class ParallelLayer:
    """A layer whose MLP has no gate and runs in parallel with attention, so that one sum over tensor serves both."""

    norm: jax.Array = norm_scale("layers.{layer}.norm")
    q_proj: Any = query_matrix("layers.{layer}.q")
    k_proj: Any = key_value_matrix("layers.{layer}.k")
    v_proj: Any = key_value_matrix("layers.{layer}.v")
    o_proj: Any = output_matrix("layers.{layer}.o")
    up_proj: Any = mlp_in_matrix("layers.{layer}.up")
    down_proj: Any = mlp_out_matrix("layers.{layer}.down")


@flax.struct.dataclass
class ParallelWeights(Qwen2Weights):
    """The weights of such a model."""

    layers: Any = layers_of(ParallelLayer)

    @staticmethod
    def cost(layout: ModelLayout) -> LayerCost:
        """The cost of a dense layer, with fewer reads, arrays and sums."""
        width, mlp = layout.size_per_device("embed"), layout.size_per_device("mlp")
        dense = dense_layer_cost(layout, gated=False)
        return replace(
            dense,
            activations_per_position=dense.activations_per_position - 6 * width,
            live_in_mlp=(LiveArrays("up", 1, mlp),),
            tensor_collectives=(LayerCollective("all-reduce", width, 1, "sum"),),
        )


@flax.struct.dataclass
class NormedLayer(Qwen2Layer):
    """Qwen2's layer with a norm of each head of queries and keys."""

    q_norm: jax.Array = head_norm_scale("layers.{layer}.q_norm")
    k_norm: jax.Array = head_norm_scale("layers.{layer}.k_norm")


@flax.struct.dataclass
class NormedWeights(Qwen2Weights):
    """The weights of such a model."""

    layers: Any = layers_of(NormedLayer)


def toy(**changes: Any) -> ModelConfig:
    """Qwen2.5-7B as a family that is not in the list."""
    family: Family = replace(QWEN2, name="toy", **changes)
    return replace(preset("qwen2.5-7b"), family=family)


def test_a_layer_with_another_cost_has_another_estimate() -> None:
    mesh, shape = "data=2,tensor=4", {"batch": 16, "prompt": 1024, "new_tokens": 1024}
    dense, parallel = (
        planned(model, "8xh100", mesh, **shape) for model in ("qwen2.5-7b", toy(weights=ParallelWeights))
    )
    positions, layers, width, mlp = 8 * 1024, 28, 3584, 18944 // 4
    before, after = dense.phases[0], parallel.phases[0]
    # Without the gate, a norm, and the biases of a device's 7 query heads, one key head and one value head.
    gone = mlp * width + width + 9 * 128
    assert before.flops - after.flops == 2 * positions * layers * gone
    moved = positions * layers * (6 * width + 2 * mlp)
    assert before.hbm_bytes - after.hbm_bytes == 2 * (layers * gone + moved)
    residual = positions * width * 2
    assert before.collective_bytes - after.collective_bytes == layers * residual
    assert [one.times for one in after.collectives if one.what == "sum, 1 per layer"] == [layers]
    peak = {tensor.name: tensor.bytes for tensor in parallel.memory.peak}
    assert peak["up"] == positions * mlp * 2
    assert dense.memory.total - parallel.memory.total == 2 * layers * gone + peak["up"]
    assert parallel.seconds < dense.seconds


def test_norms_over_heads_are_counted() -> None:
    plain, normed = (planned(model, "8xh100", "data=8", batch=8) for model in (toy(), toy(weights=NormedWeights)))
    numbers = 28 * 2 * 128
    assert normed.layout.parameter_count - plain.layout.parameter_count == numbers
    assert normed.memory.total - plain.memory.total == 2 * numbers
    for one, other in zip(normed.phases, plain.phases, strict=True):
        positions = one.phase.rows * one.phase.positions
        assert one.flops - other.flops == 2 * positions * numbers
        assert one.hbm_bytes - other.hbm_bytes == 2 * numbers


def test_attention_counts_the_pairs_that_the_mask_leaves() -> None:
    config = preset("qwen2.5-7b")
    masks = [("bidirectional", 0), ("causal", 0), ("block_causal", 256)]
    toys = [
        replace(config, family=replace(QWEN2, attention=kind), attention_block_length=length) for kind, length in masks
    ]
    both, causal, blocks = (planned(one, "8xh100", "data=8", batch=8, prompt=1024).phases[0].flops for one in toys)
    pairs = 1024 * 1024
    every = 28 * 4 * 28 * 128 * pairs
    assert both - causal == every / 2
    assert both - blocks == every * (1 - 0.5 - 256 / 2048)


@pytest.mark.parametrize("model", ["diffucoder-7b", "qwen2.5-7b", "qwen3-8b", "qwen3-0.6b"])
def test_layers_gather_keys_and_values_alone_over_sequence(model: str) -> None:
    """Over the sequence axis, layers gather keys and values, not the wider residual."""
    sizes = {"num_layers": 3, "hidden_size": 512, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2}
    tokens = {"vocab_size": 128, "mask_token_id": 1, "pad_token_id": 0, "end_token_ids": ()}
    config = replace(preset(model), head_dim=16, **sizes, **tokens)
    layout = model_layout(config, MeshSpec(sequence=2), jax.devices()[:2])
    canvas = jax.ShapeDtypeStruct((1, 32), jnp.int32, sharding=layout.sharding("batch", "canvas"))
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=layout.sharding("batch"))
    run = jax.jit(functools.partial(hidden_states, Forward(layout, "xla")))
    text = run.lower(layout.abstract_weights(jnp.float32), canvas, lengths).compile().as_text()
    found = [(one.kind, one.payload, one.repeats) for one in read_collectives(text or "")]
    assert found == [("all-gather", 32 * 2 * 16 * 4, 1)] * 2 * config.num_layers


@pytest.mark.parametrize(("model", "tied"), [("gpt2", True), ("qwen3-0.6b", True), ("qwen3-8b", False)])
def test_the_head_and_the_embedding_are_declared(model: str, tied: bool) -> None:
    layout = planned(model, "8xh100", "data=8").layout
    assert layout.embedding.name == "embedding"
    assert layout.head.name == ("embedding" if tied else "lm_head")
    taken = 0 if tied else 2 * math.prod(shard_shape(layout.embedding, layout))
    assert layout.bytes_read_per_pass("bfloat16") == layout.bytes_per_device("bfloat16") - taken
