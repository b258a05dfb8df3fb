"""What a scheduler asks the devices to do in one step, and what came of it. Plans travel between hosts as JSON.

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
      row: number of the row, by which plans and outcomes name it.
      request: what to generate.
    """

    row: int
    request: RowRequest


@dataclass(frozen=True)
class BucketPlan:
    """One step of one bucket.

    Attributes:
      number: of the bucket among those of its pool; one that is not open yet is opened.
      rows, width: its shape.
      slots: number of the row that each slot is to hold, None for none. A row that other slots hold moves here; one
        that no slot is to hold any more is evicted.
      iterations: denoise steps, or tokens, to run at most; 0 for none.
      canvases: whether the outcome has the canvases of unfinished rows.
      chunks: of prompts that each shard of ``data`` reads at most before the iterations; None for whole prompts.
    """

    number: int
    rows: int
    width: int
    slots: Sequence[int | None]
    iterations: int
    canvases: bool = False
    chunks: int | None = 1


@dataclass(frozen=True)
class PoolPlan:
    """One step of one pool.

    Attributes:
      pool: index of the pool.
      insert: rows that get a slot for the first time.
      buckets: all that are open from now on.
      finish: rows that are done with what they have: results of the outcome, evicted before anything else.
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
      targets: token ids whose log-probabilities are wanted, as many for each row.
      temperature: divides the logits.
      width: positions to run at, a bucket.
      batch: rows to run at a time, at least as many as there are.
    """

    rows: Sequence[Sequence[int]]
    targets: Sequence[Sequence[int]]
    temperature: float
    width: int
    batch: int


@dataclass(frozen=True)
class StepPlan:
    """What all hosts do next.

    Attributes:
      pools: plans of the pools that have something to do.
      score: rows to score, if any.
    """

    pools: Sequence[PoolPlan] = field(default_factory=list)
    score: ScorePass | None = None

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values, for the other hosts."""
        plan = dataclasses.asdict(self)
        for pool, own in zip(plan["pools"], self.pools, strict=True):
            for inserted, insertion in zip(pool["insert"], own.insert, strict=True):
                inserted["request"]["kind"] = type(insertion.request.config).__name__
        return plan

    @classmethod
    def from_json(cls, plan: Mapping[str, Any]) -> StepPlan:
        """The plan that :meth:`to_json` wrote."""
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
    return Insertion(said["row"], RowRequest(request["tokens"], config, request["seed"]))


@dataclass(frozen=True)
class BucketRun:
    """What a step made of one bucket.

    Attributes:
      number: of the bucket.
      forwards: forward passes, prefills included.
      iterations: iterations that were run, no more than planned.
      seconds: wall time of the iterations on this host.
      prefill_seconds: that of reading prompts in chunks.
    """

    number: int
    forwards: int
    iterations: int
    seconds: float
    prefill_seconds: float = 0.0


@dataclass(frozen=True)
class PoolOutcome:
    """What a step made of one pool.

    Attributes:
      pool: index of the pool.
      results: rows that are done; their slots are free again.
      canvases: int32 ``[S]`` of each unfinished row by its number, -1 where nothing is committed or generated yet;
        empty if the plan did not ask for them.
      runs: of the buckets that had something to do.
      unread: rows whose prompts are not read to their end, so that they took no part in iterations.
    """

    pool: int
    results: Sequence[RowResult]
    canvases: Mapping[int, np.ndarray]
    runs: Sequence[BucketRun]
    unread: Collection[int] = ()

    @property
    def iterations(self) -> int:
        """Iterations of all buckets."""
        return sum(run.iterations for run in self.runs)

    @property
    def forwards(self) -> int:
        """Forward passes, prefills included."""
        return sum(run.forwards for run in self.runs)


@dataclass(frozen=True)
class StepOutcome:
    """What a step came to.

    Attributes:
      pools: outcomes of the planned pools.
      scores: float32 of each row that was scored, as long as the row; None if nothing was.
    """

    pools: Sequence[PoolOutcome] = field(default_factory=list)
    scores: Sequence[np.ndarray] | None = None
