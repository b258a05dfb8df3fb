"""What every kind of run hands back.

Dimension letters: B batch, S the caller's prompt width, N new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RunResult:
    """Tokens of one batch, in the caller's rows.

    Attributes:
      sequences: int32 ``[B, S + N]``.
      commit_steps: int32 ``[B, S + N]``, the step that set each position, -1 for the prompt and where none has.
      history: int32 ``[steps, B, S + N]`` when asked for.
      log_probabilities: float32 ``[B, S + N]`` when asked for.
      forwards: forward passes run.
      positions: positions that they computed for rows that were not done, prompts included.
    """

    sequences: np.ndarray
    commit_steps: np.ndarray
    history: np.ndarray | None
    log_probabilities: np.ndarray | None
    forwards: int
    positions: int
