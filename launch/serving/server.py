"""Assembles the server from its parts."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence

from launch.openai.bodies import Defaults
from launch.serving.app import application
from launch.serving.backend import Backend
from launch.serving.engine import ServingEngine
from launch.serving.errors import ENGINE_FAILED
from launch.serving.guard import Guard
from launch.serving.http import HttpServer
from launch.serving.keys import Keys
from launch.serving.limits import Limits
from launch.serving.metrics import Metrics
from launch.serving.reading import Mode, Reader
from launch.serving.turns import Hosts
from runtime import Executor


class Server:
    """The HTTP server and the engine behind it. The HTTP server answers requests even before the engine is loaded.

    Attributes:
      serving: the interface to the engine's thread.
      reader: turns request bodies into rows.
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
        """Start the HTTP server. Until :meth:`run`, it answers that the server is warming up.

        Args:
          own: a socket that :func:`launch.serving.http.listen` bound.
          defaults: decoding parameters of requests that do not set them.
          modes: the modes that requests can use, each with the index of its pool in the executor.
          limits: limits of requests and connections.
          keys: the accepted API keys.
          names: accepted names in the Host header; if empty, any name is accepted.
          hosts: the connection to the other hosts.
          version: the version that ``/version`` reports.
        """
        metrics = Metrics(defaults.model_name)
        self.serving = ServingEngine(hosts, metrics, limits.queue, limits.grace_period)
        self.reader = Reader(defaults, modes, limits)
        self._backend = Backend(self.serving, self.reader, defaults, metrics, limits, version)
        self.http = HttpServer(Guard(application(self._backend), keys, limits, names), own, limits)
        if self.reader.can_chat:
            defaults.tokenizer.start_renderer()
        self.http.start()
        self._hosts = hosts

    def run(self, executor: Executor, ready: Callable[[], None]) -> None:
        """Serve until the server is told to stop. When this returns or raises, every request has been answered.

        Args:
          executor: has the slots, and runs the rows in them.
          ready: called when the server begins to accept requests.
        """
        self.reader.serve(executor)
        self._hosts.before_end(self.fail)
        try:
            self.serving.run(executor, self.http.alive, ready)
        finally:
            self._backend.close()
            self.http.stop()

    def fail(self) -> None:
        """Answer every request with an error and stop the HTTP server. Any thread may call this."""
        # Requests that arrive before the socket is closed get the same error.
        self.serving.state = "dead"
        self.serving.fail(ENGINE_FAILED, "engine failed")
        self.http.stop()
