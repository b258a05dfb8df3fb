"""The control server on host 0: every supervisor, including host 0's own, connects to it.

It authenticates clients with the run's secret and passes their messages on: reports about the state of a host to the
fault hub (:mod:`launch.hosts.hub`), and values that hosts exchange without devices to :mod:`launch.hosts.exchanges`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from launch.hosts.exchanges import Exchanges
from launch.hosts.faults import EXIT_USER_ERROR, Fault, Timeouts
from launch.hosts.hub import WAITING_REPORT_SECONDS, Hub
from launch.hosts.messages import MAX_BYTES, Message, encode, printable, receive, receive_greeting
from launch.hosts.secret import is_proof, nonce, proof
from runtime import InputError

_TICK = 0.25
_CLOSE_WAIT = 2.0
_GREETING_SECONDS = 10.0
# Unauthenticated connections that are kept open beyond the number of hosts.
_MORE_STRANGERS = 32


class ControlServer:
    """The server that all supervisors connect to."""

    def __init__(self, hosts: int, timeouts: Timeouts, say: Callable[[str], None], secret: bytes) -> None:
        """Create the server.

        Args:
          hosts: number of hosts of the run.
          timeouts: when a host counts as missing, gone or stalled.
          say: prints a message.
          secret: the run's secret, which every host must know.
        """
        self._hosts = hosts
        self._print = say
        self._secret = secret
        # Connections that have not yet authenticated, the oldest first; the values are unused.
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._hub = Hub(hosts, timeouts, self._say, self._tell_all)
        self._exchanges = Exchanges(hosts, self._hub.names)
        self._is_over = False
        self._server: asyncio.Server | None = None

    def _say(self, text: str) -> None:
        self._print(printable(text))

    async def listen(self, address: str, port: int) -> None:
        """Open the port.

        Raises:
          InputError: the port is in use, or this machine does not have the address.
        """
        # With "::" asyncio would listen on IPv6 only.
        host = None if address in ("[::]", "::") else address.strip("[]")
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_BYTES)
        except OSError as error:
            raise InputError(
                f"host 0 cannot listen on {address}:{port} ({error.strerror or error}); --control_port and "
                "--coordinator_bind_address name another port and address"
            ) from error

    async def watch(self) -> Fault | None:
        """Wait until all hosts are done or the run has failed, and tell all hosts. Returns the fault, or None."""
        waiting = asyncio.ensure_future(self._report_waiting())
        try:
            fault = await self._hub.watch()
        finally:
            waiting.cancel()
        self._is_over = True
        await self._close()
        return fault

    async def _report_waiting(self) -> None:
        """Report regularly which hosts an exchange waits for."""
        while True:
            await asyncio.sleep(_TICK)
            if len(self._writers) == self._hosts:
                for message in self._exchanges.late(time.monotonic(), WAITING_REPORT_SECONDS):
                    self._say(message)

    # ---- connections ------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host: int | None = None
        try:
            hello = await self._authenticate(reader, writer)
            host = None if hello is None else self._admit(hello, writer)
            while host is not None and (message := await receive(reader)) is not None:
                self._take(host, message)
        except asyncio.CancelledError:
            # The run is over. asyncio would report a connection that ends with this exception as an error.
            pass
        finally:
            if host is not None and not self._is_over:
                self._hub.report(Fault("gone", "its connection closed: the machine or its processes are gone"), host)
            writer.close()

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Message | None:
        """Authenticate a client and return its ``hello`` message; None if it sends none or does not know the secret."""
        if len(self._strangers) >= self._hosts + _MORE_STRANGERS:
            # Not the new one, which may be a host: a host answers at once, so that the oldest is hardly ever one.
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        challenge = nonce()
        try:
            writer.write(encode("challenge", nonce=challenge))
            hello = await asyncio.wait_for(receive_greeting(reader), _GREETING_SECONDS)
        except TimeoutError:  # the client sends nothing
            return None
        finally:
            self._strangers.pop(writer, None)
        # A host whose connection was closed for a newer one connects again, so it must not be admitted on this one.
        if hello is None or hello["kind"] != "hello" or writer.is_closing():
            return None
        signed = (challenge, hello.get("nonce"), hello.get("host"), hello.get("hosts"), hello.get("name"))
        if not is_proof(hello.get("proof"), self._secret, "host", *signed):
            self._refuse(hello, writer, "it does not know the secret of this run")
            return None
        writer.write(encode("welcome", proof=proof(self._secret, "hub", hello.get("nonce"))))
        return hello

    def _refuse(self, hello: Message, writer: asyncio.StreamWriter, problem: str) -> None:
        """Refuse a client. The run goes on, because the client may belong to another run."""
        host, name = f"{hello.get('host')!r:.20}", f"{hello.get('name', '')!r:.100}"
        self._say(f"refused a connection of {name} as host {host}: {problem}")
        fault = Fault("input", f"refused by host 0: {problem}", EXIT_USER_ERROR, who=f"host {host} ({name})")
        writer.write(encode("verdict", **fault.fields()))

    def _admit(self, hello: Message, writer: asyncio.StreamWriter) -> int | None:
        """Admit a host: returns its process index, or None if it is refused."""
        host, hosts, name = hello.get("host"), hello.get("hosts"), str(hello.get("name", ""))[:100]
        problem = None
        if hosts != self._hosts:
            problem = f"it was started for {hosts} hosts, and host 0 for {self._hosts}"
        elif not isinstance(host, int) or not 0 <= host < self._hosts:
            problem = f"process index {host} is out of range for {self._hosts} hosts"
        elif host in self._writers:
            problem = f"{self._hub.names([host])} has already joined"
        if problem is not None:
            self._refuse(hello, writer, problem)
            return None
        assert isinstance(host, int)
        self._writers[host] = writer
        self._hub.join(host, name)
        return host

    def _take(self, host: int, message: Message) -> None:
        self._hub.take(host, message)
        if message["kind"] == "terminated":
            self._tell_all("terminated", interrupted=bool(message.get("interrupted")))
        topic, number = str(message.get("topic", "")), int(message.get("number", 0))
        found: list[Any] | Fault | None = None
        if message["kind"] == "gather":
            found = self._exchanges.add(host, (topic, number), message.get("value"))
        elif message["kind"] == "done":
            found = self._exchanges.end(host)
        if isinstance(found, Fault):
            self._hub.report(found, host if found.host is None else found.host)
        elif found is not None:
            self._tell_all("gathered", topic=topic, values=found)

    def _tell_all(self, kind: str, **fields: Any) -> None:
        line = encode(kind, **fields)
        for writer in self._writers.values():
            if not writer.is_closing():
                writer.write(line)

    async def _close(self) -> None:
        """Give every host ``_CLOSE_WAIT`` seconds to read its messages and to disconnect, then stop listening."""
        deadline = time.monotonic() + _CLOSE_WAIT
        while time.monotonic() < deadline and not all(one.is_closing() for one in self._writers.values()):
            await asyncio.sleep(0.05)
        if self._server is not None:
            self._server.close()
