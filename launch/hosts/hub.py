"""The fault hub on host 0: tracks the state of all hosts and finds the cause of a fault.

Each host reports to it through the control server (:mod:`launch.hosts.control`). A closed connection means that the
host is gone; a silent one means that it is frozen or cut off. The first fault that reaches the hub need not be the
cause: when a host dies, collectives of the others fail, often before the dead host is noticed. Such faults wait for a
few seconds in case a better explanation arrives.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from launch.hosts.faults import EXIT_RESTART, Fault, Timeouts, host_name
from launch.hosts.messages import Message, shorten

_TICK = 0.25
WAITING_REPORT_SECONDS = 5.0  # between two messages about hosts that the others wait for
GRACE_PERIOD_SECONDS = 3.0  # how long a fault that may be a consequence waits for its cause to be reported
_STILL = 5.0  # seconds: when other hosts fail, a worker that has not run for this long is the cause
_STACKS_WAIT = 5.0  # seconds to wait for the stacks of all hosts
# Faults that are kept per host. The first ones explain a failure, and a faulty host may report without end.
_FAULTS_PER_HOST = 16


@dataclass
class _Member:
    name: str
    heard: float
    marks: int = 0
    still: float = 0.0
    done: bool = False
    stacks: str | None = None


class Hub:
    """The state of all hosts, and the faults that they report."""

    def __init__(
        self, hosts: int, timeouts: Timeouts, say: Callable[[str], None], tell_all: Callable[..., None]
    ) -> None:
        """Create the fault hub, which finds the cause when a host of the run fails.

        Args:
          hosts: number of hosts of the run.
          timeouts: when a host counts as missing, gone or stalled.
          say: prints a message.
          tell_all: sends all hosts a message: called with its kind, and its fields by name.
        """
        self._hosts = hosts
        self._timeouts = timeouts
        self._say = say
        self._tell_all = tell_all
        self._members: dict[int, _Member] = {}
        self._faults: list[tuple[float, Fault]] = []
        self._started = self._moved = time.monotonic()
        self._reported = self._started
        self._marks = 0

    async def watch(self) -> Fault | None:
        """Wait until all hosts are done or the run has failed, and tell all hosts. Returns the fault, or None."""
        while True:
            await asyncio.sleep(_TICK)
            now = time.monotonic()
            self._check_hosts(now)
            fault = self._cause(now)
            if fault is None and self._stalled(now):
                fault = await self._stall()
            if fault is not None:
                self._tell_all("verdict", **fault.fields())
                return fault
            if len(self._members) == self._hosts and all(member.done for member in self._members.values()):
                self._tell_all("bye")
                return None
            self._tell_all("heartbeat")

    # ---- reports of hosts -------------------------------------------------------------------------------------

    def join(self, host: int, name: str) -> None:
        """Add a host that has connected."""
        self._members[host] = _Member(name, time.monotonic())

    def take(self, host: int, message: Message) -> None:
        """Handle a message from a host; a message of any kind shows that the host is running."""
        member = self._members[host]
        member.heard = time.monotonic()
        match message["kind"]:
            case "heartbeat":
                member.marks, member.still = int(message.get("marks", 0)), float(message.get("still", 0.0))
            case "fault":
                self.report(Fault.parse(message), host)
            case "stacks":
                member.stacks = shorten(str(message.get("text", "")))
            case "done":
                member.done = True

    def report(self, fault: Fault, host: int) -> None:
        """Note a fault of a host, unless it has already reported many."""
        if sum(found.host == host for _, found in self._faults) >= _FAULTS_PER_HOST:
            return
        who = "all hosts" if fault.kind == "differ" else self._name(host)
        named = replace(fault, text=shorten(fault.text), host=host, who=who)
        self._faults.append((time.monotonic(), named))

    def names(self, hosts: Iterable[int]) -> str:
        """Return the names of hosts for a message."""
        return ", ".join(self._name(host) for host in hosts)

    # ---- faults -----------------------------------------------------------------------------------------------

    def _name(self, host: int) -> str:
        member = self._members.get(host)
        return host_name(host, member.name if member else None)

    def _check_hosts(self, now: float) -> None:
        """Report hosts that are missing or silent."""
        missing = [host for host in range(self._hosts) if host not in self._members]
        waited = now - self._started
        if missing and waited > self._timeouts.initialization:
            text = f"has not joined within {waited:.0f} s; {len(self._members)} of {self._hosts} hosts have joined"
            fault = Fault("missing", text, EXIT_RESTART, missing[0], self.names(missing))
            self._faults.append((now, fault))
        if missing and now - self._reported > WAITING_REPORT_SECONDS:
            self._reported = now
            self._say(f"waiting for {self.names(missing)} of {self._hosts} for {waited:.0f} s")
        for host, member in self._members.items():
            if now - member.heard > self._timeouts.heartbeat:
                self.report(Fault("gone", f"no heartbeat for {now - member.heard:.0f} s"), host)

    def _cause(self, now: float) -> Fault | None:
        """Return the fault to end the run with; None if there is none yet."""
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
            return Fault("frozen", text, EXIT_RESTART, still[0], self.names(still))
        behind = self._behind()
        if behind and first.host not in behind and not aborted:
            text = f"{first.text}\n(reported by {first.who}, while {self.names(behind)} had made less progress)"
            return Fault(first.kind, text, first.code, behind[0], self.names(behind))
        return first

    def _behind(self) -> list[int]:
        """Return the hosts with the least progress; no host if all have made the same progress."""
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
        """Collect and print the stacks of all hosts. Returns a fault that names the hosts with the least progress."""
        stalled = time.monotonic() - self._moved
        self._tell_all("dump")
        deadline = time.monotonic() + _STACKS_WAIT
        while time.monotonic() < deadline and any(member.stacks is None for member in self._members.values()):
            await asyncio.sleep(0.05)
        for host, member in sorted(self._members.items()):
            self._say(
                f"---- {self._name(host)}, progress counter {member.marks}, stack traces:\n{member.stacks or '(none)'}"
            )
        behind = self._behind()
        text = f"no progress for {stalled:.0f} s"
        if not behind:
            return Fault("stalled", f"{text}; all hosts are at the same point, their stacks are above", who="all hosts")
        return Fault(
            "stalled",
            f"{text}; the other hosts are further along and wait for it",
            EXIT_RESTART,
            behind[0],
            self.names(behind),
        )
