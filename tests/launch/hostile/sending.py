"""Sends raw bytes and requests to a server, and checks the form of error responses."""

from __future__ import annotations

import http.client
import json
import socket
import time
from pathlib import Path
from typing import Any

from launch.serving.app import Application
from runtime import DiffusionConfig
from tests.launch.served import PATIENCE, Served

ROOT = Path(__file__).parents[3]
CONFIG = DiffusionConfig.published(8, 0.8)
GOOD = {"prompt": "def is_even(number):\n", "seed": 7}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/score")
READ = [
    "/openapi.json",
    *(path for path, methods in Application("1.2.3").openapi()["paths"].items() if "get" in methods),
]
KEY = "key-of-somebody-1"
# Statuses of refused requests. Status 500 would be a bug of the server.
REFUSED = (400, 401, 403, 404, 405, 408, 413, 414, 415, 431)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


def check_refusal(status: int, content: bytes) -> None:
    assert status in REFUSED, content[:200]
    error = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for said in ("Traceback", "Error(", "pydantic", "jax", "/launch/", "site-packages"):
        assert said not in content.decode()


def port(found: Served) -> int:
    return int(found.url.rpartition(":")[2])


def raw(found: Served, *parts: bytes, pause: float = 0.0) -> tuple[int, bytes]:
    """Status and body of the response to bytes on a socket; status 0 if the connection closes without a response."""
    with socket.create_connection(("127.0.0.1", port(found)), timeout=PATIENCE) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
            answer = http.client.HTTPResponse(connection, method=parts[0].split()[0].decode("latin-1"))
            answer.begin()
            return answer.status, answer.read()
        except (ConnectionError, http.client.BadStatusLine):
            return 0, b""


def post_head(path: str = "/v1/completions", *lines: str) -> bytes:
    more = "".join(f"{line}\r\n" for line in lines)
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}\r\n".encode()
