"""The forms of a product for a few positions on a CPU give the same product."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime.models import quantization
from runtime.models.quantization import einsum, quantize

# Expression, shape of the weight, contracted dimensions: with the channels first, and with the sum first.
PRODUCTS = [
    ("bsd,vd->bsv", (37, 24), (1,)),
    ("bsd,kghd->bskgh", (2, 3, 5, 24), (3,)),
    ("bsf,fd->bsd", (24, 7), (0,)),
    ("bsf,fd->bsd", (24, 40), (0,)),
]


@pytest.mark.parametrize("block", [1, 48, 100, 1 << 17])
@pytest.mark.parametrize(("expression", "shape", "contracted"), PRODUCTS)
def test_blocks_give_the_product(
    monkeypatch: pytest.MonkeyPatch, expression: str, shape: tuple[int, ...], contracted: tuple[int, ...], block: int
) -> None:
    monkeypatch.setattr(quantization, "BLOCK_WEIGHTS", block)
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
