"""The HTTP server: uvicorn in its own thread."""

from __future__ import annotations

import logging
import socket
import threading

import uvicorn
from starlette.types import ASGIApp

from launch.serving.connections import Connections
from launch.serving.limits import Limits
from runtime import InputError

_BACKLOG = 1024
_KEEP_ALIVE_SECONDS = 30
_FLUSH_SECONDS = 5


def listen(host: str, port: int) -> socket.socket:
    """Bind a TCP socket. It accepts connections when :class:`HttpServer` starts.

    Raises:
      InputError: the port is in use, or this machine does not have the address.
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


def address(own: socket.socket) -> str:
    """Return the URL of a socket that :func:`listen` bound."""
    host, port = own.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class HttpServer:
    """uvicorn in a thread of its own, which the caller starts and stops."""

    def __init__(self, app: ASGIApp, own: socket.socket, limits: Limits) -> None:
        """Prepare to serve ``app`` on a socket that :func:`listen` bound."""
        connections = Connections(app, limits)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        config = uvicorn.Config(
            connections,
            loop="asyncio",
            http="h11",
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
        connections.bound(config)
        self._server, self._own = uvicorn.Server(config), own
        self._thread = threading.Thread(target=self._server.run, args=([own],), name="http", daemon=True)

    def start(self) -> None:
        """Accept connections.

        Raises:
          InputError: another program has taken the port in the meantime.
        """
        try:
            self._own.listen(_BACKLOG)
        except OSError as error:
            host, port = self._own.getsockname()[:2]
            raise InputError(f"--host={host} --port={port}: cannot listen there ({error.strerror})") from error
        self._thread.start()

    def alive(self) -> bool:
        """Whether the server's thread is running."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop the server. Responses that have begun get a few seconds to finish."""
        self._server.should_exit = True
        self._thread.join(2 * _FLUSH_SECONDS)
