"""Windows of several canvases that share a cache are as if each canvas alone had been written into it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime.models import xla_attention
from runtime.models.cached import run_window
from runtime.models.canvases import run_canvases, write_canvas
from runtime.models.forward import Forward
from runtime.models.kv_cache import Cache, abstract_cache
from tests import golden_cases
from tests.divergence import assert_same_cache

B, N, W, T = 4, 3, 6, 24
STARTS = np.array([3, 0, 0, 18], np.int32)
LENGTHS = np.array([24, 13, 4, 23], np.int32)
# Windows that end before their width, at it, and at the end of the row. The third row's window covers all of its keys,
# and the second row has no window.
STOPS = np.array([9, 0, 4, 23], np.int32)
ACTIVE = STOPS > STARTS


def random_cache(forward: Forward, dtype: str) -> Cache:
    draw = np.random.default_rng(0).standard_normal

    def fill(leaf: Any) -> Any:
        values = draw(leaf.shape) * (40 if leaf.dtype == jnp.int8 else 1)
        scales = leaf.ndim == 4
        return jax.device_put((abs(values) / 40 if scales else values).astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(fill, abstract_cache(forward.layout, B, T, dtype))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("mesh", ["data=1", "data=2,sequence=2,tensor=2"])
@pytest.mark.parametrize("blocks", [False, True])
def test_every_canvas_is_as_if_alone(mesh: str, dtype: str, blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if blocks:
        monkeypatch.setitem(xla_attention.SCORES_AT_ONCE, "cpu", 0)
        monkeypatch.setattr(xla_attention, "BLOCK", 5)
    runner = golden_cases.engine(mesh).runner
    forward, cache = runner.forward(T), random_cache(runner.forward(T), dtype)
    tokens = np.random.default_rng(1).integers(0, 300, (B, N, W)).astype(np.int32)
    spans = [jax.device_put(one, forward.layout.sharding("batch")) for one in (STARTS, LENGTHS, STOPS)]
    chosen = np.array([0, 1, 2, 1], np.int32)

    @jax.jit
    def together(weights: Any, cache: Cache) -> tuple[Any, Cache]:
        hidden, windows = run_canvases(forward, weights, cache, tokens, *spans)
        return hidden, write_canvas(forward, cache, windows, jnp.asarray(chosen), spans[0], spans[2])

    @jax.jit
    def alone(weights: Any, cache: Cache, tokens: Any) -> tuple[Any, Cache]:
        return run_window(forward, weights, cache, tokens, *spans)

    hidden, written = together(runner.weights, cache)
    for number in range(N):
        expected, _ = alone(runner.weights, cache, tokens[:, number])
        inside = ACTIVE[:, None] & (STARTS[:, None] + np.arange(W) < STOPS[:, None])
        scale = abs(np.asarray(expected)[inside]).max()
        # A value that is rounded to the other integer changes the next layers by a part of an int8 step.
        atol = scale * (1e-5 if dtype == "float32" else 2e-3)
        np.testing.assert_allclose(np.asarray(hidden)[:, number][inside], np.asarray(expected)[inside], atol=atol)
    _, expected_cache = alone(runner.weights, cache, tokens[np.arange(B), chosen])
    assert_same_cache(written, expected_cache)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_canvases_do_not_see_each_other(dtype: str) -> None:
    """Another second canvas changes nothing in the others, to the bit; all are stored in the dtype of the cache."""
    runner = golden_cases.engine().runner
    forward, cache = runner.forward(T), random_cache(runner.forward(T), dtype)
    tokens = np.random.default_rng(2).integers(0, 300, (B, N, W)).astype(np.int32)

    def run(tokens: Any) -> tuple[Any, Cache]:
        hidden, windows = run_canvases(
            forward, runner.weights, cache, tokens, *(jnp.asarray(one) for one in (STARTS, LENGTHS, STOPS))
        )
        return hidden, windows

    hidden, windows = jax.jit(run)(tokens)
    assert {leaf.dtype for leaf in jax.tree.leaves(windows) if leaf.ndim == 5} == {jnp.dtype(dtype)}
    other = tokens.copy()
    other[:, 1] = (other[:, 1] + 7) % 300
    changed, _ = jax.jit(run)(other)
    np.testing.assert_array_equal(np.asarray(changed)[:, ::2], np.asarray(hidden)[:, ::2])
    assert (np.asarray(changed)[ACTIVE, 1] != np.asarray(hidden)[ACTIVE, 1]).any()
