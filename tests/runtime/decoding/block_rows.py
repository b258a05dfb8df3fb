"""Shared fixtures: ragged rows of the golden model, modes of block diffusion, and the results of every mode."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from runtime import DiffusionConfig, GenerationResult
from tests import golden_cases

MESHES = ("tensor=8", "sequence=4", "data=2", "data=2,sequence=2,tensor=2")
LENGTHS = (11, 4, 1, 7)
NEW_TOKENS, BLOCK = 22, 6
BASE = DiffusionConfig(max_new_tokens=NEW_TOKENS, steps=NEW_TOKENS, algorithm="entropy", temperature=0.7, seed=5)


@functools.cache
def ragged_rows() -> tuple[np.ndarray, np.ndarray]:
    config = golden_cases.engine("tensor=1").config
    generator = np.random.default_rng(11)
    ids = generator.integers(0, config.vocab_size, (len(LENGTHS), max(LENGTHS))).astype(np.int32)
    ids[ids == config.mask_token_id] = 0
    ids[0, -3] = ids[3, -2] = config.mask_token_id  # to be filled too
    mask = (np.arange(max(LENGTHS)) >= max(LENGTHS) - np.array(LENGTHS)[:, None]).astype(np.int32)
    return ids * mask, mask


def generate(mesh: str, config: DiffusionConfig, rows: slice = slice(None), history: bool = False) -> GenerationResult:
    ids, mask = ragged_rows()
    return golden_cases.engine(mesh).generate_tokens(ids[rows], mask[rows], config, history=history)


def generate_samples(mesh: str, config: DiffusionConfig, samples: int) -> GenerationResult:
    ids, mask = ragged_rows()
    return golden_cases.engine(mesh).generate_tokens(ids, mask, config, num_return_sequences=samples)


def same(found: GenerationResult, expected: GenerationResult) -> None:
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    np.testing.assert_array_equal(found.commit_steps, expected.commit_steps)


STOPS = tuple(range(0, 320, 5))  # so many that rows end early
MODES: list[dict[str, Any]] = [
    {"cache": "none"},
    {"cache": "dual", "algorithm": "origin", "refresh_interval": 3},
    {
        **{"cache": "dual", "parallel": "threshold", "threshold": 0.2, "algorithm": "maskgit_plus"},
        **{"refresh_blocks": 2, "stop_token_ids": STOPS},
    },
    {"cache": "prefix", "parallel": "factor", "factor": 1.5, "temperature": 0.0},
    {"cache": "prefix", "alg_temp": 0.4, "top_p": 0.9, "steps": 40},
    {"cache": "none", "parallel": "threshold", "threshold": 0.1, "algorithm": "topk_margin", "refresh_interval": None},
    {"cache": "prefix", "refresh_blocks": 0, "refresh_interval": 9},
    {"cache": "dual", "parallel": "factor", "factor": 1.5, "algorithm": "topk_margin"},
    {"cache": "prefix", "parallel": "threshold", "threshold": 0.3, "stop_token_ids": STOPS},
    {"cache": "none", "parallel": "frechet", "factor": 1.7, "algorithm": "maskgit_plus"},
    {"cache": "dual", "parallel": "entropy_bound", "entropy_bound": 3.0, "refresh_interval": 3},
    {
        **{"cache": "prefix", "parallel": "threshold", "threshold": 0.5, "threshold_decay": 0.8},
        **{"algorithm": "maskgit_plus", "stop_token_ids": STOPS},
    },
    {
        **{"cache": "dual", "parallel": "threshold", "threshold": 0.3, "algorithm": "maskgit_plus"},
        **{"block_rule": "fast_dllm", "stop_token_ids": STOPS},
    },
    {"cache": "prefix", "block_rule": "fast_dllm", "steps": 16},
]


def mode(number: int) -> DiffusionConfig:
    return BASE.replace(block_length=BLOCK, log_probabilities=True, **MODES[number])


@functools.cache
def on_one_device(number: int) -> GenerationResult:
    return generate("tensor=1", mode(number))
