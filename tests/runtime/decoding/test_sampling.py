"""Choosing tokens: filters, confidences, ties and statistics, on one device and on a sharded vocabulary.

Dimension letters: B batch, P positions, V vocab.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from runtime.decoding import diffusion
from runtime.decoding.diffusion import Choices, DenoiseProgram, DenoiseState, Request
from runtime.decoding.sampling import (
    TOKEN_STREAM,
    SamplingRule,
    choose_tokens,
    filter_logits,
    gumbel_noise,
    log_probabilities,
    position_keys,
    vocab_argmax,
    vocab_sum,
)
from runtime.execution.rows import row_seeds, seed_words
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

# Sums against top_p are made of integers; a token whose mass above is this near to top_p may go either way.
BOUNDARY = 1e-6
# Below this a fixed seed is called a bad draw. With some forty such tests a false alarm is a matter of 1 in 250.
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
    """Logits ``[..., V]`` in float32 with the padding that the head gives them."""
    width = [(0, 0)] * (logits.ndim - 1) + [(0, vocab - logits.shape[-1])]
    return np.pad(logits.astype(np.float32), width, constant_values=-np.inf)


def softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


# ---- top-p and top-k --------------------------------------------------------------------------------------------


@functools.cache
def filter_program(mesh: str) -> Callable[..., jax.Array]:
    def run(logits: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
        return filter_logits(logits, jax.nn.softmax(logits, axis=-1), top_p, top_k)

    return jax.jit(run, out_shardings=forward(mesh).layout.replicated)


def run_filter(mesh: str, logits: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    return np.asarray(filter_program(mesh)(vocab_sharded(mesh, logits), np.float32(top_p), np.int32(top_k)))


def sorted_filter(logits: np.ndarray, top_p: float, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens are kept ``[..., V]``, by sorting in float64, and which are too near to ``top_p`` to say."""
    kept, unsure = np.zeros(logits.shape, bool), np.zeros(logits.shape, bool)
    for place in np.ndindex(logits.shape[:-1]):
        row = logits[place].astype(np.float64)
        order = np.argsort(-row, kind="stable")
        ranked, probabilities = row[order], softmax(row)[order]
        before = np.concatenate([[0.0], np.cumsum(probabilities)])[:-1]
        # Equal logits stand or fall together: the mass above each is the mass above the first of them.
        before = before[np.searchsorted(-ranked, -ranked, side="left")]
        by_mass = np.ones(len(row), bool) if top_p >= 1 else before <= top_p
        kth = ranked[min(top_k, len(row)) - 1]
        kept[place][order] = by_mass & (ranked >= kth)
        unsure[place][order] = (top_p < 1) & (np.abs(before - top_p) <= BOUNDARY) & (before > 0)
    return kept, unsure


def draw_logits(seed: int, kind: str) -> np.ndarray:
    generator = np.random.default_rng(seed)
    shape = (B, P, VOCAB)
    if kind == "normal":
        values = generator.normal(0, generator.choice([0.1, 1.0, 5.0, 30.0]), shape)
    elif kind == "tied":
        values = generator.integers(-3, 4, shape) / generator.choice([1, 2, 8])
    elif kind == "bfloat16":
        values = generator.normal(0, 4, shape).astype(ml_dtypes.bfloat16).astype(np.float32)
    elif kind == "equal":
        values = np.full(shape, generator.normal())
    elif kind == "zeros":
        values = np.where(generator.random(shape) < 0.5, 0.0, -0.0)
    else:  # saturated: one or few far above
        values = generator.normal(0, 1, shape)
        values[..., generator.integers(0, VOCAB, 3)] += generator.choice([20, 100, 1e4])
    values[..., generator.random(VOCAB) < generator.choice([0.0, 0.5])] = -np.inf
    values[..., 5] = 0.0  # never nothing
    return padded(values)


KINDS = ("normal", "tied", "bfloat16", "equal", "zeros", "saturated")


