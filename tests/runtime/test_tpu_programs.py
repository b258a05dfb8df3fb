"""The 7.6B generation program, compiled for TPU slices: memory, collectives, and arrays that must not exist."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from runtime import DiffusionConfig
from runtime.execution.programs import abstract_denoise, compiler_options, lower_denoise
from runtime.execution.runner import head_chunk
from runtime.execution.specialization import denoise_program
from runtime.models.declarations import ModelLayout, shard_shape
from runtime.models.families import model_layout, parse_config
from runtime.models.forward import Forward
from runtime.planner.hlo import read_collectives
from runtime.planner.presets import preset
from sharding.aot import aot_devices
from sharding.heads import HeadLayout
from sharding.mesh import MeshSpec, build_mesh
from sharding.topology import parse_topology

pytestmark = pytest.mark.programs

DIFFUCODER = parse_config(
    {
        "model_type": "Dream",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "mask_token_id": 151666,
        "pad_token_id": 151643,
        "torch_dtype": "bfloat16",
    }
)
B, S, STEPS = 16, 512, 256
# Rows of meshes whose checks are about single collectives; with few rows, programs compile in half the time.
FEW_ROWS = {"sequence=4": 2}
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "ragged-all-to-all")


@dataclass(frozen=True)
class Program:
    layout: ModelLayout
    compiled: jax.stages.Compiled
    chunk: int
    rows: int

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.compiled.as_text().splitlines()

    def operations(self, kinds: tuple[str, ...]) -> list[tuple[str, str, str]]:
        """(kind, result shape, named scope) of every instruction of these kinds."""
        pattern = re.compile(rf"= (.*?) ({'|'.join(kinds)})(?:-start)?\(")
        found = []
        for line in self.lines:
            match = pattern.search(line)
            if match:
                scope = re.search(r'op_name="([^"]*)"', line)
                found.append((match[2], match[1], scope[1] if scope else ""))
        return found

    def arrays(self) -> set[tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of every array in the program."""
        return {
            (dtype, tuple(map(int, shape.split(","))))
            for dtype, shape in re.findall(r"\b(f32|bf16|s32|pred|u32)\[([\d,]+)\]", "\n".join(self.lines))
        }


@functools.cache
def compiled(topology: str, mesh: str, attention: str, model: str = "diffucoder-7b") -> Program:
    config = DIFFUCODER if model == "diffucoder-7b" else preset(model)
    layout = model_layout(config, MeshSpec.parse(mesh), aot_devices(parse_topology(topology)))
    rows = FEW_ROWS.get(mesh, B)
    chunk = head_chunk(rows, S, layout, "tpu")
    decoding = DiffusionConfig.published_for(config.family, "", max_new_tokens=STEPS)
    program = denoise_program(decoding, config, "bfloat16", chunk=chunk, width=S, span=S)
    assert program.sampling.filtered  # top_p is in
    lowered = lower_denoise(
        Forward(layout, attention),
        program,
        layout.abstract_weights(jnp.bfloat16),
        *abstract_denoise(layout, rows, S, S),
    )
    return Program(layout, lowered.compile(compiler_options=compiler_options(layout, jnp.bfloat16)), chunk, rows)


TENSOR = [
    ("v5e:2x4", "tensor=8", "splash"),
    ("v4:2x2x1", "tensor=4", "xla"),
]
SEQUENCE = [("v4:2x2x1", "sequence=4", "xla")]
MIXED = [pytest.param(("v5e:2x4", "sequence=2,tensor=4", "splash"), marks=pytest.mark.slow)]
# Canvases that grow and shrink: positions move by gathers within a row.
GROWING = [
    pytest.param(("v5e:2x4", mesh, "splash", "dreamon-7b"), marks=pytest.mark.slow)
    for mesh in ("tensor=8", "sequence=2,tensor=4")
]


def test_parameter_count() -> None:
    layout = model_layout(DIFFUCODER)
    assert layout.parameter_count == 7_615_616_512
    assert (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(layout.abstract_weights(jnp.bfloat16))) == 7_615_616_512
    )
    assert sum(len(leaf.sources) for leaf in layout.leaves) == 339


@pytest.mark.parametrize(("mesh", "gigabytes"), [("tensor=4", 3.81), ("tensor=8", 1.96), ("tensor=16", 1.00)])
def test_weight_bytes_per_chip(mesh: str, gigabytes: float) -> None:
    layout = model_layout(DIFFUCODER, MeshSpec.parse(mesh))
    found = sum(2 * math.prod(shard_shape(leaf, layout)) for leaf in layout.leaves)
    assert found == pytest.approx(gigabytes * 1e9, rel=0.02)


@pytest.mark.parametrize("case", TENSOR + SEQUENCE + MIXED, ids="/".join)
def test_memory_of_the_compiled_program(case: tuple[str, str, str]) -> None:
    program = compiled(*case)
    weights = sum(2 * math.prod(shard_shape(leaf, program.layout)) for leaf in program.layout.leaves)
    memory = program.compiled.memory_analysis()
    assert memory.argument_size_in_bytes == pytest.approx(weights, rel=0.02)
    # The size of full bfloat16 logits.
    assert memory.temp_size_in_bytes < weights
    peaks = {"tensor=8": 2.38e9, "tensor=4": 4.55e9}
    if case[1] in peaks:
        assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < peaks[case[1]]


