"""Conversion between a caller's left-padded batch and the start-aligned row requests that run on the devices.

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
    """The row requests for a caller's left-padded batch, and the conversion of their results to left-padded arrays.

    The left-padded arrays do not include suffixes.

    Attributes:
      requests: one request per row.
      padding: int32 ``[B, S + N]``, the values of padding positions in the left-padded arrays.
      lengths: int32 ``[B]``, length of each row, prompt and new tokens together.
    """

    def __init__(
        self,
        rows: Rows,
        config: DiffusionConfig | SamplingConfig,
        seeds: Sequence[int],
        model: ModelConfig,
        width: int,
    ) -> None:
        """Create the requests.

        Args:
          rows: the prompts, start-aligned and as the caller gave them.
          config: decoding parameters of all rows.
          seeds: one seed per row.
          model: the model's configuration, for its mask and padding tokens.
          width: C, the bucket of the canvases; at least the longest prompt with its new tokens and suffix.
        """
        self._config, self._model = config, model
        self._start, self.lengths = make_canvas(rows, model, config.max_new_tokens, width)
        prompts = [rows.tokens[row, :length].tolist() for row, length in enumerate(rows.lengths)]
        self.requests = [
            RowRequest(prompt, config, seed, rows.suffix(row))
            for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        fill = 0 if isinstance(config, DiffusionConfig) else model.pad_token_id
        self.padding = np.pad(rows.original, ((0, 0), (0, config.max_new_tokens)), constant_values=fill)

    def align(self, values: np.ndarray, onto: np.ndarray | None = None) -> np.ndarray:
        """Convert start-aligned values ``[B or more, C, ...]`` to left-padded ones ``[B, S + N, ...]``."""
        return end_align(values[: len(self.lengths)], self.lengths, self.padding if onto is None else onto)

    def canvas(self, tokens: np.ndarray) -> np.ndarray:
        """Convert canvases ``[B or more, C]``, -1 at open positions, to left-padded int32 ``[B, S + N]``."""
        # Open positions are masks, or positions that an autoregressive model has not generated yet.
        is_diffusion = isinstance(self._config, DiffusionConfig)
        fill = self._model.mask_token_id if is_diffusion else self._model.pad_token_id
        return self.align(np.where(tokens < 0, fill, tokens))

    def sequences(self, results: Sequence[RowResult]) -> np.ndarray:
        """Return the tokens of all rows, int32 ``[B, S + N]``."""
        return self.align(self._stack([one.sequence for one in results], 0))

    def commit_steps(self, results: Sequence[RowResult]) -> np.ndarray:
        """Return the step that committed each position, int32 ``[B, S + N]``; -1 where no step has."""
        return self.align(self._stack([one.commit_steps for one in results], -1), np.full_like(self.padding, -1))

    def log_probabilities(self, results: Sequence[RowResult]) -> np.ndarray | None:
        """Return log-probabilities of the new tokens, float32 ``[B, S + N]``, 0 elsewhere; None if not requested."""
        if not self._config.log_probabilities:
            return None
        kept = self._stack([one.log_probabilities for one in results], 0.0)
        return self.align(kept, np.zeros(self.padding.shape, np.float32))

    def history(self, results: Sequence[RowResult], steps: int) -> np.ndarray:
        """Reconstruct the canvas after each of ``steps`` steps, int32 ``[steps, B, S + N]``."""
        sequences = self._stack([one.sequence for one in results], 0)
        commit_steps = self._stack([one.commit_steps for one in results], -1)
        prompts = np.array([len(one.tokens) for one in self.requests], np.int32)
        stop_tokens = stop_rows(self._config.stop_token_ids, len(results))

        # A row that a stop test has ended is padded too.
        last, mask = commit_steps.max(axis=1, keepdims=True), self._model.mask_token_id

        def after(step: int) -> np.ndarray:
            canvas = canvas_after(step, self._start, sequences, commit_steps, prompts, stop_tokens, self._model)
            return np.where((step >= last) & (canvas == mask), sequences, canvas)

        return np.stack([self.align(after(step)) for step in range(steps)])

    def _stack(self, rows: Sequence[Any], fill: float) -> np.ndarray:
        """Stack rows of different lengths into one array ``[B, C]``."""
        out = np.full(self._start.shape, fill, rows[0].dtype)
        for row, values in enumerate(rows):
            out[row, : len(values)] = values
        return out
