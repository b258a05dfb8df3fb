"""An emulator of Google Cloud Storage: the part of its JSON interface that TensorStore uses.

The emulators on PyPI list objects outside the requested range, which crashes TensorStore. This one keeps objects in
memory, with generations and their preconditions. It logs every request, and can refuse writes.
"""

from __future__ import annotations

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class ObjectStore(ThreadingHTTPServer):
    """A server with one bucket, ``bucket``.

    Attributes:
      objects: name -> (generation, data).
      log: (method, object) of every request that reads, writes or deletes one.
      delay: seconds that each read takes.
      wait_for: number of reads that must have taken place at the same time before one of an object whose name contains
        ``wait_in`` ends; each waits 20 s at most.
      wait_in: see ``wait_for``.
      reads_at_a_time: the largest number of reads that took place at the same time.
      writes_left: number of writes and deletions that are accepted before all others are refused.
    """

    daemon_threads = True
    request_queue_size = 128  # a client opens many connections at once

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.log: list[tuple[str, str]] = []
        self.bytes_sent = 0
        self.longest_answer = 0
        self.delay = 0.0
        self.wait_for, self.wait_in = 0, ""
        self.reading = self.reads_at_a_time = 0
        self.writes_left = 1 << 60
        self.lock = threading.Lock()
        self.arrived = threading.Condition(self.lock)
        self.generation = 1

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def settle(self) -> None:
        """Wait until no request arrives, because a refused write also ends other writes that are in flight."""
        seen = -1
        while seen != len(self.log):
            seen = len(self.log)
            time.sleep(0.3)

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self.objects if name.startswith(prefix))


class _Handler(BaseHTTPRequestHandler):
    server: ObjectStore
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        # Counted first: once a client has the answer, a test may reset the counts.
        self.server.bytes_sent += len(data)
        self.server.longest_answer = max(self.server.longest_answer, len(data))
        self.wfile.write(data)
        self.wfile.flush()

    def answer_json(self, value: Any) -> None:
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refused(self, query: dict[str, list[str]], name: str) -> bool:
        """Whether a write or deletion fails: no longer allowed, or its precondition does not hold."""
        wanted = query.get("ifGenerationMatch")
        if wanted is not None and int(wanted[0]) != self.server.objects.get(name, (0, b""))[0]:
            self.answer(412)
        elif self.server.writes_left <= 0:
            self.answer(403)
        else:
            self.server.writes_left -= 1
            return False
        return True

    def metadata(self, name: str) -> dict[str, str]:
        generation, data = self.server.objects[name]
        return {"name": name, "bucket": "bucket", "generation": str(generation), "size": str(len(data))}

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.reading += 1
            self.server.reads_at_a_time = max(self.server.reads_at_a_time, self.server.reading)
            self.server.arrived.notify_all()
            if self.server.wait_in in unquote(self.path):
                self.server.arrived.wait_for(lambda: self.server.reads_at_a_time >= self.server.wait_for, timeout=20)
        time.sleep(self.server.delay)
        # Counted before the answer, after which the client may send another request.
        with self.server.lock:
            self.server.reading -= 1
        self.get()

    def get(self) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        with self.server.lock:
            if address.path == "/storage/v1/b/bucket/o":
                low, high = query.get("startOffset", [""])[0], query.get("endOffset", ["\U0010ffff"])[0]
                prefix = query.get("prefix", [""])[0]
                names = [name for name in self.server.names(prefix) if low <= name < high]
                start = int(query.get("pageToken", ["0"])[0])
                page = min(int(query.get("maxResults", ["7"])[0]), 7)
                more = {"nextPageToken": str(start + page)} if start + page < len(names) else {}
                items = [self.metadata(name) for name in names[start : start + page]]
                self.answer_json({"kind": "storage#objects", "items": items} | more)
                return
            name = unquote(address.path.removeprefix("/storage/v1/b/bucket/o/"))
            self.server.log.append(("GET", name))
            if name == address.path or name not in self.server.objects:
                self.answer(404)
                return
            generation, data = self.server.objects[name]
        if query.get("ifGenerationNotMatch", [""])[0] == str(generation):
            self.answer(304)
            return
        headers = {"x-goog-generation": str(generation)}
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if part is None:
            self.answer(200, data, headers)
            return
        if int(part[1]) >= len(data):
            self.answer(416)
            return
        first, last = int(part[1]), min(int(part[2] or len(data) - 1), len(data) - 1)
        piece = data[first : last + 1]
        self.answer(206, piece, headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def do_POST(self) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = query["name"][0]
        assert address.path == "/upload/storage/v1/b/bucket/o"
        assert query["uploadType"] == ["media"]
        with self.server.lock:
            self.server.log.append(("POST", name))
            if not self.refused(query, name):
                self.server.generation += 1
                self.server.objects[name] = (self.server.generation, data)
                self.answer_json(self.metadata(name))

    def do_DELETE(self) -> None:
        address = urlsplit(self.path)
        name = unquote(address.path.removeprefix("/storage/v1/b/bucket/o/"))
        with self.server.lock:
            self.server.log.append(("DELETE", name))
            if self.refused(parse_qs(address.query), name):
                return
            found = self.server.objects.pop(name, None)
            self.answer(404 if found is None else 204)

    def log_message(self, *_: Any) -> None:
        pass
