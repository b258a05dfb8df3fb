from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sharding.aot import aot_devices, missing_compiler
from sharding.errors import MeshError
from sharding.heads import HeadLayout
from sharding.links import Wiring
from sharding.mesh import MeshSpec, arrange_devices, build_mesh, has_reduce_scatter
from sharding.topology import CHIPS, parse_topology, places
from tests.unmapped_axes import refuse


@pytest.mark.parametrize(
    ("text", "devices", "slices"),
    [
        ("v5e:2x4", 8, 1),
        ("v4:2x2x4", 16, 1),
        ("v5p:4x4x4", 64, 1),
        ("2xv5e:16x16", 512, 2),
        ("8xh100", 8, 1),
        ("2x8xh200", 16, 1),
        ("h100", 1, 1),
        ("4xL4", 4, 1),
        ("rtx4090", 1, 1),
        ("2x8xA100-40GB", 16, 1),
    ],
)
def test_topologies_are_read(text: str, devices: int, slices: int) -> None:
    topology = parse_topology(text)
    assert (topology.num_devices, topology.num_slices) == (devices, slices)
    assert len(places(topology)) == devices
    assert parse_topology(str(topology)) == topology


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("v5e-8", "v5e:2x4"),
        ("v5litepod-16", "v5e:4x4"),
        ("V6E-4", "v6e:2x2"),
        ("v4-32", "v4:2x2x4"),
        ("v5p-8", "v5p:2x2x1"),
        ("2xv5e-256", "2xv5e:16x16"),
        ("8xH100", "8xh100"),
        ("a100-80gb", "1xa100"),
        ("RTX-4090", "1xrtx4090"),
        ("a100-40GB", "1xa100-40gb"),
        ("NVIDIA A100 80GB", "1xa100"),
        ("RTX 4090", "1xrtx4090"),
        ("8 x H100", "8xh100"),
        ("H200x8", "8xh200"),
        ("2 x 8 x H100", "2x8xh100"),
        ("nvidia-l4 x2", "2xl4"),
        ("tpu-v5e-8", "v5e:2x4"),
        ("TPU v4-32", "v4:2x2x4"),
    ],
)
def test_names_as_people_write_them(text: str, same: str) -> None:
    assert str(parse_topology(text)) == same
    assert parse_topology(text) == parse_topology(same)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("v5e-12", "v5e has no such slice of 12 chips"),
        ("v4-7", "v4 has no such slice of 7 TensorCores"),
        ("h100-8", "8xh100"),
        ("2x2xv5e:2x4", "v5e:2x2"),
        ("v7:2x2", 'unknown chip "v7"'),
        ("v5e:3x3", "v5e has no such slice"),
        ("v5e:2x4x2", "v5e has no such slice"),
        ("v4:2x4", "v4 has no such slice"),
        ("v5p:8x4x4", "v5p has no such slice"),
        ("9xh100", "2x8xh100"),
        ("0x8xh100", "slices or hosts"),
        ("v5e", "v5e:2x2"),
        ("h100:2x4", "8xh100"),
        ("", "cannot be read"),
        ("2*v5e:2x4", "cannot be read"),
        ("99999xv5e:2x4", "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_topology(text: str, says: str) -> None:
    with pytest.raises(MeshError, match=r"write for example|has no such|a host has|slices or hosts") as caught:
        parse_topology(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("v5e:2x4", "tensor=8"),
        ("v5e:2x4", "data=2,sequence=2,tensor=2"),
        ("v5e:4x4", "data=2,tensor=8"),
        ("v5p:2x2x2", "sequence=2,tensor=4"),
        ("v4:2x2x4", "sequence=4,tensor=4"),
        ("2xv5e:2x4", "data=2,tensor=8"),
    ],
)
def test_places_are_arranged_as_the_devices_are(text: str, mesh: str) -> None:
    topology, spec = parse_topology(text), MeshSpec.parse(mesh)
    heads = HeadLayout.for_tensor(28, 4, spec.tensor)
    ours = arrange_devices(spec, heads, places(topology))
    theirs = arrange_devices(spec, heads, aot_devices(topology))
    for place, device in zip(ours.flat, theirs.flat, strict=True):
        assert (place.coords, place.slice_index) == (tuple(device.coords), getattr(device, "slice_index", 0))
        assert place.device_kind == device.device_kind


