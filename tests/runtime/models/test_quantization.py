"""Products with int8 weights are equal whether the weights are converted block by block or at once."""

from __future__ import annotations

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
    blocks, whole = (einsum(expression, left, weight, in_blocks=how) for how in (True, False))
    assert blocks.shape == whole.shape
    np.testing.assert_allclose(blocks, whole, rtol=1e-5, atol=1e-5)
    for one in (weight, weight.values.astype(jnp.float32)):
        matrices, whole = (einsum(expression, left, one, as_matrix=how) for how in (True, False))
        assert matrices.shape == whole.shape
        np.testing.assert_allclose(matrices, whole, rtol=1e-5, atol=1e-4)
