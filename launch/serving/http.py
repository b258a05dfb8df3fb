"""The HTTP server: uvicorn in a thread of its own, with bounds that it does not have by itself."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from launch.serving.errors import ApiError
from launch.serving.limits import Limits
from runtime import InputError

_BACKLOG = 1024
_KEEP_ALIVE_SECONDS = 30
_FLUSH_SECONDS = 5


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not answer yet.

    Raises:
      InputError: the port is taken, or there is no such address here.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        return made
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"--host={host} --port={port}: cannot listen there ({why})") from error


class BoundedConnection(H11Protocol):
    """uvicorn's connection with bounds: how many at a time, heads that come in time, clients that read.

    Attributes:
      limits: the bounds, set by :func:`bounded_connections`.
    """

    limits: Limits
    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse a client beyond the limit; wait for the head of any other."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            transport.abort()
            return
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Stop waiting for the head once it is whole."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()
        elif self._head is not None:
            self._head.cancel()
            self._head = None
        self._read_on()

    def _read_on(self) -> None:
        """Go on reading after a whole request, or its client could go away unseen while it is worked on.

        uvicorn stops at the first byte that is not of the request, be it a stray one. No more than a head is read, so
        that a client that sends on and on costs no memory.
        """
        open_cycle = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        if open_cycle and len(self.conn.trailing_data[0]) <= self.limits.headers:
            self.flow.resume_reading()

    def _expect_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(self.limits.read_seconds, self.transport.abort)

    def pause_writing(self) -> None:
        """Close the connection if the client leaves the answer unread for too long."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read as HTTP in OpenAI's shape too."""
        body = json.dumps(ApiError(400, "not an HTTP request", "invalid_http").body()).encode()
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        self.transport.write(head + body)
        self.transport.close()


def bounded_connections(limits: Limits) -> type[BoundedConnection]:
    """The class of connections with these bounds: uvicorn makes each one by itself."""
    return type("Connection", (BoundedConnection,), {"limits": limits})


class HttpServer:
    """uvicorn, started and ended by the launcher."""

    def __init__(self, app: ASGIApp, own: socket.socket, limits: Limits) -> None:
        """Prepare to serve ``app`` on a socket of :func:`listen`."""
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=bounded_connections(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
            h11_max_incomplete_event_size=limits.headers,
        )
        self._server, self._own = uvicorn.Server(config), own
        self._thread = threading.Thread(target=self._server.run, args=([own],), name="http", daemon=True)

    def start(self) -> None:
        """Answer from now on.

        Raises:
          InputError: another program listens on the port by now.
        """
        try:
            self._own.listen(_BACKLOG)
        except OSError as error:
            host, port = self._own.getsockname()[:2]
            raise InputError(f"--host={host} --port={port}: cannot listen there ({error.strerror})") from error
        self._thread.start()

    def alive(self) -> bool:
        """Whether it does."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Let every response that has begun be sent, then end."""
        self._server.should_exit = True
        self._thread.join(2 * _FLUSH_SECONDS)
