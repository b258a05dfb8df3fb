"""Drafts of held-out prompts, in one batch on several meshes, against runs without drafts on one device."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from checkpoints import DEMO
from runtime import DiffusionConfig, Engine, GenerationResult
from tests.compilation import optimized
from tests.divergence import assert_same_tokens
from tests.runtime.decoding.drafted_rows import HELD_OUT

NEW, DRAFTS = 32, 3
THRESHOLD = {"algorithm": "maskgit_plus", "parallel": "threshold", "threshold": 0.9, "block_length": 8}
MODES = {
    "greedy": DiffusionConfig(NEW, steps=NEW, algorithm="entropy", log_probabilities=True),
    "sampled": DiffusionConfig.published(NEW, temperature=0.2, seed=1, log_probabilities=True),
    "dual, threshold": DiffusionConfig(NEW, cache="dual", log_probabilities=True, **THRESHOLD),
}
MESHES = ("data=1", "data=2", "tensor=4", "data=2,sequence=2,tensor=2")


@functools.cache
def engine(mesh: str) -> Engine:
    """The demo's engine, with optimized programs: they run for most of the time."""
    with optimized():
        return Engine.load(DEMO, mesh=mesh)


@functools.cache
def without_drafts(name: str, prompts: int) -> GenerationResult:
    own = engine("data=1")
    return own.generate_tokens(*own.encode(HELD_OUT[:prompts]), MODES[name], history=True)


@pytest.mark.parametrize(
    ("prompts", "name", "mesh"),
    [
        (3, "sampled", "data=1"),
        *[pytest.param(20, name, mesh, marks=pytest.mark.slow) for name, mesh in itertools.product(MODES, MESHES)],
    ],
)
def test_held_out_prompts(prompts: int, name: str, mesh: str) -> None:
    config, alone, expected = MODES[name], engine("data=1"), without_drafts(name, prompts)
    ids, mask = alone.encode(HELD_OUT[:prompts])
    found = engine(mesh).generate_tokens(ids, mask, config.replace(draft_steps=DRAFTS), history=True)
    assert found.history is not None
    assert expected.history is not None
    real = np.pad(mask, ((0, 0), (0, NEW)), constant_values=1)
    ties = 0
    for row in range(len(ids)):
        own = slice(row, row + 1)
        assert_same_tokens(found.history[:, own], expected.history[:, own], real[own], alone, config)
        if not np.array_equal(found.history[:, row], expected.history[:, row]):
            ties += 1
            continue
        np.testing.assert_array_equal(found.sequences[row], expected.sequences[row])
        np.testing.assert_array_equal(found.commit_steps[row], expected.commit_steps[row])
        np.testing.assert_allclose(found.log_probabilities[row], expected.log_probabilities[row], atol=1e-4)
    assert ties < len(ids)
    # Most rows save passes; how many, depends on the text.
    assert sum(own.accepted > 0 for own in found.drafts) > len(ids) / 2
