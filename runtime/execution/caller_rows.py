"""A batch as its caller sees it: left-padded rows with the new tokens at their end.

Dimension letters: B batch, S the caller's prompt width, N new tokens, C canvas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.execution.canvas import canvas_after
from runtime.execution.left_padding import Rows, end_align
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.rows import make_canvas, stop_rows
from runtime.models.config import ModelConfig


class CallerRows:
    """The requests that a caller's rows come to, and what is handed back for them.

    Attributes:
      requests: one per row.
      padding: int32 ``[B, S + N]``, what is in the caller's rows where no token of ours is.
      lengths: int32 ``[B]``, prompt and new tokens of each row.
    """

    def __init__(
        self,
        rows: Rows,
        config: DiffusionConfig | SamplingConfig,
        seeds: Sequence[int],
        model: ModelConfig,
        width: int,
    ) -> None:
        """Make the requests.

        Args:
          rows: start-aligned prompts, and the caller's own.
          config: decoding parameters of all rows.
          seeds: one per row.
          model: for its mask and padding tokens.
          width: bucket C, at least the longest prompt and its new tokens.
        """
        self._config, self._model = config, model
        self._start, self.lengths = make_canvas(rows, model, config.max_new_tokens, width)
        prompts = [rows.tokens[row, :length].tolist() for row, length in enumerate(rows.lengths)]
        self.requests = [RowRequest(prompt, config, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        fill = 0 if isinstance(config, DiffusionConfig) else model.pad_token_id
        self.padding = np.pad(rows.original, ((0, 0), (0, config.max_new_tokens)), constant_values=fill)

    def align(self, values: np.ndarray, onto: np.ndarray | None = None) -> np.ndarray:
        """Start-aligned values ``[B or more, C, ...]`` in the caller's rows ``[B, S + N, ...]``."""
        return end_align(values[: len(self.lengths)], self.lengths, self.padding if onto is None else onto)

    def canvas(self, tokens: np.ndarray) -> np.ndarray:
        """A canvas in the caller's rows, int32 ``[B, S + N]``, from tokens ``[B or more, C]`` with -1 where none is."""
        # Masks, or positions that an autoregressive model has not come to.
        is_diffusion = isinstance(self._config, DiffusionConfig)
        fill = self._model.mask_token_id if is_diffusion else self._model.pad_token_id
        return self.align(np.where(tokens < 0, fill, tokens))

    def sequences(self, results: Sequence[RowResult]) -> np.ndarray:
        """The tokens of all rows, int32 ``[B, S + N]``."""
        return self.align(self._stack([one.sequence for one in results], 0))

    def commit_steps(self, results: Sequence[RowResult]) -> np.ndarray:
        """The step that committed each position, int32 ``[B, S + N]``, -1 for the prompt and where none has."""
        return self.align(self._stack([one.commit_steps for one in results], -1), np.full_like(self.padding, -1))

    def log_probabilities(self, results: Sequence[RowResult]) -> np.ndarray | None:
        """The log-probability of each new token, float32 ``[B, S + N]``, 0 elsewhere; None where none are kept."""
        if not self._config.log_probabilities:
            return None
        kept = self._stack([one.log_probabilities for one in results], 0.0)
        return self.align(kept, np.zeros(self.padding.shape, np.float32))

    def history(self, results: Sequence[RowResult], steps: int) -> np.ndarray:
        """The canvas after each of so many steps, int32 ``[steps, B, S + N]``."""
        sequences = self._stack([one.sequence for one in results], 0)
        commit_steps = self._stack([one.commit_steps for one in results], -1)
        prompts = np.array([len(one.tokens) for one in self.requests], np.int32)
        stop_tokens = stop_rows(self._config.stop_token_ids, len(results))

        def after(step: int) -> np.ndarray:
            return canvas_after(step, self._start, sequences, commit_steps, prompts, stop_tokens, self._model)

        return np.stack([self.align(after(step)) for step in range(steps)])

    def _stack(self, rows: Sequence[Any], fill: float) -> np.ndarray:
        """Rows of different lengths as one array ``[B, C]``."""
        out = np.full(self._start.shape, fill, rows[0].dtype)
        for row, values in enumerate(rows):
            out[row, : len(values)] = values
        return out
