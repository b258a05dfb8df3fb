"""Sharding the residual over the tensor axis: when it is done, and that it changes only the order of sums."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime import Engine
from runtime.models import forward as forward_module
from runtime.models.cached import fill_rows
from runtime.models.declarations import ModelLayout
from runtime.models.families import model_layout
from runtime.models.forward import Forward, residual_over_tensor
from runtime.models.kv_cache import abstract_cache
from runtime.models.transformer import hidden_states
from runtime.planner.presets import preset
from sharding.links import Wiring
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology
from tests.golden_cases import DREAM
from tests.runtime.models.test_masks import random_weights

DIFFUCODER = preset("diffucoder-7b")
SIZES = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16}
TOKENS = {"vocab_size": 96, "mask_token_id": 1, "pad_token_id": 0, "end_token_ids": ()}
MESHES = ["tensor=4", "data=2,sequence=2,tensor=2"]
B, S = 4, 64


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Shard the residual wherever its positions allow it, on any platform; records for each pass whether it was."""
    divided: list[bool] = []

    def divides(layout: ModelLayout, devices: np.ndarray, rows: int, positions: int) -> bool:
        divided.append(positions % (layout.spec.sequence * layout.spec.tensor) == 0)
        return divided[-1]

    monkeypatch.setattr(forward_module, "residual_over_tensor", divides)
    return divided


@pytest.mark.parametrize(
    ("topology", "mesh", "rows", "positions", "divided"),
    [
        ("v5e:2x4", "tensor=8", 16, 512, True),
        ("8xh100", "tensor=8", 16, 512, False),
        ("v5e:2x4", "tensor=8", 1, 512, False),  # few positions
        ("v5e:2x4", "tensor=8", 1, 8192, True),
        ("v5e:2x4", "tensor=8", 1, 8192 + 64, False),  # do not divide
        ("v5e:2x4", "tensor=8", 128, 512, False),  # too large for the chip
        ("v5e:2x4", "data=8", 64, 512, False),
        ("v5e:2x4", "data=2,tensor=4", 16, 512, True),
        ("v5e:2x4", "data=2,tensor=4", 4, 512, False),
        ("v5e:2x4", "sequence=2,tensor=4", 4, 512, False),
        ("v5e:2x4", "sequence=2,tensor=4", 8, 512, True),
        ("v5e:4x4", "data=2,tensor=8", 16, 512, True),
        ("v5e:4x4", "tensor=16", 16, 512, False),  # no reduce-scatter over the whole slice
        ("v5p:2x2x2", "tensor=8", 1, 2048, False),
    ],
)
def test_where_it_is_divided(topology: str, mesh: str, rows: int, positions: int, divided: bool) -> None:
    layout = model_layout(DIFFUCODER, MeshSpec.parse(mesh))
    chips = Wiring(parse_topology(topology), layout.spec, layout.heads).chips
    assert residual_over_tensor(layout, chips, rows, positions) == divided


def norms(text: str) -> set[tuple[int, ...]]:
    """Shapes of the divisors in norms."""
    found = re.findall(r"f32\[([\d,]+)\]\S* rsqrt\(", text)
    return {tuple(int(size) for size in shape.split(",") if size != "1") for shape in found}


@pytest.mark.parametrize("mesh", MESHES)
def test_nothing_changes_but_the_order_of_sums(mesh: str, everywhere: list[bool]) -> None:
    spec = MeshSpec.parse(mesh)
    layout = model_layout(replace(DIFFUCODER, **SIZES, **TOKENS), spec, jax.devices()[: spec.size])
    divided, weights = Forward(layout), random_weights(layout, 0, "float32", scale=0.1)
    rng = np.random.default_rng(1)
    tokens = jax.device_put(rng.integers(0, 90, (B, S)).astype(np.int32), layout.sharding("batch", "canvas"))
    lengths = jax.device_put(np.array([S, 5, S - 3, 40], np.int32), layout.sharding("batch"))
    arguments = weights, tokens, lengths
    compiled = jax.jit(lambda *given: hidden_states(divided, *given)).lower(*arguments).compile()
    rows, positions = B // spec.data, S // spec.sequence
    assert norms(compiled.as_text() or "") == {(rows, positions // spec.tensor)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_module, "residual_over_tensor", lambda *_: False)
        plain = jax.jit(lambda *given: hidden_states(divided, *given)).lower(*arguments).compile()
        assert norms(plain.as_text() or "") == {(rows, positions)}
        exact = plain(*arguments)
    np.testing.assert_allclose(compiled(*arguments), exact, atol=1e-5)
    empty: Any = jax.tree.map(
        lambda leaf: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        abstract_cache(layout, B, S, "float32"),
    )
    first = jax.device_put(np.zeros(spec.data, np.int32), layout.sharding("batch"))
    filled, _ = jax.jit(fill_rows, static_argnums=0)(divided, weights, empty, tokens, lengths, first)
    np.testing.assert_allclose(filled, exact, atol=1e-5)


@pytest.mark.parametrize("mesh", ["tensor=4", "sequence=2,tensor=4"])
def test_golden_tokens(mesh: str, everywhere: list[bool]) -> None:
    name = next(iter(DREAM.cases))
    engine = Engine.load(DREAM.folder, mesh, dtype="float32")
    found = engine.generate_tokens(*DREAM.inputs(name), DREAM.config(name)).sequences
    expected = DREAM.sequences(name, found.shape[1], engine.config.pad_token_id)
    np.testing.assert_array_equal(found, expected)
    assert everywhere
    assert all(everywhere)