@pytest.mark.parametrize("mesh", MESHES)
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 32),
    kind=st.sampled_from(KINDS),
    top_p=st.one_of(st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0]), st.floats(0, 1, width=32)),
    top_k=st.one_of(st.sampled_from([1, 2, 50, VOCAB - 1, VOCAB, PADDED, 1 << 30]), st.integers(1, VOCAB)),
)
def test_filters_equal_sorting(mesh: str, seed: int, kind: str, top_p: float, top_k: int) -> None:
    logits = draw_logits(seed, kind)
    found = run_filter(mesh, logits, top_p, top_k)
    kept, unsure = sorted_filter(logits, top_p, top_k)
    expected = np.where(kept, logits, -np.inf)
    np.testing.assert_array_equal(np.where(unsure, 0, found), np.where(unsure, 0, expected))
    # A token that may go either way is whole or gone, and the most probable token always stays.
    assert ((found == logits) | (found == -np.inf)).all()
    assert (found.max(axis=-1) == logits.max(axis=-1)).all()


@pytest.mark.parametrize("mesh", MESHES)
def test_the_token_that_crosses_top_p_stays(mesh: str) -> None:
    probabilities = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
    logits = padded(np.broadcast_to(np.log(probabilities), (B, P, 5)))
    for top_p, kept in [
        (0.0, 1),
        (0.39, 1),
        (0.41, 2),
        (0.69, 2),
        (0.71, 3),
        (0.89, 3),
        (0.91, 4),
        (0.97, 5),
        (1.0, 5),
    ]:
        assert np.isfinite(run_filter(mesh, logits, top_p, PADDED)[0, 0]).sum() == kept, top_p


@pytest.mark.parametrize("mesh", MESHES)
def test_ties_at_the_kth_logit_all_stay(mesh: str) -> None:
    row = np.full(VOCAB, -1.0)
    row[[3, 40, 41, 170, 299]] = [5.0, 2.0, 2.0, 2.0, 1.0]
    logits = padded(np.broadcast_to(row, (B, P, VOCAB)))
    for top_k, kept in [(1, 1), (2, 4), (3, 4), (4, 4), (5, 5), (6, VOCAB), (VOCAB, VOCAB), (1 << 30, VOCAB)]:
        assert np.isfinite(run_filter(mesh, logits, 1.0, top_k)[0, 0]).sum() == kept, top_k


@pytest.mark.parametrize("mesh", MESHES)
def test_the_two_zeros_are_one_logit(mesh: str) -> None:
    logits = np.full((B, P, VOCAB), -3.0)
    logits[..., [4, 200]], logits[..., [3, 5, 150]] = 0.0, -0.0
    for top_p, top_k in [(1.0, 1), (0.1, PADDED)]:
        assert np.isfinite(run_filter(mesh, padded(logits), top_p, top_k)[0, 0]).sum() == 5


def test_top_p_runs_before_top_k() -> None:
    """Top-p reads the mass of the whole distribution, not of the k that top-k leaves."""
    logits = padded(np.broadcast_to(np.log([0.4, 0.3, 0.2, 0.1]), (B, P, 4)))
    # Of the two largest alone the first would have 4/7 of the mass, above .5, and the second would go.
    assert np.isfinite(run_filter("data=1", logits, 0.5, 2)[0, 0]).sum() == 2
    assert np.isfinite(run_filter("data=1", logits, 0.75, 2)[0, 0]).sum() == 2
    assert np.isfinite(run_filter("data=1", logits, 0.3, 2)[0, 0]).sum() == 1


def test_a_vocabulary_of_the_real_size() -> None:
    """152064 tokens: the rounding of so many small masses stays within bounds."""
    vocab = 152064
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 2.5, (1, 2, vocab)).astype(np.float32)
    for top_p in (0.5, 0.95, 0.999):
        found = np.isfinite(np.asarray(filter_program("data=1")(logits, np.float32(top_p), np.int32(vocab))))
        for place in range(2):
            probabilities = -np.sort(-softmax(logits[0, place]))
            count = found[0, place].sum()
            mass = probabilities[: count - 1].sum()  # above the last one kept
            assert mass <= top_p + 2e-5
            assert mass + probabilities[count - 1] >= top_p - 2e-5


