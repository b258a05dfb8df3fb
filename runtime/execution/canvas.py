"""Postprocessing of canvases: padding after the end of a row, and reconstruction of the canvas after each step.

Dimension letters: B batch, S canvas, E stop tokens.
"""

from __future__ import annotations

import numpy as np

from runtime.models.config import ModelConfig


def pad_after_end(
    canvas: np.ndarray, commit_steps: np.ndarray, prompts: np.ndarray, stop_tokens: np.ndarray, model: ModelConfig
) -> np.ndarray:
    """Replace the masks after the end of a row that stopped early by padding.

    Args:
      canvas: int32 ``[B, S]``.
      commit_steps: int32 ``[B, S]``, -1 at positions that no step has committed.
      prompts: int32 ``[B]``, length of each prompt.
      stop_tokens: int32 ``[B, E]``. A row ends at the first of these after its prompt that has no mask before it.
      model: the model's configuration, for its mask and padding tokens.

    Returns:
      int32 ``[B, S]``.
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
    """Reconstruct the canvas ``[B, S]`` after a step.

    Args:
      step: number of the step, from 0.
      start: int32 ``[B, S]``, the canvas before the first step.
      final: int32 ``[B, S]``, the canvas after the last step.
      commit_steps: int32 ``[B, S]``, the step that committed each position; -1 if none has.
      prompts, stop_tokens, model: see :func:`pad_after_end`.
    """
    there = (commit_steps >= 0) & (commit_steps <= step)
    return pad_after_end(np.where(there, final, start), np.where(there, commit_steps, -1), prompts, stop_tokens, model)
