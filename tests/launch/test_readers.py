"""Waiting requests: threads that parse bodies serve clients in turn, and a response stream keeps its deadline."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from launch.serving.errors import NON_FINITE_LOGITS, ApiError
from launch.serving.readers import Readers
from launch.serving.response_stream import ResponseStream


def test_owners_take_turns() -> None:
    order: list[str] = []

    async def go() -> None:
        readers = Readers(1, 100, "test")
        begun, go_on = threading.Event(), threading.Event()

        def first() -> None:
            begun.set()
            assert go_on.wait(60)

        waiting = [asyncio.ensure_future(readers.run("flood", first))]
        await asyncio.to_thread(begun.wait, 60)
        for owner, count in (("flood", 20), ("quiet", 2)):
            waiting += [
                asyncio.ensure_future(readers.run(owner, lambda own=owner: order.append(own))) for _ in range(count)
            ]
        await asyncio.sleep(0)
        assert readers.busy_seconds() > 0
        go_on.set()
        await asyncio.gather(*waiting)
        assert readers.busy_seconds() == 0
        readers.close()

    asyncio.run(go())
    assert order[:4] == ["flood", "quiet", "flood", "quiet"]
    assert order[4:] == ["flood"] * 18


def test_failures_and_the_end() -> None:
    class Panic(BaseException):
        pass

    def fail(error: BaseException) -> None:
        raise error

    async def go() -> None:
        refusals: list[int] = []
        readers = Readers(1, 2, "test", lambda: refusals.append(1))
        for error, expected in ((ValueError("x"), ValueError), (Panic("y"), RuntimeError)):
            with pytest.raises(expected):
                await readers.run("a", lambda error=error: fail(error))
        assert await readers.run("a", lambda: 7) == 7
        hang = threading.Event()
        stuck = asyncio.ensure_future(readers.run("a", lambda: hang.wait(60)))
        while not readers.busy_seconds():
            await asyncio.sleep(0.01)
        waiting = [asyncio.ensure_future(readers.run("a", lambda: None)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as full:
            await readers.run("a", lambda: None)
        assert full.value.status == 429
        assert refusals == [1]
        readers.close()
        for one in waiting:
            with pytest.raises(ApiError, match="shutting down"):
                await one
        with pytest.raises(ApiError, match="shutting down"):
            await readers.run("b", lambda: None)
        hang.set()
        assert await stuck
        deadline = time.monotonic() + 60
        while any(thread.name.startswith("test-") for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    asyncio.run(go())


def test_an_error_that_requests_share_keeps_no_frames_of_earlier_ones() -> None:
    async def waiting() -> None:
        now = time.monotonic()
        stream = ResponseStream(now, now + 60)
        stream.put(error=NON_FINITE_LOGITS)
        await stream.wait()

    depths = []
    for _ in range(3):
        with pytest.raises(ApiError) as caught:
            asyncio.run(waiting())
        depths.append(len(caught.traceback))
    assert depths[0] == depths[1] == depths[2]


def test_who_waits_for_an_engine_that_says_nothing_is_told_the_timeout() -> None:
    async def waiting() -> None:
        now = time.monotonic()
        await ResponseStream(now - 5, now - 3).wait()

    with pytest.raises(ApiError, match="not finished within 2 s"):
        asyncio.run(waiting())
