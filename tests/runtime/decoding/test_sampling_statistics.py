"""Statistics of sampling: the noise is Gumbel-distributed, and draws follow the filtered distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from runtime.decoding.sampling import (
    TOKEN_STREAM,
    gumbel_noise,
    position_keys,
)
from runtime.execution.rows import row_seeds, seed_words
from tests.runtime.decoding.token_choices import (
    PADDED,
    SIGNIFICANCE,
    chi_square,
    choose_program,
    rule,
    softmax,
    sorted_filter,
    vocab_sharded,
)


def test_noise_is_gumbel() -> None:
    keys = jax.random.split(jax.random.key(10), 200)
    noise = np.asarray(jax.jit(gumbel_noise, static_argnums=1)(keys, PADDED)).astype(np.float64)
    assert np.isfinite(noise).all()
    assert stats.kstest(noise.ravel(), "gumbel_r").pvalue > SIGNIFICANCE
    # The noise of neighbouring tokens and of neighbouring keys is uncorrelated.
    for one, other in [(noise[:, :-1], noise[:, 1:]), (noise[:-1], noise[1:])]:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(one.size)


def key_data(seeds: np.ndarray, step: int, positions: np.ndarray) -> np.ndarray:
    """Key data of the keys with which a generation draws tokens: uint32 ``[B, P, 2]``."""
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
    """Draw ``count`` tokens from one distribution. The keys differ only in position, step or seed, as ``over`` says."""
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
