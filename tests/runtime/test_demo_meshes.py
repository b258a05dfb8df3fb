"""The trained demo model, whose distributions are sharp, yields the same tokens on every mesh, greedy and sampled."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from checkpoints import DEMO
from runtime import DiffusionConfig, Engine, GenerationResult
from tests.compilation import optimized
from tests.divergence import assert_same_tokens

MESHES = [
    "tensor=2",
    "tensor=4",
    "tensor=8",
    "tensor=16",
    "sequence=2",
    "sequence=4",
    "data=2",
    "data=2,sequence=2",
    "sequence=2,tensor=4",
    "data=4,tensor=4",
    "data=2,sequence=2,tensor=4",
]
# The default run; the slow tests cover every mesh with every configuration.
QUICK_GRID = {
    ("tensor=4", "margin"),
    ("tensor=8", "published"),
    ("sequence=4", "origin"),
    ("data=2,sequence=2", "greedy"),
    ("sequence=2,tensor=4", "published"),
    ("sequence=2,tensor=4", "margin"),
}
PROMPTS = ["def add(first, second):\n", "def is_even(number):\n    return", "class"]
CONFIGS = {
    "greedy": DiffusionConfig(max_new_tokens=40, steps=40, algorithm="entropy"),
    "published": DiffusionConfig.published(40, temperature=0.2, seed=1),
    "origin": DiffusionConfig(max_new_tokens=40, steps=20, algorithm="origin", temperature=1.0, top_p=0.9, seed=2),
    "margin": DiffusionConfig(
        max_new_tokens=40, steps=20, algorithm="topk_margin", temperature=0.5, alg_temp=0.5, top_k=20, seed=3
    ),
}


@functools.cache
def engine(mesh: str) -> Engine:
    with optimized():
        return Engine.load(DEMO, mesh=mesh)


@functools.cache
def generated(mesh: str, name: str) -> GenerationResult:
    loaded = engine(mesh)
    ids, mask = loaded.encode(PROMPTS)
    return loaded.generate_tokens(ids, mask, CONFIGS[name], history=True)


def real(name: str) -> np.ndarray:
    _, mask = engine("data=1").encode(PROMPTS)
    return np.pad(mask, ((0, 0), (0, CONFIGS[name].max_new_tokens)), constant_values=1)


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        pytest.param(*pair, marks=() if pair in QUICK_GRID else pytest.mark.slow)
        for pair in itertools.product(MESHES, CONFIGS)
    ],
)
def test_every_mesh_gives_the_tokens_of_one_device(mesh: str, name: str) -> None:
    found, expected = generated(mesh, name), generated("data=1", name)
    assert found.history is not None
    assert expected.history is not None
    assert_same_tokens(found.history, expected.history, real(name), engine("data=1"), CONFIGS[name])


def test_the_comparison_can_fail() -> None:
    expected = generated("data=1", "greedy").history
    assert expected is not None
    wrong = expected.copy()
    wrong[-1, 0, -1] = (wrong[-1, 0, -1] + 1) % 100 + 5
    with pytest.raises(AssertionError, match="more than rounding"):
        assert_same_tokens(wrong, expected, real("greedy"), engine("data=1"), CONFIGS["greedy"])
    # One run commits a position earlier than the other.
    mask_id = engine("data=1").config.mask_token_id
    step, row = next(
        (step, row)
        for step, row in itertools.product(range(1, len(expected)), range(expected.shape[1]))
        if ((expected[step - 1, row] == mask_id) & (expected[step, row] == mask_id)).any()
    )
    early = expected.copy()
    place = int(np.argmax(expected[step, row] == mask_id))
    early[step:, row, place] = expected[-1, row, place]
    with pytest.raises(AssertionError, match="1 positions more, 0 fewer"):
        assert_same_tokens(early, expected, real("greedy"), engine("data=1"), CONFIGS["greedy"])


def test_rows_alone() -> None:
    together = generated("data=1", "published")
    loaded = engine("data=1")
    for row, prompt in enumerate(PROMPTS):
        ids, mask = loaded.encode([prompt])
        config = CONFIGS["published"].replace(seed=[together.seeds[row]])
        alone = loaded.generate_tokens(ids, mask, config)
        np.testing.assert_array_equal(alone.sequences[0], together.sequences[row][-alone.sequences.shape[1] :])
