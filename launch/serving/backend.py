"""The objects that routes use: the engine's thread, the readers of request bodies, defaults, metrics and limits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from launch.openai.bodies import Defaults
from launch.openai.objects import parse_object
from launch.serving.bodies import MAX_NAMES, RequestBody
from launch.serving.engine import ServingEngine
from launch.serving.errors import ApiError, from_input_error, too_late
from launch.serving.limits import Limits
from launch.serving.metrics import Metrics
from launch.serving.readers import Readers
from launch.serving.reading import Reader
from runtime import InputError, RendererStartError, RequestHandle

# Numbers of threads that read bodies. Chats have threads of their own, so that a chat template that never returns
# delays only chats.
_READERS, _CHAT_READERS = 2, 2
# Values of Content-Encoding that name a compression; some clients name a character set there.
_COMPRESSIONS = {"gzip", "x-gzip", "deflate", "compress", "x-compress", "br", "zstd"}

Kind = TypeVar("Kind", bound=RequestBody)
Read = TypeVar("Read")


@dataclass(frozen=True)
class ReadRequest(Generic[Kind, Read]):
    """A request that was read and validated.

    Attributes:
      arrived: when its head arrived, on the monotonic clock.
      deadline: when it must be finished, on the same clock.
      body: its validated body.
      reading: what the engine has to run for it: the rows to generate, or the scoring passes.
    """

    arrived: float
    deadline: float
    body: Kind
    reading: Read


class Backend:
    """The state that all routes share: the engine, readers of bodies, defaults, metrics and limits.

    Attributes:
      serving: the interface to the engine's thread.
      reader: turns bodies into rows for the engine.
      defaults: decoding parameters of requests that do not set them.
      metrics: the server's metrics.
      version: the installed version of diffumesh.
    """

    def __init__(
        self,
        serving: ServingEngine,
        reader: Reader,
        defaults: Defaults,
        metrics: Metrics,
        limits: Limits,
        version: str,
    ) -> None:
        """Start the threads that read bodies."""
        self.serving, self.reader, self.defaults, self.metrics = serving, reader, defaults, metrics
        self.version = version
        self._limits = limits
        self._started = int(time.time())
        # The parser holds the GIL until it is done, and large bodies take it milliseconds. If several threads parsed at
        # the same time, each other thread of the server would wait for all of them.
        self._parsing = threading.Lock()
        refused = partial(metrics.refused, "queue full")
        self._readers = Readers(_READERS, limits.queue, "reader", refused)
        self._chat_readers = Readers(_CHAT_READERS, limits.queue, "chat-reader", refused)

    def close(self) -> None:
        """Stop the threads that read bodies."""
        for readers in (self._readers, self._chat_readers):
            readers.close()

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the server can answer requests, and the body of ``/health``."""
        state: str = self.serving.state
        busy = max(readers.busy_seconds() for readers in (self._readers, self._chat_readers))
        healthy = self.serving.healthy(self._limits.stall_seconds) and busy < self._limits.stall_seconds
        if state in ("ready", "draining") and not healthy:
            state = "stalled"
        if healthy and state == "ready":
            return True, {"status": state, "programs_remaining": self.serving.remaining}
        return False, {"status": state}

    def model(self) -> dict[str, Any]:
        """Return the served model as an entry of ``/v1/models``."""
        return {
            "id": self.defaults.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "diffumesh",
            "max_model_len": self.reader.widest or None,
            "chat_template": self.reader.can_chat,
            "modes": self.reader.modes,
        }

    async def read(
        self, request: Request, kind: type[Kind], read: Callable[[Kind], Read], chat: bool = False
    ) -> ReadRequest[Kind, Read]:
        """Read and validate a request in one of the reader threads.

        Args:
          request: the HTTP request.
          kind: the model of its body.
          read: called in the reader thread; computes from the body what the engine has to run.
          chat: whether to use the threads for chats.

        Raises:
          ApiError: the server is busy or shutting down, it takes too long, the body is compressed or not JSON, or a
            value is wrong.
          RendererStartError: the process that renders chat messages cannot start.
          pydantic.ValidationError: the body does not match ``kind``.
        """
        arrived = time.monotonic()
        # The body is received before a request is refused, so that the client can reuse the connection.
        raw = await request.body()
        self.serving.check_room()
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(415, "Content-Type must be application/json.", "unsupported_media_type")
        codings = {coding.strip().lower() for coding in request.headers.get("content-encoding", "").split(",")}
        if not codings.isdisjoint(_COMPRESSIONS):
            raise ApiError(415, "Content-Encoding must be identity: not compressed.", "unsupported_media_type")

        def parse() -> tuple[Kind, Read]:
            # Checked again, because the request may have waited here behind large ones.
            self.serving.check_room()
            try:
                with self._parsing:
                    fields = parse_object(raw, MAX_NAMES)
            except InputError as error:
                raise from_input_error(error) from None
            body = kind.model_validate(fields)
            return body, read(body)

        readers = self._chat_readers if chat else self._readers
        longest = self._limits.request_seconds
        try:
            async with asyncio.timeout(arrived + longest - time.monotonic()):
                body, reading = await readers.run(request.state.owner, parse)
        except TimeoutError:
            self.metrics.refused("deadline")
            raise too_late(longest) from None
        except RendererStartError:
            self.metrics.refused("renderer")
            raise
        wanted = body.timeout
        deadline = arrived + (longest if wanted is None else min(wanted, longest))
        return ReadRequest(arrived, deadline, body, reading)

    async def unless_gone(self, request: Request, handle: RequestHandle, work: Coroutine[Any, Any, Any]) -> Any:
        """Wait for ``work`` and return its result. Abort the request if its client disconnects first.

        Raises:
          ClientDisconnect: the client has disconnected.
        """
        working = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            return working.result()
        finally:
            self.serving.abort(handle)
            for task in (working, gone):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
