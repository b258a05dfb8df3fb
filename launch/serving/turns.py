"""Messages between the hosts of a server: JSON values that travel between the devices, through collectives.

A server takes turns: host 0 decides on a step, and all hosts execute it. Steps travel through
``multihost_utils.broadcast_one_to_all``, reports of the hosts through ``process_allgather``. Both carry a buffer of a
fixed size, so that each is a single program, which is compiled at warm-up. A longer message takes several rounds.

Host 0 begins a turn at least every 0.25 s, even if there is nothing to do. No host therefore waits so long that a
collective times out, unless host 0 is held up; the fault hub (:mod:`launch.hosts.hub`) notices that first. A host
that waits in a collective cannot be interrupted. Its supervisor ends it when another host has failed or the grace
period is over; before that, a thread of host 0 answers all requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from jax.experimental import multihost_utils

BUFFER_BYTES = 16 << 10
_LENGTH_BYTES = 4  # the length of the message, little-endian, before the message


class Hosts(Protocol):
    """The part of :class:`launch.hosts.host.Host` that the server uses.

    Attributes:
      process_index: the index of this host.
      count: the number of hosts.
    """

    process_index: int
    count: int

    @property
    def terminated(self) -> bool:
        """Whether this host received SIGTERM."""

    def mark(self) -> None:
        """Note that this host makes progress, so that it does not count as stalled."""

    def before_end(self, tell: Callable[[], None]) -> None:
        """Register a callback that runs, in another thread, shortly before a fault on any host ends this process."""


class Turns:
    """Exchanges messages between all hosts. Each host makes the same calls in the same order, in one thread."""

    def __init__(self, hosts: Hosts) -> None:
        """Exchange messages on behalf of the host that ``hosts`` describes."""
        self._hosts = hosts

    def warm_up(self) -> None:
        """Compile both collectives, by running each of them once."""
        self.broadcast(None)
        self.gather(None)

    def broadcast(self, value: Any) -> Any:
        """Send a JSON value from host 0 to all hosts and return it. What other hosts pass as ``value`` is ignored."""
        self._hosts.mark()
        if self._hosts.count == 1:
            return value
        is_source = self._hosts.process_index == 0
        message = _frame(value) if is_source else b""

        def exchange(part: bytes) -> list[bytes]:
            # By default JAX's process 0 is the source, and JAX may number the hosts of a TPU slice differently.
            return [_bytes(multihost_utils.broadcast_one_to_all(_buffer(part), is_source=is_source))]

        return _in_rounds(message, exchange)[0]

    def gather(self, value: Any) -> list[Any]:
        """Send the JSON value of each host to all hosts. Returns the values of all hosts, by process index."""
        self._hosts.mark()
        if self._hosts.count == 1:
            return [value]

        def exchange(part: bytes) -> list[bytes]:
            return [_bytes(row) for row in multihost_utils.process_allgather(_buffer(part))]

        # JAX's order, which on a TPU slice may be another.
        arrived = _in_rounds(_frame([self._hosts.process_index, value]), exchange)
        return [value for _, value in sorted(arrived, key=lambda one: one[0])]

    def draining(self) -> bool:
        """Return whether any host received SIGTERM, so that the run should finish its work in flight and exit.

        All hosts get the same answer.
        """
        return any(self.gather(self._hosts.terminated))


def _frame(value: Any) -> bytes:
    message = json.dumps(value, separators=(",", ":")).encode()
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


def _buffer(part: bytes) -> np.ndarray:
    return np.frombuffer(part.ljust(BUFFER_BYTES, b"\0"), np.uint8)


def _bytes(buffer: Any) -> bytes:
    return np.asarray(buffer).astype(np.uint8).tobytes()


def _in_rounds(message: bytes, exchange: Callable[[bytes], list[bytes]]) -> list[Any]:
    """Exchange messages in rounds of ``BUFFER_BYTES`` bytes, and return the values in the messages that arrive.

    Each message begins with its length, so after the first round all hosts know how many rounds there are.

    Args:
      message: the message of this host, as :func:`_frame` returns it; empty if this host only receives.
      exchange: does one round: sends a piece of this host's message and returns the pieces that arrive, each padded
        to ``BUFFER_BYTES``.
    """
    arrived = exchange(message[:BUFFER_BYTES])
    lengths = [_LENGTH_BYTES + int.from_bytes(one[:_LENGTH_BYTES], "little") for one in arrived]
    for start in range(BUFFER_BYTES, max(lengths), BUFFER_BYTES):
        parts = exchange(message[start : start + BUFFER_BYTES])
        arrived = [before + part for before, part in zip(arrived, parts, strict=True)]
    return [json.loads(one[_LENGTH_BYTES:length]) for one, length in zip(arrived, lengths, strict=True)]
