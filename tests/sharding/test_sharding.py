"""Mesh specs, head layouts, partition rules, divisibility."""

from __future__ import annotations

from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import jax
import pytest
from jax.sharding import PartitionSpec

from sharding.errors import MeshError
from sharding.heads import HeadLayout
from sharding.mesh import MeshSpec, build_mesh
from sharding.rules import PartitionRules
from sharding.validate import NamedShape, check_mesh, working_tensor_sizes

SHAPES = [
    NamedShape("mlp.up_proj", ("embed", "mlp"), (3584, 18944)),
    NamedShape("q_proj", ("embed", "kv_heads", "queries_per_kv", "head_dim"), (3584, 4, 7, 128)),
    NamedShape("embedding", ("vocab", "embed"), (152064, 3584)),
]


def test_parse() -> None:
    assert MeshSpec.parse("data=2,sequence=1,tensor=4") == MeshSpec(2, 1, 4)
    assert MeshSpec.parse("tensor=8") == MeshSpec(tensor=8)
    assert MeshSpec.parse(" data = -1 , tensor=2").resolve(8) == MeshSpec(data=4, tensor=2)
    for sizes in ({"tensor": 0}, {"data": -2}, {"sequence": 1 << 21}, {"data": -1, "tensor": -1}):
        with pytest.raises(MeshError, match=r"positive integer|only one axis"):
            MeshSpec(**sizes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model=2", 'unknown axis "model"'),
        ("tensor=2,tensor=2", "twice"),
        ("tensor=0", "positive"),
        ("tensor=two", "cannot read"),
        ("data=-1,tensor=-1", "only one"),
        ("data=-2", "positive"),
        ("", "names no axis"),
        (" , ", "names no axis"),
        ("tensor=99999999999999999999", "cannot read"),
    ],
)
def test_parse_errors(text: str, says: str) -> None:
    with pytest.raises(MeshError, match=says):
        MeshSpec.parse(text)


def test_resolve_errors() -> None:
    with pytest.raises(MeshError, match="needs 32 devices, and there are 8"):
        MeshSpec(tensor=32).resolve(8)
    with pytest.raises(MeshError, match="the number of devices, 8, is not a multiple of 3"):
        MeshSpec(data=-1, tensor=3).resolve(8)


@pytest.mark.parametrize(
    ("tensor", "kv", "group", "padded"),
    [(1, 1, 1, 7), (2, 2, 1, 7), (4, 4, 1, 7), (8, 4, 2, 8), (16, 4, 4, 8), (32, 4, 8, 8)],
)
def test_head_layout_of_the_7b_models(tensor: int, kv: int, group: int, padded: int) -> None:
    heads = HeadLayout.for_tensor(28, 4, tensor)
    assert (heads.kv, heads.group, heads.padded_queries_per_kv) == (kv, group, padded)
    assert heads.shards_group


def test_head_layout_replicates_attention_when_heads_are_too_few() -> None:
    heads = HeadLayout.for_tensor(12, 12, 8)
    assert (heads.kv, heads.group, heads.shards_group, heads.padded_queries_per_kv) == (4, 2, False, 1)
    assert PartitionRules.for_heads(heads).spec("kv_heads", "queries_per_kv") == PartitionSpec("kv", None)


@hypothesis.given(kv_heads=st.integers(1, 32), per_kv=st.integers(1, 16), tensor=st.integers(1, 64))
def test_head_layout_properties(kv_heads: int, per_kv: int, tensor: int) -> None:
    heads = HeadLayout.for_tensor(kv_heads * per_kv, kv_heads, tensor)
    assert heads.kv * heads.group == tensor
    assert kv_heads % heads.kv == 0
    assert heads.padded_queries_per_kv >= per_kv
    assert not heads.shards_group or heads.padded_queries_per_kv % heads.group == 0
    assert heads.padded_queries_per_kv < 2 * max(per_kv, heads.group)


def test_rules() -> None:
    rules = PartitionRules()
    assert rules.spec("vocab", "embed") == PartitionSpec(("kv", "group"), None)
    assert rules.spec("batch", "canvas", ("kv_heads", "queries_per_kv")) == PartitionSpec(
        "data", "sequence", ("kv", "group")
    )
    with pytest.raises(MeshError, match=r'"vocab" and "mlp".*mesh axis "kv"'):
        rules.spec("vocab", "mlp")
    with pytest.raises(MeshError, match="no partition rule"):
        rules.spec("experts")


def test_divisibility_errors_name_everything() -> None:
    with pytest.raises(MeshError) as error:
        check_mesh(SHAPES, MeshSpec(data=2, tensor=3), 28, 4)
    message = str(error.value)
    for part in ('"mlp.up_proj"', '"mlp"', "18944", "tensor=3", "data=2,sequence=1,tensor=2"):
        assert part in message
    check_mesh(SHAPES, MeshSpec(tensor=16), 28, 4)
    assert working_tensor_sizes(SHAPES, 16, 28, 4) == [1, 2, 4, 8, 16]


def test_a_mesh_that_works_does_work() -> None:
    for tensor in range(1, 65):
        try:
            check_mesh(SHAPES, MeshSpec(tensor=tensor), 28, 4)
        except MeshError as error:
            suggestion = MeshSpec.parse(str(error).rsplit(": ", 1)[1])
            check_mesh(SHAPES, suggestion, 28, 4)
            assert 1 <= suggestion.tensor < tensor


@pytest.mark.parametrize(
    ("mesh", "needs"),
    [
        ("tensor=3", "on 2 devices: data=1,sequence=1,tensor=2"),
        ("data=4,sequence=2,tensor=3", "on 16 devices: data=4,sequence=2,tensor=2"),
        ("data=-1,tensor=3", "on a multiple of 2 devices: data=-1,sequence=1,tensor=2"),
    ],
)
def test_a_mesh_that_works_says_how_many_devices_it_needs(mesh: str, needs: str) -> None:
    """There may be fewer: devices are not used before the mesh is known to work."""
    with pytest.raises(MeshError, match=rf"\. A mesh that works {needs}$"):
        check_mesh(SHAPES, MeshSpec.parse(mesh), 28, 4)


def test_a_mesh_of_one_device_that_works() -> None:
    odd = [NamedShape("mlp.up_proj", ("embed", "mlp"), (3584, 18945))]
    with pytest.raises(MeshError, match=r"works on 1 device: data=1,sequence=1,tensor=1$"):
        check_mesh(odd, MeshSpec(tensor=2), 28, 4)
    with pytest.raises(MeshError, match=r"works on any number of devices: data=-1,sequence=1,tensor=1$"):
        check_mesh(odd, MeshSpec(data=-1, tensor=2), 28, 4)


def test_build_mesh() -> None:
    mesh = build_mesh(MeshSpec(data=2, tensor=8), HeadLayout.for_tensor(28, 4, 8), jax.devices())
    assert dict(mesh.shape) == {"data": 2, "sequence": 1, "kv": 4, "group": 2}
    with pytest.raises(MeshError, match="needs 32"):
        build_mesh(MeshSpec(data=4, tensor=8), HeadLayout.for_tensor(28, 4, 8), jax.devices())


def test_only_data_crosses_slices() -> None:
    devices = [SimpleNamespace(platform="tpu", slice_index=number // 8) for number in range(16)]
    with pytest.raises(MeshError, match=r"2 slices.*multiple of 2"):
        build_mesh(MeshSpec(tensor=16), HeadLayout.for_tensor(28, 4, 16), devices)
