"""The server, put together."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence

from launch.openai.bodies import Defaults
from launch.serving.app import Routes
from launch.serving.errors import ENGINE_FAILED
from launch.serving.guard import Guard
from launch.serving.http import HttpServer
from launch.serving.keys import Keys
from launch.serving.limits import Limits
from launch.serving.mesh import Mesh
from launch.serving.metrics import Metrics
from launch.serving.reading import Mode, Reader
from launch.serving.scheduler import Hosts, Scheduler


class Server:
    """A socket that is answered, from the start, and a mesh that does the work, once there is one.

    Attributes:
      scheduler: who gets which slot when.
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
        """Answer on a socket of :func:`launch.serving.http.listen`, that this is warming up.

        Args:
          own: the socket.
          defaults: what requests start from.
          modes: the ways of decoding, and which of the mesh's pools are for which.
          limits: bounds of everything from outside.
          keys: who may ask.
          names: by which the server may be called; none for any.
          hosts: this host among all.
          version: what ``/version`` says.
        """
        metrics = Metrics(defaults.model_name)
        self.scheduler = Scheduler(hosts, metrics, limits.queue, limits.grace)
        self._reader = Reader(defaults, modes, limits)
        routes = Routes(self.scheduler, self._reader, defaults, metrics, limits, version)
        self._http = HttpServer(Guard(routes.application(), keys, limits, names), own, limits)
        self._http.start()
        self._hosts = hosts

    def run(self, mesh: Mesh, ready: Callable[[], None]) -> None:
        """Serve until told to end; whoever waits then has been answered when this returns or raises.

        Args:
          mesh: the slots.
          ready: called when requests are taken.
        """
        self._reader.serve(mesh)
        self._hosts.before_end(self._fail)
        try:
            self.scheduler.run(mesh, self._http.alive, ready)
        finally:
            self._http.stop()

    def _fail(self) -> None:
        # Whoever comes between the answers to all and the end of the socket is told so too.
        self.scheduler.state = "dead"
        self.scheduler.fail(ENGINE_FAILED)
        self._http.stop()