# ---- choosing and confidence ------------------------------------------------------------------------------------


def rule(confidence: str = "entropy", **changes: Any) -> SamplingRule:
    plain = {"sampled": False, "filtered": False, "suppress_mask": False, "confidence_dtype": "float32"}
    return SamplingRule(**({"confidence": confidence} | plain | changes))


@functools.cache
def choose_program(mesh: str, sampling: SamplingRule) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def run(
        logits: jax.Array, words: jax.Array, temperature: jax.Array, top_p: jax.Array, top_k: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.wrap_key_data(words)
        return choose_tokens(forward(mesh).config, sampling, logits, keys, temperature, top_p, top_k)

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


def reference_confidence(probabilities: np.ndarray, tokens: np.ndarray, confidence: str) -> np.ndarray:
    ranked = -np.sort(-probabilities, axis=-1)
    return {
        "maskgit_plus": np.take_along_axis(probabilities, tokens[..., None], axis=-1)[..., 0],
        "topk_margin": ranked[..., 0] - ranked[..., 1],
        "entropy": (probabilities * np.log(probabilities + 1e-10)).sum(axis=-1),
    }[confidence]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("confidence", ["maskgit_plus", "topk_margin", "entropy"])
def test_confidences_are_those_of_the_filtered_distribution(mesh: str, sampled: bool, confidence: str) -> None:
    """Against float64: tempered, filtered, renormalised, then measured."""
    sampling = rule(confidence, sampled=sampled, filtered=True)
    generator = np.random.default_rng(1)
    for scale, temperature, top_p, top_k in [
        (0.5, 0.7, 0.9, 40),
        (4.0, 0.1, 0.99, PADDED),
        (3.0, 2.0, 1.0, 2),
        (3.0, 1.0, 0.3, 50),
    ]:
        logits = padded(generator.normal(0, scale, (B, P, VOCAB)))
        tokens, found = choose(mesh, sampling, logits, seed=2, temperature=temperature, top_p=top_p, top_k=top_k)
        tempered = logits.astype(np.float64) / (temperature if sampled else 1.0)
        kept, unsure = sorted_filter(tempered, top_p, top_k)
        sure = ~unsure.any(axis=-1)
        assert sure.sum() > B * P / 2
        probabilities = softmax(np.where(kept, tempered, -np.inf))
        expected = reference_confidence(probabilities, tokens, confidence)
        np.testing.assert_allclose(found[sure], expected[sure], rtol=2e-5, atol=2e-6)
        assert np.take_along_axis(kept, tokens[..., None], axis=-1)[sure].all()
        if not sampled:
            np.testing.assert_array_equal(tokens, logits.argmax(axis=-1))


def test_entropy_of_one_token_is_exactly_nothing() -> None:
    """So that one-hot positions tie, and of a uniform distribution it is minus the logarithm of their number."""
    logits = padded(np.random.default_rng(0).normal(0, 3, (B, P, VOCAB)))
    _, found = choose("data=1", rule("entropy", filtered=True), logits, top_k=1)
    assert (found == 0).all()
    _, found = choose("data=1", rule("entropy", filtered=True), padded(np.zeros((B, P, VOCAB))))
    np.testing.assert_allclose(found, -np.log(VOCAB), rtol=1e-6)
    for confidence in ("maskgit_plus", "topk_margin"):
        _, found = choose("data=1", rule(confidence, filtered=True), logits, top_k=1)
        assert (found == 1).all()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("confidence", ["origin", "maskgit_plus", "topk_margin", "entropy"])
def test_greedy_ties_go_to_the_lowest_token(mesh: str, confidence: str) -> None:
    """Tied tokens in one shard, in neighbouring and in distant ones; also where all are equal."""
    generator = np.random.default_rng(3)
    logits = generator.normal(0, 1, (B, P, VOCAB))
    lowest = np.empty((B, P), int)
    ties = [(0, 299), (47, 48), (96, 97, 98), (200, 210), (10, 150, 290), (143, 144), (298, 299), tuple(range(VOCAB))]
    for place in np.ndindex(B, P):
        tied = ties[place[1]]
        logits[place][list(tied)] = 6.0
        lowest[place] = min(tied)
    tokens, found = choose(mesh, rule(confidence), padded(logits))
    np.testing.assert_array_equal(tokens, lowest)
    if confidence == "topk_margin":
        assert (found == 0).all(), "two equal tokens leave no margin"


@pytest.mark.parametrize("mesh", MESHES)
def test_suppressed_masks(mesh: str) -> None:
    logits = np.random.default_rng(4).normal(0, 1, (B, P, VOCAB))
    logits[..., MASK] = 9.0
    plain, _ = choose(mesh, rule("maskgit_plus"), padded(logits))
    assert (plain == MASK).all()
    tokens, found = choose(mesh, rule("maskgit_plus", suppress_mask=True), padded(logits))
    without = logits.copy()
    without[..., MASK] = -np.inf
    np.testing.assert_array_equal(tokens, without.argmax(axis=-1))
    np.testing.assert_allclose(found, softmax(without).max(axis=-1), rtol=1e-5)
    for seed in range(20):
        drawn, _ = choose(mesh, rule("maskgit_plus", suppress_mask=True, sampled=True), padded(logits), seed=seed)
        assert MASK not in drawn


def test_a_temperature_orders_and_zero_does_not_scale() -> None:
    """Temperature 0 is the unscaled distribution, not the limit of small temperatures."""
    logits = padded(np.random.default_rng(5).normal(0, 2, (B, P, VOCAB)))
    _, unscaled = choose("data=1", rule("maskgit_plus"), logits, temperature=0.1)
    np.testing.assert_allclose(unscaled, softmax(logits).max(axis=-1), rtol=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_log_probabilities(mesh: str) -> None:
    generator = np.random.default_rng(6)
    logits = padded(generator.normal(0, 6, (B, P, VOCAB)))
    targets = generator.integers(0, VOCAB, (B, P))
    found = jax.jit(log_probabilities)(vocab_sharded(mesh, logits), targets)
    expected = np.take_along_axis(np.log(softmax(logits[..., :VOCAB])), targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-5)


# ---- the mesh changes nothing -----------------------------------------------------------------------------------

EVERY_MESH = ("tensor=1", "tensor=2", "tensor=4", "tensor=8", "tensor=16", "sequence=4", "data=2,sequence=2,tensor=4")


def hard_to_add(vocab: int) -> np.ndarray:
    """Numbers from 0 to 1 of all sizes: any other order of adding them as floats rounds otherwise."""
    generator = np.random.default_rng(7)
    return np.exp(-np.abs(generator.normal(0, 6, (B, P, vocab)))).astype(np.float32)


@pytest.mark.parametrize("vocab", [PADDED, 512, 1280, 152064])
def test_vocab_sum_is_the_same_to_the_bit_on_every_mesh(vocab: int) -> None:
    values = hard_to_add(vocab)
    found = {}
    for mesh in EVERY_MESH:
        program = jax.jit(vocab_sum, out_shardings=forward(mesh).layout.replicated)
        found[mesh] = np.asarray(program(vocab_sharded(mesh, values)))
    for mesh, sums in found.items():
        np.testing.assert_array_equal(sums.view(np.int32), found["tensor=1"].view(np.int32), err_msg=mesh)
    wide = values.astype(np.float64)
    np.testing.assert_allclose(
        found["tensor=1"], wide.sum(axis=-1), rtol=0, atol=1e-5 * np.abs(wide).sum(axis=-1).max()
    )
    # The numbers tell orders apart: a plain sum from the other end is another number.
    shuffled = values[..., ::-1].sum(axis=-1, dtype=np.float32)
    assert (shuffled != values.sum(axis=-1, dtype=np.float32)).any()


@pytest.mark.parametrize("confidence", ["maskgit_plus", "topk_margin", "entropy"])
def test_choices_are_the_same_to_the_bit_on_every_mesh(confidence: str) -> None:
    """From the same logits: tokens drawn, and confidences, saturated ones too."""
    generator = np.random.default_rng(8)
    logits = generator.normal(0, 6, (B, P, VOCAB))
    logits[..., ::2, 11] += 40
    sampling = rule(confidence, sampled=True, filtered=True)
    found = {
        mesh: choose(mesh, sampling, padded(logits), temperature=0.7, top_p=0.95, top_k=40)
        for mesh in ("tensor=1", "tensor=2", "tensor=8", "tensor=16", "sequence=4")
    }
    for mesh, (tokens, confidences) in found.items():
        np.testing.assert_array_equal(tokens, found["tensor=1"][0], err_msg=mesh)
        np.testing.assert_array_equal(confidences, found["tensor=1"][1], err_msg=mesh)


def test_noise_does_not_depend_on_padding() -> None:
    """A token's noise belongs to its key and its number: more tokens behind it change nothing."""
    keys = jax.random.split(jax.random.key(9), (B, P))
    short = np.asarray(jax.jit(gumbel_noise, static_argnums=1)(keys, VOCAB))
    assert short.shape == (B, P, VOCAB)
    for vocab in (PADDED, 512, 1000):
        longer = np.asarray(jax.jit(gumbel_noise, static_argnums=1)(keys, vocab))
        np.testing.assert_array_equal(longer[..., :VOCAB], short)
    one = np.asarray(gumbel_noise(keys[1:, 3:4], VOCAB))
    np.testing.assert_array_equal(one[0, 0], short[1, 3])
    assert len(np.unique(short)) > 0.99 * short.size


def test_noise_is_gumbel() -> None:
    keys = jax.random.split(jax.random.key(10), 200)
    noise = np.asarray(jax.jit(gumbel_noise, static_argnums=1)(keys, PADDED)).astype(np.float64)
    assert np.isfinite(noise).all()
    assert stats.kstest(noise.ravel(), "gumbel_r").pvalue > SIGNIFICANCE
    # Neither neighbouring tokens nor neighbouring keys know of one another.
    for one, other in [(noise[:, :-1], noise[:, 1:]), (noise[:-1], noise[1:])]:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(one.size)


def test_maximum_and_its_lowest_index() -> None:
    values = np.array([[1.0, 3.0, 3.0, -np.inf], [-np.inf] * 4, [0.0, -0.0, 0.0, -1.0]], np.float32)
    best, index = vocab_argmax(jnp.asarray(values))
    np.testing.assert_array_equal(best, [3.0, -np.inf, 0.0])
    np.testing.assert_array_equal(index, [1, 0, 0])


# ---- statistics -------------------------------------------------------------------------------------------------


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """P value of counts under probabilities; outcomes of probability 0 must not occur."""
    possible = probabilities > 0
    assert not counts[~possible].any(), "drawn although it cannot be"
    counts, expected = counts[possible], probabilities[possible] / probabilities.sum() * counts.sum()
    # Rare outcomes count as one.
    order = np.argsort(expected)
    together = max(1, int((np.cumsum(expected[order]) < 10).sum() + 1))
    counts, expected = (
        np.append(values[order[together:]], values[order[:together]].sum()) for values in (counts, expected)
    )
    assert len(counts) > 1
    return float(stats.chisquare(counts, expected).pvalue)


def key_data(seeds: np.ndarray, step: int, positions: np.ndarray) -> np.ndarray:
    """Key data of the very keys that a generation draws tokens with: uint32 ``[B, P, 2]``."""
    keys = position_keys(seeds, jnp.int32(step), TOKEN_STREAM, positions)
    return np.asarray(jax.random.key_data(keys))


LOGITS = np.array([2.0, 1.2, 1.2, 0.7, 0.1, -0.4, -0.9, -1.5])
DRAWS = {
    "plain": (1.0, 1.0, PADDED),
    "tempered": (0.6, 1.0, PADDED),
    "hot": (1.7, 1.0, PADDED),
    "top_p": (1.0, 0.8, PADDED),
    "top_k": (1.0, 1.0, 2),  # three tokens: the second and the third tie
    "all": (0.8, 0.9, 5),
}


def draw_tokens(mesh: str, over: str, temperature: float, top_p: float, top_k: int, count: int) -> np.ndarray:
    """``count`` draws from one distribution whose keys differ only in position, only in step, or only in seed."""
    if over == "positions":
        words = key_data(seed_words([5]), 3, np.arange(count)[None])
    elif over == "steps":
        stream, place = TOKEN_STREAM, np.array([[4]])
        one = jax.vmap(lambda step: position_keys(seed_words([5]), step, stream, place))
        words = np.asarray(jax.random.key_data(one(jnp.arange(count)))).reshape(1, count, 2)
    else:
        seeds = seed_words(row_seeds(5, count))
        words = key_data(seeds, 3, np.full((count, 1), 4)).reshape(1, count, 2)
    scattered = np.full(128, -np.inf, np.float32)
    scattered[np.arange(8) * 16 + 3] = LOGITS  # one in each of 8 shards
    logits = np.broadcast_to(scattered, (1, count, 128))
    numbers = (np.float32(temperature), np.float32(top_p), np.int32(top_k))
    sampling = rule("maskgit_plus", sampled=True, filtered=True)
    tokens, _ = choose_program(mesh, sampling)(vocab_sharded(mesh, logits), words, *numbers)
    return (np.asarray(tokens)[0] - 3) // 16


@pytest.mark.parametrize(
    ("mesh", "over", "kind"),
    [
        *(("data=1", "positions", kind) for kind in DRAWS),
        ("data=1", "steps", "all"),
        ("data=1", "seeds", "all"),
        ("tensor=8", "positions", "all"),
    ],
)
def test_tokens_are_drawn_from_the_tempered_filtered_distribution(mesh: str, over: str, kind: str) -> None:
    temperature, top_p, top_k = DRAWS[kind]
    tokens = draw_tokens(mesh, over, temperature, top_p, top_k, 40_000)
    kept, unsure = sorted_filter(LOGITS / temperature, top_p, top_k)
    assert not unsure.any()
    assert (kind in ("plain", "tempered", "hot")) == kept.all()
    probabilities = softmax(np.where(kept, LOGITS / temperature, -np.inf))
    assert chi_square(np.bincount(tokens, minlength=8), probabilities) > SIGNIFICANCE
    # Draws with neighbouring keys are independent.
    pairs = np.bincount(8 * tokens[0::2] + tokens[1::2], minlength=64)
    assert chi_square(pairs, np.outer(probabilities, probabilities).ravel()) > SIGNIFICANCE


def test_the_chi_square_test_can_fail() -> None:
    tokens = draw_tokens("data=1", "positions", 1.0, 1.0, PADDED, 40_000)
    assert chi_square(np.bincount(tokens, minlength=8), softmax(LOGITS / 1.1)) < SIGNIFICANCE


def commit_once(
    confidences: np.ndarray, count: int, alg_temp: float, rows: int, *, seeds: list[int] | None = None, step: int = 2
) -> np.ndarray:
    """Which positions ``rows`` rows of equal confidences commit: bool ``[rows, S]``."""
    width = len(confidences)
    program = DenoiseProgram("entropy", rule("entropy"), sample_positions=True, chunk=width)
    canvas = np.full((rows, width), MASK, np.int32)
    words = seed_words(row_seeds(17, rows) if seeds is None else seeds)
    state = DenoiseState(
        canvas=canvas, commit_steps=np.full_like(canvas, -1), step=np.int32(step), forwards=np.int32(0)
    )
    request = Request(
        lengths=np.full(rows, width, np.int32),
        seeds=words,
        ratios=np.zeros(16, np.float32),
        steps=np.int32(16),
        limit=np.int32(16),
        temperature=np.float32(1),
        top_p=np.float32(1),
        top_k=np.int32(VOCAB),
        alg_temp=np.float32(alg_temp),
    )
    tokens = np.full_like(canvas, MASK + 1)
    after = jax.jit(functools.partial(diffusion.commit, forward("data=1"), program))(
        request,
        state,
        Choices(tokens, np.broadcast_to(confidences.astype(np.float32), canvas.shape)),
        np.ones_like(canvas, bool),
        np.full(rows, count, np.int32),
    )
    committed = np.asarray(after.canvas) != MASK
    np.testing.assert_array_equal(committed, np.asarray(after.commit_steps) == step)
    assert (committed.sum(axis=1) == count).all()
    return committed


CONFIDENCES = np.array([-0.2, -1.5, -0.9, -0.2, -2.5])


@pytest.mark.parametrize("alg_temp", [0.4, 1.0, 5.0])
def test_first_positions_are_drawn_by_confidence(alg_temp: float) -> None:
    """One position of a row: from softmax(confidence / alg_temp)."""
    committed = commit_once(CONFIDENCES, 1, alg_temp, 40_000)
    assert chi_square(committed.sum(axis=0), softmax(CONFIDENCES / alg_temp)) > SIGNIFICANCE


@pytest.mark.parametrize("alg_temp", [0.7, 2.0])
def test_several_positions_are_drawn_without_replacement(alg_temp: float) -> None:
    """Pairs: the second from what the first leaves, renormalised. And all of them when all are wanted."""
    probabilities = softmax(CONFIDENCES / alg_temp)
    pairs = {}
    for one in range(5):
        for other in range(one + 1, 5):
            first = probabilities[one] * probabilities[other] / (1 - probabilities[one])
            second = probabilities[other] * probabilities[one] / (1 - probabilities[other])
            pairs[one, other] = first + second
    committed = commit_once(CONFIDENCES, 2, alg_temp, 40_000)
    found = np.array([(committed[:, one] & committed[:, other]).sum() for one, other in pairs])
    assert chi_square(found, np.array(list(pairs.values()))) > SIGNIFICANCE
    assert commit_once(CONFIDENCES, 5, alg_temp, 8).all()


def test_positions_are_drawn_anew_in_every_step() -> None:
    first, second = (commit_once(CONFIDENCES, 1, 1.0, 40_000, step=step).argmax(axis=1) for step in (2, 3))
    probabilities = softmax(CONFIDENCES)
    counts = np.bincount(5 * first + second, minlength=25)
    assert chi_square(counts, np.outer(probabilities, probabilities).ravel()) > SIGNIFICANCE


@pytest.mark.parametrize("ratio", [0.03, 0.25, 0.5, 0.9])
def test_origin_transfers_each_position_with_the_stated_probability(ratio: float) -> None:
    """Independently: the number of positions of a row is binomial, and each position has the same share."""
    rows, width = 20_000, 6
    program = DenoiseProgram("origin", rule("origin"), sample_positions=False, chunk=width)
    canvas = np.full((rows, width + 2), MASK, np.int32)
    canvas[:, 1] = 3  # not masked
    ratios = np.zeros(16, np.float32)
    ratios[4] = ratio

    def plan(step: int) -> np.ndarray:
        request = Request(
            lengths=np.full(rows, width + 1, np.int32),
            seeds=seed_words(row_seeds(23, rows)),
            ratios=ratios,
            steps=np.int32(6),
            **dict.fromkeys(("limit", "temperature", "top_p", "top_k", "alg_temp"), np.int32(1)),
        )
        state = DenoiseState(canvas=canvas, commit_steps=canvas, step=np.int32(step), forwards=np.int32(0))
        wanted, counts = jax.jit(functools.partial(diffusion.transfer_plan, forward("data=1"), program))(request, state)
        np.testing.assert_array_equal(np.asarray(counts), np.asarray(wanted).sum(axis=1))
        return np.asarray(wanted)

    wanted = plan(4)
    assert not wanted[:, 1].any()
    assert not wanted[:, width + 1].any(), "filler after the row"
    masked = np.delete(wanted[:, : width + 1], 1, axis=1)
    for position in range(width):
        assert stats.binomtest(int(masked[:, position].sum()), rows, ratio).pvalue > SIGNIFICANCE
    expected = stats.binom.pmf(np.arange(width + 1), width, ratio)
    counts = np.bincount(masked.sum(axis=1), minlength=width + 1)
    assert chi_square(counts, expected) > SIGNIFICANCE
    if ratio == 0.5:
        last = plan(5)
        assert last[:, [0, *range(2, width + 1)]].all(), "the last step transfers everything"
        assert not plan(3).any(), "a ratio of 0 transfers nothing"


# ---- the model's own precision ----------------------------------------------------------------------------------


def is_bfloat16(values: np.ndarray) -> np.ndarray:
    return values == values.astype(ml_dtypes.bfloat16).astype(np.float32)


def torch_confidence(logits: np.ndarray, confidence: str) -> np.ndarray:
    """The original's arithmetic in bfloat16."""
    probabilities = torch.softmax(torch.from_numpy(logits).bfloat16(), dim=-1)
    if confidence == "maskgit_plus":
        found = probabilities.max(dim=-1).values
    elif confidence == "topk_margin":
        ranked = probabilities.sort(dim=-1, descending=True).values
        found = ranked[..., 0] - ranked[..., 1]
    else:
        found = (probabilities * torch.log(probabilities + 1e-10)).sum(dim=-1)
    return found.float().numpy()


@pytest.mark.parametrize("confidence", ["maskgit_plus", "topk_margin", "entropy"])
def test_ranking_in_the_models_dtype(confidence: str) -> None:
    """Confidences are numbers of bfloat16, the ones that torch gives, and tie far more often than in float32."""
    generator = np.random.default_rng(12)
    logits = generator.normal(0, 1, (B, 256, VOCAB))
    logits[..., 13] += generator.uniform(4, 14, (B, 256))
    rounded, exact = (
        choose("data=1", rule(confidence, confidence_dtype=dtype), padded(logits))[1]
        for dtype in ("bfloat16", "float32")
    )
    assert is_bfloat16(rounded).all()
    assert not is_bfloat16(exact).all()
    assert len(np.unique(rounded)) < 0.8 * len(np.unique(exact))
    expected = torch_confidence(logits.astype(np.float32), confidence)
    # The last bit of a bfloat16 is 2^-8 of it; sums of terms that were rounded in another order may differ by one.
    np.testing.assert_allclose(rounded, expected, rtol=2**-7, atol=1e-30)
    assert (rounded == expected).mean() > 0.95


@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_that_tie_in_the_models_dtype(mesh: str) -> None:
    """10 and 10.01 are one number in bfloat16: the lower token wins there, the larger logit in float32."""
    logits = np.zeros((B, P, VOCAB))
    logits[..., 9], logits[..., 250] = 10.0, 10.01
    sampling = {dtype: rule("topk_margin", confidence_dtype=dtype) for dtype in ("bfloat16", "float32")}
    tokens, margin = choose(mesh, sampling["bfloat16"], padded(logits))
    assert (tokens == 9).all()
    assert (margin == 0).all()
    tokens, margin = choose(mesh, sampling["float32"], padded(logits))
    assert (tokens == 250).all()
    assert (margin > 0).all()
