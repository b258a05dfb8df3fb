"""Messages between supervisors, and between a supervisor and its worker: JSON objects, one a line, bounded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

MAX_BYTES = 64 << 20
MAX_TEXT = 64 << 10  # of a traceback
MAX_GREETING = 4 << 10  # of what is said before a host is known

Message = dict[str, Any]


def encode(kind: str, **fields: Any) -> bytes:
    """A message as a line."""
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """A line as a message.

    Raises:
      ValueError: it is none.
    """
    message = json.loads(line)
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("not a message")
    return message


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """The next message, None at the end of the connection or where no message can be made of what comes."""
    try:
        line = await reader.readline()
        return decode(line) if line else None
    except (ValueError, RecursionError, OSError):
        return None


async def receive_greeting(reader: asyncio.StreamReader) -> Message | None:
    """The next message from somebody who is not known yet; None where it is none, or is longer than one of these."""
    received = b""
    try:
        while not received.endswith(b"\n"):
            part = await reader.read(MAX_GREETING)
            received += part
            if not part or len(received) > MAX_GREETING:
                return None
        return decode(received)
    except (ValueError, RecursionError, OSError):
        return None


def printable(text: str) -> str:
    """A text of others as a terminal may see it: control characters, but for line feeds and tabs, are escaped."""
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape", "backslashreplace").decode()
        for one in text
    )


def shorten(text: str) -> str:
    """A text that fits a message: its end is what matters of a traceback."""
    return text if len(text) <= MAX_TEXT else "...\n" + text[-MAX_TEXT:]
