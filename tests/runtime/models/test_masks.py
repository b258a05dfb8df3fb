"""Every attention mask in every implementation that runs here equals a NumPy reference, also for ragged rows.

Dimension letters: B batch, S sequence, K kv heads, G query heads per KV head, H head dim.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from runtime.models import xla_attention
from runtime.models.attention import choose_attention, dot_product_attention
from runtime.models.cached import fill_rows, run_window
from runtime.models.config import ModelConfig
from runtime.models.declarations import ModelLayout
from runtime.models.dream import DREAM
from runtime.models.families import model_layout, parse_config
from runtime.models.forward import Forward
from runtime.models.kv_cache import abstract_cache, attend
from runtime.models.masks import AttentionMask
from runtime.models.random_weights import random_weights
from runtime.models.transformer import hidden_states
from sharding.errors import InputError
from sharding.mesh import MeshSpec
from tests.runtime.test_layer_copies import needs_gpu, run_on_gpu

KINDS = [
    AttentionMask("bidirectional"),
    AttentionMask("causal"),
    AttentionMask("block_causal", 1),
    AttentionMask("block_causal", 5),
    AttentionMask("block_causal", 8),
]
MESHES = ("data=1", "sequence=4", "data=2,sequence=2,tensor=4")
# The default run covers every kind and every mesh; the slow tests cover every combination.
QUICK_GRID = {(0, 1), (1, 0), (2, 0), (3, 1), (4, 2)}
GRID = [
    pytest.param(mask, mesh, marks=() if (kind, place) in QUICK_GRID else pytest.mark.slow)
    for kind, mask in enumerate(KINDS)
    for place, mesh in enumerate(MESHES)
]
B, S = 4, 24
LENGTHS = np.array([24, 13, 1, 8], np.int32)
WINDOW = 8


def config(mask: AttentionMask, **sizes: int) -> ModelConfig:
    raw = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "mask_token_id": 95,
        "model_type": "Dream",
    }
    family = replace(DREAM, attention=mask.kind)
    return replace(parse_config(raw | sizes), family=family, attention_block_length=mask.block_length)


def layout_of(mask: AttentionMask, mesh: str = "data=1") -> ModelLayout:
    spec = MeshSpec.parse(mesh)
    return model_layout(config(mask), spec, jax.devices()[: spec.size])


def sees(mask: AttentionMask, query: int, key: int) -> bool:
    """Evaluate the definition of the mask for one pair."""
    if mask.kind == "bidirectional":
        return True
    if mask.kind == "causal":
        return key <= query
    return key // mask.block_length <= query // mask.block_length


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray, mask: AttentionMask) -> np.ndarray:
    """Reference attention in float64, one query at a time."""
    out = np.zeros(q.shape)
    for b, s, head, group in np.ndindex(q.shape[:4]):
        keys = [t for t in range(lengths[b]) if sees(mask, s, t)]
        scores = k[b, keys, head].astype(np.float64) @ q[b, s, head, group] / np.sqrt(q.shape[-1])
        shares = np.exp(scores - scores.max())
        out[b, s, head, group] = shares @ v[b, keys, head] / shares.sum()
    return out


def random_heads(rows: int, positions: int, head_dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0).standard_normal
    shape = (rows, positions, 4, 2, head_dim)
    q, k, v = draw(shape), draw((*shape[:3], head_dim)), draw((*shape[:3], head_dim))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize(
    ("rows", "heads", "queries", "keys", "block"),
    [
        (1, 4, 4096, 4096, None),  # 256 MiB of scores
        (1, 4, 4096, 4097, 256),
        (16, 4, 1024, 1024, None),
        (16, 4, 1025, 1024, 205),  # five nearly equal blocks, not four and one of a single query
        (64, 28, 256, 256, 256),  # all queries are one block
        (512, 28, 16, 2048, 16),
        (1, 28, 32768, 32768, 256),
    ],
)
def test_scores_of_up_to_256_megabytes_are_computed_at_once(
    platform: str, rows: int, heads: int, queries: int, keys: int, block: int | None
) -> None:
    assert (4 * rows * heads * queries * keys <= 256 << 20) == (block is None)
    # The blocks of a row and KV head run one after the other, here with 7 query heads per KV head.
    assert xla_attention.query_block(platform, rows, heads, 7, queries, keys) == block
    assert block is None or 4 * 7 * block * keys <= 256 << 20


@pytest.mark.parametrize(
    ("per_kv", "canvas", "block"), [(4, 256, None), (4, 512, 256), (4, 2048, 128), (7, 2048, 71), (7, 65536, 16)]
)
def test_scores_of_a_block_on_cpu_fit_into_its_caches(per_kv: int, canvas: int, block: int | None) -> None:
    assert xla_attention.query_block("cpu", 1, 2 * per_kv, per_kv, canvas, canvas) == block
    assert block in (None, 16) or 4 * per_kv * block * canvas <= 4 << 20


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("mask", KINDS, ids=str)
def test_xla_is_the_reference(mask: AttentionMask, mesh: str) -> None:
    layout = layout_of(mask, mesh)
    q, k, v = random_heads(B, S, 4)
    placed = [
        jax.device_put(q, layout.sharding("batch", "canvas", "kv_heads", "queries_per_kv", "head_dim")),
        *(jax.device_put(one, layout.sharding("batch", None, "kv_heads", "head_dim")) for one in (k, v)),
        jax.device_put(LENGTHS, layout.sharding("batch")),
    ]
    found = jax.jit(dot_product_attention, static_argnums=(0, 1))("xla", layout, *placed)
    np.testing.assert_allclose(found, reference(q, k, v, LENGTHS, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("mask", "mesh"), GRID, ids=str)
def test_blocks_of_queries_are_all_at_once(mask: AttentionMask, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that do not divide a shard's queries, over whole rows, equal the reference and the unblocked form."""
    layout = layout_of(mask, mesh)
    q, k, v = random_heads(B, S, 4)
    placed = [
        jax.device_put(q, layout.sharding("batch", "canvas", "kv_heads", "queries_per_kv", "head_dim")),
        *(jax.device_put(one, layout.sharding("batch", None, "kv_heads", "head_dim")) for one in (k, v)),
        jax.device_put(LENGTHS, layout.sharding("batch")),
    ]
    programs = []
    for limit in (xla_attention.SCORES_AT_ONCE["cpu"], 0):
        monkeypatch.setitem(xla_attention.SCORES_AT_ONCE, "cpu", limit)
        monkeypatch.setattr(xla_attention, "BLOCK", 5)
        run = jax.jit(lambda *arrays: dot_product_attention("xla", layout, *arrays))
        programs.append(run.lower(*placed).compile())
    whole, blocks = programs
    assert " while(" not in whole.as_text()
    assert " while(" in blocks.as_text()
    for kind in ("all-reduce", "all-to-all", "all-gather", "collective-permute"):
        assert kind not in blocks.as_text()
    np.testing.assert_allclose(blocks(*placed), whole(*placed), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(blocks(*placed), reference(q, k, v, LENGTHS, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("mask", "mesh"), GRID, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_blocks_of_a_window_are_all_at_once(
    mask: AttentionMask, mesh: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks with a cache that is sharded over a sequence axis, where each shard averages over its own keys."""
    layout = layout_of(mask, mesh)
    draw = np.random.default_rng(0).standard_normal
    cache = jax.tree.map(
        lambda leaf: jax.device_put((3 * draw(leaf.shape)).astype(leaf.dtype), leaf.sharding),
        abstract_cache(layout, B, S, dtype),
    )
    starts, lengths = np.array([3, 0, 0, 5], np.int32), np.array([24, 13, 1, 8], np.int32)
    sharding = layout.sharding("batch", None, "kv_heads", "queries_per_kv", "head_dim")
    q = jax.device_put(draw((B, WINDOW, 4, 2, 4)).astype(np.float32), sharding)
    found = []
    for limit in (xla_attention.SCORES_AT_ONCE["cpu"], 0):
        monkeypatch.setitem(xla_attention.SCORES_AT_ONCE, "cpu", limit)
        monkeypatch.setattr(xla_attention, "BLOCK", 3)
        run = jax.jit(lambda *arrays: attend(layout, cache[1], 0, *arrays))
        found.append(np.asarray(run(q, *(jax.device_put(one, layout.sharding("batch")) for one in (starts, lengths)))))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_memory_of_blocks_is_linear_in_the_canvas() -> None:
    layout = layout_of(KINDS[0])

    def temporaries(canvas: int) -> int:
        q, k, v = (jax.ShapeDtypeStruct((2, canvas, 4, *size), jnp.float32) for size in ((2, 4), (4,), (4,)))
        run = jax.jit(lambda *arrays: dot_product_attention("xla", layout, *arrays))
        memory = run.lower(q, k, v, jax.ShapeDtypeStruct((2,), jnp.int32)).compile().memory_analysis()
        return int(memory.temp_size_in_bytes)

    short, long = temporaries(1024), temporaries(4096)
    assert short < 4 * 2 * 8 * 1024 * 1024  # less than the scores
    assert long < 4.2 * short


@pytest.mark.parametrize("mask", KINDS, ids=str)
def test_cudnn_is_asked_for_the_reference(mask: AttentionMask, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments passed to cuDNN, computed by JAX's own implementation of the same call, give the reference."""
    call = jax.nn.dot_product_attention

    def by_xla(*arrays: jax.Array, implementation: str, **arguments: Any) -> jax.Array:
        assert implementation == "cudnn"
        return call(*arrays, **arguments, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    q, k, v = random_heads(B, S, 4)
    found = dot_product_attention("cudnn", layout_of(mask), *map(jnp.asarray, (q, k, v, LENGTHS)))
    np.testing.assert_allclose(found, reference(q, k, v, LENGTHS, mask), rtol=1e-5, atol=1e-5)


@needs_gpu
def test_cudnn_is_xla_on_a_gpu() -> None:
    run_on_gpu("tests.runtime.models.gpu_attention")


@pytest.mark.parametrize(("mask", "mesh"), GRID, ids=str)
def test_windows_against_a_cache_are_whole_rows(mask: AttentionMask, mesh: str) -> None:
    """Every window of a row, recomputed with the row's cache, gives the same result as the whole row."""
    layout = layout_of(mask, mesh)
    forward, weights = Forward(layout), random_weights(layout, 0, "float32", scale=0.3)
    rows = layout.sharding("batch")
    tokens = np.random.default_rng(1).integers(0, 90, (B, S)).astype(np.int32)
    lengths = jax.device_put(LENGTHS, rows)
    whole = jax.jit(hidden_states, static_argnums=0)(forward, weights, tokens, lengths)
    empty = jax.tree.map(
        lambda leaf: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        abstract_cache(layout, B, S, "float32"),
    )
    first = jax.device_put(np.zeros(layout.spec.data, np.int32), rows)
    filled, cache = jax.jit(fill_rows, static_argnums=0)(forward, weights, empty, tokens, lengths, first)
    np.testing.assert_allclose(filled, whole, atol=1e-5)
    window = jax.jit(run_window, static_argnums=0)
    for start in (0, 3, S - WINDOW):
        starts = np.clip(np.array([start, start + 1, 0, start // 2]), 0, S - WINDOW).astype(np.int32)
        own = np.stack([row[at : at + WINDOW] for row, at in zip(tokens, starts, strict=True)])
        found, _ = window(forward, weights, cache, own, jax.device_put(starts, rows), lengths)
        for row, at in enumerate(starts):
            real = max(0, min(WINDOW, LENGTHS[row] - at))
            np.testing.assert_allclose(found[row, :real], whole[row, at : at + real], atol=2e-5)


@pytest.mark.parametrize("mask", KINDS, ids=str)
def test_a_last_layer_for_a_few_positions(mask: AttentionMask) -> None:
    """Of rows that fill a cache, some outputs can be left out: the others, and the cache, stay as they are."""
    layout = layout_of(mask)
    forward, weights = Forward(layout), random_weights(layout, 0, "float32", scale=0.3)
    tokens = np.random.default_rng(1).integers(0, 90, (B, S)).astype(np.int32)
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_cache(layout, B, S, "float32"))
    common = (weights, empty, tokens, jnp.asarray(LENGTHS), jnp.zeros(1, jnp.int32))
    whole, expected = jax.jit(fill_rows, static_argnums=0)(forward, *common)
    starts = np.array([0, 3, S - WINDOW, S - 2], np.int32)

    @jax.jit
    def fill_few(*arguments: Any) -> Any:
        return fill_rows(forward, *arguments, outputs=(jnp.asarray(starts), WINDOW))

    few, cache = fill_few(*common)
    assert few.shape == (B, WINDOW, whole.shape[-1])
    jax.tree.map(lambda own, other: np.testing.assert_allclose(own, other, atol=1e-6), cache, expected)
    for row, at in enumerate(starts):
        real = max(0, min(WINDOW, LENGTHS[row] - at))
        np.testing.assert_allclose(few[row, :real], whole[row, at : at + real], atol=2e-5)


@pytest.mark.parametrize("mask", [KINDS[1], KINDS[3]], ids=str)
def test_what_is_hidden_changes_nothing(mask: AttentionMask) -> None:
    layout = layout_of(mask)
    forward, weights = Forward(layout), random_weights(layout, 0, "float32", scale=0.3)
    tokens = np.random.default_rng(1).integers(0, 90, (1, S)).astype(np.int32)
    other = tokens.copy()
    other[0, 10] += 1
    run = jax.jit(hidden_states, static_argnums=0)
    lengths = np.array([S], np.int32)
    changed = np.abs(run(forward, weights, tokens, lengths) - run(forward, weights, other, lengths)).max(-1)[0] > 0
    np.testing.assert_array_equal(changed, [sees(mask, query, 10) for query in range(S)])


@pytest.mark.parametrize("mask", KINDS, ids=str)
def test_kernels_run_where_their_masks_are_right(mask: AttentionMask) -> None:
    """Kernels are rejected for sharded queries, because their masks count from the first query of the shard."""
    spec = MeshSpec(sequence=2)
    sharded = model_layout(config(mask, head_dim=128), spec)
    whole = model_layout(config(mask, head_dim=128))
    kernel = "splash" if mask.kind == "bidirectional" else "xla"
    assert choose_attention("auto", "tpu", sharded, 512, "bfloat16") == kernel
    assert choose_attention("auto", "tpu", whole, 512, "bfloat16") == "splash"
    assert choose_attention("auto", "tpu", whole, 512, "float16") == "xla"
    with pytest.raises(InputError, match="requires a TPU, bfloat16 or float32"):
        choose_attention("splash", "tpu", whole, 512, "float16")
    assert choose_attention("auto", "gpu", whole, 512, "bfloat16") == "cudnn"
    if mask.depends_on_position:
        with pytest.raises(InputError, match="causal and block-causal models also require sequence=1"):
            choose_attention("cudnn", "gpu", sharded, 512, "bfloat16")


@pytest.mark.parametrize(
    ("capability", "head_dim", "kernel"),
    [
        ("7.5", 128, "xla"),
        ("8.0", 128, "cudnn"),
        ("8.9", 128, "cudnn"),
        ("8.9", 256, "xla"),
        ("9.0", 256, "cudnn"),
        ("12.0", 128, "cudnn"),
        ("gfx942", 128, "xla"),
        ("9.0", 100, "xla"),
    ],
)
def test_gpus_that_cudnn_does_not_support_use_xla(capability: str, head_dim: int, kernel: str) -> None:
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    layout = model_layout(config(AttentionMask("bidirectional"), head_dim=head_dim))
    on_gpu = replace(layout, mesh=cast(Mesh, SimpleNamespace(devices=np.array([device]))))
    assert choose_attention("auto", "gpu", on_gpu, 512, "bfloat16") == kernel
    if kernel == "xla":
        with pytest.raises(InputError, match=r"requires an NVIDIA GPU of compute capability 8\.0 or newer"):
            choose_attention("cudnn", "gpu", on_gpu, 512, "bfloat16")


def test_a_block_needs_a_length() -> None:
    with pytest.raises(ValueError, match="block length"):
        AttentionMask("block_causal")
