"""Top-p and top-k keep the same tokens as a filter that sorts in float64."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from runtime.decoding.sampling import filter_logits
from runtime.decoding.threshold_search import bits_per_pass, threshold_candidates, threshold_passes
from runtime.decoding.vocabulary import vocab_sum
from tests.runtime.decoding.token_choices import (
    MESHES,
    PADDED,
    VOCAB,
    B,
    P,
    forward,
    halving_filter,
    padded,
    softmax,
    sorted_filter,
    vocab_sharded,
)


@functools.cache
def filter_program(mesh: str) -> Callable[..., jax.Array]:
    def run(logits: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
        return filter_logits(logits, top_p, top_k)

    return jax.jit(run, out_shardings=forward(mesh).layout.replicated)


def run_filter(mesh: str, logits: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    return np.asarray(filter_program(mesh)(vocab_sharded(mesh, logits), np.float32(top_p), np.int32(top_k)))


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
    # A borderline token is either kept or removed, and the most probable token is always kept.
    assert ((found == logits) | (found == -np.inf)).all()
    assert (found.max(axis=-1) == logits.max(axis=-1)).all()


@functools.cache
def filters(mesh: str, dtype: str) -> Callable[..., list[jax.Array]]:
    """Filter with one, two and three bits per pass, and with three bits as on GPU."""

    def run(logits: jax.Array, top_p: jax.Array, top_k: jax.Array) -> list[jax.Array]:
        rounded = logits.astype(dtype).astype(jnp.float32)
        weights = jnp.exp(rounded - rounded.max(axis=-1, keepdims=True))
        probabilities = (weights / vocab_sum(weights)[..., None]).astype(dtype).astype(jnp.float32)
        exact = halving_filter(rounded, probabilities, top_p, top_k)
        forms = ((2, False), (3, False), (3, True))
        return [exact, *(filter_logits(rounded, top_p, top_k, dtype, bits, for_gpu) for bits, for_gpu in forms)]

    return jax.jit(run, out_shardings=forward(mesh).layout.replicated)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 32),
    kind=st.sampled_from(["normal", "tied", "bfloat16", "equal", "zeros", "saturated"]),
    top_p=st.one_of(st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0]), st.floats(0, 1, width=32)),
    top_k=st.one_of(st.sampled_from([1, 2, 50, VOCAB - 1, VOCAB, PADDED, 1 << 30]), st.integers(1, VOCAB)),
)
def test_filters_are_those_of_halving(mesh: str, dtype: str, seed: int, kind: str, top_p: float, top_k: int) -> None:
    """Searching two or three bits per pass, in a loop or as on GPU, finds the threshold of one bit per pass."""
    logits = vocab_sharded(mesh, draw_logits(seed, kind))
    expected, *found = filters(mesh, dtype)(logits, np.float32(top_p), np.int32(top_k))
    for one in found:
        np.testing.assert_array_equal(np.asarray(one), np.asarray(expected))


@pytest.mark.parametrize("device_kind", ["TPU v4", "TPU v5 lite", "TPU v5", "NVIDIA H100 80GB HBM3", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_vector_units_compare_less(device_kind: str, dtype: str) -> None:
    """At most 11 passes (6 for 16 bits), except on TPU v4, where more passes with fewer comparisons are faster."""
    bits = bits_per_pass(device_kind, 4)
    found = threshold_passes(dtype, bits), threshold_candidates(dtype, bits)
    wide = dtype == "float32"
    if device_kind == "TPU v4":
        assert found == ((16, 48) if wide else (8, 24))
    else:
        assert found == ((11, 77) if wide else (6, 42))


@pytest.mark.parametrize(("dtype", "passes"), [("float32", 11), ("bfloat16", 6), ("float16", 6)])
def test_passes_over_the_vocabulary(dtype: str, passes: int) -> None:
    """The program has one loop with the expected number of passes, and a single reduction over all candidates in it."""
    arguments = vocab_sharded("data=1", draw_logits(0, "normal")), np.float32(0.9), np.int32(50)

    def run(logits: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
        return filter_logits(logits, top_p, top_k, dtype)

    lowered = jax.jit(run).lower(*arguments)
    loops = re.findall(r"stablehlo\.while", lowered.as_text())
    text = lowered.compile().as_text()
    assert len(loops) == 1
    assert re.findall(r'known_trip_count":\{"n":"(\d+)"', text) == [str(passes)]
    # The loop body reads two arrays over the vocabulary, and writes none.
    body = re.search(r"body=%?([\w.]+)", text)
    assert body is not None
    lines = text[text.index(f"%{body[1]} (") :].split("\n}")[0].splitlines()
    written = [line for line in lines[1:] if re.search(rf"= \w+\[{B},{P},{PADDED}\]", line)]
    assert [line for line in written if "get-tuple-element" not in line] == []
    assert len(written) == 2


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
    """Top-p uses the mass of the whole distribution, not only of the k tokens that top-k keeps."""
    logits = padded(np.broadcast_to(np.log([0.4, 0.3, 0.2, 0.1]), (B, P, 4)))
    # If only the two largest were left, the first would have 4/7 of the mass, so top_p=0.5 would drop the second.
    assert np.isfinite(run_filter("data=1", logits, 0.5, 2)[0, 0]).sum() == 2
    assert np.isfinite(run_filter("data=1", logits, 0.75, 2)[0, 0]).sum() == 2
    assert np.isfinite(run_filter("data=1", logits, 0.3, 2)[0, 0]).sum() == 1


@pytest.mark.parametrize("mesh", MESHES)
def test_top_k_runs_before_top_p_where_the_original_does_that(mesh: str) -> None:
    """With both filters, the kept tokens are those of transformers; with one, those of a single search."""

    def run(logits: jax.Array, top_p: jax.Array, top_k: jax.Array) -> tuple[jax.Array, ...]:
        return filter_logits(logits, top_p, top_k, top_k_first_of=VOCAB), filter_logits(logits, top_p, top_k)

    program = jax.jit(run, out_shardings=forward(mesh).layout.replicated)
    generator, more = np.random.default_rng(3), 0
    for top_p, top_k in [(0.5, 2), (0.9, 40), (0.3, 7), (0.95, 3), (0.7, VOCAB), (1.0, 9), (1.0, VOCAB), (0.0, 5)]:
        own = generator.normal(0, generator.choice([0.3, 1.0, 3.0]), (B, P, VOCAB)).astype(np.float32)
        logits = padded(own)
        found, once = (
            np.asarray(one) for one in program(vocab_sharded(mesh, logits), np.float32(top_p), np.int32(top_k))
        )
        if top_k >= VOCAB or top_p >= 1:
            np.testing.assert_array_equal(found, once)
        expected = torch.tensor(own.reshape(-1, VOCAB))
        if top_k < VOCAB:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if 0 < top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        elif top_p == 0:
            expected = torch.where(expected == expected.max(dim=-1, keepdim=True).values, expected, -torch.inf)
        np.testing.assert_array_equal(found[..., :VOCAB].reshape(-1, VOCAB), expected.numpy())
        more += int(np.isfinite(once).sum() - np.isfinite(found).sum())
    assert more > 0, "the order matters"


def test_a_vocabulary_of_the_real_size() -> None:
    """With 152064 tokens, the rounding errors of the many small masses stay within bounds."""
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
