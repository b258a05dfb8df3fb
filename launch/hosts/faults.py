"""Faults of a host: their kinds, exit codes and messages."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from launch.hosts.messages import Message
from runtime import InputError

EXIT_USER_ERROR = 2
EXIT_RESTART = 42
EXIT_INTERRUPTED = 130

# A terminal and a parent process may both pass on the same Ctrl-C.
SECONDS_OF_ONE_SIGNAL = 0.5

# Kinds of faults. The last three may be consequences of the end of another host: this host stops too, its collectives
# fail, or JAX aborts its process.
FaultKind = Literal[
    "input",  # an error that the user can fix
    "differ",  # the hosts differ, and each of them notices it
    "exception",
    "killed",
    "ended",
    "frozen",
    "gone",
    "missing",
    "stalled",
    "stopped",
    "followed",
    "device",
    "aborted",
]
CONSEQUENCES = ("followed", "device", "aborted")


class HostsDifferError(InputError):
    """Hosts have different flags, inputs, code or programs; the message names them.

    Attributes:
      hosts: process indices of the hosts that differ from most.
    """

    def __init__(self, message: str, hosts: Iterable[int]) -> None:
        super().__init__(message)
        self.hosts = sorted(set(hosts))


@dataclass(frozen=True)
class Timeouts:
    """How long hosts wait for each other, in seconds.

    Attributes:
      initialization: after this, a host that has not joined counts as missing.
      heartbeat: without a heartbeat for this long, a host counts as dead.
      shutdown: a host whose command is done must end within this time.
      stall: without progress on any host for this long, the run counts as stalled.
    """

    initialization: float
    heartbeat: float
    shutdown: float
    stall: float


@dataclass(frozen=True)
class Fault:
    """The reason why a run ends early.

    Attributes:
      kind: what happened.
      text: a sentence or a traceback.
      code: exit code of all hosts.
      host: process index of the host at fault; None if no single host is.
      who: index and name of the host or hosts at fault, for messages.
      differing: process indices of the hosts that differ from most, if ``kind`` is ``differ``.
    """

    kind: FaultKind
    text: str
    code: int = EXIT_RESTART
    host: int | None = None
    who: str = ""
    differing: tuple[int, ...] = ()

    @property
    def hosts(self) -> tuple[int, ...]:
        """Process indices of the hosts at fault."""
        if self.kind == "differ":
            return self.differing
        return () if self.host is None else (self.host,)

    @property
    def is_consequence(self) -> bool:
        """Whether the end of another host may have caused this fault."""
        return self.kind in CONSEQUENCES

    def fields(self) -> Message:
        """Return the fields of the message that reports this fault."""
        return {
            "fault": self.kind,
            "text": self.text,
            "code": self.code,
            "host": self.host,
            "who": self.who,
            "differing": list(self.differing),
        }

    @classmethod
    def parse(cls, message: Message) -> Fault:
        """Read a fault from a message. A missing kind becomes ``exception``; other invalid fields get defaults."""
        code, host, differing = message.get("code"), message.get("host"), message.get("differing")
        return cls(
            kind=message.get("fault", "exception"),
            text=str(message.get("text", "")),
            code=code if isinstance(code, int) and 0 < code < 256 else EXIT_RESTART,
            host=host if isinstance(host, int) else None,
            who=str(message.get("who", "")),
            differing=tuple(one for one in differing if isinstance(one, int)) if isinstance(differing, list) else (),
        )

    def describe(self) -> str:
        """Return one line that names the host and the fault."""
        lines = self.text.strip().splitlines() or ["no more is known"]
        if self.kind == "differ":
            return lines[0].removeprefix("error: ").rstrip(":")
        return f"{self.who}: {lines[0 if self.kind == 'input' else -1]}"


def host_name(process_index: int, name: str | None) -> str:
    """Return the name of a host for messages, such as ``host 2 (worker-2)``."""
    return f"host {process_index} ({name})" if name else f"host {process_index}"


def fault_of_status(status: int) -> Fault:
    """Return the fault that the exit status of a worker indicates when the worker itself reported none.

    Args:
      status: as :func:`os.waitpid` gives it, not 0.
    """
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGABRT:
        return Fault("aborted", "its process aborted (SIGABRT)")
    if code < 0:
        hint = "; the system does that when memory runs out" if code == -signal.SIGKILL else ""
        return Fault("killed", f"its process was killed by {signal.Signals(-code).name}{hint}")
    restart = code not in (EXIT_USER_ERROR, EXIT_INTERRUPTED)
    return Fault("ended", f"its process ended with exit code {code}", EXIT_RESTART if restart else code)
