"""Helpers to choose tokens from given logits on any mesh, and float64 references for the result.

Dimension letters: B batch, P positions, V vocab.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from runtime.decoding.sampling import (
    SamplingRule,
    choose_tokens,
)
from runtime.models.config import ModelConfig
from runtime.models.dream import DREAM
from runtime.models.families import model_layout
from runtime.models.forward import Forward
from sharding.mesh import MeshSpec

VOCAB = 300
PADDED = 384
B, P = 2, 8
MESHES = ("data=1", "tensor=8")
MASK = 7

# Masses are summed in fixed point, so a token whose mass is this close to top_p may be kept or dropped.
BOUNDARY = 1e-6
# Reject below this p-value. Over some forty such tests, the probability of a false alarm is 1 in 250.
SIGNIFICANCE = 1e-4


@functools.cache
def forward(mesh: str, vocab: int = VOCAB) -> Forward:
    config = ModelConfig(
        family=DREAM,
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=512,
        rope_theta=10000.0,
        norm_eps=1e-6,
        tied_embeddings=False,
        dtype="float32",
        mask_token_id=MASK,
        pad_token_id=0,
        end_token_ids=(),
    )
    return Forward(model_layout(config, MeshSpec.parse(mesh), jax.devices()))


def on_mesh(mesh: str, array: np.ndarray, *dimensions: str | None) -> jax.Array:
    return jax.device_put(array, forward(mesh).layout.sharding(*dimensions))


def vocab_sharded(mesh: str, logits: np.ndarray) -> jax.Array:
    return on_mesh(mesh, logits, "batch", "canvas", "vocab")


def padded(logits: np.ndarray, vocab: int = PADDED) -> np.ndarray:
    """Logits ``[..., V]`` in float32, padded like the output of the head."""
    width = [(0, 0)] * (logits.ndim - 1) + [(0, vocab - logits.shape[-1])]
    return np.pad(logits.astype(np.float32), width, constant_values=-np.inf)


def softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def sorted_filter(logits: np.ndarray, top_p: float, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens ``[..., V]`` that a float64 sort keeps, and those that are too close to ``top_p`` to decide."""
    kept, unsure = np.zeros(logits.shape, bool), np.zeros(logits.shape, bool)
    for place in np.ndindex(logits.shape[:-1]):
        row = logits[place].astype(np.float64)
        order = np.argsort(-row, kind="stable")
        ranked, probabilities = row[order], softmax(row)[order]
        before = np.concatenate([[0.0], np.cumsum(probabilities)])[:-1]
        # Equal logits are kept or dropped together, so each uses the mass above the first of them.
        before = before[np.searchsorted(-ranked, -ranked, side="left")]
        by_mass = np.ones(len(row), bool) if top_p >= 1 else before <= top_p
        kth = ranked[min(top_k, len(row)) - 1]
        kept[place][order] = by_mass & (ranked >= kth)
        unsure[place][order] = (top_p < 1) & (np.abs(before - top_p) <= BOUNDARY) & (before > 0)
    return kept, unsure


def halving_filter(logits: jax.Array, probabilities: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """Top-p and top-k by bisection of the float32 range, 32 passes with one candidate each."""
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0.0, 0.0, logits), jnp.int32)
    keys = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    masses = jnp.round(probabilities * 2.0**30).astype(jnp.int32)
    allowed = jnp.where(top_p >= 1.0, 2**31 - 1, jnp.round(top_p * 2.0**30)).astype(jnp.int32)
    high = keys.max(axis=-1)
    low = jnp.full_like(high, -(2**31))
    for _ in range(32):
        middle = (low & high) + ((low ^ high) >> 1)
        above = keys > middle[..., None]
        enough = (jnp.where(above, masses, 0).sum(axis=-1) <= allowed) & (above.sum(axis=-1) < top_k)
        low, high = jnp.where(enough, low, middle), jnp.where(enough, middle, high)
    return jnp.where(keys >= high[..., None], logits, -jnp.inf)


def rule(confidence: str = "entropy", **changes: Any) -> SamplingRule:
    plain = {"sampled": False, "filtered": False, "suppress_mask": False, "confidence_dtype": "float32"}
    return SamplingRule(**({"confidence": confidence} | plain | changes))


@functools.cache
def choose_program(mesh: str, sampling: SamplingRule) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def run(
        logits: jax.Array, words: jax.Array, temperature: jax.Array, top_p: jax.Array, top_k: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.wrap_key_data(words)
        return choose_tokens(forward(mesh), sampling, logits, keys, temperature, top_p, top_k)

    return jax.jit(run, out_shardings=forward(mesh).layout.replicated)


def choose(
    mesh: str,
    sampling: SamplingRule,
    logits: np.ndarray,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = PADDED,
) -> tuple[np.ndarray, np.ndarray]:
    words = np.random.default_rng(seed).integers(0, 1 << 32, (*logits.shape[:-1], 2), dtype=np.uint32)
    found = choose_program(mesh, sampling)(
        vocab_sharded(mesh, logits), words, np.float32(temperature), np.float32(top_p), np.int32(top_k)
    )
    return np.asarray(found[0]), np.asarray(found[1])


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """P-value of counts under given probabilities. Outcomes of probability 0 must not occur."""
    possible = probabilities > 0
    assert not counts[~possible].any(), "drawn although it cannot be"
    counts, expected = counts[possible], probabilities[possible] / probabilities.sum() * counts.sum()
    # Rare outcomes are merged into one.
    order = np.argsort(expected)
    together = max(1, int((np.cumsum(expected[order]) < 10).sum() + 1))
    counts, expected = (
        np.append(values[order[together:]], values[order[:together]].sum()) for values in (counts, expected)
    )
    assert len(counts) > 1
    return float(stats.chisquare(counts, expected).pvalue)
