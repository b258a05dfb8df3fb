"""Messages between supervisors, and between a supervisor and its worker: JSON objects, one a line, bounded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

MAX_BYTES = 64 << 20
MAX_TEXT = 64 << 10  # of a traceback

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


def shorten(text: str) -> str:
    """A text that fits a message: its end is what matters of a traceback."""
    return text if len(text) <= MAX_TEXT else "...\n" + text[-MAX_TEXT:]
