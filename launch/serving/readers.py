"""Threads that read request bodies, shared fairly among the owners of requests.

The owner of a request is the API key or the address that it came from. Tokenizing a long prompt or rendering a chat
template can take long. Neither may delay the event loop, requests of other owners, or the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

from launch.serving.errors import ApiError, busy, unavailable
from runtime import FairQueue

Result = TypeVar("Result")

_RETRY_SECONDS = 1


@dataclass(frozen=True)
class _Task:
    owner: Hashable
    work: Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop

    def answer(self, result: Any, error: BaseException | None) -> None:
        """Pass the result or the error to the event loop."""

        def put() -> None:
            if self.future.cancelled():
                return
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)

        with contextlib.suppress(RuntimeError):  # the event loop is closed, so nothing waits
            self.loop.call_soon_threadsafe(put)


def _ending() -> ApiError:
    return unavailable("The server is shutting down.")


class Readers:
    """Daemon threads that read waiting requests, taking one request of each owner in turn.

    Python waits for the threads of concurrent.futures when it exits, so a thread that hangs would keep the process
    alive. It does not wait for daemon threads.
    """

    def __init__(self, threads: int, waiting: int, name: str, refused: Callable[[], object] = lambda: None) -> None:
        """Start the threads.

        Args:
          threads: number of threads.
          waiting: maximum number of waiting requests per owner.
          name: prefix of the threads' names.
          refused: called for each request that is refused.
        """
        self._most, self._refused = waiting, refused
        self._queue: FairQueue[_Task] = FairQueue()
        self._waiting: dict[Hashable, int] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._since: dict[int, float] = {}  # when each busy thread began its request, by the thread's number
        for number in range(threads):
            threading.Thread(target=self._work, args=(number,), name=f"{name}-{number}", daemon=True).start()

    async def run(self, owner: Hashable, work: Callable[[], Result]) -> Result:
        """Call ``work`` in one of the threads, and return its result or raise its exception.

        Raises:
          ApiError: too many requests of this owner are waiting, or the server is shutting down.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        with self._changed:
            if self._closed:
                raise _ending()
            if self._waiting.get(owner, 0) >= self._most:
                self._refused()
                raise busy(_RETRY_SECONDS)
            self._waiting[owner] = self._waiting.get(owner, 0) + 1
            self._queue.push(owner, _Task(owner, work, future, loop))
            self._changed.notify()
        return await future

    def busy_seconds(self) -> float:
        """Return for how many seconds the longest of the reads in progress has run; 0 if there is none."""
        now = time.monotonic()
        return max((now - since for since in list(self._since.values())), default=0.0)

    def close(self) -> None:
        """Refuse waiting requests and stop idle threads. Busy threads end with the process."""
        with self._changed:
            self._closed = True
            while (task := self._queue.pop()) is not None:
                task.answer(None, _ending())
            self._changed.notify_all()

    def _work(self, number: int) -> None:
        while (task := self._next()) is not None:
            self._since[number] = time.monotonic()
            result, error = None, None
            try:
                if not task.future.cancelled():
                    result = task.work()
            except BaseException as raised:
                # A future accepts only instances of Exception, and this thread must continue.
                error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
            del self._since[number]
            task.answer(result, error)
            del task, result, error  # frees the body before the next request arrives

    def _next(self) -> _Task | None:
        """Wait for the next request. None means that the thread must stop."""
        with self._changed:
            while not self._closed:
                if (task := self._queue.pop()) is not None:
                    self._waiting[task.owner] -= 1
                    if not self._waiting[task.owner]:
                        del self._waiting[task.owner]
                    return task
                self._changed.wait()
        return None
