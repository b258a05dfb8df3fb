"""Threads that read bodies, shared fairly among the owners of requests.

Tokenizing a long prompt takes a while, and so does a chat template: neither may hold up the event loop, other owners'
requests, or the end of the process.
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
        """Hand on what came of it, to the thread of the event loop."""

        def put() -> None:
            if self.future.cancelled():
                return
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(put)


def _ending() -> ApiError:
    return unavailable("the server is shutting down")


class Readers:
    """A pool of daemon threads; owners that wait take turns.

    The threads of concurrent.futures are waited for when Python ends: one that hangs would keep the process.
    """

    def __init__(self, threads: int, waiting: int, name: str) -> None:
        """Start the threads.

        Args:
          threads: how many.
          waiting: requests of one owner that may wait for them.
          name: of the threads, for a debugger.
        """
        self._most = waiting
        self._queue: FairQueue[_Task] = FairQueue()
        self._waiting: dict[Hashable, int] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._since: dict[int, float] = {}  # when a thread has begun what it is at
        for number in range(threads):
            threading.Thread(target=self._work, args=(number,), name=f"{name}-{number}", daemon=True).start()

    async def run(self, owner: Hashable, work: Callable[[], Result]) -> Result:
        """What ``work`` returns or raises, called in one of the threads.

        Raises:
          ApiError: too many requests of this owner wait already, or the server ends.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        with self._changed:
            if self._closed:
                raise _ending()
            if self._waiting.get(owner, 0) >= self._most:
                raise busy(_RETRY_SECONDS)
            self._waiting[owner] = self._waiting.get(owner, 0) + 1
            self._queue.push(owner, _Task(owner, work, future, loop))
            self._changed.notify()
        return await future

    def busy_seconds(self) -> float:
        """For how long the thread that is at one request for the longest has been at it."""
        now = time.monotonic()
        return max((now - since for since in list(self._since.values())), default=0.0)

    def close(self) -> None:
        """Refuse what waits and end the threads that have nothing to do; the others end with the process."""
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
                # The event loop takes no other kind, and this thread must go on.
                error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
            del self._since[number]
            task.answer(result, error)
            del task, result, error  # a body is not kept until the next one comes

    def _next(self) -> _Task | None:
        """The next request, when there is one; None when the threads are to end."""
        with self._changed:
            while not self._closed:
                if (task := self._queue.pop()) is not None:
                    self._waiting[task.owner] -= 1
                    if not self._waiting[task.owner]:
                        del self._waiting[task.owner]
                    return task
                self._changed.wait()
        return None
