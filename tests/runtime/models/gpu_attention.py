"""Compares cuDNN attention with XLA's on a GPU, with every mask and 7 queries per KV head; run as its own process."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from runtime.models.attention import dot_product_attention
from runtime.models.dream import DREAM
from runtime.models.families import model_layout, parse_config
from runtime.models.masks import AttentionMask
from sharding.mesh import MeshSpec
from tests.checkpoints.small import MICRO

B, S, K, G, H = 2, 512, 2, 7, 128
MASKS = (AttentionMask("bidirectional"), AttentionMask("causal"), AttentionMask("block_causal", 32))


def main() -> None:
    draw = np.random.default_rng(0).standard_normal
    q, k, v = (jnp.asarray(draw((B, S, K, *size)), jnp.bfloat16) for size in ((G, H), (H,), (H,)))
    lengths = np.array([S, 301], np.int32)
    for mask in MASKS:
        config = replace(
            parse_config(MICRO | {"head_dim": H}),
            family=replace(DREAM, attention=mask.kind),
            attention_block_length=mask.block_length,
        )
        layout = model_layout(config, MeshSpec(), jax.devices("gpu")[:1])
        run = jax.jit(dot_product_attention, static_argnums=(0, 1))
        found, expected = (np.asarray(run(name, layout, q, k, v, lengths), np.float32) for name in ("cudnn", "xla"))
        np.testing.assert_allclose(found, expected, atol=2e-2)
    print("cuDNN agrees with XLA")


if __name__ == "__main__":
    main()
