"""The shared secret with which the hosts of a run authenticate each other.

A client that connects to host 0 proves that it knows the secret, and host 0 proves the same to the client. Neither
sends it. Each proof is an HMAC over a nonce of the other side, so that a recorded proof cannot be replayed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from runtime import InputError

SECRET, SECRET_FILE = "DIFFUMESH_HOSTS_SECRET", "DIFFUMESH_HOSTS_SECRET_FILE"
_LEAST, _MOST = 16, 4096


def new_secret() -> str:
    """Make a secret for one run."""
    return secrets.token_hex(32)


def nonce() -> str:
    """Draw a random nonce."""
    return secrets.token_hex(16)


def read_secret(environment: Mapping[str, str] | None = None) -> bytes:
    """Read the secret from the environment or from the file that it names; empty if there is neither.

    Raises:
      InputError: the file cannot be read, other users can read it, or the secret is too short.
    """
    around = os.environ if environment is None else environment
    if path := around.get(SECRET_FILE):
        where = f"{SECRET_FILE}={path}"
        try:
            with Path(path).expanduser().open("rb") as file:
                if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                    raise InputError(f"{where}: other users can read this file; run chmod 600 {path}")
                text = file.read(_MOST + 1)
        except (OSError, RuntimeError) as error:
            raise InputError(f"{where}: cannot be read ({error})") from error
    elif SECRET in around:
        where, text = SECRET, os.fsencode(around[SECRET])
    else:
        return b""
    text = text.strip()
    if not _LEAST <= len(text) <= _MOST:
        raise InputError(f"{where}: expected a secret of {_LEAST} to {_MOST} characters, such as openssl rand -hex 32")
    return text


def proof(secret: bytes, *said: object) -> str:
    """Return the HMAC of a message, given as JSON values, under the secret."""
    return hmac.new(secret, json.dumps(said).encode(), hashlib.sha256).hexdigest()


def is_proof(given: object, secret: bytes, *said: object) -> bool:
    """Return whether ``given`` is the proof of a message. The comparison takes constant time."""
    # compare_digest raises an error for text that is not ASCII.
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, proof(secret, *said))
