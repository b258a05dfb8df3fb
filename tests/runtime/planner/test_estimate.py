from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from runtime.models.families import model_layout
from runtime.planner import traffic
from runtime.planner.candidates import candidate_meshes
from runtime.planner.default import default_mesh, topology_of
from runtime.planner.estimate import estimate_workload, out_of_memory, rank, what_would_help
from runtime.planner.presets import PRESETS, preset
from runtime.planner.workload import Workload
from sharding.errors import InputError, MeshError
from sharding.mesh import MeshSpec
from sharding.topology import CHIPS, parse_topology, places
from tests.unmapped_axes import refuse

MODEL = preset("diffucoder-7b")


@pytest.mark.parametrize(
    ("name", "parameters"), [("diffucoder-7b", 7_615_616_512), ("qwen2.5-7b", 7_615_616_512), ("gpt2", 124_439_808)]
)
def test_presets_have_the_published_parameters(name: str, parameters: int) -> None:
    found = estimate_workload(Workload(preset(name)), parse_topology("8xh100"), MeshSpec())
    assert found.layout.parameter_count == parameters


def test_one_long_row_on_eight_v5p_prefers_sequence() -> None:
    fitting, _ = rank(Workload(MODEL, prompt=1024, new_tokens=1024, steps=1024), parse_topology("v5p:2x2x2"))
    assert fitting[0].spec == MeshSpec(sequence=8)
    tensor = next(one for one in fitting if one.spec.tensor == 8)
    assert tensor.main_phase.network_seconds > 5 * fitting[0].main_phase.network_seconds
    why = fitting[0].explain_against(tensor)
    assert "all-gather over sequence" in why
    assert "all-reduce over tensor" in why


def test_the_same_phases_are_compared() -> None:
    workload = Workload(preset("qwen2.5-7b"), batch=8, prompt=4096, new_tokens=32)
    meshes = MeshSpec(data=2, tensor=4), MeshSpec(data=8)
    best, other = (estimate_workload(workload, parse_topology("v5e:2x4"), spec) for spec in meshes)
    assert [one.main_phase.phase.name for one in (best, other)] == ["prefill", "decode"]
    prefill = other.phases[0]
    expected = f"ms per prefill (estimated), {other.spec} takes {1e3 * prefill.seconds:.2f} ms."
    assert expected in best.explain_against(other)


def test_memory_decides_how_much_is_sharded() -> None:
    topology = parse_topology("8xh100")
    small = replace(topology, chip=replace(topology.chip, usable_bytes=6 << 30))
    fitting, others = rank(Workload(MODEL, batch=8), small)
    assert fitting
    assert all(one.spec.tensor >= 4 for one in fitting)
    assert all(one.spec.tensor <= 2 for one in others)


def test_out_of_memory_names_tensors_and_help() -> None:
    topology = parse_topology("8xh100")
    tiny = replace(topology, chip=replace(topology.chip, usable_bytes=1 << 30))
    fitting, others = rank(Workload(MODEL, batch=8), tiny)
    assert not fitting
    text = out_of_memory(others, tiny)
    assert "weights" in text
    assert "What would help: a larger tensor axis" in text


@pytest.mark.parametrize(
    ("dtype", "quantization", "advice"),
    [
        ("float32", "none", "a larger tensor axis, bfloat16, "),
        ("bfloat16", "none", "a larger tensor axis, int8, "),
        ("float32", "int8", "a larger tensor axis, int4, "),
        ("bfloat16", "int8", "a larger tensor axis, int4, "),
        ("float32", "int4", "a larger tensor axis, "),
        ("bfloat16", "int4", "a larger tensor axis, "),
    ],
)
def test_help_is_smaller_than_the_present_weights(dtype: str, quantization: str, advice: str) -> None:
    workload = Workload(MODEL, dtype, quantization=quantization, cache="dual")
    found = estimate_workload(workload, parse_topology("8xh100"), MeshSpec(tensor=2))
    expected = f"What would help: {advice}fewer rows, a larger sequence axis, an int8 cache, more or larger chips"
    weights, cache = found.memory.resident[:2]
    vars(found)["memory"] = replace(found.memory, resident=(weights, cache), peak=())
    assert what_would_help(found).endswith(expected)
    assert out_of_memory([found], found.topology).endswith(expected)


