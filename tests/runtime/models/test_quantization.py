"""Products are equal in all forms, also with quantized weights: block by block, at once, and with sums of groups."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime.models import products
from runtime.models.families import model_layout
from runtime.models.leaves import int4_group
from runtime.models.products import einsum
from runtime.models.quantization import Quantized, pack_int4, quantize, unpack_int4
from runtime.planner.presets import preset
from sharding.errors import MeshError
from sharding.mesh import MeshSpec

# Expression, shape of the weight, contracted dimensions: with the channels first, and with the sum first.
PRODUCTS = [
    ("bsd,vd->bsv", (37, 24), (1,)),
    ("bsd,kghd->bskgh", (2, 3, 5, 24), (3,)),
    ("bsf,fd->bsd", (24, 7), (0,)),
    ("bsf,fd->bsd", (24, 40), (0,)),
]


# The same with groups of 8: three or four of them.
GROUP = 8
GROUPED = [
    ("bsd,vd->bsv", (37, 24), (1,)),
    ("bsd,kghd->bskgh", (2, 3, 5, 32), (3,)),
    ("bsf,fd->bsd", (32, 7), (0,)),
]


@pytest.mark.parametrize("block", [1, 48, 100, 1 << 17])
@pytest.mark.parametrize(("expression", "shape", "contracted"), PRODUCTS)
def test_blocks_give_the_product(
    monkeypatch: pytest.MonkeyPatch, expression: str, shape: tuple[int, ...], contracted: tuple[int, ...], block: int
) -> None:
    monkeypatch.setattr(products, "BLOCK_WEIGHTS", block)
    generator = np.random.default_rng(0)
    weight = quantize(jnp.asarray(generator.normal(size=shape), jnp.float32), contracted)
    left = jnp.asarray(generator.normal(size=(2, 3, 24)), jnp.float32)
    blocks, whole = (einsum(expression, left, weight, few=how) for how in (True, False))
    assert blocks.shape == whole.shape
    np.testing.assert_allclose(blocks, whole, rtol=1e-5, atol=1e-5)
    for one in (weight, weight.values.astype(jnp.float32)):
        matrices, few, whole = (
            einsum(expression, left, one, as_matrix=as_matrix, few=few)
            for as_matrix, few in ((True, False), (True, True), (False, False))
        )
        for found in (matrices, few):
            assert found.shape == whole.shape
            np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("positions", "first"), [(1, False), (2, True), (64, True)])
def test_a_float32_weight_is_the_left_operand_of_a_product_of_few_positions(positions: int, first: bool) -> None:
    """XLA on CPU would pack it as the right operand, and exchanges operands where it can."""

    def product(left: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.tanh(einsum("bsd,kghd->bskgh", left, weight, as_matrix=True, few=True))

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, positions, 24), (2, 3, 5, 24))]
    text = jax.jit(product).lower(*shapes).compile().as_text()
    (out,) = re.findall(r"f32\[([\d,]+)\]\{[\d,]*\} dot\(", text)
    assert (out == f"30,{positions}") is first, text


def widened(weight: Quantized, contracted: tuple[int, ...]) -> np.ndarray:
    """The numbers that int4 values and their scales stand for."""
    scales = np.moveaxis(np.asarray(weight.scales), range(len(contracted)), contracted)
    return np.asarray(weight.values).astype(np.float32) * np.repeat(scales, GROUP, contracted[-1])


@pytest.mark.parametrize(("expression", "shape", "contracted"), GROUPED)
def test_every_form_of_a_product_with_int4(
    monkeypatch: pytest.MonkeyPatch, expression: str, shape: tuple[int, ...], contracted: tuple[int, ...]
) -> None:
    monkeypatch.setattr(products, "BLOCK_WEIGHTS", 100)
    generator = np.random.default_rng(0)
    matrix = generator.normal(size=shape).astype(np.float32)
    weight = quantize(jnp.asarray(matrix), contracted, GROUP, dtype=jnp.int4)
    wide = widened(weight, contracted)
    assert np.abs(wide - matrix).max() <= 0.5001 * np.asarray(weight.scales).max()
    assert np.abs(np.asarray(weight.values).astype(int)).max() == 7
    left = jnp.asarray(generator.normal(size=(2, 3, shape[contracted[-1]])), jnp.float32)
    forms: list[dict[str, object]] = [{"few": True}, {"as_matrix": True}]
    shards = 2 if contracted == (0,) else 1
    for rows, on_tpu in ((6, False), (600, False), (6, True), (600, True)):
        forms.append({"rows": rows, "on_tpu": on_tpu, "shards": shards})
    for one, own in ((left, forms), (left[:1, :1], forms[2:3])):
        expected = np.einsum(expression, np.asarray(one), wide)
        for form in own:
            found = einsum(expression, one, weight, **form)  # type: ignore[arg-type]
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4, err_msg=str(form))


@pytest.mark.parametrize("form", [{}, {"few": True}, {"rows": 6}, {"rows": 6, "on_tpu": True}, {"rows": 600}])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4])
def test_large_activations_in_float16(dtype: Any, form: dict[str, Any]) -> None:
    """Unscaled sums would exceed 65,504: one activation is as large as those of real models are."""
    generator = np.random.default_rng(0)
    matrix = generator.normal(size=(16, 512)).astype(np.float32) / 50
    left = generator.normal(size=(2, 3, 512)).astype(np.float16)
    left[0, 0, 7] = 20000
    weight = quantize(jnp.asarray(matrix), (1,), 64 if dtype == jnp.int4 else None, dtype=dtype)
    found = einsum("bsd,vd->bsv", jnp.asarray(left), weight, **form)
    exact = einsum("bsd,vd->bsv", jnp.asarray(left, jnp.float32), weight, **form)
    assert found.dtype == jnp.float16
    assert np.abs(exact[0, 0]).max() > 300
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_two_integers_are_a_byte(axis: int) -> None:
    values = np.random.default_rng(axis).integers(-7, 8, (4, 6, 8)).astype(np.int8)
    packed = pack_int4(values, axis)
    assert packed.dtype == np.uint8
    assert packed.size == values.size // 2
    np.testing.assert_array_equal(unpack_int4(jnp.asarray(packed), axis), values)


def test_groups_follow_from_the_model_alone() -> None:
    assert [int4_group("embed", size) for size in (3584, 224, 96, 24)] == [64, 32, 32, None]
    # Up to eight shards of the MLP's axis consist of whole groups.
    assert [int4_group("mlp", size) for size in (18944, 12288, 4864, 160)] == [64, 64, 32, None]
    layout = model_layout(preset("qwen2.5-7b"), MeshSpec(tensor=8), quantization="int4")
    held = {leaf.name.split(".")[-1]: (leaf.integers, leaf.group) for leaf in layout.leaves if leaf.quantized}
    assert held["embedding"] == held["lm_head"] == ("int8", None)
    assert {held[name] for name in held if name.endswith("_proj")} == {("int4", 64)}
    eight = model_layout(preset("qwen2.5-7b"), MeshSpec(tensor=8), quantization="int8")
    assert layout.bytes_read_per_pass("bfloat16") < 0.62 * eight.bytes_read_per_pass("bfloat16")


def test_a_group_that_would_cross_shards_is_refused() -> None:
    model_layout(preset("qwen2.5-7b"), MeshSpec(tensor=16), quantization="int8")
    says = r"groups of 64 int4 weights.*296.*tensor=16.*works on 8 devices: .*tensor=8; int8 works"
    with pytest.raises(MeshError, match=says):
        model_layout(preset("qwen2.5-7b"), MeshSpec(tensor=16), quantization="int4")
