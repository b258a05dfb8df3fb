"""A request on its way: what it asks of the mesh, and the letter box in which the answer arrives."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from launch.serving.errors import ApiError, too_late
from launch.serving.mesh import Scoring
from runtime.execution.row_request import RowRequest, RowResult

# Seconds that the engine's thread has to say itself that a deadline has passed.
_MERCY = 1.0


class Mail:
    """What has come for a request. Posted from the engine's thread, read in the loop of the server.

    Of canvases only the newest of each row is kept, so that a slow reader costs no memory.

    Attributes:
      canvases: int32 ``[S]`` of rows, by index in their job.
      results: of rows that are done, likewise.
      scores: float32 of rows that are scored, likewise.
      error: why there will be no more.
    """

    def __init__(self, arrived: float, deadline: float) -> None:
        """Belong to the loop that is running; nobody waits long after the ``deadline``.

        Args:
          arrived: when the request did, on the monotonic clock.
          deadline: on the same.
        """
        self._loop = asyncio.get_running_loop()
        self._seconds = deadline - arrived
        self._by = self._loop.time() + deadline - time.monotonic() + _MERCY
        self._came = asyncio.Event()
        self.canvases: dict[int, np.ndarray] = {}
        self.results: dict[int, RowResult] = {}
        self.scores: dict[int, np.ndarray] = {}
        self.error: ApiError | None = None

    async def wait(self) -> None:
        """Wait until something has come since the last time.

        Raises:
          ApiError: what came is an error; or the deadline has passed and the engine does not even say so.
        """
        try:
            async with asyncio.timeout_at(self._by):
                await self._came.wait()
        except TimeoutError:
            raise too_late(self._seconds) from None
        self._came.clear()
        if self.error is not None:
            raise self.error

    def post(
        self,
        canvases: Mapping[int, np.ndarray] | None = None,
        results: Mapping[int, RowResult] | None = None,
        scores: Mapping[int, np.ndarray] | None = None,
        error: ApiError | None = None,
    ) -> None:
        """Bring something; from any thread."""

        def take() -> None:
            self.canvases |= canvases or {}
            self.results |= results or {}
            self.scores |= scores or {}
            self.error = self.error or error
            self._came.set()

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(take)


@dataclass(eq=False)
class Job:
    """A request for the mesh.

    Attributes:
      mail: where the answer goes.
      owner: whose it is, for fairness.
      deadline: on the monotonic clock.
      arrived: on the monotonic clock.
      pool: whose slots the rows enter.
      rows: to generate.
      look: whether to post canvases along the way.
      scorings: to score, one after another.
      left: rows, or scorings, that are not done.
      gone: nobody wants the answer any more, or it has been posted.
    """

    mail: Mail
    owner: Hashable
    deadline: float
    arrived: float
    pool: int = 0
    rows: Sequence[RowRequest] = ()
    look: bool = False
    scorings: Sequence[Scoring] = ()
    left: int = field(init=False)
    gone: bool = False

    def __post_init__(self) -> None:
        self.left = len(self.rows) + len(self.scorings)


@dataclass(eq=False)
class Ticket:
    """One row of a job, or one of its scorings.

    Attributes:
      job: whose it is.
      index: which.
      entered: when it got its slot.
      shown: when the first of its tokens was certain.
      certain: tokens before its first open position.
      grown: when they last became more.
    """

    job: Job
    index: int
    entered: float = 0.0
    shown: float = 0.0
    certain: int = 0
    grown: float = 0.0
