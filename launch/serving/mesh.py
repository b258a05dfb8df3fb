"""The mesh's side of the server: fixed slots, and one turn after another, the same on every host.

What is done in a turn is decided on host 0 and done by all. What is done here depends on that alone.

Dimension letters: S positions of a slot.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.decoding.block_schedule import block_schedule
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.engine import Engine
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.runner import canvas_bucket
from runtime.execution.specialization import general
from sharding.errors import InputError

Config = DiffusionConfig | SamplingConfig

_WARM_UP_TOKENS = 2


@dataclass(frozen=True)
class Shape:
    """Slots that there are to be.

    Attributes:
      config: decides what is compiled.
      width: S.
      slots: how many.
      steps: of a block, the most that a row may have; None for as many as positions, or as ``config`` has.
    """

    config: Config
    width: int
    slots: int
    steps: int | None


def most_steps(config: Config, width: int, wanted: int | None) -> int:
    """Steps of a block that rows may have in slots of this width, as :class:`Shape` says.

    Raises:
      InputError: fewer than a request has that says nothing.
    """
    if isinstance(config, SamplingConfig):
        return 1
    length, own = block_schedule(config, width)
    if wanted is None:
        return max(width, own)
    if wanted < own:
        raise InputError(
            f"--max_steps={wanted}: by default a block of {length} positions has {own} steps (parallel="
            f"{config.parallel}); give as many, fewer --steps, or a shorter --block_length"
        )
    return wanted


@dataclass(frozen=True)
class PoolTurn:
    """What becomes of one pool in a turn.

    Attributes:
      pool: its number.
      empty: slots whose rows are given up.
      enter: slot, number and request of rows that enter.
      iterations: to run.
      look: whether what stands in the slots is wanted.
    """

    pool: int
    empty: Sequence[int]
    enter: Sequence[tuple[int, int, RowRequest]]
    iterations: int
    look: bool


@dataclass(frozen=True)
class Scoring:
    """Rows to score in one pass.

    Attributes:
      rows: what the model reads.
      targets: tokens whose probabilities are wanted, as many a row.
      temperature: divides the logits.
      width: positions to run at.
      batch: rows to run at a time, at least as many as there are.
    """

    rows: Sequence[Sequence[int]]
    targets: Sequence[Sequence[int]]
    temperature: float
    width: int
    batch: int


@dataclass(frozen=True)
class Turn:
    """What all hosts do next.

    Attributes:
      pools: those in which something is done.
      scoring: to be scored, if anything.
      ask: whether to ask all hosts if the run is to end.
      end: whether this is the last turn.
    """

    pools: Sequence[PoolTurn] = ()
    scoring: Scoring | None = None
    ask: bool = False
    end: bool = False

    def to_json(self) -> dict[str, Any]:
        """For the other hosts."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Turn:
        """From host 0."""
        pools = [PoolTurn(**(one | {"enter": [_row(*entry) for entry in one["enter"]]})) for one in said["pools"]]
        scoring = Scoring(**said["scoring"]) if said["scoring"] else None
        return cls(pools, scoring, said["ask"], said["end"])


def _row(slot: int, number: int, request: dict[str, Any]) -> tuple[int, int, RowRequest]:
    kind = DiffusionConfig if "steps" in request["config"] else SamplingConfig
    return slot, number, RowRequest(request["tokens"], kind(**request["config"]), request["seed"])


@dataclass
class PoolOutcome:
    """What a turn made of one pool.

    Attributes:
      pool: its number.
      results: of rows that are done and have left.
      canvases: int32 ``[S]`` of rows that are still there, by number, -1 where nothing stands yet; if looked at.
      forwards: passes that the turn took.
      seconds: that an iteration took on this host, 0 where there was none.
    """

    pool: int
    results: list[RowResult]
    canvases: dict[int, np.ndarray]
    forwards: int
    seconds: float


@dataclass
class Outcome:
    """What a turn came to.

    Attributes:
      pools: of those that had something to do.
      scores: float32 of every row that was scored, as long as the row.
    """

    pools: list[PoolOutcome] = field(default_factory=list)
    scores: list[np.ndarray] | None = None


