"""DreamOn's generation of one row in NumPy, from the logits of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from runtime import DiffusionConfig, Engine


@dataclass
class Grown:
    """What :func:`generate` found: the final canvas, and the canvas after each change."""

    canvas: list[int]
    entries: list[list[int]] = field(default_factory=list)
    forwards: int = 0


def generate(engine: Engine, canvas: list[int], config: DiffusionConfig) -> Grown:
    """Generate one row greedily. ``canvas`` has the masks, and the suffix if there is one."""
    model = engine.config
    mask, expand, delete = model.mask_token_id, model.expand_token_id, model.delete_token_id
    limit = len(canvas) - canvas.count(mask) + config.max_new_tokens
    room = limit - canvas.index(mask)
    budget = 2 * room if config.expand_budget is None else config.expand_budget
    grown = Grown(canvas)
    for _ in range(2 * room + 2 * budget):
        masks = [place for place, token in enumerate(canvas) if token == mask]
        if not masks:
            break
        logits = engine.logits([canvas])[0].astype(np.float64)
        grown.forwards += 1
        logits = logits[[max(place - 1, 0) for place in masks]]
        if len(canvas) >= limit or budget <= 0:
            logits[:, expand] = -1e9
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        order = np.argsort(-_confidence(config.algorithm, probabilities), kind="stable")
        canvas = list(canvas)
        for chosen in order[: config.number_transfer_tokens]:
            canvas[masks[chosen]] = int(probabilities[chosen].argmax())
        grown.entries.append(list(canvas))
        if config.pad_delete_to_right and delete in canvas:
            canvas = [
                delete if place in masks and place >= canvas.index(delete) else token
                for place, token in enumerate(canvas)
            ]
        kept = [token for place, token in enumerate(canvas) if not (place in masks and token == delete)]
        if len(kept) < len(canvas):
            grown.entries.append(kept)
        canvas = []
        free = limit - len(kept)
        for token in kept:
            canvas += [mask, mask] if token == expand and free > 0 else [mask] if token == expand else [token]
            free -= token == expand
            budget -= token == expand
        if expand in kept:
            grown.entries.append(canvas)
    grown.canvas = canvas
    return grown


def _confidence(algorithm: str, probabilities: np.ndarray) -> np.ndarray:
    ranked = np.sort(probabilities, axis=1)
    if algorithm == "topk_margin":
        return np.asarray(ranked[:, -1] - ranked[:, -2])
    if algorithm == "entropy":
        return np.asarray((probabilities * np.log(probabilities + 1e-10)).sum(axis=1))
    return np.asarray(ranked[:, -1])
