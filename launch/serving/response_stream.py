"""Passes results from the engine's thread to the coroutine that answers a request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping

import numpy as np

from launch.serving.errors import ApiError, too_late
from runtime import RowResult

# Seconds. The engine's thread aborts a request at its deadline; the coroutine gives up this much later.
_DEADLINE_SLACK = 1.0


class ResponseStream:
    """The results of one request, written by the engine's thread and read on the event loop.

    Only the newest canvas of each row is kept, so a slow client does not use more memory.

    Attributes:
      canvases: the new tokens of each unfinished row, int32 ``[N]`` with -1 at open positions, by the row's index in
        the request.
      results: the result of each finished row, by the row's index.
      scores: the log-probabilities of each scored row, float32, by the row's index.
      error: the error that ended the request, if any.
    """

    def __init__(self, arrived: float, deadline: float) -> None:
        """Create a stream for the running event loop.

        Args:
          arrived: when the request arrived, on the monotonic clock.
          deadline: when the request must be finished, on the same clock.
        """
        self._loop = asyncio.get_running_loop()
        self._seconds = deadline - arrived
        self._until = self._loop.time() + deadline - time.monotonic() + _DEADLINE_SLACK
        self._changed = asyncio.Event()
        self.canvases: dict[int, np.ndarray] = {}
        self.results: dict[int, RowResult] = {}
        self.scores: dict[int, np.ndarray] = {}
        self.error: ApiError | None = None

    async def wait(self) -> None:
        """Wait until results have arrived since the last call.

        Raises:
          ApiError: the request ended with an error, or its deadline has passed.
        """
        try:
            async with asyncio.timeout_at(self._until):
                await self._changed.wait()
        except TimeoutError:
            raise too_late(self._seconds) from None
        self._changed.clear()
        if self.error is not None:
            # Requests share some errors, which would keep the frames of every request that failed so far.
            raise self.error.with_traceback(None)

    def put(
        self,
        canvases: Mapping[int, np.ndarray] | None = None,
        results: Mapping[int, RowResult] | None = None,
        scores: Mapping[int, np.ndarray] | None = None,
        error: ApiError | None = None,
    ) -> None:
        """Add results, or the error that ends the request. Any thread may call this. Only the first error is kept."""

        def add() -> None:
            self.canvases |= canvases or {}
            self.results |= results or {}
            self.scores |= scores or {}
            self.error = self.error or error
            self._changed.set()

        with contextlib.suppress(RuntimeError):  # the event loop is closed, so there is no reader
            self._loop.call_soon_threadsafe(add)
