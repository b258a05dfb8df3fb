"""The request for one row, and its result.

Dimension letters: S length of the row's canvas, prompt and new tokens together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.decoding.block_schedule import canvas_length
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.execution.left_padding import Rows
from runtime.execution.result import DraftStats
from runtime.models.config import ModelConfig
from sharding.errors import NonFiniteError


@dataclass(slots=True)  # not frozen: a batch makes millions of these, which would take four times as long
class RowRequest:
    """A row to generate.

    Attributes:
      tokens: tokens of the prompt. A diffusion model also fills mask tokens in it.
      config: decoding parameters, of which ``seed`` is ignored.
      seed: the row's seed.
      suffix: tokens after the new tokens, which a diffusion model with bidirectional attention sees too. They are on
        the row's canvas, but not in its result.
    """

    tokens: Sequence[int]
    config: DiffusionConfig | SamplingConfig
    seed: int
    suffix: Sequence[int] = field(default_factory=list)

    @property
    def given(self) -> int:
        """The number of tokens that are given, prompt and suffix together."""
        return len(self.tokens) + len(self.suffix)

    @property
    def length(self) -> int:
        """S, the length of prompt and new tokens together."""
        return len(self.tokens) + self.config.max_new_tokens

    @property
    def length_with_suffix(self) -> int:
        """The length of prompt, new tokens and suffix together."""
        return self.given + self.config.max_new_tokens

    @property
    def canvas_length(self) -> int:
        """The length of the row's canvas: suffix included, rounded up to whole blocks if attention is block-causal."""
        return canvas_length(self.given, self.config)

    @property
    def rows(self) -> Rows:
        """The prompt as a batch of one row."""
        tokens = np.array([self.tokens], np.int32)
        return Rows(tokens, np.array([len(self.tokens)], np.int32), tokens, [self.suffix] if len(self.suffix) else ())


def first_position(request: RowRequest, model: ModelConfig) -> int:
    """Return the position at which the first block of a diffusion request starts: that of its first mask.

    With the ``even`` schedule, blocks start after the prompt, as in LLaDA's ``generate.py``: masks in the prompt are
    candidates in every block, but no block starts at them. With a cache or a parallel rule, only the masks of a block
    are candidates, so the first block starts at the first mask there too. Blocks of block-causal attention are counted
    from position 0.
    """
    prompt = list(request.tokens)
    if model.family.block_causal:
        block = request.config.attention_block_length  # type: ignore[union-attr]
        return (prompt.index(model.mask_token_id) if model.mask_token_id in prompt else len(prompt)) // block * block
    config = request.config
    scheduled = isinstance(config, DiffusionConfig) and config.cache == "none" and config.parallel == "none"
    after = model.family.schedule == "even" and scheduled and config.max_new_tokens
    if model.mask_token_id not in prompt or after:
        return len(prompt)
    return prompt.index(model.mask_token_id)


def masks_inside(request: RowRequest, model: ModelConfig) -> int:
    """Return the number of masks in the prompt of a request."""
    return list(request.tokens).count(model.mask_token_id)


def first_masks(request: RowRequest, model: ModelConfig) -> int:
    """Return how many masks follow the prompt of a diffusion request at its start.

    They are the new tokens, rounded up to whole blocks if attention is block-causal. A canvas of variable length starts
    with ``initial_masks``, or with those of the prompt.
    """
    config = request.config
    if not (isinstance(config, DiffusionConfig) and model.family.variable_length):
        return request.canvas_length - request.given
    return 0 if masks_inside(request, model) else min(config.initial_masks, config.max_new_tokens)


def length_limit(request: RowRequest, model: ModelConfig) -> int:
    """Return the limit of a canvas of variable length: ``max_new_tokens`` limits the masks and what fills them."""
    return request.length_with_suffix - masks_inside(request, model)


def expansion_limit(request: RowRequest, model: ModelConfig) -> int:
    """Return how often a mask of a canvas of variable length may become two."""
    assert isinstance(request.config, DiffusionConfig)
    found = request.config.expand_budget
    return 2 * (length_limit(request, model) - first_position(request, model)) if found is None else found


def most_steps_of_row(request: RowRequest, model: ModelConfig) -> int:
    """Return the limit of the steps of a row of variable length."""
    return 2 * (length_limit(request, model) - first_position(request, model) + expansion_limit(request, model))


def block_span(request: RowRequest, model: ModelConfig) -> int:
    """Return the number of positions in all blocks of a request together; 0 if there is nothing to fill.

    Blocks end before the suffix.
    """
    return request.canvas_length - len(request.suffix) - first_position(request, model)


def final_tokens(canvas: np.ndarray, prompt: int) -> np.ndarray:
    """Return the new tokens of an unfinished row that are final: those before its first open position.

    Args:
      canvas: int32 ``[S]``, -1 at open positions.
      prompt: position at which the new tokens start.
    """
    new = canvas[prompt:]
    return new[: int(np.argmax(np.append(new, -1) < 0))]


@dataclass(frozen=True)
class RowResult:
    """A row that is done.

    Attributes:
      number: number of the request.
      sequence: int32 ``[S]``, the tokens; padding after the end of a row that stopped early or is shorter than
        its limit.
      commit_steps: int32 ``[S]``, the row's step that committed each position; -1 if none has.
      log_probabilities: float32 ``[S]``, or None if they were not requested.
      positions: number of positions that forward passes computed for the row, prompt included.
      non_finite: whether the row ended without a result, because the model's logits were NaN or infinite.
      drafts: passes and accepted steps in slots with drafts, otherwise None.
    """

    number: int
    sequence: np.ndarray
    commit_steps: np.ndarray
    log_probabilities: np.ndarray | None
    positions: int = 0
    non_finite: bool = False
    drafts: DraftStats | None = None

    def check(self) -> None:
        """Check that the row has a result.

        Raises:
          NonFiniteError: the model's logits were not finite, so the row has no result.
        """
        if self.non_finite:
            raise NonFiniteError([self.number])
