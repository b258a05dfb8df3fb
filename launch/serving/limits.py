"""What the server allows, from its flags."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of everything that comes from outside.

    Attributes:
      body: bytes of a request.
      headers: bytes of its head.
      rows: completions, or scored rows, of one request.
      queue: rows that may wait.
      connections: open at a time.
      request_seconds: from arrival to the end; a request may ask for less.
      read_seconds: in which a head, and then a body, must be there.
      write_seconds: that a client may leave a full socket unread.
      stall_seconds: of one step of the engine until it counts as stalled.
      grace_period: seconds to finish what was accepted when the server is told to end.
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
