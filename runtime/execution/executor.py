"""Executes step plans: all pools of a server on one mesh. Every host of a run executes the same plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.execution.buckets import Bucket
from runtime.execution.left_padding import Rows
from runtime.execution.pool import Pool, PoolShape, check_pools
from runtime.execution.row_request import RowRequest
from runtime.execution.runner import Runner
from runtime.execution.scoring import compile_scoring, score_rows
from runtime.execution.step_plan import BucketPlan, Insertion, PoolPlan, ScorePass, StepOutcome, StepPlan

_WARM_UP_TOKENS = 2
# Widths that are scored at are halves of the widest, so many of them.
_SCORE_WIDTHS = 4


@dataclass(frozen=True, order=True)
class Programs:
    """The programs of one bucket.

    Attributes:
      pool: whose bucket it is; None for what scores rows.
      bucket: its shape.
    """

    pool: int | None
    bucket: Bucket

    def to_json(self) -> list[Any]:
        """As JSON values, for the other hosts."""
        return [self.pool, self.bucket.rows, self.bucket.width]

    @classmethod
    def from_json(cls, said: Sequence[Any]) -> Programs:
        """What :meth:`to_json` wrote."""
        return cls(said[0], Bucket(*said[1:]))

    def __str__(self) -> str:
        owner = "scores" if self.pool is None else f"mode {self.pool}"
        return f"{owner}: {self.bucket.rows} x {self.bucket.width}"


class Executor:
    """Slots of several ways of decoding on one mesh.

    Attributes:
      pools: in the order of their shapes.
      score_widths: widths of score passes whose programs are there, ascending.
      score_rows: rows of a score pass.
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
        self.score_rows = runner.layout.spec.data
        widest = max(pool.width for pool in self.pools)
        self._score_widths = sorted({runner.bucket(-(-widest >> power)) for power in range(_SCORE_WIDTHS)} | {widest})
        self.score_widths = [widest]

    @property
    def compiled_programs(self) -> int:
        """Programs compiled so far."""
        return self._runner.programs.compiled

    @property
    def cached_programs(self) -> int:
        """Those of them that were in JAX's persistent cache."""
        return self._runner.programs.cached

    # ---- programs ---------------------------------------------------------------------------------------------

    @property
    def later(self) -> list[Programs]:
        """What is compiled after :meth:`warm_up`, in the order in which it is likely to be of use."""
        buckets = [Programs(pool, bucket) for pool, one in enumerate(self.pools) for bucket in one.grid.buckets[1:]]
        ranked = sorted(buckets, key=lambda one: self.pools[one.pool or 0].grid.buckets.index(one.bucket))
        return ranked + [Programs(None, Bucket(self.score_rows, width)) for width in self._score_widths[-2::-1]]

    def compile(self, programs: Programs) -> str:
        """Compile all programs of a bucket, from any thread.

        Returns:
          What all hosts have alike that have compiled the same so far.
        """
        if programs.pool is not None:
            self.pools[programs.pool].compile(programs.bucket)
        else:
            compile_scoring(self._runner, programs.bucket.rows, programs.bucket.width)
        return self._runner.programs.fingerprint

    def allow_scoring(self, width: int) -> None:
        """Let score passes have this width from now on."""
        self.score_widths = sorted({*self.score_widths, width})

    def warm_up(self, stop: Callable[[], bool]) -> bool:
        """Run one bucket of each pool, in which every row fits, and one score pass, so that requests can be served.

        Args:
          stop: asked between programs, on all hosts alike, whether to leave it at that.

        Returns:
          Whether the programs are there; False if ``stop`` ended it.
        """
        # Any token but the mask, which a diffusion model would fill.
        token = 0 if self._runner.layout.config.mask_token_id != 0 else 1
        for number, pool in enumerate(self.pools):
            if stop():
                return False
            bucket = pool.grid.buckets[0]
            row = RowRequest([token], pool.short_config(_WARM_UP_TOKENS), 0)
            free = [None] * (bucket.rows - 1)
            # From one bucket into another of its shape, so that what moves rows has run too.
            new = [Insertion(0, row)]
            self.execute(StepPlan([PoolPlan(number, new, [BucketPlan(0, *_sizes(bucket), [0, *free], 1, True)])]))
            while pool.held:
                self.execute(StepPlan([PoolPlan(number, [], [BucketPlan(1, *_sizes(bucket), [0, *free], 1, True)])]))
            self.execute(StepPlan([PoolPlan(number, [], [])]))
            pool.compile(bucket)
        if stop():
            return False
        score = ScorePass([[token] * 2], [[token] * 2], 1.0, self.score_widths[-1], self.score_rows)
        self.execute(StepPlan(score=score))
        return not stop()

    # ---- steps ------------------------------------------------------------------------------------------------

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


def _sizes(bucket: Bucket) -> tuple[int, int]:
    return bucket.rows, bucket.width
