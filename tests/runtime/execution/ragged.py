"""Shared fixtures: four ragged rows of the golden model, the requests that run them, and their results."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from runtime import DiffusionConfig, GenerationResult
from runtime.models.dream import DREAM
from tests import golden_cases

MASK = 300
NEW_TOKENS = 16
SEEDS = (11, 2**63 - 1, 13, 0)
# With its new tokens, the third row fills a bucket exactly, so it has no filler in a batch of one.
LENGTHS = (1, 7, 48, 100)

MODES: dict[str, dict[str, Any]] = {
    **{f"{algorithm}-greedy": {"algorithm": algorithm} for algorithm in DREAM.algorithms},
    **{
        f"{algorithm}-sampled": {"algorithm": algorithm, "temperature": 0.7, "top_p": 0.9, "top_k": 40}
        for algorithm in DREAM.algorithms
    },
    "entropy-positions": {"algorithm": "entropy", "temperature": 0.7, "alg_temp": 0.5},
}


def request(mode: str, **changes: Any) -> DiffusionConfig:
    return DiffusionConfig(**({"max_new_tokens": NEW_TOKENS, "steps": 11, "seed": SEEDS} | MODES[mode] | changes))


@functools.cache
def ragged_rows() -> tuple[np.ndarray, np.ndarray]:
    """Four left-padded rows: a single mask, one that starts with a mask, one without masks, and a long one.

    At the start, the first row consists only of masks, so its confidences are equal up to rounding. The padding has
    arbitrary values, including mask tokens and ids outside the vocabulary.
    """
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, MASK, length) for length in LENGTHS]
    rows[0][0] = MASK
    rows[1][[0, 3]] = MASK
    rows[3][[20, 21, 50, 98, 99]] = MASK
    width = max(LENGTHS)
    ids = np.where(generator.random((len(rows), width)) < 0.3, MASK, generator.integers(-5, 999, (len(rows), width)))
    mask = np.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = tokens
        mask[row, width - len(tokens) :] = 1
    return ids, mask


@functools.cache
def run(mesh: str, mode: str) -> GenerationResult:
    """Run all four rows at once on a mesh in a mode."""
    return golden_cases.engine(mesh).generate_tokens(*ragged_rows(), request(mode), history=True)


def alone(row: int) -> np.ndarray:
    """Return one row without its padding: ``[1, length]``."""
    return ragged_rows()[0][row : row + 1, max(LENGTHS) - LENGTHS[row] :]


def real(values: np.ndarray, row: int) -> np.ndarray:
    """Return one of the four rows without its left padding: ``[..., 4, S + N]`` -> ``[..., length + N]``."""
    return values[..., row, max(LENGTHS) - LENGTHS[row] :]


def start_canvas(row: int, new_tokens: int = NEW_TOKENS) -> np.ndarray:
    return np.concatenate([alone(row)[0], np.full(new_tokens, MASK)])
