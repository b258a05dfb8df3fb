"""Block decoding with the parallel rules, written a second time in NumPy, one row and one forward pass at a time.

Only the forward passes are those of the library. Tokens are the most probable ones, so rows draw no random bits.

Dimension letters: P masked positions of a block, S canvas, V vocab.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from runtime import DiffusionConfig, Engine
from runtime.execution.cache_programs import lower_empty_cache
from runtime.models.cached import fill_rows, run_window
from runtime.models.transformer import hidden_states, project_logits


def certainties(probabilities: np.ndarray, algorithm: str) -> np.ndarray:
    """Return the certainty of each position in the terms of an algorithm: ``[P, V]`` -> ``[P]``."""
    ranked = -np.sort(-probabilities, axis=-1)
    if algorithm == "entropy":
        return np.exp(-entropies(probabilities))
    return ranked[:, 0] - ranked[:, 1] if algorithm == "topk_margin" else ranked[:, 0]


def entropies(probabilities: np.ndarray) -> np.ndarray:
    """Return entropies in nats: ``[P, V]`` -> ``[P]``."""
    return -(probabilities * np.log(np.maximum(probabilities, 1e-300))).sum(axis=-1)


def frechet_count(certainty: np.ndarray, factor: float) -> int:
    """The largest n with max(0, sum of the n largest - (n - 1)) - (1 - the n-th) > 1 - factor; 0 if there is none."""
    best, count = -np.sort(-certainty), 0
    for n in range(1, len(best) + 1):
        if max(0.0, best[:n].sum() - (n - 1)) - (1 - best[n - 1]) > 1 - factor:
            count = n
    return count


def entropy_count(entropy: np.ndarray, bound: float) -> int:
    """The largest k at which the k smallest entropies without the largest of them sum to at most the bound."""
    ascending, count = np.sort(entropy), 0
    for k in range(1, len(ascending) + 1):
        if ascending[:k].sum() - ascending[:k].max() <= bound:
            count = k
    return count


def accepted(config: DiffusionConfig, probabilities: np.ndarray, share: float, first_step: bool) -> np.ndarray:
    """Return which masked positions of a block a step commits, bool ``[P]``.

    Args:
      config: the rule and its numbers.
      probabilities: float64 ``[P, V]``, at the block's masks.
      share: masks of the block, divided by its positions.
      first_step: the block's first step.
    """
    places = np.arange(len(probabilities))
    if config.parallel == "entropy_bound":
        entropy = entropies(probabilities)
        return np.isin(places, np.argsort(entropy, kind="stable")[: entropy_count(entropy, config.entropy_bound)])
    certainty = certainties(probabilities, config.algorithm)
    order = np.argsort(-certainty, kind="stable")
    if config.parallel == "threshold":
        enough = certainty > config.threshold * (1 - config.threshold_decay * (1 - share))
    elif config.parallel == "frechet":
        enough = np.isin(places, order[: frechet_count(certainty, config.factor)])
    else:
        assert config.parallel == "factor"
        enough = np.isin(places, order[: (certainty[order] >= 1 - config.factor / (places + 2)).sum()])
    enough[0 if first_step else order[0]] = True
    return np.asarray(enough)


class Decoded(NamedTuple):
    """The tokens of a row ``[S]``, and the forward passes and positions that they cost."""

    tokens: np.ndarray
    forwards: int
    positions: int


class Passes:
    """The forward passes of one row of a golden model, and its cache."""

    def __init__(self, engine: Engine, length: int) -> None:
        self.width = engine.runner.bucket(length)
        self.lengths, self.weights = jnp.array([length], jnp.int32), engine.weights
        self.programs = _programs(engine, self.width)
        self.cache = lower_empty_cache(engine.layout, 1, self.width, jnp.float32).compile()()

    def whole(self, canvas: np.ndarray, keep: bool) -> np.ndarray:
        """Run the whole canvas ``[S]``, and with ``keep`` write the cache. Return probabilities ``[S, V]``."""
        if not keep:
            return _softmax(self.programs["plain"](self.weights, jnp.array(canvas[None]), self.lengths))
        logits, self.cache = self.programs["fill"](self.weights, self.cache, jnp.array(canvas[None]), self.lengths)
        return _softmax(logits)

    def window(self, canvas: np.ndarray, start: int, stop: int, width: int) -> np.ndarray:
        """Run positions ``start`` to ``stop`` with the cache, in a window of ``width``. Return probabilities."""
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : stop - start] = canvas[start:stop]
        where = (jnp.array([start], jnp.int32), self.lengths, jnp.array([stop], jnp.int32))
        logits, self.cache = self.programs["window"](self.weights, self.cache, jnp.array(tokens), *where)
        return _softmax(logits)[: stop - start]


@functools.cache
def _programs(engine: Engine, width: int) -> dict[str, Callable[..., Any]]:
    forward = engine.runner.forward(width)

    def plain(weights: Any, canvas: jax.Array, lengths: jax.Array) -> jax.Array:
        return project_logits(forward, weights, hidden_states(forward, weights, canvas, lengths))

    def fill(weights: Any, cache: Any, canvas: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Any]:
        hidden, cache = fill_rows(forward, weights, cache, canvas, lengths, jnp.zeros(1, jnp.int32))
        return project_logits(forward, weights, hidden), cache

    def window(weights: Any, cache: Any, tokens: jax.Array, *where: jax.Array) -> tuple[jax.Array, Any]:
        starts, lengths, stops = where
        hidden, cache = run_window(forward, weights, cache, tokens, starts, lengths, stops)
        return project_logits(forward.window, weights, hidden), cache

    return {"plain": jax.jit(plain), "fill": jax.jit(fill), "window": jax.jit(window)}


def _softmax(logits: Any) -> np.ndarray:
    values = np.asarray(logits, np.float64)[0]
    weights = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def decode(engine: Engine, prompt: np.ndarray, config: DiffusionConfig) -> Decoded:
    """Complete a prompt ``[S]`` at temperature 0 in blocks, with any cache that is refreshed on entering a block."""
    mask, length = engine.config.mask_token_id, len(prompt) + config.max_new_tokens
    block = config.block_length or length
    passes = Passes(engine, length)
    canvas = np.zeros(passes.width, np.int32)
    canvas[:length] = [*prompt, *[mask] * config.max_new_tokens]
    forwards = positions = 0
    for start in range(len(prompt), length, block):
        end, first_step = min(start + block, length), True
        while (masked := canvas[start:end] == mask).any():
            if config.cache == "none" or first_step:
                probabilities = passes.whole(canvas, config.cache != "none")[start - 1 : end - 1]
                positions += length
            else:
                stop, width = (end, block) if config.cache == "dual" else (length, config.max_new_tokens)
                probabilities = passes.window(canvas, start - 1, stop, width + 1)[: end - start]
            chosen = np.flatnonzero(masked)
            chosen = chosen[accepted(config, probabilities[masked], masked.mean(), first_step)]
            canvas[start + chosen] = probabilities[chosen].argmax(axis=-1)
            forwards, first_step = forwards + 1, False
    return Decoded(canvas[:length], forwards, positions)
