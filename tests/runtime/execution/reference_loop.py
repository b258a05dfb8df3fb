"""An independent implementation of the denoise loop in NumPy, one row at a time.

It uses only the logits and the random bits of the real implementation. If two runs differ, the margin between their
choices is computed in float64 and printed; a margin larger than rounding in the logits is a failure.

Dimension letters: S canvas, V vocab.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import numpy as np
import torch

from runtime import DiffusionConfig, Engine
from runtime.decoding import sampling
from runtime.execution.rows import seed_words
from tests.divergence import ROUNDING
from tests.runtime.execution.ragged import LENGTHS, MASK, NEW_TOKENS


@functools.cache
def bits_program(draw: Any, stream: int, shape: tuple[int, ...]) -> Any:
    def bits(words: jax.Array, step: jax.Array) -> jax.Array:
        positions = np.arange(max(LENGTHS) + NEW_TOKENS, dtype=np.int32)[None]
        return jax.vmap(lambda key: draw(key, shape, np.float32))(
            sampling.position_keys(words, step, stream, positions)[0]
        )

    return jax.jit(bits)


def random_bits(draw: Any, seed: int, step: int, stream: int, positions: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the random numbers of one row and step, float32 ``[positions, *shape]``."""
    return np.asarray(bits_program(draw, stream, shape)(seed_words([seed]), np.int32(step)))[:positions]


@functools.lru_cache(maxsize=16)
def row_logits(engine: Engine, canvas: tuple[int, ...]) -> np.ndarray:
    """Return the model's logits float64 ``[S, V]`` of one row, run in a shape that is already compiled.

    They are kept, because steps that commit nothing compute the same canvas again.
    """
    positions = max(*LENGTHS, len(canvas))
    rows, mask = np.zeros((4, positions), np.int64), np.zeros((4, positions), np.int64)
    rows[0, positions - len(canvas) :] = canvas
    mask[0, positions - len(canvas) :] = 1
    mask[1:, -1] = 1
    return engine.logits(rows, mask)[0, positions - len(canvas) :].astype(np.float64)


