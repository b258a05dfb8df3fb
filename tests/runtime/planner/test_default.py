"""The choice of a model's layout: a mesh is checked once, and before devices are used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from checkpoints import DEMO, open_folder
from runtime.models import declarations
from runtime.models.families import model_layout, parse_config
from runtime.planner import default
from runtime.planner.default import choose_layout, default_mesh
from runtime.planner.presets import preset
from sharding.errors import InputError, MeshError
from sharding.mesh import MeshSpec, arrange_devices
from sharding.topology import parse_topology, places
from sharding.validate import check_mesh
from tests.unmapped_axes import refuse


def attached(topology: str) -> list[Any]:
    """Return stand-ins for the devices of a machine."""
    return [
        SimpleNamespace(**vars(one), memory_stats=lambda: {"bytes_limit": 90 << 30})
        for one in places(parse_topology(topology))
    ]


@pytest.mark.parametrize(("text", "rows"), [("v5p:4x8x20", 8), ("v5p:4x8x28", 8), ("v5p:4x8x28", 64)])
def test_a_mesh_that_cannot_be_laid_out_is_not_chosen(text: str, rows: int) -> None:
    """JAX 0.10 maps only some meshes onto a torus with a side of 20 or 28."""
    model, devices = preset("diffucoder-7b"), attached(text)
    spec = default_mesh(model, devices, "bfloat16", rows)
    assert arrange_devices(spec, model_layout(model, spec).heads, devices).size == len(devices)


def test_hosts_without_a_mesh_for_all_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them take part. One host alone can leave devices idle."""
    model = preset("diffucoder-7b")
    refuse(monkeypatch, lambda shape: True)
    says = "cannot be divided over any mesh of all 16 devices that can be laid out on v5e:4x4; .*: data=16"
    with pytest.raises(MeshError, match=says):
        choose_layout(model, None, attached("v5e:4x4"), "bfloat16")
    assert default_mesh(model, attached("v5e:2x4"), "bfloat16", 1) == MeshSpec()


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [("data=2,tensor=2", "data=2,sequence=1,tensor=2"), ("data=-1,tensor=2", "data=2,sequence=1,tensor=2")],
)
def test_a_mesh_is_checked_once(mesh: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[MeshSpec] = []

    def counted(shapes: Any, spec: MeshSpec, *heads: int) -> None:
        checked.append(spec)
        check_mesh(shapes, spec, *heads)

    monkeypatch.setattr(declarations, "check_mesh", counted)
    config, devices = parse_config(open_folder(str(DEMO)).config), jax.devices()[:4]
    layout, _, _ = choose_layout(config, MeshSpec.parse(mesh), devices, None)
    assert checked == [MeshSpec.parse(mesh)]
    assert str(layout.spec) == expected
    assert layout.mesh is not None
    assert layout.mesh.devices.size == 4
    direct = declarations.ModelLayout.create(config, layout.weights_class, layout.spec, devices)
    assert layout == direct


def test_a_mesh_that_cannot_work_touches_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices() -> list[Any]:
        raise AssertionError("devices were used")

    monkeypatch.setattr(default.jax, "devices", devices)
    config = parse_config(open_folder(str(DEMO)).config)
    with pytest.raises(MeshError, match="cannot be divided over mesh"):
        choose_layout(config, MeshSpec.parse("data=-1,tensor=7"), None, None)


def test_no_devices_and_no_rows() -> None:
    config = parse_config(open_folder(str(DEMO)).config)
    for spec in (None, MeshSpec(), MeshSpec.parse("tensor=-1")):
        with pytest.raises(MeshError, match="devices is empty; expected at least one device, or None for all"):
            choose_layout(config, spec, [], None)
    wrong: Any
    for wrong in (0, -3, 2.5, "2"):
        with pytest.raises(InputError, match=f"rows is {wrong!r}; expected an integer from 1 to") as found:
            choose_layout(config, None, jax.devices()[:1], None, rows=wrong)
        assert found.value.field == "rows"