def in_layers(program: Program) -> list[tuple[str, tuple[str, ...]]]:
    """Kind and mesh axes of the collectives of a layer."""
    found = read_collectives("\n".join(program.lines))
    return sorted((one.kind, one.axes(program.layout.mesh_axis_sizes)) for one in found if one.repeats == 28)


def products_beside_transfers(program: Program) -> list[str]:
    """Scope of the product in each loop of a layer that computes while a part of its operand or result is in flight.

    Instructions are in the order in which they run.
    """
    found = []
    for computation in re.split(r"\n(?=\S)", "\n".join(program.lines)):
        in_flight, scopes = 0, set()
        for line in computation.splitlines():
            in_flight += (" collective-permute-start(" in line) - (" collective-permute-done(" in line)
            product = re.search(
                r'(?:kind=kOutput| convolution\(| dot\().*op_name="[^"]*/layer/([^"]*)/dot_general', line
            )
            if in_flight and product:
                scopes.add(product[1])
        found += sorted(scopes)
    return sorted(found)


@pytest.mark.parametrize("case", TENSOR + MIXED, ids="/".join)
def test_norms_run_on_a_part_of_the_positions(case: tuple[str, str, str]) -> None:
    """With the residual sharded over the tensor axis, sums are reduce-scatters, and the next product all-gathers."""
    program = compiled(*case)
    spec, heads = program.layout.spec, program.layout.heads
    norms = set(re.findall(r"= f32\[([\d,]+)\]\S* rsqrt\(", "\n".join(program.lines)))
    assert norms == {f"{B // spec.data},{S // spec.sequence // spec.tensor}"}
    tensor = tuple(axis for axis, size in (("kv", heads.kv), ("group", heads.group)) if size > 1)
    moved = [("all-gather", tensor)] * 2 + [("reduce-scatter", tensor)] * 2
    over_sequence = [("all-gather", ("sequence",))] * 2 if spec.sequence > 1 else []
    assert in_layers(program) == sorted(moved + over_sequence)


def test_collectives_of_the_mlp_run_beside_its_products() -> None:
    """On v5e, the gather before gate and up and the scatter after down are done in parts; attention's are exposed."""
    program = compiled(*TENSOR[0])
    exposed = [scope for kind, _, scope in program.operations(("all-gather", "reduce-scatter")) if "/mlp/" in scope]
    assert not exposed
    assert products_beside_transfers(program) == ["mlp/bsd,fd->bsf", "mlp/bsd,fd->bsf", "mlp/bsf,fd->bsd"]


@pytest.mark.parametrize("case", SEQUENCE, ids="/".join)
def test_sequence_meshes_gather_keys_and_values_alone(case: tuple[str, str, str]) -> None:
    program = compiled(*case)
    in_layer = [entry for entry in program.operations(COLLECTIVES) if "/layer/" in entry[2]]
    assert [kind for kind, _, _ in in_layer] == ["all-gather", "all-gather"]
    assert all(f"bf16[{program.rows},{S},4,128]" in shape for _, shape, _ in in_layer)
    # Keys after their rotation, which each device computes for its own positions, and values after their bias.
    own = [scope.split("/layer/attention/")[1] for _, _, scope in in_layer]
    assert sorted(own) == ["qkv/add", "sharding_constraint"]


@pytest.mark.parametrize("case", TENSOR + SEQUENCE + MIXED + GROWING, ids="/".join)
def test_no_all_to_all_no_vocabulary_sort_no_full_logits(case: tuple[str, ...]) -> None:
    program = compiled(*case)
    kinds = {kind for kind, _, _ in program.operations(COLLECTIVES)}
    assert "all-to-all" not in kinds
    assert "ragged-all-to-all" not in kinds
    tensor, vocab = program.layout.spec.tensor, program.layout.padded_vocab
    arrays = program.arrays()
    assert ("bf16", (vocab // tensor, 3584)) in arrays  # the parser sees the head
    for _, shape in arrays:
        if tensor > 1:
            assert vocab not in shape, f"gathered vocabulary: {shape}"
        if vocab // tensor in shape:
            positions = math.prod(shape) // (vocab // tensor)
            assert positions <= max(3584, program.rows * program.chunk), f"logits of too many positions: {shape}"
    for kind, shape, _ in program.operations(("sort",)):
        sizes = {int(size) for group in re.findall(r"\[([\d,]+)\]", shape) for size in group.split(",")}
        assert max(sizes) <= S, f"{kind} over more than the canvas: {shape}"


@pytest.mark.parametrize("case", TENSOR + SEQUENCE + MIXED + GROWING, ids="/".join)
def test_full_logits_never_exist(case: tuple[str, ...]) -> None:
    program = compiled(*case)
    largest = max(math.prod(shape) for dtype, shape in program.arrays() if dtype == "f32")
    assert (
        largest
        < program.rows * S * program.layout.padded_vocab // program.layout.spec.tensor // program.layout.spec.sequence
    )


def test_splash_attention_is_in_the_program() -> None:
    assert any("splash" in line for line in compiled(*TENSOR[0]).lines)
    assert not any("splash" in line for line in compiled(*SEQUENCE[0]).lines)


def test_slices_are_crossed_by_data_alone() -> None:
    devices = aot_devices(parse_topology("2xv5e:2x4"))
    mesh = build_mesh(MeshSpec(data=2, tensor=8), HeadLayout.for_tensor(28, 4, 8), devices)
    slices = [[device.slice_index for device in part.flat] for part in mesh.devices]
    assert all(len(set(part)) == 1 for part in slices)
    assert len({part[0] for part in slices}) == 2
