"""Messages between supervisors, and between a supervisor and its worker: one JSON object per line, of bounded size."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from runtime import parse_json_object

MAX_BYTES = 64 << 20
MAX_TEXT = 64 << 10  # maximum characters of a traceback
MAX_GREETING = 4 << 10  # maximum bytes of a message before authentication

Message = dict[str, Any]


def encode(kind: str, **fields: Any) -> bytes:
    """Encode a message as a line."""
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Decode a line that :func:`encode` made.

    Raises:
      ValueError: the line is not a message.
    """
    message = parse_json_object(line)
    if not isinstance(message.get("kind"), str):
        raise ValueError("not a message")
    return message


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """Read the next message; None at the end of the connection or if the line is not a message."""
    try:
        line = await reader.readline()
        return decode(line) if line else None
    except (ValueError, OSError):
        return None


async def receive_greeting(reader: asyncio.StreamReader) -> Message | None:
    """Read a message from an unauthenticated client; None if it is invalid or too long."""
    received = b""
    try:
        while not received.endswith(b"\n"):
            part = await reader.read(MAX_GREETING)
            received += part
            if not part or len(received) > MAX_GREETING:
                return None
        return decode(received)
    except (ValueError, OSError):
        return None


def printable(text: str) -> str:
    """Escape the control characters of an untrusted text, except line feeds and tabs, for a terminal."""
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape", "backslashreplace").decode()
        for one in text
    )


def shorten(text: str) -> str:
    """Cut a text to the size of a message. The end is kept, because it is the important part of a traceback."""
    return text if len(text) <= MAX_TEXT else "...\n" + text[-MAX_TEXT:]
