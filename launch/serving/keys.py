"""API keys: read from a file and compared in constant time."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from runtime import InputError

_MAX_BYTES = 64 << 10
_LEAST = 16


class Keys:
    """The accepted API keys. Without any key, every client may use the server."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        """Store the SHA-256 digests of the keys."""
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read the keys from a file with one key per line. Blank lines and lines that begin with # are ignored.

        Raises:
          InputError: the file cannot be read, other users can read it, it has no key, or a line is not a key.
        """
        flag = f"--api_key_file={path}"
        try:
            if path.stat().st_mode & 0o077:
                raise InputError(f"{flag}: other users can read this file; run chmod 600 {path}")
            with path.open("rb") as file:
                text = file.read(_MAX_BYTES + 1).decode("ascii")
        except OSError as error:
            raise InputError(f"{flag}: cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{flag}: cannot be read as text ({error})") from error
        lines = [line.strip() for line in text.splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        wrong = [number for number, line in enumerate(found, 1) if len(line) < _LEAST or not line.isprintable()]
        if len(text) > _MAX_BYTES or not found or wrong or any(" " in line for line in found):
            raise InputError(f"{flag}: expected one key per line, each of at least {_LEAST} characters without spaces")
        return cls(found)

    @property
    def wanted(self) -> bool:
        """Whether requests need a key."""
        return bool(self._digests)

    def whose(self, authorization: bytes | None) -> int | None:
        """Return the index of the key in an ``Authorization`` header, or None if the header has no valid key.

        The header is ``Bearer KEY`` or, for browsers, ``Basic`` with any user name and the key as the password. The
        given key is compared with every key, each time in constant time.
        """
        kind, _, said = (authorization or b"").partition(b" ")
        given = said.strip()
        if kind.lower() == b"basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                given = b""
        elif kind.lower() != b"bearer":
            given = b""
        digest = hashlib.sha256(given).digest()
        found = None
        for number, own in enumerate(self._digests):
            if hmac.compare_digest(own, digest):
                found = number
        return found
