"""A cache whose heads are padded, as on TPU, gives the same tokens as one whose heads are not."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from runtime.decoding.autoregressive_parameters import SamplingConfig
from runtime.decoding.parameters import DiffusionConfig
from runtime.engine import Engine
from runtime.models import kv_cache
from runtime.models.families import model_layout
from runtime.models.kv_cache import abstract_cache, cache_bytes_per_device, stored_head_dim
from runtime.planner.presets import preset
from sharding.aot import aot_devices
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology
from tests.golden_cases import DREAM, FOLDER, Golden

QWEN3 = Golden(FOLDER.parent / "qwen3_tiny")
PADDED = 24


def tokens(golden: Golden, mesh: str, kv_cache_dtype: str, config: DiffusionConfig | SamplingConfig) -> np.ndarray:
    engine = Engine.load(golden.folder, mesh, dtype="float32", kv_cache=kv_cache_dtype)
    prompts = np.random.default_rng(0).integers(5, 90, (2, 9))
    return engine.generate_tokens(prompts, None, config).sequences


@pytest.mark.parametrize(
    ("golden", "mesh", "dtype", "config"),
    [
        (QWEN3, "data=1", "model", SamplingConfig(12)),
        (QWEN3, "data=2,sequence=2,tensor=2", "int8", SamplingConfig(12)),
        (DREAM, "data=1", "int8", DiffusionConfig(16, steps=16, cache="dual", block_length=8)),
        (DREAM, "sequence=2,tensor=2", "model", DiffusionConfig(16, steps=16, cache="dual", block_length=8)),
        (DREAM, "data=1", "model", DiffusionConfig(16, steps=16, cache="prefix", block_length=8, draft_steps=2)),
    ],
    ids=["decode", "decode mesh int8", "dual int8", "dual mesh", "drafts"],
)
def test_tokens_do_not_depend_on_padding(
    golden: Golden,
    mesh: str,
    dtype: str,
    config: DiffusionConfig | SamplingConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = tokens(golden, mesh, dtype, config)
    asked = []

    def padded(layout: object, platform: str | None = None) -> int:
        asked.append(platform)
        return PADDED

    monkeypatch.setattr(kv_cache, "stored_head_dim", padded)
    np.testing.assert_array_equal(tokens(golden, mesh, dtype, config), expected)
    assert asked, "no cache was made"


def test_heads_are_padded_on_tpu_alone() -> None:
    gpt2, qwen = preset("gpt2"), preset("qwen2.5-7b")
    bare = model_layout(gpt2)
    assert [stored_head_dim(bare, platform) for platform in (None, "cpu", "gpu", "tpu")] == [64, 64, 64, 128]
    tpu = model_layout(gpt2, MeshSpec(), aot_devices(parse_topology("v5e:1x1")))
    assert stored_head_dim(tpu) == 128
    assert abstract_cache(tpu, 1, 256, jnp.bfloat16).keys.shape[-1] == 128
    assert cache_bytes_per_device(bare, 1, 256, jnp.bfloat16, "tpu") == cache_bytes_per_device(
        tpu, 1, 256, jnp.bfloat16
    )
    assert stored_head_dim(model_layout(qwen), "tpu") == qwen.head_dim == 128
