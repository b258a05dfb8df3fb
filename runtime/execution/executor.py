"""The executor of step plans: all pools of a server on one mesh. Every host of a run executes the same plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.execution.buckets import Bucket
from runtime.execution.left_padding import Rows
from runtime.execution.pool import Pool
from runtime.execution.pool_shape import PoolShape, check_pools
from runtime.execution.row_request import RowRequest
from runtime.execution.runner import Runner
from runtime.execution.scoring import compile_scoring, score_rows
from runtime.execution.step_plan import BucketPlan, Insertion, PoolPlan, ScorePass, StepOutcome, StepPlan

# A row that is not done after its first step, which may add two tokens.
_WARM_UP_TOKENS = 3
# Number of widths for score passes: the widest, and successive halves of it.
_SCORE_WIDTHS = 4


@dataclass(frozen=True, order=True)
class Programs:
    """The programs of one bucket.

    Attributes:
      pool: index of the bucket's pool; None for programs that score rows.
      bucket: shape of the bucket.
    """

    pool: int | None
    bucket: Bucket

    def to_json(self) -> list[Any]:
        """Convert to JSON values, for the other hosts."""
        return [self.pool, self.bucket.rows, self.bucket.width]

    @classmethod
    def from_json(cls, said: Sequence[Any]) -> Programs:
        """Create from the output of :meth:`to_json`."""
        return cls(said[0], Bucket(*said[1:]))

    def __str__(self) -> str:
        owner = "scores" if self.pool is None else f"mode {self.pool}"
        return f"{owner}: {self.bucket.rows} x {self.bucket.width}"


class Executor:
    """The slots of several modes on one mesh.

    Attributes:
      pools: one pool per mode.
      warmed_up: the programs that :meth:`warm_up` has compiled and run, with the seconds that each took.
      score_widths: widths of score passes whose programs have been compiled, in ascending order.
      score_rows: number of rows of a score pass.
    """

    def __init__(self, runner: Runner, shapes: Sequence[PoolShape]) -> None:
        """Create the pools.

        Args:
          runner: the model on its mesh.
          shapes: specifications of the pools, at least one.

        Raises:
          InputError: the model does not allow a specification, or the slots need too much memory.
        """
        self._runner = runner
        check_pools(runner, list(shapes))
        self.pools = [Pool.open(runner, shape) for shape in shapes]
        self.warmed_up: dict[Programs, float] = {}
        self.score_rows = runner.layout.spec.data
        widest = max(pool.width for pool in self.pools)
        self._score_widths = sorted({runner.bucket(-(-widest >> power)) for power in range(_SCORE_WIDTHS)} | {widest})
        self.score_widths = [widest]

    @property
    def compiled_programs(self) -> int:
        """Number of programs compiled so far, or read from JAX's persistent compilation cache."""
        return self._runner.programs.compiled

    @property
    def cached_programs(self) -> int:
        """Number of these programs that were read from the persistent cache."""
        return self._runner.programs.cached

    # ---- programs ---------------------------------------------------------------------------------------------

    @property
    def later(self) -> list[Programs]:
        """Programs to compile after :meth:`warm_up`, the most useful ones first."""
        buckets = [Programs(pool, bucket) for pool, one in enumerate(self.pools) for bucket in one.grid.buckets[1:]]
        ranked = sorted(buckets, key=lambda one: self.pools[one.pool or 0].grid.buckets.index(one.bucket))
        return ranked + [Programs(None, Bucket(self.score_rows, width)) for width in self._score_widths[-2::-1]]

    def compile(self, programs: Programs) -> str:
        """Compile all programs of a bucket. May be called from any thread.

        Returns:
          A fingerprint of these programs, equal on hosts that compiled the same ones; empty on a single host.
        """
        # A host that failed at an earlier bucket must not differ in all later ones.
        self._runner.programs.fingerprint = ""
        if programs.pool is not None:
            self.pools[programs.pool].compile(programs.bucket)
        else:
            compile_scoring(self._runner, programs.bucket.rows, programs.bucket.width)
        return self._runner.programs.fingerprint

    def allow_scoring(self, width: int) -> None:
        """Allow score passes of this width from now on."""
        self.score_widths = sorted({*self.score_widths, width})

    def warm_up(self, stop: Callable[[], bool]) -> bool:
        """Run one row in the first bucket of each pool, which is wide enough for any row, and one score pass.

        After that, requests can be served.

        Args:
          stop: called between programs, at the same points on all hosts; returns whether to stop the warm-up.

        Returns:
          True when the warm-up is complete; False if ``stop`` ended it.
        """
        pools = [Programs(number, pool.grid.buckets[0]) for number, pool in enumerate(self.pools)]
        for one in [*pools, Programs(None, Bucket(self.score_rows, self.score_widths[-1]))]:
            if stop():
                return False
            start = time.perf_counter()
            self.run_once(one)
            if one.pool is not None:
                self.pools[one.pool].compile(one.bucket)
            self.warmed_up[one] = time.perf_counter() - start
        return not stop()

    def run_once(self, programs: Programs) -> None:
        """Run one short row in a bucket, or one score pass. All hosts call this; nothing else may be running.

        The first run of a program takes longer than later ones; on a CPU, XLA prepares its matrix products then.
        """
        # Any token except the mask, which a diffusion model would fill.
        token = 0 if self._runner.layout.config.mask_token_id != 0 else 1
        number, bucket = programs.pool, programs.bucket
        if number is None:
            self.execute(StepPlan(score=ScorePass([[token] * 2], [[token] * 2], 1.0, bucket.width, bucket.rows)))
            return
        pool = self.pools[number]
        row = RowRequest([token], pool.short_config(_WARM_UP_TOKENS), 0)
        free = [None] * (bucket.rows - 1)
        # Move the row into another bucket of the same shape, so that the programs that move rows have run too.
        new = [Insertion(0, row)]
        self.execute(StepPlan([PoolPlan(number, new, [BucketPlan(0, *_sizes(bucket), [0, *free], 1, True)])]))
        while pool.held:
            self.execute(StepPlan([PoolPlan(number, [], [BucketPlan(1, *_sizes(bucket), [0, *free], 1, True)])]))
        self.execute(StepPlan([PoolPlan(number, [], [])]))

    # ---- steps ------------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Execute a plan on this host's devices."""
        pools = [self.pools[pool.pool].execute(pool) for pool in plan.pools]
        return StepOutcome(pools, None if plan.score is None else self._score(plan.score))

    def _score(self, score: ScorePass) -> list[np.ndarray]:
        lengths = np.array([len(row) for row in score.rows], np.int32)
        rows, targets = (_start_aligned(tokens, lengths) for tokens in (score.rows, score.targets))
        scores = score_rows(self._runner, rows, targets, score.temperature, score.width, score.batch)
        # The scores are end-aligned in rows of equal width.
        return [own[len(own) - length :] for own, length in zip(scores, lengths, strict=True)]


def _start_aligned(rows: Sequence[Sequence[int]], lengths: np.ndarray) -> Rows:
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for own, row in zip(tokens, rows, strict=True):
        own[: len(row)] = row
    return Rows(tokens, lengths, tokens)


def _sizes(bucket: Bucket) -> tuple[int, int]:
    return bucket.rows, bucket.width
