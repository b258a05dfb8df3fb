"""Splash attention: equality with XLA's attention in interpreter mode, and its blocks in compiled TPU programs.

Dimension letters: B batch, S sequence, K kv heads, G query heads per KV head, H head dim.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime.models.attention import dot_product_attention
from runtime.models.dream import DREAM
from runtime.models.families import model_layout, parse_config
from runtime.models.masks import AttentionMask
from runtime.models.splash import splash_attention
from runtime.models.splash_blocks import splash_blocks
from sharding.aot import aot_devices
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology
from tests.checkpoints.small import MICRO

BIDIRECTIONAL, CAUSAL = AttentionMask("bidirectional"), AttentionMask("causal")
# Bytes of a key with 128 bfloat16 numbers.
KEY = 256


@pytest.mark.parametrize(
    ("mask", "queries", "keys", "key_bytes", "blocks"),
    [
        (BIDIRECTIONAL, 2048, 2048, KEY, (512, 2048, 512)),
        (BIDIRECTIONAL, 8192, 8192, KEY, (512, 2048, 512)),
        (BIDIRECTIONAL, 1024, 8192, KEY, (512, 2048, 512)),  # a shard of the canvas
        (BIDIRECTIONAL, 2048, 2048, 4 * KEY, (512, 512, 512)),
        (CAUSAL, 2048, 2048, KEY, (512, 512, 512)),
        (AttentionMask("block_causal", 32), 1024, 1024, KEY, (512, 512, 512)),
        (BIDIRECTIONAL, 512, 512, KEY, (512, 512, 512)),
        (BIDIRECTIONAL, 128, 128, KEY, (128, 128, 128)),
        (BIDIRECTIONAL, 640, 640, KEY, (640, 640, 640)),
        (BIDIRECTIONAL, 768, 768, KEY, (384, 768, 384)),
        (BIDIRECTIONAL, 11 * 128, 11 * 128, KEY, (128, 1408, 128)),
    ],
)
def test_blocks(mask: AttentionMask, queries: int, keys: int, key_bytes: int, blocks: tuple[int, int, int]) -> None:
    assert splash_blocks(mask, queries, keys, key_bytes) == blocks


@pytest.mark.parametrize("canvas", range(128, 8192 + 1, 128))
def test_blocks_divide_every_canvas(canvas: int) -> None:
    for mask in (BIDIRECTIONAL, CAUSAL):
        queries, keys, compute = splash_blocks(mask, canvas, canvas, KEY)
        assert canvas % queries == canvas % keys == keys % compute == compute % 128 == queries % 128 == 0
        assert max(queries, compute) <= 1024
        assert keys <= 2048


@pytest.mark.parametrize(
    "mask", [BIDIRECTIONAL, CAUSAL, AttentionMask("block_causal", 5), AttentionMask("block_causal", 32)], ids=str
)
def test_the_kernel_is_xla(mask: AttentionMask) -> None:
    """In interpreter mode, on ragged rows of several blocks, with 7 queries per KV head."""
    B, S, K, G, H = 2, 1024, 1, 7, 128
    assert splash_blocks(mask, S, S, 4 * H)[0] < S
    config = replace(
        parse_config(MICRO | {"head_dim": H}),
        family=replace(DREAM, attention=mask.kind),
        attention_block_length=mask.block_length,
    )
    draw = np.random.default_rng(0).standard_normal
    q, k, v = (jnp.asarray(draw((B, S, K, *size)), jnp.float32) for size in ((G, H), (H,), (H,)))
    lengths = jnp.array([S, 601], jnp.int32)
    found = splash_attention(q, k, v, lengths, mask, interpret=True)
    layout = model_layout(config, MeshSpec(), jax.devices())
    expected = jax.jit(functools.partial(dot_product_attention, "xla", layout))(q, k, v, lengths)
    # In interpreter mode, the kernel multiplies in the platform's default precision.
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.programs
@pytest.mark.parametrize(("mask", "positions"), [(BIDIRECTIONAL, 2048), (CAUSAL, 1024)], ids=str)
def test_the_compiled_kernel_has_these_blocks(mask: AttentionMask, positions: int) -> None:
    """The kernel's metadata in the optimized program state the expected blocks."""
    device = jax.sharding.SingleDeviceSharding(aot_devices(parse_topology("v5e:2x4"))[0])

    def array(*shape: int, dtype: type = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    heads = array(1, positions, 1, 128)
    run = jax.jit(functools.partial(splash_attention, mask=mask))
    compiled = run.lower(array(1, positions, 1, 7, 128), heads, heads, array(1, dtype=jnp.int32)).compile()
    found = re.search(r'(\{\\*"block_q[^}]*\})', compiled.as_text())
    assert found is not None
    sizes = json.loads(found[1].replace("\\", ""))
    assert (sizes["block_q"], sizes["block_kv"], sizes["block_kv_compute"]) == splash_blocks(
        mask, positions, positions, KEY
    )