def model_logits(engine: Engine, canvas: np.ndarray) -> np.ndarray:
    """Return shifted logits float64 ``[S, V]`` of one row, in an array of their own."""
    logits = row_logits(engine, tuple(canvas.tolist()))
    return np.concatenate([logits[:1], logits[:-1]])


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def filtered(logits: np.ndarray, config: DiffusionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return filtered logits ``[S, V]``, and the margin ``[S]`` by which each position keeps exactly these tokens."""
    if config.temperature:
        logits = logits / config.temperature
    gap = np.full(len(logits), np.inf)
    out = logits.copy()
    if config.top_p is not None and config.top_p < 1:
        for place, row in enumerate(logits):
            order = np.argsort(-row, kind="stable")
            before = np.concatenate([[0.0], np.cumsum(softmax(row)[order])[:-1]])  # mass of the tokens above
            out[place, order[before > config.top_p]] = -np.inf
            gap[place] = np.abs(before - config.top_p).min()
    if config.top_k is not None and config.top_k < logits.shape[1]:
        ranked = -np.sort(-out, axis=-1)
        last, next_one = ranked[:, config.top_k - 1], ranked[:, config.top_k]
        out = np.where(out >= last[:, None], out, -np.inf)
        gap = np.where(np.isfinite(next_one), np.minimum(gap, last - np.where(np.isfinite(next_one), next_one, 0)), gap)
    return out, gap


def confidences(probabilities: np.ndarray, tokens: np.ndarray, algorithm: str) -> np.ndarray:
    ranked = -np.sort(-probabilities, axis=-1)
    return {
        "origin": np.zeros(len(tokens)),
        "maskgit_plus": probabilities[np.arange(len(tokens)), tokens],
        "topk_margin": ranked[:, 0] - ranked[:, 1],
        "entropy": (probabilities * np.log(probabilities + 1e-10)).sum(axis=-1),
    }[algorithm]


class Step:
    """One denoise step of one row, with the quantities that its choices depend on."""

    def __init__(self, engine: Engine, before: np.ndarray, config: DiffusionConfig, seed: int, step: int) -> None:
        masked = np.flatnonzero(before == MASK)
        times = torch.linspace(1, config.eps, config.steps + 1)
        ratio = 1 - times[step + 1] / times[step]
        last = step == config.steps - 1
        self.before, self.config = before, config
        self.count = len(masked) if last else int(torch.tensor(float(len(masked))) * ratio)
        logits = model_logits(engine, before)
        if config.suppress_mask:
            logits[:, MASK] = -np.inf
        self.scores, self.filter_gap = filtered(logits, config)
        probabilities = softmax(self.scores)
        if config.temperature:
            self.scores = self.scores + random_bits(jax.random.gumbel, seed, step, 0, len(before), (logits.shape[1],))
        self.tokens = self.scores.argmax(axis=-1)
        self.confidence = confidences(probabilities, self.tokens, config.algorithm)
        if config.algorithm == "origin":
            uniform = random_bits(jax.random.uniform, seed, step, 1, len(before), ())
            chosen = masked if last else masked[uniform[masked] < ratio.item()]
        else:
            if config.alg_temp:
                self.confidence = self.confidence / config.alg_temp
                self.confidence = self.confidence + random_bits(jax.random.gumbel, seed, step, 1, len(before), ())
            # Ties go to the lower position.
            chosen = masked[np.argsort(-self.confidence[masked].astype(np.float32), kind="stable")[: self.count]]
        self.chosen = chosen
        self.after = before.copy()
        self.after[chosen] = self.tokens[chosen]

    def margin(self, one: np.ndarray, other: np.ndarray) -> float:
        """The smallest change of logits, probabilities or confidences for which two outcomes become equal."""
        scale = self.config.temperature or 1.0
        places = np.flatnonzero(one != other)
        margins = [self.filter_gap[place] for place in places]
        confidence_scale = self.config.alg_temp or 1.0
        for place in places:
            pair = self.scores[place, [one[place], other[place]]]
            if np.isfinite(pair).all():
                margins.append(abs(pair[0] - pair[1]) * scale)
        added = [place for place in places if one[place] != MASK and other[place] == MASK]
        removed = [place for place in places if one[place] == MASK and other[place] != MASK]
        if len(added) == len(removed) > 0 and self.config.algorithm != "origin":
            return max(np.ptp(self.confidence[[*added, *removed]]) * confidence_scale, 0.0)
        return float(min(margins))


def assert_same_tokens(
    found: np.ndarray, expected: np.ndarray, start: np.ndarray, engine: Engine, config: DiffusionConfig, seed: int
) -> None:
    """Assert that two histories ``[steps, S]`` of a row are equal, except for ties within rounding."""
    assert found.shape == expected.shape
    if np.array_equal(found, expected):
        return
    step = next(step for step in range(len(expected)) if not np.array_equal(found[step], expected[step]))
    before = expected[step - 1] if step else start
    places = np.flatnonzero(found[step] != expected[step]).tolist()
    margin = Step(engine, before, config, seed, step).margin(found[step], expected[step])
    message = f"step {step}, positions {places}: margin {margin:.3g}"
    print(message)
    assert margin < ROUNDING, message


def check_against_the_algorithm(
    engine: Engine, history: np.ndarray, start: np.ndarray, config: DiffusionConfig, seed: int
) -> int:
    """Check every step of one row, starting each from the run's own canvas; return the number of ties."""
    ties = 0
    for step, (before, after) in enumerate(itertools.pairwise([start, *history])):
        expected = Step(engine, before, config, seed, step)
        if not np.array_equal(after, expected.after):
            places = np.flatnonzero(after != expected.after).tolist()
            margin = expected.margin(after, expected.after)
            message = f"step {step}, positions {places}: margin {margin:.3g}, {config}"
            print(message)
            assert margin < ROUNDING, message
            ties += 1
    return ties
