"""What comes of a canvas: padding after the end of a row, and the canvas after each step.

Dimension letters: B batch, S canvas, E stop tokens.
"""

from __future__ import annotations

import numpy as np

from runtime.models.config import ModelConfig


def pad_after_end(
    canvas: np.ndarray, commit_steps: np.ndarray, prompts: np.ndarray, stop_tokens: np.ndarray, model: ModelConfig
) -> np.ndarray:
    """Put padding in the place of masks that a row which ended early has left.

    Args:
      canvas: int32 ``[B, S]``.
      commit_steps: int32 ``[B, S]``, -1 where no step has committed a position.
      prompts: int32 ``[B]``, length of each prompt.
      stop_tokens: int32 ``[B, E]``; a row ends with the first of these after its prompt before which nothing is masked.
      model: for its mask and padding tokens.
    """
    masked = canvas == model.mask_token_id
    is_stop = (canvas[..., None] == stop_tokens[:, None]).any(axis=-1)
    is_new = np.arange(canvas.shape[-1]) >= prompts[:, None]
    ends = is_stop & is_new & (commit_steps >= 0) & (np.cumsum(masked, axis=-1) == 0)
    return np.where(masked & (np.cumsum(ends, axis=-1) > 0), model.pad_token_id, canvas)


def canvas_after(
    step: int,
    start: np.ndarray,
    final: np.ndarray,
    commit_steps: np.ndarray,
    prompts: np.ndarray,
    stop_tokens: np.ndarray,
    model: ModelConfig,
) -> np.ndarray:
    """The canvas ``[B, S]`` after a step, from the one before the first, the last one, and the steps of all positions.

    Args:
      step: which one, from 0.
      start: int32 ``[B, S]``.
      final: int32 ``[B, S]``.
      commit_steps: int32 ``[B, S]``, -1 where no step has committed a position.
      prompts, stop_tokens, model: see :func:`pad_after_end`.
    """
    there = (commit_steps >= 0) & (commit_steps <= step)
    return pad_after_end(np.where(there, final, start), np.where(there, commit_steps, -1), prompts, stop_tokens, model)
