"""What runs on a canvas of masks share: rows in, and canvases, steps and histories out.

Dimension letters: B batch, S the caller's prompt width, N new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.decoding.diffusion import DenoiseProgram
from runtime.decoding.parameters import DiffusionConfig
from runtime.decoding.sampling import SamplingRule
from runtime.execution.programs import fetch
from runtime.execution.rows import Rows, end_align, make_canvas
from runtime.execution.run_result import RunResult
from runtime.execution.runner import Runner
from runtime.models.config import ModelConfig


def denoise_program(config: DiffusionConfig, vocab_size: int, model_dtype: str, chunk: int) -> DenoiseProgram:
    """What of a request is compiled in; everything else is a run-time argument."""
    filtered = (config.top_p is not None and config.top_p < 1.0) or (
        config.top_k is not None and config.top_k < vocab_size
    )
    # Parallel rules need a certainty, and the original's algorithm has none.
    confidence = config.algorithm
    if confidence == "origin" and config.parallel != "none":
        confidence = "maskgit_plus"
    return DenoiseProgram(
        algorithm=config.algorithm,
        sampling=SamplingRule(
            confidence=confidence,
            sampled=config.temperature > 0,
            filtered=filtered,
            suppress_mask=config.suppress_mask,
            confidence_dtype=model_dtype if config.confidence_dtype == "model" else "float32",
        ),
        sample_positions=bool(config.alg_temp) and config.algorithm != "origin",
        chunk=chunk,
        log_probabilities=config.log_probabilities,
    )


def pad_after_end(
    canvas: np.ndarray, committed: np.ndarray, stop_tokens: Sequence[int], model: ModelConfig
) -> np.ndarray:
    """Padding in the place of masks that a row which ended early has left.

    Args:
      canvas: int32 ``[..., S]``.
      committed: the same shape, -1 where no step has set a position.
      stop_tokens: a row ends with the first of these that everything before is committed.
      model: knows masks and padding.
    """
    masked = canvas == model.mask_token_id
    ends = np.isin(canvas, stop_tokens) & (committed >= 0) & (np.cumsum(masked, axis=-1) == 0)
    return np.where(masked & (np.cumsum(ends, axis=-1) > 0), model.pad_token_id, canvas)


class CanvasRows:
    """A batch's canvases on their way to the devices and back.

    Attributes:
      canvas: int32 ``[batch, width]``, filler rows included.
      lengths: int32 ``[batch]``.
      count: rows that are no filler.
      own_lengths: int32 ``[count]``.
      onto: int32 ``[B, S + N]``, what stands in the caller's rows where no token of ours does.
    """

    def __init__(self, runner: Runner, rows: Rows, config: DiffusionConfig, width: int, batch: int) -> None:
        """Lay rows out on canvases.

        Args:
          runner: the model.
          rows: at most ``batch`` start-aligned prompts.
          config: the request.
          width: bucket, at least the longest prompt and its new tokens.
          batch: rows on the devices, filler included.
        """
        model = runner.layout.config
        canvas, lengths = make_canvas(rows, model, config.max_new_tokens, width)
        self._start, self.own_lengths = canvas, lengths
        self._model, self._stop_tokens = model, config.stop_token_ids
        self.count = len(canvas)
        # Filler rows have one token that is no mask, and so nothing to do.
        quiet = np.int32(0 if model.mask_token_id != 0 else 1)
        self.canvas = np.pad(canvas, ((0, batch - self.count), (0, 0)), constant_values=quiet)
        self.lengths = np.pad(lengths, (0, batch - self.count), constant_values=1).astype(np.int32)
        # What stands in the caller's rows where no token of ours does: the caller's own padding.
        self.onto = np.pad(rows.original, ((0, 0), (0, config.max_new_tokens)))

    def to_caller(self, values: np.ndarray, onto: np.ndarray | None = None) -> np.ndarray:
        """Values ``[batch, width, ...]`` in the caller's rows ``[B, S + N, ...]``."""
        return end_align(values[: self.count], self.own_lengths, self.onto if onto is None else onto)

    def canvas_of(self, state: Any) -> np.ndarray:
        """The canvas of a state with ``canvas`` and ``committed``, in the caller's rows: int32 ``[B, S + N]``."""
        return self.to_caller(self._ended(fetch(state.canvas), fetch(state.commit_steps)))

    def _ended(self, canvas: np.ndarray, committed: np.ndarray) -> np.ndarray:
        return pad_after_end(canvas, committed, self._stop_tokens, self._model)

    def result(self, state: Any, steps: int, history: bool, forwards: int, positions: int) -> RunResult:
        """What a run hands back, from its final state with ``canvas``, ``committed`` and ``log_probabilities``."""
        final, committed = fetch(state.canvas), fetch(state.commit_steps)
        log_probabilities, unfolded = None, None
        if state.log_probabilities is not None:
            log_probabilities = self.to_caller(fetch(state.log_probabilities), np.zeros(self.onto.shape, np.float32))
        if history:
            count = np.arange(steps, dtype=np.int32)[:, None, None]
            own, kept = committed[: self.count], final[: self.count]
            there = (own >= 0) & (own <= count)
            canvases = self._ended(np.where(there, kept, self._start), np.where(there, own, -1))
            unfolded = np.stack([self.to_caller(canvas) for canvas in canvases])
        return RunResult(
            sequences=self.to_caller(self._ended(final, committed)),
            commit_steps=self.to_caller(committed, np.full_like(self.onto, -1)),
            history=unfolded,
            log_probabilities=log_probabilities,
            forwards=forwards,
            positions=positions,
        )
