"""An engine inside somebody's training program: its settings of JAX, and its arrays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
import pytest

from runtime import DiffusionConfig, Engine
from runtime.execution.rows import seed_words
from tests import golden_cases

CONFIG = DiffusionConfig(max_new_tokens=8, steps=4, algorithm="entropy", temperature=0.8, top_p=0.9, seed=5)
IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def answers(mesh: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Load an engine and use it: its tokens, scores and logits."""
    engine = Engine.load(golden_cases.FOLDER, mesh)
    tokens = engine.generate_tokens(IDS, None, CONFIG).sequences
    return tokens, engine.score(IDS, IDS), np.asarray(engine.logits(IDS))


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {mesh: answers(mesh) for mesh in ("tensor=1", "data=2,tensor=2")}


def training_mesh() -> AbstractContextManager[Any]:
    return jax.set_mesh(jax.make_mesh((8,), ("x",)))


@pytest.mark.parametrize(
    ("mesh", "setting"),
    [
        pytest.param("tensor=1", training_mesh, id="mesh, one device"),
        pytest.param("data=2,tensor=2", training_mesh, id="mesh, four devices"),
        pytest.param("tensor=1", lambda: jax.default_prng_impl("rbg"), id="rbg"),
        pytest.param("tensor=1", lambda: jax.default_prng_impl("unsafe_rbg"), id="unsafe_rbg"),
        pytest.param("data=2,tensor=2", lambda: jax.threefry_partitionable(False), id="other bits"),
        pytest.param("tensor=1", lambda: jax.enable_x64(True), id="x64"),
        pytest.param("tensor=1", lambda: jax.numpy_dtype_promotion("strict"), id="strict types"),
        pytest.param("tensor=1", lambda: jax.numpy_rank_promotion("raise"), id="strict ranks"),
    ],
)
def test_settings_of_the_program_around_it(
    mesh: str, setting: Callable[[], AbstractContextManager[Any]], expected: dict[str, Any]
) -> None:
    with setting():
        tokens, scores, logits = answers(mesh)
    np.testing.assert_array_equal(tokens, expected[mesh][0])
    np.testing.assert_array_equal(scores, expected[mesh][1])
    np.testing.assert_array_equal(logits, expected[mesh][2])


def test_numpy_arrays_stay_the_callers() -> None:
    engine = Engine.load(golden_cases.FOLDER, "tensor=1")
    assert engine.loaded is not None
    before = engine.score(IDS, IDS)

    def aligned(leaf: Any) -> np.ndarray:
        """A writable copy whose memory a CPU device could use as it is."""
        raw = np.empty(leaf.nbytes + 64, np.uint8)
        own = raw[-raw.ctypes.data % 64 :][: leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
        own[...] = np.asarray(leaf)
        return own

    own = jax.tree.map(aligned, engine.weights)
    engine.replace_weights(own)
    assert engine.loaded is None, "these weights are from no checkpoint"
    for leaf in jax.tree.leaves(own):
        leaf[...] = 0
    np.testing.assert_array_equal(engine.score(IDS, IDS), before)


def test_a_hook_that_changes_nothing_may_use_the_logits_as_scratch() -> None:
    engine = golden_cases.engine()
    config = CONFIG.replace(temperature=0.0)

    def observe(step: int, canvas: np.ndarray, logits: np.ndarray) -> None:
        logits[...] = 0

    found = engine.generate_tokens(IDS, None, config, logits_hook=observe)
    np.testing.assert_array_equal(found.sequences, engine.generate_tokens(IDS, None, config).sequences)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_seeds_of_numpy(dtype: str) -> None:
    np.testing.assert_array_equal(seed_words(np.array([7, 100], dtype)), seed_words([7, 100]))
