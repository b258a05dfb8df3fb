"""Plans of the work that the devices do in one scheduler step, and its outcome. Plans are sent between hosts as JSON.

Dimension letters: S positions of a slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.execution.row_request import RowRequest, RowResult

_CONFIGS: dict[str, type[DiffusionConfig | SamplingConfig]] = {
    kind.__name__: kind for kind in (DiffusionConfig, SamplingConfig)
}


@dataclass(frozen=True)
class Insertion:
    """A row that gets its first slot.

    Attributes:
      row: number that identifies the row in plans and outcomes.
      request: what to generate.
    """

    row: int
    request: RowRequest


@dataclass(frozen=True)
class BucketPlan:
    """The plan of one step for one bucket.

    Attributes:
      number: number of the bucket within its pool. A bucket that is not open yet is opened.
      rows, width: shape of the bucket.
      slots: number of the row that each slot holds after the step starts; None for a free slot. A row that is elsewhere
        moves here. A row that no plan mentions is evicted.
      iterations: maximum number of denoise steps, or tokens, to run; 0 for none.
      canvases: whether the outcome includes the canvases of unfinished rows.
      chunks: maximum number of prompt chunks that each ``data`` shard reads before the iterations; None for no limit.
      until_ended: the iterations end with the one in which this many rows have ended; 0 for all rows.
    """

    number: int
    rows: int
    width: int
    slots: Sequence[int | None]
    iterations: int
    canvases: bool = False
    chunks: int | None = 1
    until_ended: int = 0


@dataclass(frozen=True)
class PoolPlan:
    """The work of one pool in one scheduler step.

    Attributes:
      pool: index of the pool.
      insert: rows that get a slot for the first time.
      buckets: all buckets that are open from now on.
      finish: rows that a stop test has ended. They are evicted first, and the outcome includes their results.
    """

    pool: int
    insert: Sequence[Insertion]
    buckets: Sequence[BucketPlan]
    finish: Sequence[int] = field(default_factory=list)


@dataclass(frozen=True)
class ScorePass:
    """Rows to score in one forward pass.

    Attributes:
      rows: token ids that the model reads.
      targets: token ids to score, of the same lengths.
      temperature: divides the logits.
      width: the bucket to pad to.
      batch: number of rows of the program, at least ``len(rows)``.
    """

    rows: Sequence[Sequence[int]]
    targets: Sequence[Sequence[int]]
    temperature: float
    width: int
    batch: int


@dataclass(frozen=True)
class StepPlan:
    """The plan of one step, which every host executes.

    Attributes:
      pools: plans of the pools that have something to do.
      score: rows to score, if any.
    """

    pools: Sequence[PoolPlan] = field(default_factory=list)
    score: ScorePass | None = None

    def to_json(self) -> dict[str, Any]:
        """Convert the plan to JSON values, for the other hosts."""
        plan = dataclasses.asdict(self)
        for pool, own in zip(plan["pools"], self.pools, strict=True):
            for inserted, insertion in zip(pool["insert"], own.insert, strict=True):
                inserted["request"]["kind"] = type(insertion.request.config).__name__
        return plan

    @classmethod
    def from_json(cls, plan: Mapping[str, Any]) -> StepPlan:
        """Create a plan from the output of :meth:`to_json`."""
        pools = [
            PoolPlan(
                pool["pool"],
                [_insertion(one) for one in pool["insert"]],
                [BucketPlan(**bucket) for bucket in pool["buckets"]],
                pool["finish"],
            )
            for pool in plan["pools"]
        ]
        return cls(pools, ScorePass(**plan["score"]) if plan["score"] else None)


def _insertion(said: Mapping[str, Any]) -> Insertion:
    request = said["request"]
    config = _CONFIGS[request["kind"]](**request["config"])
    return Insertion(said["row"], RowRequest(request["tokens"], config, request["seed"], request["suffix"]))


@dataclass(frozen=True)
class BucketRun:
    """The outcome of one step in one bucket.

    Attributes:
      number: number of the bucket.
      forwards: number of forward passes, prefills included.
      iterations: number of iterations, at most as planned.
      seconds: wall time of the iterations on this host.
      prefill_seconds: wall time of reading prompts in chunks.
    """

    number: int
    forwards: int
    iterations: int
    seconds: float
    prefill_seconds: float = 0.0


@dataclass(frozen=True)
class PoolOutcome:
    """The outcome of one step in one pool.

    Attributes:
      pool: index of the pool.
      results: results of the rows that are done; their slots are free again.
      canvases: by the number of each unfinished row, its canvas int32 ``[S]``, with -1 at positions that have no token
        yet. Only buckets whose plan requests canvases are included.
      runs: the buckets that ran.
      unread: rows whose prompts are not completely in the cache. No tokens were chosen for them.
      accepted: by the number of each unfinished row that grows with drafts, its accepted steps so far.
    """

    pool: int
    results: Sequence[RowResult]
    canvases: Mapping[int, np.ndarray]
    runs: Sequence[BucketRun]
    unread: Collection[int] = ()
    accepted: Mapping[int, int] = field(default_factory=dict)

    @property
    def forwards(self) -> int:
        """Number of forward passes, including prefills."""
        return sum(run.forwards for run in self.runs)


@dataclass(frozen=True)
class StepOutcome:
    """The results of a :class:`StepPlan` on this host.

    Attributes:
      pools: one outcome for each pool of the plan, in the same order.
      scores: float32 scores of each scored row, of the row's length; None if nothing was scored.
    """

    pools: Sequence[PoolOutcome] = field(default_factory=list)
    scores: Sequence[np.ndarray] | None = None
