"""Choosing tokens: confidences, ties, reductions over a sharded vocabulary, and ranking in the model's dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from runtime.decoding.sampling import gumbel_noise, log_probabilities
from runtime.decoding.vocabulary import vocab_argmax, vocab_sum
from tests.runtime.decoding.token_choices import (
    MASK,
    MESHES,
    PADDED,
    VOCAB,
    B,
    P,
    choose,
    choose_program,
    forward,
    padded,
    rule,
    softmax,
    sorted_filter,
    vocab_sharded,
)


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
    """Confidences equal a float64 reference that applies temperature, filters and renormalisation first."""
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
    """One-hot positions have entropy exactly 0, so they tie; n equal tokens have the negative entropy -log(n)."""
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
    """Ties between tokens of one shard, of neighbouring shards, of distant shards, and of all tokens."""
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
    """Temperature 0 leaves the distribution unscaled; it is not the limit of small temperatures."""
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


# ---- independence of the mesh -----------------------------------------------------------------------------------

EVERY_MESH = ("tensor=1", "tensor=2", "tensor=4", "tensor=8", "tensor=16", "sequence=4", "data=2,sequence=2,tensor=4")


def hard_to_add(vocab: int) -> np.ndarray:
    """Numbers from 0 to 1 of very different sizes, for which every order of float addition rounds differently."""
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
    # The test data detects the order of addition: a plain float sum in reverse order differs.
    shuffled = values[..., ::-1].sum(axis=-1, dtype=np.float32)
    assert (shuffled != values.sum(axis=-1, dtype=np.float32)).any()


@pytest.mark.parametrize("confidence", ["maskgit_plus", "topk_margin", "entropy"])
def test_choices_are_the_same_to_the_bit_on_every_mesh(confidence: str) -> None:
    """From the same logits, every mesh samples bit-identical tokens and confidences, even with a probability near 1."""
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


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("confidence", ["entropy", "low_confidence", "topk_margin"])
def test_single_positions_are_chosen_as_among_others(mesh: str, confidence: str) -> None:
    """A position alone, without its axis inside, has the token and the confidence that it has among others."""
    generator = np.random.default_rng(5)
    logits = padded(generator.normal(0, 3, (B, P, VOCAB)))
    words = generator.integers(0, 1 << 32, (B, P, 2), dtype=np.uint32)
    settings = [
        generator.choice([0.0, 0.5, 1.5], (B, P)).astype(np.float32),
        generator.uniform(0.3, 1, (B, P)).astype(np.float32),
        generator.integers(1, VOCAB, (B, P), dtype=np.int32),
    ]
    program = choose_program(mesh, rule(confidence, sampled=True, filtered=True))
    tokens, confidences = program(vocab_sharded(mesh, logits), words, *settings)
    for place in range(P):
        one = slice(place, place + 1)
        alone = program(vocab_sharded(mesh, logits[:, one]), words[:, one], *(value[:, one] for value in settings))
        np.testing.assert_array_equal(np.asarray(alone[0]), np.asarray(tokens[:, one]))
        np.testing.assert_array_equal(np.asarray(alone[1]), np.asarray(confidences[:, one]))


def test_noise_does_not_depend_on_padding() -> None:
    """A token's noise depends only on the key and the token id, not on the size of the vocabulary."""
    keys = jax.random.split(jax.random.key(9), (B, P))
    short = np.asarray(jax.jit(gumbel_noise, static_argnums=1)(keys, VOCAB))
    assert short.shape == (B, P, VOCAB)
    for vocab in (PADDED, 512, 1000):
        longer = np.asarray(jax.jit(gumbel_noise, static_argnums=1)(keys, vocab))
        np.testing.assert_array_equal(longer[..., :VOCAB], short)
    one = np.asarray(gumbel_noise(keys[1:, 3:4], VOCAB))
    np.testing.assert_array_equal(one[0, 0], short[1, 3])
    assert len(np.unique(short)) > 0.99 * short.size


def test_maximum_and_its_lowest_index() -> None:
    values = np.array([[1.0, 3.0, 3.0, -np.inf], [-np.inf] * 4, [0.0, -0.0, 0.0, -1.0]], np.float32)
    best, index = vocab_argmax(jnp.asarray(values))
    np.testing.assert_array_equal(best, [3.0, -np.inf, 0.0])
    np.testing.assert_array_equal(index, [1, 0, 0])


# ---- ranking in the model's dtype -------------------------------------------------------------------------------


def is_bfloat16(values: np.ndarray) -> np.ndarray:
    return values == values.astype(ml_dtypes.bfloat16).astype(np.float32)


def torch_confidence(logits: np.ndarray, confidence: str) -> np.ndarray:
    """Confidence computed with the original code's bfloat16 arithmetic."""
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
    """Confidences are the bfloat16 numbers that torch computes, and tie far more often than in float32."""
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
    # Sums of terms rounded in another order may differ in the last bit of a bfloat16, which is a relative 2^-8.
    np.testing.assert_allclose(rounded, expected, rtol=2**-7, atol=1e-30)
    assert (rounded == expected).mean() > 0.95


@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_that_tie_in_the_models_dtype(mesh: str) -> None:
    """10 and 10.01 are equal in bfloat16, where the lower id wins; in float32 the larger logit wins."""
    logits = np.zeros((B, P, VOCAB))
    logits[..., 9], logits[..., 250] = 10.0, 10.01
    sampling = {dtype: rule("topk_margin", confidence_dtype=dtype) for dtype in ("bfloat16", "float32")}
    tokens, margin = choose(mesh, sampling["bfloat16"], padded(logits))
    assert (tokens == 9).all()
    assert (margin == 0).all()
    tokens, margin = choose(mesh, sampling["float32"], padded(logits))
    assert (tokens == 250).all()
    assert (margin > 0).all()