@pytest.mark.parametrize(
    ("text", "mesh", "error", "why"),
    [
        ("v4:4x4x20", "data=10,sequence=8,tensor=4", ValueError(), "its axes cannot be mapped onto 4x4x20 chips"),
        ("v5p:4x8x28", "data=14,sequence=8,tensor=8", None, "its axes cannot be mapped onto 4x8x28 chips"),
        ("2xv4:4x4x20", "data=20,sequence=8,tensor=4", None, "its axes cannot be mapped onto 4x4x20 chips"),
        ("v5e:4x4", "data=2,tensor=4", None, "its axes cannot be mapped onto 4x2 chips"),
        ("v5e:4x4", "data=2,tensor=3", None, "the first 6 of 16 chips do not form a box of the interconnect"),
        ("2xv5e:2x2", "data=2,tensor=3", None, "the first 6 of 8 chips are not the same box in each slice"),
    ],
)
def test_why_a_mesh_cannot_be_laid_out(
    text: str, mesh: str, error: Exception | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chips, spec = places(parse_topology(text)), MeshSpec.parse(mesh)
    heads = HeadLayout.for_tensor(spec.tensor, spec.tensor, spec.tensor)
    if "axes" in why:
        refuse(monkeypatch, lambda shape: shape[2] > 1, error)
    says = f"mesh {spec} cannot be laid out: {why}; a mesh that fits: data={len(chips)}"
    with pytest.raises(MeshError, match=f"^{says}$") as caught:
        arrange_devices(spec, heads, chips)
    other = MeshSpec.parse(str(caught.value).rsplit(": ", 1)[1])
    assert arrange_devices(other, HeadLayout.for_tensor(1, 1, 1), chips).size == len(chips)


@pytest.mark.parametrize(
    ("text", "mesh", "found"),
    [
        ("v5e:2x4", "tensor=8", True),
        ("v5e:4x4", "tensor=16", False),
        ("v5p:2x2x2", "tensor=8", False),
        ("v5e:4x4", "data=2,tensor=8", True),
        pytest.param("v5e:4x8", "tensor=32", True, marks=pytest.mark.slow),
        pytest.param("v4:2x2x1", "tensor=4", True, marks=pytest.mark.slow),
        pytest.param("v5p:2x2x2", "sequence=2,tensor=4", True, marks=pytest.mark.slow),
        pytest.param("v4:2x2x4", "tensor=16", False, marks=pytest.mark.slow),
        pytest.param("2xv5e:4x4", "data=2,tensor=16", False, marks=pytest.mark.slow),
    ],
)
def test_where_the_compiler_has_a_reduce_scatter(text: str, mesh: str, found: bool) -> None:
    topology, spec = parse_topology(text), MeshSpec.parse(mesh)
    heads = HeadLayout.for_tensor(28, 4, spec.tensor)
    assert has_reduce_scatter(arrange_devices(spec, heads, places(topology))) == found
    devices = build_mesh(spec, heads, aot_devices(topology))
    assert has_reduce_scatter(devices.devices) == found
    tensor = ("kv", "group")

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        scattered = NamedSharding(devices, PartitionSpec("data", ("sequence", *tensor), None))
        return jax.lax.with_sharding_constraint(jnp.einsum("bsx,xd->bsd", x, weight), scattered)

    def array(*shape: int, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(devices, spec))

    x = array(4, 1024, 3584, spec=PartitionSpec("data", "sequence", tensor))
    weight = array(3584, 3584, spec=PartitionSpec(tensor, None))
    compiled = jax.jit(product).lower(x, weight).compile().as_text() or ""
    assert "all-reduce" in compiled
    assert ("all-reduce-scatter" in compiled) == found  # the name of an all-reduce fused with the slice


def link(text: str, mesh: str, *axes: str) -> tuple[str, float]:
    spec = MeshSpec.parse(mesh)
    found = Wiring(parse_topology(text), spec, HeadLayout.for_tensor(28, 4, spec.tensor)).link(axes)
    return found.kind, found.bandwidth


def test_links_of_an_axis() -> None:
    v5e, h200 = CHIPS["v5e"], CHIPS["h200"]
    # A whole 2x4 slice uses both dimensions, and neither closes a ring.
    assert link("v5e:2x4", "tensor=8", "kv", "group") == ("interconnect", 2 * v5e.link_bandwidth)
    # 16 chips in a row close a ring.
    assert link("v5e:16x16", "data=16,tensor=16", "data") == ("interconnect", 2 * v5e.link_bandwidth)
    assert link("8xh200", "tensor=8", "kv", "group") == ("NVLink", h200.link_bandwidth)
    assert link("2x8xh200", "data=2,tensor=8", "kv", "group") == ("NVLink", h200.link_bandwidth)
    assert link("2x8xh200", "data=2,tensor=8", "data") == ("network", h200.network_bandwidth)
    # Between two hosts, there is one ring per network card of a host, at most as fast as NVLink together.
    assert link("2x8xh200", "tensor=16", "kv", "group") == ("network", 8 * h200.network_bandwidth)
    assert link("2x8xh200", "data=4,tensor=4", "data") == ("network", 2 * h200.network_bandwidth)
    assert link("2x3xh200", "tensor=6", "kv", "group") == ("network", 3 * h200.network_bandwidth)
    assert link("2x8xh200", "tensor=12", "kv", "group") == ("network", 4 * h200.network_bandwidth)  # 8 and 4 of them
    fast = replace(parse_topology("2x8xh200"), chip=replace(h200, network_bandwidth=h200.link_bandwidth / 4))
    wiring = Wiring(fast, MeshSpec(tensor=16), HeadLayout.for_tensor(28, 4, 16))
    assert wiring.link(("kv", "group")).bandwidth == h200.link_bandwidth
    assert link("2xv5e:2x4", "data=2,tensor=8", "data") == ("network", v5e.network_bandwidth)


def test_what_crosses_the_network() -> None:
    """The network's latency depends on the number of slices, because the interconnect joins the hosts of a slice."""
    gpus = Wiring(parse_topology("4x8xh200"), MeshSpec(data=32), HeadLayout.for_tensor(28, 4, 1))
    both = Wiring(parse_topology("2xv5e:16x16"), MeshSpec(data=256, tensor=2), HeadLayout.for_tensor(28, 4, 2))
    one = Wiring(parse_topology("2xv5e:16x16"), MeshSpec(data=256), HeadLayout.for_tensor(28, 4, 1))
    assert (both.slices, one.slices) == (2, 1)
    across, inside = both.link(("data",)), both.link(("data",), inside_slices=True)
    assert (across.kind, inside.kind) == ("network", "interconnect")
    assert (both.members(("data",)), both.members(("data",), inside_slices=True)) == (256, 128)
    assert gpus.link(("data",)).latency == pytest.approx(3 * across.latency)  # four hosts against two slices


def test_time_of_a_collective() -> None:
    spec = MeshSpec(tensor=8)
    found = Wiring(parse_topology("8xh200"), spec, HeadLayout.for_tensor(28, 4, 8)).link(("kv", "group"))
    gather = found.seconds("all-gather", 450_000_000, 8)
    assert gather == pytest.approx(450e6 * 7 / 8 / 450e9 + found.latency)
    assert found.seconds("all-reduce", 450_000_000, 8) == pytest.approx(2 * gather)


def test_a_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "libtpu" in str(missing_compiler("tpu"))
    assert "CUDA" in str(missing_compiler("gpu"))
    with pytest.raises(MeshError, match="not installed"):
        aot_devices(parse_topology("v5e:2x4"))


@pytest.mark.parametrize("name", ["v4-12288", "v4:16x16x20", "v5p-17920", "v5p-43904", "v5p:16x20x28"])
def test_slices_larger_than_a_pod_do_not_exist(name: str) -> None:
    with pytest.raises(MeshError, match="has no such slice"):
        parse_topology(name)


@pytest.mark.parametrize(("name", "chips"), [("v4-8192", 4096), ("v5p-12288", 6144), ("v5p:16x16x24", 6144)])
def test_the_largest_slices(name: str, chips: int) -> None:
    found = parse_topology(name)
    assert found.num_devices == chips
    assert parse_topology(str(found)) == found
