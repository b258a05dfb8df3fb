"""Requests in a scheduler, and what happens to them.

Times are of the caller's clock, in seconds. Dimension letters: N new tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.decoding.parameters import DiffusionConfig
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.step_plan import ScorePass

# Whether the text of a row has come to an end that no token marks, as a stop string does. Called with the row's new
# tokens that will not change any more, and whether they are all; each call has those of the last one, and more. It
# returns how many of them count, or None while the row goes on.
StopTest = Callable[[Sequence[int], bool], int | None]


@dataclass(eq=False)
class RequestHandle:
    """A request: rows to generate, or passes to score, which are finished or aborted together.

    Attributes:
      owner: whose request it is, for fairness.
      rows: to generate.
      pool: index of the pool whose slots the rows get.
      score_passes: to run, one after another.
      arrived: when the request came.
      deadline: when it is aborted.
      stream: whether canvases are wanted along the way.
      stop_tests: of each row, None for one that ends with its tokens alone; empty for none at all.
      remaining: rows and passes that are not done.
      closed: whether the request is finished or aborted.
    """

    owner: Hashable = None
    rows: Sequence[RowRequest] = ()
    pool: int = 0
    score_passes: Sequence[ScorePass] = ()
    arrived: float = 0.0
    deadline: float = math.inf
    stream: bool = False
    stop_tests: Sequence[StopTest | None] = ()
    remaining: int = field(init=False)
    closed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.remaining = len(self.rows) + len(self.score_passes)


@dataclass(eq=False)
class ScheduledRow:
    """One row of a request, or one of its score passes.

    Attributes:
      handle: the request.
      index: which of its rows, or passes.
      inserted: when the row got its slot.
      iterations: that it has been in its slot for.
      prefix: tokens before its first open position, as far as canvases were looked at.
      first_token: when the first of them was seen, None before.
      last_growth: when they last became more.
      unread: whether its prompt is not read to its end: it has a slot, and no part in the iterations of its bucket.
      counted: new tokens that count, once the row's stop test has ended it; None before.
    """

    handle: RequestHandle
    index: int
    inserted: float = 0.0
    iterations: int = 0
    prefix: int = 0
    first_token: float | None = None
    last_growth: float = 0.0
    unread: bool = False
    counted: int | None = None

    @property
    def request(self) -> RowRequest:
        """The row to generate."""
        return self.handle.rows[self.index]

    @property
    def remaining(self) -> int:
        """Iterations that are still to come, at most, about."""
        return max(1, iterations_of(self.request) - self.iterations)

    @property
    def stop_test(self) -> StopTest | None:
        """The row's stop test, None if it has none."""
        return self.handle.stop_tests[self.index] if self.handle.stop_tests else None

    def look(self, tokens: np.ndarray, whole: bool) -> None:
        """Put new tokens that will not change any more to the row's stop test."""
        if self.stop_test is not None and self.counted is None:
            self.counted = self.stop_test(tokens.tolist(), whole)


def iterations_of(request: RowRequest) -> int:
    """Iterations that a row takes at most, masks in its prompt left out."""
    config = request.config
    if not isinstance(config, DiffusionConfig) or config.parallel != "none":
        return max(1, config.max_new_tokens)
    return max(1, min(config.steps, config.max_new_tokens or config.steps))


@dataclass(frozen=True)
class RowInserted:
    """A row has got a slot, after so many seconds of waiting."""

    handle: RequestHandle
    index: int
    seconds: float


@dataclass(frozen=True)
class FirstToken:
    """A row's first token stands, so many seconds after the request came."""

    handle: RequestHandle
    index: int
    seconds: float


@dataclass(frozen=True)
class PrefixGrown:
    """A streamed row has more tokens before its first open position, so many seconds after the last time."""

    handle: RequestHandle
    index: int
    seconds: float


@dataclass(frozen=True)
class CanvasChanged:
    """The canvas of a streamed row: new tokens int32 ``[N]``, -1 where nothing is committed or generated yet."""

    handle: RequestHandle
    index: int
    canvas: np.ndarray


@dataclass(frozen=True)
class RowFinished:
    """A row is done.

    Attributes:
      handle: the request.
      index: of the row.
      result: its tokens.
      tokens: that were committed, without what follows its end.
      steps: of its own that committed any.
      seconds: from its insertion.
      seconds_per_token: from the first token to the end, for each token after the first; None if there was none.
    """

    handle: RequestHandle
    index: int
    result: RowResult
    tokens: int
    steps: int
    seconds: float
    seconds_per_token: float | None


@dataclass(frozen=True)
class RowsScored:
    """A score pass is done: float32 scores of the request's rows from index ``first`` on."""

    handle: RequestHandle
    first: int
    scores: Sequence[np.ndarray]


@dataclass(frozen=True)
class RequestFinished:
    """All of a request is done, so many seconds after it came."""

    handle: RequestHandle
    seconds: float


Event = RowInserted | FirstToken | PrefixGrown | CanvasChanged | RowFinished | RowsScored | RequestFinished