class Pool:
    """Slots of one shape, and who is in them.

    Attributes:
      width: S, rounded up.
      count: how many slots.
      steps: of a block, the most that a row may have.
      held: number and request of each slot that is taken.
      warm_up_config: of a row that is soon done.
    """

    def __init__(self, engine: Engine, shape: Shape) -> None:
        """Make free slots on the mesh."""
        config = general(shape.config)
        width = canvas_bucket(shape.width, engine.layout, engine.platform)
        self.steps = most_steps(config, width, shape.steps)
        self._slots = engine.slots(config, width, shape.slots, self.steps)
        few: dict[str, Any] = {"max_new_tokens": _WARM_UP_TOKENS}
        if isinstance(config, DiffusionConfig):
            few["steps"] = _WARM_UP_TOKENS
        self.warm_up_config = config.replace(**few)
        self.width, self.count = self._slots.width, self._slots.count
        self.held: dict[int, tuple[int, RowRequest]] = {}

    def turn(self, turn: PoolTurn) -> PoolOutcome:
        """Rows go, rows come, all that are there go on."""
        slots, before = self._slots, self._slots.forwards
        changes: dict[int, RowRequest | None] = dict.fromkeys(turn.empty)
        for slot in turn.empty:
            self.held.pop(slot, None)
        for slot, number, request in turn.enter:
            changes[slot] = request
            self.held[slot] = number, request
        if changes:
            slots.insert(changes)
        results: list[RowResult] = []
        canvases: dict[int, np.ndarray] = {}
        seconds = 0.0
        if self.held and turn.iterations:
            start, iterations = time.perf_counter(), slots.iterations
            done = slots.run(turn.iterations)
            seconds = (time.perf_counter() - start) / max(1, slots.iterations - iterations)
            leaving = {slot: self.held.pop(slot) for slot in list(self.held) if done[slot]}
            results = slots.collect(leaving) if leaving else []
            if turn.look and self.held:
                canvas = slots.canvas()
                canvases = {number: canvas[slot, : row.length] for slot, (number, row) in self.held.items()}
        return PoolOutcome(turn.pool, results, canvases, slots.forwards - before, seconds)


class Mesh:
    """An engine with all its slots.

    Attributes:
      engine: the model.
      pools: narrow slots before wide ones, those of the first configuration first.
    """

    def __init__(self, engine: Engine, shapes: Sequence[Shape]) -> None:
        """Make the slots.

        Raises:
          InputError: a shape that the model does not allow, or more of them than memory does.
        """
        self.engine = engine
        engine.check_slots([(general(shape.config), shape.width, shape.slots) for shape in shapes])
        self.pools = [Pool(engine, shape) for shape in shapes]

    def warm_up(self, ending: Callable[[], bool]) -> bool:
        """Run every program once, so that all are compiled.

        Args:
          ending: asked on all hosts between programs, whether to leave it at that.

        Returns:
          Whether there is somebody to serve.
        """
        model = self.engine.config
        quiet = 0 if model.mask_token_id != 0 else 1
        for number, pool in enumerate(self.pools):
            if ending():
                return False
            row = RowRequest([quiet], pool.warm_up_config, 0)
            self.turn(Turn([PoolTurn(number, [], [(0, 0, row)], 1, True)]))
            while pool.held:
                self.turn(Turn([PoolTurn(number, [], [], 1, True)]))
        for width in sorted({pool.width for pool in self.pools}):
            if ending():
                return False
            self.turn(Turn(scoring=Scoring([[quiet] * 2], [[quiet] * 2], 1.0, width, self.score_batch(width))))
        return not ending()

    def score_batch(self, width: int) -> int:
        """Rows of this width that are scored at a time."""
        return min(pool.count for pool in self.pools if pool.width == width)

    def turn(self, turn: Turn) -> Outcome:
        """Do what was decided."""
        outcome = Outcome([self.pools[one.pool].turn(one) for one in turn.pools])
        if turn.scoring is not None:
            outcome.scores = self._score(turn.scoring)
        return outcome

    def _score(self, scoring: Scoring) -> list[np.ndarray]:
        longest = max(map(len, scoring.rows))
        ids, targets, mask = (np.zeros((len(scoring.rows), longest), np.int32) for _ in range(3))
        for row, (tokens, wanted) in enumerate(zip(scoring.rows, scoring.targets, strict=True)):
            start = longest - len(tokens)
            ids[row, start:], targets[row, start:], mask[row, start:] = tokens, wanted, 1
        found = self.engine.score(
            ids, targets, mask, temperature=scoring.temperature, width=scoring.width, batch=scoring.batch
        )
        return [found[row, longest - len(tokens) :] for row, tokens in enumerate(scoring.rows)]
