"""Requests in a scheduler, and the events that report their progress.

Times are in seconds, on the caller's clock. Dimension letters: N new tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.execution.row_request import RowRequest, RowResult
from runtime.execution.step_plan import ScorePass

# A test that ends a row where no stop token does, for example at a stop string. It is called with the row's final new
# tokens so far (each call extends the tokens of the previous one), and with whether these are all of them. It returns
# how many of the tokens count, or None while the row should continue.
StopTest = Callable[[Sequence[int], bool], int | None]


@dataclass(eq=False)
class RequestHandle:
    """A request: rows to generate, or score passes, which finish or are aborted together.

    Attributes:
      owner: identifies the client, for fairness between clients.
      rows: rows to generate.
      pool: index of the pool whose slots the rows use.
      score_passes: score passes to run, one after another.
      arrived: time at which the request arrived.
      deadline: time at which the request is aborted.
      stream: whether to report the canvases of unfinished rows.
      stop_tests: one per row, None for a row without a stop test; empty if no row has one.
      remaining: number of rows and passes that are not done.
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


@dataclass(eq=False, slots=True)
class ScheduledRow:
    """One row of a request, or one of its score passes.

    Attributes:
      handle: the request.
      index: index among the request's rows, or among its score passes.
      inserted: time at which the row got its slot.
      iterations: number of iterations since then.
      positions: positions of the row, over all its canvases, that these iterations computed.
      accepted: accepted steps since then of a row that grows with drafts; otherwise 0.
      prefix: number of tokens before the first open position, in the last canvas that was fetched.
      first_token: time at which the first token was seen; None before that.
      last_growth: time at which ``prefix`` last grew.
      unread: whether part of its prompt is not in the cache yet. Such a row takes no part in iterations.
      counted: number of new tokens to keep, once the row's stop test has ended the row; None before that.
    """

    handle: RequestHandle
    index: int
    inserted: float = 0.0
    iterations: int = 0
    positions: int = 0
    accepted: int = 0
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
        """Approximate upper bound of the iterations that are left, at least 1."""
        return max(1, iterations_of(self.request) - self.iterations - self.accepted)

    @property
    def stop_test(self) -> StopTest | None:
        """The row's stop test; None if it has none."""
        return self.handle.stop_tests[self.index] if self.handle.stop_tests else None

    def run_stop_test(self, tokens: np.ndarray, whole: bool) -> None:
        """Run the row's stop test, if any, on the final new tokens; ``whole`` says that there will be no more."""
        if self.stop_test is not None and self.counted is None:
            self.counted = self.stop_test(tokens.tolist(), whole)


def iterations_of(request: RowRequest) -> int:
    """Return the maximum number of iterations that a row takes, not counting masks in its prompt.

    If its canvas has a variable length, this is the number without deletions.
    """
    config = request.config
    if isinstance(config, DiffusionConfig) and config.variable_length:
        # Twice the tokens that a canvas at its limit has: each may take an expansion.
        return max(1, 2 * config.max_new_tokens)
    if not isinstance(config, DiffusionConfig) or config.parallel != "none" or config.attention_block_length:
        # An iteration may commit only one token. With block-causal attention, the last block may reach beyond the row's
        # end, and the positions there may be filled before the others.
        return max(1, request.canvas_length - request.given)
    return max(1, min(config.steps, config.max_new_tokens or config.steps))


def may_end_early(config: DiffusionConfig | SamplingConfig) -> bool:
    """Return whether a row may take fewer iterations than :func:`iterations_of` without a stop test."""
    if not isinstance(config, DiffusionConfig):
        return bool(config.stop_token_ids)
    early = bool(config.stop_token_ids) or config.drafts > 0 or config.parallel != "none"
    return early or config.attention_block_length > 0 or config.variable_length


@dataclass(frozen=True)
class RowInserted:
    """Event: a row got a slot, after it waited for ``seconds``."""

    handle: RequestHandle
    index: int
    seconds: float


@dataclass(frozen=True)
class FirstToken:
    """Event: a row's first token was committed, ``seconds`` after the request arrived."""

    handle: RequestHandle
    index: int
    seconds: float


@dataclass(frozen=True)
class PrefixGrown:
    """Event: more tokens precede the first open position of a streamed row, ``seconds`` after the number last grew."""

    handle: RequestHandle
    index: int
    seconds: float


@dataclass(frozen=True)
class CanvasChanged:
    """Event: the canvas of a streamed row changed. Its new tokens are int32 ``[N]``, -1 at open positions."""

    handle: RequestHandle
    index: int
    canvas: np.ndarray


@dataclass(frozen=True)
class RowFinished:
    """Event: a row is done.

    Attributes:
      handle: the request.
      index: index of the row.
      result: the tokens of the row.
      tokens: number of committed tokens up to the row's end.
      steps: number of the row's steps that committed tokens.
      seconds: time since the row got its slot.
      seconds_per_token: time from the first token to the end, divided by the number of tokens after the first; None if
        there are none.
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
    """Event: a score pass is done, with float32 scores of the request's rows, starting with row ``first``."""

    handle: RequestHandle
    first: int
    scores: Sequence[np.ndarray]


@dataclass(frozen=True)
class RequestFinished:
    """Event: a request is done, ``seconds`` after it arrived."""

    handle: RequestHandle
    seconds: float


Event = RowInserted | FirstToken | PrefixGrown | CanvasChanged | RowFinished | RowsScored | RequestFinished
