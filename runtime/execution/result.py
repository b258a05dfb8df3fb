"""The result of a generation, whichever way it was decoded.

Dimension letters: B batch, S the caller's prompt width, N new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class GenerationStats:
    """What a generation cost.

    Attributes:
      forwards: forward passes that were executed, all batches together. With a cache a pass may be the refresh of some
        rows, one after another, and a window of the others.
      positions: positions that they computed, prompts included, for rows that were not done.
      steps: denoise steps that were asked for; with blocks, the most that any row may take.
      tokens: tokens committed, without what follows the end of a row.
      seconds: wall time, compilation included.
      compiled_programs: programs compiled during this call, 0 in steady state.
      compile_seconds: time that took.
      masks_left: positions still masked at the end, because the model predicted MASK.
      batches: device batches the rows were split into.
    """

    forwards: int = 0
    positions: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    compiled_programs: int = 0
    compile_seconds: float = 0.0
    masks_left: int = 0
    batches: int = 0


@dataclass
class GenerationResult:
    """Tokens of a batch.

    Attributes:
      sequences: int32 ``[B, S + N]``, the caller's rows, padding included, and the new tokens.
      commit_steps: int32 ``[B, S + N]``, the step that set each position, -1 for the prompt.
      history: int32 ``[steps, B, S + N]`` after each step, skipped ones included, when asked for.
      seeds: the seed of each row; given back as the configuration's ``seed`` they repeat it.
      log_probabilities: float32 ``[B, S + N]``, log-probability of each new token under the model itself (temperature
        and filters left out) when it was chosen, 0 elsewhere, when asked for.
      stats: what it cost.
    """

    sequences: np.ndarray
    commit_steps: np.ndarray
    history: np.ndarray | None
    seeds: list[int]
    log_probabilities: np.ndarray | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)


def committed_tokens(
    sequence: np.ndarray, commit_steps: np.ndarray, prompt: int, stop_token_ids: Sequence[int], limit: int | None = None
) -> int:
    """Number of positions of a row that some step has set, without those after its end.

    Args:
      sequence: int32 ``[W]``.
      commit_steps: int32 ``[W]``, -1 where no step has set a position.
      prompt: where the new tokens start.
      stop_token_ids: a row ends with the first of these among its new tokens.
      limit: new tokens that count at most; None for no limit.
    """
    committed = commit_steps >= 0
    stops = np.flatnonzero((committed & np.isin(sequence, stop_token_ids))[prompt:])
    new = len(sequence) if not stops.size else int(stops[0]) + 1
    return int(committed[: prompt + (new if limit is None else min(new, limit))].sum())


def masks_left(sequences: np.ndarray, real: np.ndarray, mask_token_id: int) -> np.ndarray:
    """Masks that are left in each row: sequences ``[B, W]``, real positions bool ``[B, W]`` -> ``[B]``."""
    return ((sequences == mask_token_id) & real).sum(axis=1)