def test_meshes_that_cannot_be_laid_out_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, topology = Workload(MODEL, batch=8), parse_topology("v5p:2x2x2")
    every = candidate_meshes(workload, topology)
    refuse(monkeypatch, lambda shape: shape[1] > 1)
    left = [spec for spec in every if spec.sequence == 1]
    assert candidate_meshes(workload, topology) == left != every
    fitting, others = rank(workload, topology)
    assert {one.spec for one in fitting + others} == set(left)
    refuse(monkeypatch, lambda shape: True)
    assert rank(workload, topology) == ([], [])


@pytest.mark.parametrize("text", ["v4:4x4x20", "v5p:4x8x28"])
def test_a_torus_on_which_jax_cannot_map_every_mesh(text: str) -> None:
    """JAX 0.10 fails for some meshes if a side is 20 or 28."""
    fitting, _ = rank(Workload(MODEL, batch=64), parse_topology(text))
    assert len(fitting) > 5


def test_a_mesh_is_named_if_there_is_none_to_choose() -> None:
    topology = parse_topology("v5p:4x8x28")
    message = out_of_memory([], topology)
    assert "cannot be divided over any mesh of all 896 devices that can be laid out" in message
    assert estimate_workload(Workload(MODEL), topology, MeshSpec.parse(message.rsplit(": ", 1)[1])).fits


def test_only_data_crosses_slices() -> None:
    workload = Workload(MODEL, batch=64)
    assert all(spec.data % 2 == 0 for spec in candidate_meshes(workload, parse_topology("2xv5e:4x4")))
    with pytest.raises(MeshError, match="data must be a multiple of 2"):
        estimate_workload(workload, parse_topology("2xv5e:2x4"), MeshSpec(tensor=16))


def test_decoding_is_bound_by_memory_and_the_cache_is_counted() -> None:
    found = estimate_workload(
        Workload(preset("qwen2.5-7b"), batch=8, prompt=1024, new_tokens=1024),
        parse_topology("8xh100"),
        MeshSpec(data=8),
    )
    prefill, decode = found.phases
    assert (prefill.phase.name, prefill.bound) == ("prefill", "compute")
    assert (decode.phase.name, decode.bound) == ("decode", "memory")
    weights = found.layout.bytes_per_device("bfloat16")
    cache = 2 * 28 * 2048 * 4 * 128 * 2
    # Each token reads all weights except the embedding table, and the cache of its row.
    assert decode.hbm_bytes == pytest.approx(weights - 2 * found.layout.padded_vocab * 3584 + cache, rel=0.01)
    assert {tensor.name: tensor.bytes for tensor in found.memory.resident}["cache of keys and values"] == cache


def test_arithmetic_of_a_denoise_step() -> None:
    """14.14 GFLOP per token without attention; 30.6 TFLOP for 2048 positions with the head on all of them."""
    found = estimate_workload(
        Workload(MODEL, prompt=1024, new_tokens=1024, steps=1), parse_topology("8xh100"), MeshSpec()
    ).main_phase
    head = 2 * 1024 * 3584 * 152064  # the other half has no head here
    assert found.flops + head == pytest.approx(30.6e12, rel=0.01)


@pytest.mark.parametrize(("new_tokens", "draft_steps", "runs"), [(128, 0, 1), (256, 0, 2), (256, 3, 7)])
def test_every_run_of_the_head_reads_its_weights(new_tokens: int, draft_steps: int, runs: int) -> None:
    """All tokens are masked, in chunks of 128. Drafts guess from all chunks once more, and each of them draws."""
    workload = Workload(MODEL, new_tokens=new_tokens, steps=1, draft_steps=draft_steps)
    found = estimate_workload(workload, parse_topology("v5e:2x4"), MeshSpec(tensor=8)).main_phase
    head = next(stage for stage in found.stages if stage.name == "head")
    assert head.hbm_bytes == runs * 3584 * 152064 // 8 * 2


