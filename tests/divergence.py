"""Comparison of two runs that should give the same tokens, or leave the same cache, up to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from runtime import DiffusionConfig, Engine

# Two meshes add float32 numbers in different orders. Choices that differ by less than this in the logits are ties.
ROUNDING = 1e-5


def assert_same_tokens(
    found: np.ndarray, expected: np.ndarray, real: np.ndarray, engine: Engine, config: DiffusionConfig
) -> None:
    """Assert that two histories ``[steps, B, W]``, tokens where ``real`` ``[B, W]``, agree up to a tie within rounding.

    At the first difference, the model runs on the canvas before that step, and the margin between the two choices is
    printed: the gap of the logits if a position got two different tokens, or the spread of the confidences if different
    positions were committed. A margin larger than rounding fails, and so does a difference without a margin.
    """
    if np.array_equal(found, expected):
        return
    mask_id = engine.config.mask_token_id
    differing_steps = (found != expected).any(axis=2)
    step = int(np.argmax(differing_steps.any(axis=1)))
    row = int(np.argmax(differing_steps[step]))
    places = np.flatnonzero(found[step, row] != expected[step, row])
    message = f"step {step}, row {row}, positions {places.tolist()}"
    assert step > 0, f"{message}: the very first step differs"
    logits = engine.logits(expected[step - 1, row][None], real[row][None].astype(int))[0].astype(np.float64)
    shifted = np.concatenate([logits[:1], logits[:-1]]) / (config.temperature or 1.0)
    tokens = [place for place in places if mask_id not in (found[step, row, place], expected[step, row, place])]
    if tokens:
        gaps = [
            abs(shifted[place, found[step, row, place]] - shifted[place, expected[step, row, place]])
            for place in tokens
        ]
        margin = max(gaps)
    else:
        probabilities = np.exp(shifted[places] - shifted[places].max(axis=-1, keepdims=True))
        probabilities /= probabilities.sum(axis=-1, keepdims=True)
        ranked = np.sort(probabilities, axis=-1)
        confidence = {
            "maskgit_plus": ranked[:, -1],
            "topk_margin": ranked[:, -1] - ranked[:, -2],
            "entropy": (probabilities * np.log(probabilities + 1e-10)).sum(axis=-1),
        }.get(config.algorithm)
        assert confidence is not None, f"{message}: set in one run and not in the other"
        margin = float(np.ptp(confidence))
    assert margin < ROUNDING, f"{message}: margin {margin:.3g} is more than rounding ({ROUNDING})"
    print(f"{message}: a tie within rounding, margin {margin:.3g}")


def assert_same_cache(found: Any, expected: Any, lengths: Sequence[int] | None = None) -> None:
    """Assert that two KV caches agree up to rounding.

    An int8 value is the nearest integer to a number, so a number close to a tie may become the other integer, and a
    bfloat16 value likewise. A wrong token, position or canvas would change most values, and by much more than that.

    Args:
      found, expected: caches, with the layers stacked or in a tuple.
      lengths: for each row, the number of positions to compare; None for all.
    """
    for own, other in zip(_layers(found), _layers(expected), strict=True):
        for row in range(other.keys.shape[1]):
            end = other.keys.shape[3] if lengths is None else lengths[row]
            for name in ("keys", "values"):
                values, wanted = (getattr(one, name)[:, row, :, :end].astype(np.float32) for one in (own, other))
                if other.keys.dtype != np.int8:
                    unit = ROUNDING if other.keys.dtype == np.float32 else 2.0**-8
                    np.testing.assert_allclose(values, wanted, rtol=unit, atol=unit * max(1.0, abs(wanted).max()))
                    continue
                assert abs(values - wanted).max() <= 1
                assert (values != wanted).mean() < 0.01
                scales = [getattr(one, f"{name[:-1]}_scales")[:, row, :, :end] for one in (own, other)]
                np.testing.assert_allclose(*scales, rtol=5e-3)


def _layers(cache: Any) -> list[Any]:
    return [jax.tree.map(np.asarray, one) for one in (cache if isinstance(cache, tuple) else (cache,))]
