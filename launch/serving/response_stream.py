"""The way back from the engine's thread to the request that waits for an answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping

import numpy as np

from launch.serving.errors import ApiError, too_late
from runtime import RowResult

# Seconds after a deadline in which the engine's thread may still say so itself.
_DEADLINE_SLACK = 1.0


class ResponseStream:
    """What has come for a request: written by the engine's thread, read in the server's event loop.

    Of canvases only the newest of each row is kept, so that a slow reader costs no memory.

    Attributes:
      canvases: int32 ``[N]``, new tokens of unfinished rows, by their index in the request.
      results: of finished rows, likewise.
      scores: float32 of scored rows, likewise.
      error: why there will be no more.
    """

    def __init__(self, arrived: float, deadline: float) -> None:
        """Belong to the event loop that is running.

        Args:
          arrived: when the request came, on the monotonic clock.
          deadline: on the same; no reader waits much longer.
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
        """Wait until something has come since the last call.

        Raises:
          ApiError: what came is an error; or the deadline has passed and the engine does not even say so.
        """
        try:
            async with asyncio.timeout_at(self._until):
                await self._changed.wait()
        except TimeoutError:
            raise too_late(self._seconds) from None
        self._changed.clear()
        if self.error is not None:
            raise self.error

    def put(
        self,
        canvases: Mapping[int, np.ndarray] | None = None,
        results: Mapping[int, RowResult] | None = None,
        scores: Mapping[int, np.ndarray] | None = None,
        error: ApiError | None = None,
    ) -> None:
        """Add something, from any thread; after an error nothing else counts."""

        def add() -> None:
            self.canvases |= canvases or {}
            self.results |= results or {}
            self.scores |= scores or {}
            self.error = self.error or error
            self._changed.set()

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(add)
