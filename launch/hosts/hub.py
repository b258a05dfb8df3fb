"""The fault hub on host 0: tracks which hosts are connected and finds the cause of a fault.

Every supervisor, including host 0's own, connects to the hub and authenticates with the run's secret. A closed
connection means that the host is gone; a silent one means that it is frozen or cut off. The first fault that reaches
the hub need not be the cause: when a host dies, collectives of the others fail, often before the dead host is noticed.
Such faults wait for a few seconds in case a better explanation arrives.

The same connections carry the values that hosts exchange without devices, which :mod:`launch.hosts.exchanges` keeps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from launch.hosts.exchanges import Exchanges
from launch.hosts.faults import EXIT_RESTART, EXIT_USER_ERROR, Fault, Timeouts, host_name
from launch.hosts.messages import MAX_BYTES, Message, encode, printable, receive, receive_greeting, shorten
from launch.hosts.secret import is_proof, nonce, proof
from runtime import InputError

_TICK = 0.25
SAY_EVERY_SECONDS = 5.0
GRACE_PERIOD_SECONDS = 3.0  # how long a possible consequence waits for its cause
_STILL = 5.0  # when others fail, a worker without progress for this long is the cause
_STACKS_WAIT = 5.0
_CLOSE_WAIT = 2.0
_GREETING_SECONDS = 10.0
# Unauthenticated connections that are allowed beyond the number of hosts.
_MORE_STRANGERS = 32


@dataclass
class _Member:
    name: str
    writer: asyncio.StreamWriter
    heard: float
    marks: int = 0
    still: float = 0.0
    done: bool = False
    stacks: str | None = None


class Hub:
    """The server that all supervisors connect to."""

    def __init__(self, hosts: int, timeouts: Timeouts, say: Callable[[str], None], secret: bytes) -> None:
        """Take the number of hosts, the timeouts, the function that prints, and the secret."""
        self._hosts = hosts
        self._timeouts = timeouts
        self._print = say
        self._secret = secret
        self._strangers = 0
        self._members: dict[int, _Member] = {}
        self._exchanges = Exchanges(hosts, self._names)
        self._faults: list[tuple[float, Fault]] = []
        self._started = self._moved = time.monotonic()
        self._said = self._started
        self._marks = 0
        self._over = False
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
        """Wait until all hosts are done (returns None) or the run has failed, and tell all hosts."""
        while True:
            await asyncio.sleep(_TICK)
            now = time.monotonic()
            self._look_around(now)
            fault = self._cause(now)
            if fault is None and self._stalled(now):
                fault = await self._stall()
            if fault is not None:
                self._tell_all("verdict", **fault.fields())
                break
            if len(self._members) == self._hosts and all(member.done for member in self._members.values()):
                self._tell_all("bye")
                break
            self._tell_all("heartbeat")
        self._over = True
        await self._close()
        return fault

    # ---- connections ------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host: int | None = None
        try:
            hello = await self._meet(reader, writer)
            host = None if hello is None else self._admit(hello, writer)
            while host is not None and (message := await receive(reader)) is not None:
                self._take(host, message)
        finally:
            if host is not None and not self._over:
                self._report(Fault("gone", "its connection closed: the machine or its processes are gone"), host)
            writer.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Message | None:
        """Authenticate a client and return its ``hello`` message; None if it sends none or does not know the secret."""
        if self._strangers >= self._hosts + _MORE_STRANGERS:
            return None
        self._strangers += 1
        challenge = nonce()
        try:
            writer.write(encode("challenge", nonce=challenge))
            hello = await asyncio.wait_for(receive_greeting(reader), _GREETING_SECONDS)
        except TimeoutError:  # the client sends nothing
            return None
        finally:
            self._strangers -= 1
        if hello is None or hello["kind"] != "hello":
            return None
        said = (challenge, hello.get("nonce"), hello.get("host"), hello.get("hosts"), hello.get("name"))
        if not is_proof(hello.get("proof"), self._secret, "host", *said):
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
            problem = f"it counts {hosts} hosts, and host 0 counts {self._hosts}"
        elif not isinstance(host, int) or not 0 <= host < self._hosts:
            problem = f"there is no host {host} among {self._hosts}"
        elif host in self._members:
            problem = f"{self._name(host)} is here already"
        if problem is not None:
            self._refuse(hello, writer, problem)
            return None
        assert isinstance(host, int)
        self._members[host] = _Member(name, writer, time.monotonic())
        return host

    def _take(self, host: int, message: Message) -> None:
        member = self._members[host]
        member.heard = time.monotonic()
        match message["kind"]:
            case "heartbeat":
                member.marks, member.still = int(message.get("marks", 0)), float(message.get("still", 0.0))
            case "gather":
                self._exchange(host, str(message.get("topic", "")), message.get("value"))
            case "fault":
                self._report(Fault.parse(message), host)
            case "stacks":
                member.stacks = shorten(str(message.get("text", "")))
            case "done":
                member.done = True

    def _exchange(self, host: int, topic: str, value: Any) -> None:
        found = self._exchanges.add(host, topic, value)
        if isinstance(found, Fault):
            self._report(found, host if found.host is None else found.host)
        elif found is not None:
            self._tell_all("gathered", topic=topic, values=found)

    def _tell_all(self, kind: str, **fields: Any) -> None:
        line = encode(kind, **fields)
        for member in self._members.values():
            if not member.writer.is_closing():
                member.writer.write(line)

    async def _close(self) -> None:
        """Wait until every host has read its messages, then close."""
        deadline = time.monotonic() + _CLOSE_WAIT
        while time.monotonic() < deadline and not all(m.writer.is_closing() for m in self._members.values()):
            await asyncio.sleep(0.05)
        if self._server is not None:
            self._server.close()

    # ---- faults -----------------------------------------------------------------------------------------------

    def _name(self, host: int) -> str:
        member = self._members.get(host)
        return host_name(host, member.name if member else None)

    def _names(self, hosts: Iterable[int]) -> str:
        return ", ".join(self._name(host) for host in hosts)

    def _report(self, fault: Fault, host: int) -> None:
        who = "all hosts" if fault.kind == "differ" else self._name(host)
        named = replace(fault, text=shorten(fault.text), host=host, who=who)
        self._faults.append((time.monotonic(), named))

    def _look_around(self, now: float) -> None:
        """Report hosts that are missing, silent, or keep the others waiting."""
        missing = [host for host in range(self._hosts) if host not in self._members]
        waited = now - self._started
        if missing and waited > self._timeouts.initialization:
            text = f"has not joined within {waited:.0f} s; {len(self._members)} of {self._hosts} hosts have joined"
            fault = Fault("missing", text, EXIT_RESTART, missing[0], self._names(missing))
            self._faults.append((now, fault))
        if missing and now - self._said > SAY_EVERY_SECONDS:
            self._said = now
            self._say(f"waiting for {self._names(missing)} of {self._hosts} for {waited:.0f} s")
        for host, member in self._members.items():
            if now - member.heard > self._timeouts.heartbeat:
                self._report(Fault("gone", f"no sign of life for {now - member.heard:.0f} s"), host)
        if missing:
            return
        for message in self._exchanges.late(now, SAY_EVERY_SECONDS):
            self._say(message)

    def _cause(self, now: float) -> Fault | None:
        """The fault to end the run with; None if there is none yet."""
        for _, fault in self._faults:
            if not fault.is_consequence:
                return fault
        if not self._faults or now - self._faults[0][0] < GRACE_PERIOD_SECONDS:
            return None
        # JAX aborts all hosts when it gives up. A host that aborts alone has crashed and made the others fail.
        aborted = [fault for _, fault in self._faults if fault.kind == "aborted"]
        first = aborted[0] if 0 < len(aborted) < self._hosts else self._faults[0][1]
        still = [host for host, member in self._members.items() if member.still > _STILL and not member.done]
        if still:
            text = f"made no progress for {self._members[still[0]].still:.0f} s, and the collectives of others failed"
            return Fault("frozen", text, EXIT_RESTART, still[0], self._names(still))
        behind = self._behind()
        if behind and first.host not in behind and not aborted:
            text = f"{first.text}\n(that was {first.who}, while {self._names(behind)} did not take part)"
            return Fault(first.kind, text, first.code, behind[0], self._names(behind))
        return first

    def _behind(self) -> list[int]:
        """Hosts with less progress than others."""
        marks = {host: member.marks for host, member in self._members.items()}
        least = min(marks.values(), default=0)
        return (
            [host for host, count in marks.items() if count == least] if least < max(marks.values(), default=0) else []
        )

    def _stalled(self, now: float) -> bool:
        total = sum(member.marks for member in self._members.values())
        if total != self._marks or len(self._members) < self._hosts:
            self._marks, self._moved = total, now
        return now - self._moved > self._timeouts.stall

    async def _stall(self) -> Fault:
        """Collect and print the stacks of all hosts; the fault names the host with the least progress."""
        stood = time.monotonic() - self._moved
        self._tell_all("dump")
        deadline = time.monotonic() + _STACKS_WAIT
        while time.monotonic() < deadline and any(member.stacks is None for member in self._members.values()):
            await asyncio.sleep(0.05)
        for host, member in sorted(self._members.items()):
            self._say(
                f"---- {self._name(host)}, {member.marks} marks of progress, stacks:\n{member.stacks or '(none)'}"
            )
        behind = self._behind()
        text = f"no progress for {stood:.0f} s"
        if not behind:
            return Fault("stalled", f"{text}; all hosts are at the same point, their stacks are above", who="all hosts")
        return Fault(
            "stalled", f"{text}; the other hosts are further and wait", EXIT_RESTART, behind[0], self._names(behind)
        )
