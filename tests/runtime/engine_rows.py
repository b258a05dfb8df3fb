"""Shared fixtures: three ragged rows of the golden model, the requests of the engine tests, and their results."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from runtime import DiffusionConfig
from tests import golden_cases

# Logits differ between meshes and buckets by the rounding of float32 sums, relative to the largest logit.
LOGITS_ROUNDING = 1e-5 * 12

MASK = 300
VOCAB = 320
NEW_TOKENS = 12
LENGTHS = (20, 9, 1)
WIDTH = max(LENGTHS)
SEEDS = (3, 4, 5)

GREEDY = DiffusionConfig(max_new_tokens=NEW_TOKENS, steps=7, algorithm="entropy", seed=SEEDS)
SAMPLED = GREEDY.replace(algorithm="maskgit_plus", temperature=0.8, top_p=0.9, top_k=30, alg_temp=0.3)
ORIGIN = GREEDY.replace(algorithm="origin", temperature=0.8)
CONFIGS = {"greedy": GREEDY, "sampled": SAMPLED, "origin": ORIGIN}


@functools.cache
def rows() -> tuple[np.ndarray, np.ndarray]:
    """Three left-padded rows with a mask in the first."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, MASK, (len(LENGTHS), WIDTH))
    ids[0, 4] = MASK
    return ids, (np.arange(WIDTH) >= WIDTH - np.array(LENGTHS)[:, None]).astype(int)


@functools.cache
def plain(name: str) -> Any:
    return golden_cases.engine().generate_tokens(*rows(), CONFIGS[name], history=True)


def shifted(logits: np.ndarray) -> np.ndarray:
    return np.concatenate([logits[:, :1], logits[:, :-1]], axis=1)