def test_a_cache_makes_most_passes_small() -> None:
    topology, spec = parse_topology("8xh100"), MeshSpec(data=8)
    exact, dual = (
        estimate_workload(Workload(MODEL, batch=16, cache=cache), topology, spec) for cache in ("none", "dual")
    )
    assert {one.phase.name for one in dual.phases} == {"refresh", "block step"}
    assert dual.seconds < 0.5 * exact.seconds


def test_steps_are_shared_among_the_blocks_of_a_cache() -> None:
    """As in the engine: 16 steps fill a block of 32. Of 32 steps, the first commits nothing and is not run."""
    topology, spec = parse_topology("8xh100"), MeshSpec(data=8)
    for steps, windows in ((128, 15), (256, 30), (8, 0)):
        found = estimate_workload(Workload(MODEL, batch=8, steps=steps, cache="dual"), topology, spec)
        assert {one.phase.name: one.phase.forwards for one in found.phases} == {"refresh": 8, "block step": 8 * windows}


def test_memory_is_of_the_widest_window() -> None:
    workload, topology = Workload(MODEL, batch=64, cache="prefix"), parse_topology("8xh200")
    layout = workload.layout(MeshSpec())
    for widest, width in ((False, (4 * 257 + 2 * 129 + 2 * 65) // 8), (True, 257)):
        _, window = workload.phases(layout, "tpu", widest)
        assert (window.name, window.positions) == ("block step", width)
    # With a single block, there is one window width, the widest.
    blocks, one_block, narrow = (
        estimate_workload(replace(workload, **changes), topology, MeshSpec()).memory.total
        for changes in ({}, {"block_length": 256}, {"cache": "dual"})
    )
    assert blocks == one_block > narrow


def test_the_choice_of_mesh_knows_the_sharded_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, topology = Workload(MODEL, batch=16), parse_topology("v4:2x2x4")
    sharded, narrow, whole = MeshSpec(data=4, tensor=4), MeshSpec(data=2, sequence=4, tensor=2), MeshSpec(tensor=16)

    def order() -> list[MeshSpec]:
        return [one.spec for one in rank(workload, topology)[0] if one.spec in (sharded, narrow)]

    def over_tensor(spec: MeshSpec) -> dict[str, float]:
        found = estimate_workload(workload, topology, spec).main_phase
        return {one.kind: one.times for one in found.collectives if one.what.startswith("residual")}

    # Two sums in each of 28 layers; a gather before each of the products that follow, and one for the final norm.
    assert over_tensor(sharded) == {"reduce-scatter": 56, "all-gather": 57}
    # Too few positions on a device, and a slice without reduce-scatters over all of its chips.
    assert over_tensor(narrow) == over_tensor(whole) == {"all-reduce": 56}
    assert order() == [sharded, narrow]
    monkeypatch.setattr(traffic, "residual_over_tensor", lambda *_: False)
    assert over_tensor(sharded) == {"all-reduce": 56}
    assert order() == [narrow, sharded]


def test_chips_that_a_mesh_leaves_idle_are_paid_for() -> None:
    topology = parse_topology("8xh100")
    for data in (1, 8):
        found = estimate_workload(Workload(MODEL, batch=8), topology, MeshSpec(data=data))
        assert found.cost_per_million_tokens(3.0) == pytest.approx(8 * 3.0 / 3600 / found.tokens_per_second * 1e6)


def test_a_mesh_within_one_slice_sends_nothing_across() -> None:
    for text, data, sends in (("v5e:2x4", 2, False), ("2xv5e:2x4", 4, True)):
        spec, workload = MeshSpec(data=data, tensor=4), Workload(MODEL, batch=16)
        found = estimate_workload(workload, parse_topology(text), spec).main_phase
        assert any(one.kind == "send" for one in found.collectives) == sends


@pytest.mark.parametrize(
    ("topology", "mesh", "idle"),
    [
        ("2x8xh100", "tensor=4", "host 1 of"),
        ("2xv5e:2x4", "data=2,tensor=4", "host 1 of"),
        ("v5e:4x4", "tensor=4", "host 2, 3 of"),
        ("v5e:4x4", "data=2,tensor=4", "host"),
        ("v5e:4x4", "data=4,tensor=4", None),
        ("v5e:2x4", "tensor=4", None),
        ("8xh100", "tensor=4", None),
        ("v4:2x2x4", "data=4,tensor=4", None),
    ],
)
def test_every_host_takes_part(topology: str, mesh: str, idle: str | None) -> None:
    """As in a run, which refuses a mesh that leaves a host out."""
    arguments = Workload(MODEL, batch=16), parse_topology(topology), MeshSpec.parse(mesh)
    if idle is None:
        assert estimate_workload(*arguments).fits
        return
    with pytest.raises(MeshError, match=f"{idle}.*every host takes part"):
        estimate_workload(*arguments)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 0},
        {"steps": 0},
        {"cache": "all"},
        {"dtype": "int3"},
        {"prompt": 131072},
        {"cache": "dual", "block_length": 0},
        {"cache": "dual", "block_length": 257},
        {"quantization": "int3"},
    ],
)
def test_workloads_that_cannot_be(changes: dict[str, object]) -> None:
    with pytest.raises(InputError) as found:
        Workload(MODEL, **changes)  # type: ignore[arg-type]
    assert found.value.field == ("new_tokens" if "prompt" in changes else list(changes)[-1])


