"""Exchanges of values between hosts, through host 0: each host contributes a value, and all get the values of all.

The hosts compare versions, flags, inputs and programs in this way before they run, and a batch asks after each step
whether a host received SIGTERM. An exchange needs no device, so it can name the hosts that are late or that differ.
The steps of a server are not exchanged here, but between the devices (:mod:`launch.serving.turns`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from launch.hosts.faults import EXIT_USER_ERROR, Fault

# A host waits for one exchange to end before it starts the next.
_MAX_OPEN_TOPICS = 2
_MAX_TOPIC = 200

# Exchanges before the run begins; they are reported if they take long.
_BEFORE_THE_RUN = ("join", "preflight", "devices")


# Name of an exchange, and its number, counted by each host.
Topic = tuple[str, int]


@dataclass
class _Exchange:
    since: float
    reported: float
    values: dict[int, Any] = field(default_factory=dict)


class Exchanges:
    """The exchanges that some hosts have begun and others have not."""

    def __init__(self, hosts: int, names: Callable[[Iterable[int]], str]) -> None:
        """Take the number of hosts, and a function that returns the names of hosts for messages."""
        self._hosts = hosts
        self._names = names
        self._open: dict[Topic, _Exchange] = {}
        self._ended: set[int] = set()

    def add(self, host: int, topic: Topic, value: Any) -> list[Any] | Fault | None:
        """Add the value of one host.

        Args:
          host: its process index.
          topic: see :data:`Topic`.
          value: a JSON value.

        Returns:
          The values by process index if this was the last one, None if some are missing, or a fault if the host begins
          too many exchanges, the hosts make different ones, or a host that is missing has ended.
        """
        now = time.monotonic()
        begun = sum(host in exchange.values for exchange in self._open.values())
        name, _ = topic
        if begun >= _MAX_OPEN_TOPICS or len(name) > _MAX_TOPIC:
            text = f"sent too many unfinished gather calls, or one with an overlong name: {name!r:.80}"
            return Fault("exception", text, host=host)
        exchange = self._open.setdefault(topic, _Exchange(now, now))
        exchange.values[host] = value
        if len(exchange.values) < self._hosts:
            return self._compare(topic) or self._absent(topic)
        del self._open[topic]
        return [exchange.values[each] for each in range(self._hosts)]

    def end(self, host: int) -> Fault | None:
        """Note that a host makes no more exchanges. Returns a fault if others wait for it in one."""
        self._ended.add(host)
        return next((fault for topic in self._open if (fault := self._absent(topic)) is not None), None)

    def _absent(self, topic: Topic) -> Fault | None:
        """Return a fault if a host has ended without taking part in an open exchange."""
        if not (absent := self._ended - self._open[topic].values.keys()):
            return None
        text = f"its command ended, but other hosts reached {topic[0]!r} and wait for it"
        return Fault("ended", text, host=min(absent))

    def _compare(self, topic: Topic) -> Fault | None:
        """Return a fault if hosts have begun different exchanges under the same number.

        Hosts must make the same exchanges in the same order. The result is None until all hosts have begun.
        """
        _, number = topic
        begun = [(name, exchange) for (name, its_number), exchange in self._open.items() if its_number == number]
        here = {name: sorted(exchange.values) for name, exchange in begun}
        if sum(map(len, here.values())) < self._hosts:
            return None
        # In a tie, the group of host 0 counts as right.
        common = max(here, key=lambda name: (len(here[name]), 0 in here[name]))
        differing = {name: hosts for name, hosts in here.items() if name != common}
        others = [f"{self._names(hosts)} reached {name!r}" for name, hosts in differing.items()]
        text = (
            f"the hosts are at different steps: {'; '.join(others)}, the others {common!r}. Run the same command "
            "with the same flags and prompts on every host"
        )
        named = tuple(sorted(host for hosts in differing.values() for host in hosts))
        return Fault("differ", text, EXIT_USER_ERROR, here[common][0], differing=named)

    def late(self, now: float, interval: float) -> Iterator[str]:
        """Yield messages about exchanges before the run that take long. Each is repeated every ``interval`` seconds."""
        for (name, _), exchange in self._open.items():
            if name in _BEFORE_THE_RUN and now - exchange.reported > interval:
                exchange.reported = now
                missing = [host for host in range(self._hosts) if host not in exchange.values]
                yield f"waiting for {self._names(missing)} ({name}) for {now - exchange.since:.0f} s"
