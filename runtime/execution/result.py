"""The result of a generation, with statistics.

Dimension letters: B batch, S the caller's prompt width, N new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class DraftStats:
    """How many steps of a row needed no forward pass of their own, because a draft was right.

    A step is a denoise step (``draft_steps``), or a new token of an autoregressive row (``prompt_lookup``,
    ``draft_tokens``).

    Attributes:
      passes: forward passes in which the row took part; each made one step, and those that its drafts allowed.
      accepted: steps that drafts allowed.
    """

    passes: int
    accepted: int

    @property
    def accepted_per_pass(self) -> float:
        """Average number of steps per pass that drafts allowed; 0 without a pass."""
        return self.accepted / self.passes if self.passes else 0.0


@dataclass
class GenerationStats:
    """Statistics of a generation.

    Attributes:
      forwards: number of forward passes, all batches together. With a cache, one pass may consist of refreshes of some
        rows, one after another, and a window pass of the others.
      positions: number of positions that the passes computed for unfinished rows, prompts and all drafts included.
      row_passes: with drafts, the number of unfinished rows, summed over forward passes.
      accepted_steps: steps, over all rows, that needed no forward pass of their own because a draft was right.
      steps: number of requested denoise steps; with blocks, the maximum number of steps of any row.
      tokens: number of committed tokens up to the ends of the rows.
      seconds: wall time, compilation included.
      compiled_programs: programs compiled during this call; 0 in steady state.
      compile_seconds: time spent on compiling.
      masks_left: masks left at the end, because the model predicted the mask token.
      batches: number of device batches that the rows were split into.
    """

    forwards: int = 0
    positions: int = 0
    row_passes: int = 0
    accepted_steps: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    compiled_programs: int = 0
    compile_seconds: float = 0.0
    masks_left: int = 0
    batches: int = 0


@dataclass
class GenerationResult:
    """The result of generating a batch.

    Attributes:
      sequences: int32 ``[B, S + N]``, the caller's rows, padding included, followed by the new tokens.
      commit_steps: int32 ``[B, S + N]``, the step that committed each position; -1 for the prompt.
      history: int32 ``[steps, B, S + N]``, the canvas after each step, including steps that commit nothing; None if it
        was not requested. For canvases of variable length int32 ``[entries, B, bucket]``: the canvas of each
        row after each of its changes, and -1 beyond the row's length and after its last entry.
      seeds: the seed of each row. Passing them as the configuration's ``seed`` reproduces the result.
      log_probabilities: float32 ``[B, S + N]``, the log-probability of each new token under the model (without
        temperature and filters) when it was chosen, and 0 elsewhere; None if it was not requested.
      stats: numbers of passes, steps and tokens, and times.
      drafts: one per row with drafts (``draft_steps``, ``prompt_lookup``, ``draft_tokens``), otherwise empty.
    """

    sequences: np.ndarray
    commit_steps: np.ndarray
    history: np.ndarray | None
    seeds: list[int]
    log_probabilities: np.ndarray | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)
    drafts: Sequence[DraftStats] = ()


def committed_tokens(
    sequence: np.ndarray, commit_steps: np.ndarray, prompt: int, stop_token_ids: Sequence[int], limit: int | None = None
) -> int:
    """Count the committed positions of a row up to its end.

    Args:
      sequence: int32 ``[W]``.
      commit_steps: int32 ``[W]``, -1 at positions that no step has committed.
      prompt: position at which the new tokens start.
      stop_token_ids: a row ends with the first of these among its new tokens.
      limit: maximum number of new tokens that count; None for no limit.
    """
    committed = commit_steps >= 0
    stops = np.flatnonzero((committed & np.isin(sequence, stop_token_ids))[prompt:])
    new = len(sequence) if not stops.size else int(stops[0]) + 1
    return int(committed[: prompt + (new if limit is None else min(new, limit))].sum())


def masks_left(sequences: np.ndarray, real: np.ndarray, mask_token_id: int) -> np.ndarray:
    """Count the masks left in each row: sequences ``[B, W]``, real positions bool ``[B, W]`` -> ``[B]``."""
    return ((sequences == mask_token_id) & real).sum(axis=1)
