"""Limits of requests and connections, set by flags."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of everything that clients send, and of time.

    Attributes:
      body: maximum bytes of a request's body.
      headers: maximum bytes of a request's head.
      rows: maximum completions or scored rows per request.
      queue: maximum rows that wait for a slot.
      connections: maximum open connections.
      request_seconds: maximum seconds from the arrival of a request to its end. A request can set a shorter timeout.
      read_seconds: seconds in which a request's head must arrive, and then its body.
      write_seconds: seconds for which a client may leave a response unread.
      stall_seconds: seconds of one engine step, or of reading one body, after which ``/health`` reports a stall.
      grace_period: seconds to finish accepted requests after SIGTERM.
    """

    body: int = 1 << 20
    headers: int = 16 << 10
    rows: int = 32
    queue: int = 64
    connections: int = 1024
    request_seconds: float = 600.0
    read_seconds: float = 10.0
    write_seconds: float = 30.0
    stall_seconds: float = 60.0
    grace_period: float = 30.0
