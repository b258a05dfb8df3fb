"""Executes step plans: all pools of a server on one mesh. Every host of a run executes the same plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from runtime.execution.left_padding import Rows
from runtime.execution.pool import Pool, PoolShape, check_pools
from runtime.execution.row_request import RowRequest
from runtime.execution.runner import Runner
from runtime.execution.scoring import score_rows
from runtime.execution.step_plan import Insertion, PoolPlan, ScorePass, StepOutcome, StepPlan

_WARM_UP_TOKENS = 2


class Executor:
    """Slots of several shapes on one mesh.

    Attributes:
      pools: in the order of their shapes.
    """

    def __init__(self, runner: Runner, shapes: Sequence[PoolShape]) -> None:
        """Make the slots.

        Args:
          runner: the model on its mesh.
          shapes: of the pools, at least one.

        Raises:
          InputError: a shape that the model does not allow, or more slots than memory does.
        """
        self._runner = runner
        check_pools(runner, list(shapes))
        self.pools = [Pool.open(runner, shape) for shape in shapes]

    @property
    def compiled_programs(self) -> int:
        """Programs compiled so far."""
        return self._runner.programs.compiled

    def score_batch(self, width: int) -> int:
        """Rows that are scored at a time on a canvas of ``width``, which is that of some pool."""
        return min(pool.count for pool in self.pools if pool.width == width)

    def warm_up(self, stop: Callable[[], bool]) -> bool:
        """Run every program once, so that all are compiled.

        Args:
          stop: asked between programs, on all hosts alike, whether to leave it at that.

        Returns:
          Whether all programs are compiled; False if ``stop`` ended it.
        """
        # Any token but the mask, which a diffusion model would fill.
        token = 0 if self._runner.layout.config.mask_token_id != 0 else 1
        for number, pool in enumerate(self.pools):
            row = RowRequest([token], pool.short_config(_WARM_UP_TOKENS), 0)
            # The first insertion needs no program of its own; the second one does.
            for _ in range(2):
                if stop():
                    return False
                self.execute(StepPlan([PoolPlan(number, [], [Insertion(0, 0, row)], 1, True)]))
                while pool.held:
                    self.execute(StepPlan([PoolPlan(number, [], [], 1, True)]))
        for width in sorted({pool.width for pool in self.pools}):
            if stop():
                return False
            score = ScorePass([[token] * 2], [[token] * 2], 1.0, width, self.score_batch(width))
            self.execute(StepPlan(score=score))
        return not stop()

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Do what was planned, on this host's devices."""
        pools = [self.pools[pool.pool].execute(pool) for pool in plan.pools]
        return StepOutcome(pools, None if plan.score is None else self._score(plan.score))

    def _score(self, score: ScorePass) -> list[np.ndarray]:
        lengths = np.array([len(row) for row in score.rows], np.int32)
        rows, targets = (_start_aligned(tokens, lengths) for tokens in (score.rows, score.targets))
        scores = score_rows(self._runner, rows, targets, score.temperature, score.width, score.batch)
        # They come back at the end of rows of one width.
        return [own[len(own) - length :] for own, length in zip(scores, lengths, strict=True)]


def _start_aligned(rows: Sequence[Sequence[int]], lengths: np.ndarray) -> Rows:
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for own, row in zip(tokens, rows, strict=True):
        own[: len(row)] = row
    return Rows(tokens, lengths, tokens)
