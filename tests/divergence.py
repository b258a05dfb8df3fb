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
    """Assert that two histories ``[steps, B, W]``, tokens where ``real`` ``[B, W]``, agree up to ties within rounding.

    At the first difference of each row, the model runs on the canvas before that step, and the margin between the two
    choices is printed: the gap of the logits if a position got two different tokens, and the spread of the confidences
    if different positions were committed. A margin larger than rounding fails, and so does a difference without a
    margin: in the very first step, or if one run committed more positions than the other.
    """
    for row in range(expected.shape[1]):
        differs = (found[:, row] != expected[:, row]).any(axis=1)
        if not differs.any():
            continue
        step = int(np.argmax(differs))
        places = np.flatnonzero(found[step, row] != expected[step, row])
        message = f"step {step}, row {row}, positions {places.tolist()}"
        assert step > 0, f"{message}: the very first step differs"
        logits = engine.logits(expected[step - 1, row][None], real[row][None].astype(int))[0].astype(np.float64)
        shifted = np.concatenate([logits[:1], logits[:-1]]) / (config.temperature or 1.0)
        margin = _margin(found[step, row], expected[step, row], shifted, engine.config.mask_token_id, config, message)
        assert margin < ROUNDING, f"{message}: margin {margin:.3g} is more than rounding ({ROUNDING})"
        print(f"{message}: a tie within rounding, margin {margin:.3g}")


def _margin(
    found: np.ndarray, expected: np.ndarray, logits: np.ndarray, mask: int, config: DiffusionConfig, message: str
) -> float:
    """Return by how much the choices of a step ``[W]`` differ, from its logits ``[W, V]``."""
    differ = found != expected
    both = np.flatnonzero(differ & (found != mask) & (expected != mask))
    margin = max((abs(logits[place, found[place]] - logits[place, expected[place]]) for place in both), default=0.0)
    added, missing = np.flatnonzero(differ & (expected == mask)), np.flatnonzero(differ & (found == mask))
    assert len(added) == len(missing), f"{message}: {len(added)} positions more, {len(missing)} fewer"
    places = np.concatenate([added, missing])
    if len(places):
        probabilities = np.exp(logits[places] - logits[places].max(axis=-1, keepdims=True))
        probabilities /= probabilities.sum(axis=-1, keepdims=True)
        ranked = np.sort(probabilities, axis=-1)
        confidence = {
            "maskgit_plus": ranked[:, -1],
            "topk_margin": ranked[:, -1] - ranked[:, -2],
            "entropy": (probabilities * np.log(probabilities + 1e-10)).sum(axis=-1),
        }.get(config.algorithm)
        assert confidence is not None, f"{message}: set in one run and not in the other"
        margin = max(margin, float(np.ptp(confidence)))
    return margin


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