def test_presets_are_named() -> None:
    with pytest.raises(InputError, match=next(iter(PRESETS))):
        preset("llama")


def attached(topology: str, memory: int) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(**vars(place), memory_stats=lambda: {"bytes_limit": memory})
        for place in places(parse_topology(topology))
    ]


@pytest.mark.parametrize("text", ["v5e:2x4", "v5p:2x2x2", "2xv5e:2x4", "8xh100", "2x8xh200"])
def test_attached_devices_are_recognised(text: str) -> None:
    found = topology_of(attached(text, 10 << 30))
    assert str(found) == text
    assert found.chip == replace(CHIPS[found.chip.name], usable_bytes=10 << 30)


@pytest.mark.parametrize(
    ("text", "memory", "rows", "mesh"),
    [
        # For one short row, reading weights dominates, so some are sharded although all would fit.
        ("v5p:2x2x2", 90 << 30, 1, MeshSpec(sequence=2, tensor=4)),
        ("v5p:2x2x2", 90 << 30, 8, MeshSpec(data=8)),
        ("8xh200", 100 << 30, 64, MeshSpec(data=8)),
        ("v5e:2x4", 2 << 30, 1, MeshSpec(tensor=8)),  # nothing fits: the mesh that needs least
    ],
)
def test_default_mesh_is_the_fastest_that_fits(text: str, memory: int, rows: int, mesh: MeshSpec) -> None:
    assert default_mesh(MODEL, attached(text, memory), "bfloat16", rows) == mesh


@pytest.mark.parametrize("rows", [5000, 2**20 + 1])
def test_default_mesh_for_more_rows_than_run_at_a_time(rows: int) -> None:
    """At a time, 32 rows of each data shard run, and the weights must fit beside them."""
    devices = attached("v5e:2x4", int(15.75 * 2**30))
    assert default_mesh(MODEL, devices, "bfloat16", rows) == default_mesh(MODEL, devices, "bfloat16", 32 * 8)
    spec = default_mesh(MODEL, devices, "float32", rows)
    assert model_layout(MODEL, spec).bytes_per_device("float32") < 15.75 * 2**30


def test_default_mesh_on_slices_and_on_strange_devices() -> None:
    spec = default_mesh(MODEL, attached("2xv5e:2x4", 15 << 30), "bfloat16", 1)
    assert spec.data % 2 == 0
    assert spec.size == 16
    strange = [
        SimpleNamespace(**vars(one) | {"device_kind": "Abacus", "platform": "abacus"})
        for one in attached("8xh100", 1 << 40)
    ]
    assert default_mesh(MODEL, strange, "bfloat16", 8).size == 8
