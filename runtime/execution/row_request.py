"""One row to generate, and what comes of it.

Dimension letters: S canvas of a row, its prompt and its new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.decoding.block_schedule import canvas_length
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.execution.left_padding import Rows
from runtime.models.config import ModelConfig


@dataclass(frozen=True)
class RowRequest:
    """One row to generate.

    Attributes:
      tokens: the prompt; a diffusion model fills mask tokens in it too.
      config: decoding parameters; the ``seed`` in them is not read.
      seed: of this row.
    """

    tokens: Sequence[int]
    config: DiffusionConfig | SamplingConfig
    seed: int

    @property
    def length(self) -> int:
        """S, prompt and new tokens."""
        return len(self.tokens) + self.config.max_new_tokens

    @property
    def canvas_length(self) -> int:
        """Positions that it needs of a canvas: S, and what fills the last block of block-causal attention."""
        return canvas_length(len(self.tokens), self.config)

    @property
    def rows(self) -> Rows:
        """The prompt as a batch of one."""
        tokens = np.array([self.tokens], np.int32)
        return Rows(tokens, np.array([len(self.tokens)], np.int32), tokens)


def first_position(request: RowRequest, model: ModelConfig) -> int:
    """Position at which the first block of a diffusion request starts: its first mask.

    With the ``even`` schedule the blocks of new tokens start after the prompt, as in LLaDA's ``generate.py``: masks in
    the prompt compete with those of every block, but begin none. Blocks of block-causal attention are
    counted from position 0.
    """
    prompt = list(request.tokens)
    if model.family.attention == "block_causal":
        block = request.config.attention_block_length  # type: ignore[union-attr]
        return (prompt.index(model.mask_token_id) if model.mask_token_id in prompt else len(prompt)) // block * block
    if model.mask_token_id not in prompt or (model.family.schedule == "even" and request.config.max_new_tokens):
        return len(prompt)
    return prompt.index(model.mask_token_id)


def block_span(request: RowRequest, model: ModelConfig) -> int:
    """Positions from the first block of a diffusion request to its end, 0 where there is nothing to fill."""
    return request.canvas_length - first_position(request, model)


def certain_tokens(canvas: np.ndarray, prompt: int) -> np.ndarray:
    """The new tokens of an unfinished row that will not change any more: those before its first open position.

    Args:
      canvas: int32 ``[S]``, -1 where nothing is committed or generated yet.
      prompt: where the new tokens start.
    """
    new = canvas[prompt:]
    return new[: int(np.argmax(np.append(new, -1) < 0))]


@dataclass(frozen=True)
class RowResult:
    """One row that is done.

    Attributes:
      number: which of the requests it is.
      sequence: int32 ``[S]``; padding after the end of a row that ended early.
      commit_steps: int32 ``[S]``, the row's step that committed each position, -1 where none has.
      log_probabilities: float32 ``[S]`` where the request asks for them.
      positions: positions that forward passes computed for it, its prompt included.
    """

    number: int
    sequence: np.ndarray
    commit_steps: np.ndarray
    log_probabilities: np.ndarray | None
    positions: int = 0
