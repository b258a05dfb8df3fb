"""Limits on TCP connections that uvicorn does not have.

uvicorn limits the size of an incomplete head and the time that a connection may be idle. This module limits the number
of connections, the time in which a head must arrive, and the time in which a client must read what was sent to it. It
wraps the protocol object that uvicorn makes for a connection, and uses only methods that asyncio defines for it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launch.serving.errors import ApiError
from launch.serving.limits import Limits

# Bytes of a long response that a client must read within the time limit, so that a slow one gets it, and one that reads
# a byte now and then does not hold the memory forever.
_LEAST_READ = 256 << 10
# Linux doubles it, and lets more be written when a third is free: progress is then seen in steps of less than 100 KB.
# By default a step may be more than a megabyte, and a client that reads steadily would seem to read nothing meanwhile.
_SEND_BUFFER = 128 << 10


# The client's and the server's address and port.
_Ends = tuple[tuple[str, int], tuple[str, int]]


class Connections:
    """All open connections, and the ASGI application that serves them."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        """Serve ``app`` within ``limits``."""
        self._app, self._limits = app, limits
        self._open: dict[_Ends, Connection] = {}

    def bound(self, config: uvicorn.Config) -> None:
        """Make uvicorn's server wrap each connection in a :class:`Connection`."""
        config.load()
        protocol = config.http_protocol_class

        def connection(**arguments: Any) -> Connection:
            return Connection(protocol(**arguments), self._open, self._limits)

        config.http_protocol_class = connection  # type: ignore[assignment]  # uvicorn only calls it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and tell the connection when the request and its response are complete."""
        connection = self._open.get((tuple(scope.get("client") or ()), tuple(scope.get("server") or ())))
        if connection is None:  # the client has gone
            await self._app(scope, receive, send)
            return

        async def watched_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                connection.request_complete()
            return message

        async def watched_send(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                connection.response_complete()

        connection.request_started()
        await self._app(scope, watched_receive, watched_send)


class Connection(asyncio.Protocol):
    """One connection: forwards to uvicorn's protocol, and closes the connection when a limit is exceeded."""

    def __init__(self, protocol: asyncio.Protocol, connections: dict[_Ends, Connection], limits: Limits):
        """Wrap ``protocol``; ``connections`` holds all open connections by their two ends."""
        self._protocol, self._connections, self._limits = protocol, connections, limits
        self._loop = asyncio.get_running_loop()
        self._accepted = False
        self._answering = False  # between the end of a head and the end of its response
        self._request_complete = False  # the application has the whole request
        self._held = b""  # received after the whole request, before the end of its response
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close the connection if there are too many; otherwise start the timer for the head of its first request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        # By default the last 64 KB do not pause writing, so no timer would run for them.
        transport.set_write_buffer_limits(high=0)
        self._ends = transport.get_extra_info("peername")[:2], transport.get_extra_info("sockname")[:2]
        if len(self._connections) >= self._limits.connections:
            transport.abort()
            return
        self._accepted = True
        self._connections[self._ends] = self
        # uvicorn uses the transport only through its methods.
        self._protocol.connection_made(_Transport(transport))  # type: ignore[arg-type]
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Forward ``data``, or hold it back while a complete request is being answered.

        uvicorn would stop reading at the first byte after a request, and so not notice that the client closes the
        connection. Once more than the size of a head is held back, reading pauses, so that a client that keeps sending
        cannot fill the memory.
        """
        if self._request_complete:
            self._held += data
            if len(self._held) > self._limits.headers:
                self._transport.pause_reading()
            return
        self._protocol.data_received(data)
        if not self._answering:
            # If this was the end of a head, the application starts next and stops the timer.
            self._expect_head()

    def request_started(self) -> None:
        """Stop the timer for the head: it has arrived and the application runs."""
        self._answering, self._request_complete = True, False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def request_complete(self) -> None:
        """Note that the application has received the whole body."""
        self._request_complete = True
        self._transport.resume_reading()

    def response_complete(self) -> None:
        """Forward what was received while the request was answered: the application has sent the whole response."""
        self._answering = self._request_complete = False
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():
            self._transport.resume_reading()
            self.data_received(held)

    def pause_writing(self) -> None:
        """Start the timer that closes the connection if the client leaves the response unread for too long.

        Writing is paused whenever the kernel does not take everything at once, until it has taken the rest.
        """
        self._protocol.pause_writing()
        self._watch_reading()

    def _watch_reading(self) -> None:
        """Close the connection if the client reads less than :data:`_LEAST_READ` until the timer ends."""
        before = self._transport.get_write_buffer_size()

        def check() -> None:
            if before - self._transport.get_write_buffer_size() < _LEAST_READ:
                self._transport.abort()
            else:
                self._watch_reading()

        self._write_timer = self._loop.call_later(self._limits.write_seconds, check)

    def resume_writing(self) -> None:
        """Stop the timer: the kernel has everything."""
        self._protocol.resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def eof_received(self) -> bool | None:
        """Forward the end of the client's data."""
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and forget the connection."""
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        if self._connections.get(self._ends) is self:
            del self._connections[self._ends]
        if self._accepted:
            self._protocol.connection_lost(exc)

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(self._limits.read_seconds, self._transport.abort)


class _Transport:
    """A transport that replaces uvicorn's plain-text response to bytes that are not HTTP with an error object."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._replaced = transport, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send ``data``, or the error object in place of uvicorn's response.

        The application sends no plain text with status 400, so such a response is from uvicorn.
        """
        if self._replaced:
            return
        if data.startswith(b"HTTP/1.1 400 ") and b"\r\ncontent-type: text/plain" in data:
            self._replaced = True
            body = json.dumps(ApiError(400, "This is not a valid HTTP request.", "invalid_http").body()).encode()
            data = (
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
        self._transport.write(data)
