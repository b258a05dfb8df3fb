"""The server, put together."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence

from launch.openai.bodies import Defaults
from launch.serving.app import Routes
from launch.serving.engine import Hosts, ServingEngine
from launch.serving.errors import ENGINE_FAILED
from launch.serving.guard import Guard
from launch.serving.http import HttpServer
from launch.serving.keys import Keys
from launch.serving.limits import Limits
from launch.serving.metrics import Metrics
from launch.serving.reading import Mode, Reader
from runtime import Executor


class Server:
    """The HTTP server, which answers from the start, and the engine behind it, once there is one.

    Attributes:
      serving: the engine's thread, as other threads see it.
      reader: reads bodies.
      http: the HTTP server.
    """

    def __init__(
        self,
        own: socket.socket,
        defaults: Defaults,
        modes: Sequence[Mode],
        limits: Limits,
        keys: Keys,
        names: Collection[str],
        hosts: Hosts,
        version: str,
    ) -> None:
        """Start to answer that the server is warming up.

        Args:
          own: a socket of :func:`launch.serving.http.listen`.
          defaults: what requests start from.
          modes: the ways of decoding, and which of the executor's pools are for which.
          limits: bounds of everything from outside.
          keys: who may ask.
          names: by which the server may be called; none for any.
          hosts: this host among all.
          version: what ``/version`` says.
        """
        metrics = Metrics(defaults.model_name)
        self.serving = ServingEngine(hosts, metrics, limits.queue, limits.grace_period)
        self.reader = Reader(defaults, modes, limits)
        self._routes = Routes(self.serving, self.reader, defaults, metrics, limits, version)
        self.http = HttpServer(Guard(self._routes.application(), keys, limits, names), own, limits)
        if self.reader.can_chat:
            defaults.tokenizer.start_renderer()
        self.http.start()
        self._hosts = hosts

    def run(self, executor: Executor, ready: Callable[[], None]) -> None:
        """Serve until told to end; every request has been answered when this returns or raises.

        Args:
          executor: the slots.
          ready: called when requests are accepted.
        """
        self.reader.serve(executor)
        self._hosts.before_end(self.fail)
        try:
            self.serving.run(executor, self.http.alive, ready)
        finally:
            self._routes.close()
            self.http.stop()

    def fail(self) -> None:
        """Answer every request with an error, and end the HTTP server. From any thread."""
        # Requests that come before the socket is closed are told so too.
        self.serving.state = "dead"
        self.serving.fail(ENGINE_FAILED)
        self.http.stop()
