"""The choice of a model's layout: a mesh is checked once, and before devices are used."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from checkpoints import DEMO, open_folder
from runtime.models import declarations
from runtime.models.families import parse_config
from runtime.planner import default
from runtime.planner.default import choose_layout
from sharding.errors import MeshError
from sharding.mesh import MeshSpec
from sharding.validate import check_mesh


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
