"""Attacks on checkpoints, chat templates and the server: the number of attempts and their effects.

``python -m benchmarks.faults --attacks`` runs them with many attempts (:data:`LONG`), and those of
:mod:`benchmarks.attack_hosts`, :mod:`benchmarks.attack_inputs` and :mod:`benchmarks.command_attacks` too. Tests run
the same attacks with few attempts.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attack_hosts import attack_hosts, attack_local, resident
from benchmarks.attack_inputs import attack_batch, attack_numbers
from benchmarks.command_attacks import (
    ENDLESS_TEMPLATE,
    attack_outputs,
    attack_replacement,
    attack_side_files,
    copy_demo,
    cover,
)
from checkpoints import CheckpointError, FolderOutput, convert, open_folder, verify
from launch.hosts.local_processes import free_port
from runtime import InputError
from runtime.text.chat_template import TemplateRenderer

CHANGES = ("flip", "truncate", "zero", "append", "delete", "swap", "add")
# Files that some reader of models would use if they existed.
ADDED = (
    *("chat_template.jinja", "additional_chat_templates/tools.jinja", "added_tokens.json", "special_tokens_map.json"),
    *("model.safetensors", "model-00003-of-00003.safetensors", "pytorch_model.bin", "adapter_config.json"),
    *("vocab.json", "modeling_dream.py", "tokenizer.model", "LICENSE.txt", "LICENSE.md", ".a.json"),
    *("weights/state/d/0", "weights/_METADATA", "weights/.hidden"),
)
TEMPLATES = (
    ENDLESS_TEMPLATE,
    "{{ 10**9999999999 }}",
    "{{ 'x' * 10**11 }}",
    "{{ 'x'|center(10**12) }}",
    "{{ ('x' * 1000000) * 30 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 1 / 0 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
)
_BODIES = (
    {"prompt": "def f(x):\n", "max_tokens": 2, "seed": 1, "n": 2, "stop": ["x"]},
    {"messages": [{"role": "user", "content": "é"}], "max_tokens": 2, "temperature": 0.5},
)
_PIECES = (
    *(b"", b'"', b"}", b"null", b"true", b"NaN", b"1e999", b"-0", b"9" * 5000, b"[" * 2000, b'{"a":' * 2000),
    *(b"\0", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\xef\xbb\xbf", b'"seed":1,', b"\x1b[2J", b"-1", b"0x10"),
)
_LOOPBACK = "127.0.0.1"
_START_SECONDS = 300.0
_GRACE_SECONDS = 1
_HEALTH_REQUESTS = 20
_HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_SMUGGLED = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


def change(folder: Path, kind: str, generator: random.Random) -> dict[Path, bytes | None] | None:
    """Make one random change to a file of a checkpoint's folder.

    Args:
      folder: the checkpoint's folder; any file in it may change, except ``*.md`` and ``.gitattributes``, which
        no reader uses.
      kind: one of :data:`CHANGES`.
      generator: random number generator.

    Returns:
      The old contents by path (None for a file that did not exist); None if nothing changed.
    """
    inert = (".md", ".gitattributes")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(inert))
    path = generator.choice(files)
    data = path.read_bytes()
    at = generator.randrange(len(data) + 1)
    new: bytes | None = data
    match kind:
        case "flip" if at < len(data):
            new = data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :]
        case "truncate":
            new = data[:at]
        case "zero":
            end = min(len(data), at + generator.choice([1, 4, 64, 4096]))
            new = data[:at] + bytes(end - at) + data[end:]
        case "append":
            new = data + generator.choice([b"\n", b" ", b"\0", generator.randbytes(9)])
        case "delete":
            new = None
        case "swap":
            other = generator.choice(files)
            there = other.read_bytes()
            if there == data:
                return None
            path.write_bytes(there)
            other.write_bytes(data)
            return {path: data, other: there}
        case "add":
            path = folder / generator.choice(ADDED)
            if path.exists():
                return None
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(generator.choice([b"", b"{}", data]))
            return {path: None}
    if new == data:
        return None
    path.unlink()
    if new is not None:
        path.write_bytes(new)
    return {path: data}


def put_back(path: Path, data: bytes | None) -> None:
    """Restore the bytes of a file; None removes a file that did not exist."""
    if data is not None:
        path.write_bytes(data)
        return
    path.unlink()
    while not any(path.parent.iterdir()):
        path = path.parent
        path.rmdir()


def refusal(folder: Path) -> str:
    """Return the error of :func:`checkpoints.verify` for a folder; empty if there is none."""
    try:
        verify(open_folder(folder))
    except CheckpointError as error:
        return str(error)
    return ""


def try_changes(folder: Path, count: int, seed: int = 0) -> dict[str, int]:
    """Make random changes to a checkpoint, one at a time, and count those that ``verify`` finds."""
    generator = random.Random(seed)
    tried = found = 0
    while tried < count:
        before = change(folder, CHANGES[tried % len(CHANGES)], generator)
        if before is None:
            continue
        tried += 1
        found += bool(refusal(folder))
        for path, data in before.items():
            put_back(path, data)
    return {"tried": tried, "found": found}


def attack_checkpoints(count: int) -> dict[str, Any]:
    """Make random changes to a Hugging Face folder and to a canonical checkpoint with the demo's weights."""
    with tempfile.TemporaryDirectory() as name:
        plain, canonical = copy_demo(Path(name, "huggingface")), Path(name, "orbax")
        layout = cover(plain)
        output = FolderOutput(canonical)
        output.prepare(overwrite=False)
        convert(open_folder(plain), layout, output)
        return {folder.name: try_changes(folder, count // 2) for folder in (plain, canonical)}


def attack_templates(seconds: float = 1.0) -> dict[str, Any]:
    """Render chat templates that never end, fill the memory or fail; count refusals and measure their time."""
    renderer, longest, refused = TemplateRenderer(seconds), 0.0, 0
    for template in TEMPLATES:
        start = time.monotonic()
        try:
            renderer.render(template, [[{"role": "user", "content": "x"}]], {}, True)
        except InputError:
            refused += 1
        longest = max(longest, time.monotonic() - start)
    return {"tried": len(TEMPLATES), "refused": refused, "deadline": seconds, "longest_seconds": round(longest, 2)}


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int, subprocess.Popen[bytes]]]:
    """Serve the demo in a child process, with a chat template that does not end. Yield address, port and process."""
    log, model, port = folder / "server.log", copy_demo(folder / "model"), free_port()
    (model / "chat_template.jinja").write_text(ENDLESS_TEMPLATE)
    cover(model)
    command = [sys.executable, "-m", "launch.serve", f"--port={port}", "--mesh=tensor=1", "--canvas=128"]
    command += ["--max_new_tokens=8", f"--grace={_GRACE_SECONDS}", f"--checkpoint={model}"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file)
    try:
        end = time.monotonic() + _START_SECONDS
        while _ask((_LOOPBACK, port), _LOOPBACK, "GET", "/health") != 200:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')}")
            time.sleep(0.1)
        yield _LOOPBACK, port, process
    finally:
        process.kill()
        process.wait()


def _ask(address: tuple[str, int], source: str, method: str, path: str, body: bytes = b"") -> int:
    """Send a request from the local address ``source``; return the status of its response, 0 if there is none."""
    connection = http.client.HTTPConnection(*address, timeout=120, source_address=(source, 0))
    with contextlib.closing(connection):
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            return 0
        return answer.status


def _post(address: tuple[str, int], source: str, body: bytes) -> int:
    return _ask(address, source, "POST", "/v1/completions", body)


def send_two_lengths(address: tuple[str, int], count: int) -> dict[str, int]:
    """Send requests that state two lengths of their body, so that a proxy may see a second request; count refusals."""
    generator, refused = random.Random(0), 0
    for _ in range(count):
        chunked = generator.choice(["chunked", "CHUNKED", "gzip, chunked", " chunked "])
        lines = [
            f"Content-Length: {generator.choice([0, 5, 5 + len(_SMUGGLED)])}\r\n",
            f"Transfer-Encoding: {chunked}\r\n",
        ]
        generator.shuffle(lines)
        with socket.create_connection(address, timeout=120) as connection:
            connection.sendall(f"{_HEAD}{''.join(lines)}\r\n".encode() + b"0\r\n\r\n" + _SMUGGLED)
            received = b""
            with contextlib.suppress(ConnectionError):
                while part := connection.recv(1 << 16):
                    received += part
        # Refused means: there is one response, an error, and the connection is closed.
        refused += received.startswith(b"HTTP/1.1 4") and received.count(b"HTTP/1.1 ") == 1
    return {"tried": count, "refused": refused}


class EndlessChats:
    """Chat requests, sent from background threads to a server whose template does not end."""

    def __init__(self, address: tuple[str, int], count: int) -> None:
        """Send the chats, each from an address of its own."""
        self._statuses: list[int] = []
        self._threads = [
            threading.Thread(target=self._chat, args=(address, f"127.0.1.{1 + number}"), daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _chat(self, address: tuple[str, int], source: str) -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
        self._statuses.append(_ask(address, source, "POST", "/v1/chat/completions", body))

    def statuses(self) -> list[int]:
        """Wait for all responses and return their HTTP statuses; 0 stands for no response."""
        for thread in self._threads:
            thread.join()
        return self._statuses


def end_with_chats(address: tuple[str, int], process: subprocess.Popen[bytes], count: int) -> dict[str, Any]:
    """Ask for the health of a server that renders endless templates, then send it SIGTERM and wait for its end."""
    chats = EndlessChats(address, count)
    time.sleep(0.5)
    healthy = sum(_ask(address, "127.0.0.1", "GET", "/health") == 200 for _ in range(_HEALTH_REQUESTS))
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(_START_SECONDS)
    seconds = round(time.monotonic() - start, 2)
    chats.statuses()
    return {
        "chats": count,
        "health": {"tried": _HEALTH_REQUESTS, "ready": healthy},
        "grace": _GRACE_SECONDS,
        "code": code,
        "seconds": seconds,
    }


def hostile_body(generator: random.Random) -> bytes:
    """Return the body of a request with one to three random changes."""
    body = json.dumps(generator.choice(_BODIES)).encode()
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(len(body) + 1)
        body = body[:at] + generator.choice(_PIECES) + body[at + generator.randrange(8) :]
    return body


def send_hostile_bodies(address: tuple[str, int], count: int) -> dict[str, int]:
    """Send random bodies; count those that are refused with a 4xx status, and those that cause a 5xx status."""
    generator = random.Random(0)
    statuses = [_post(address, "127.0.0.1", hostile_body(generator)) for _ in range(count)]
    refused = sum(400 <= status < 500 for status in statuses)
    return {"tried": count, "refused": refused, "server_errors": sum(status >= 500 for status in statuses)}


def attack_readers(address: tuple[str, int], chats: int, bodies: int) -> dict[str, Any]:
    """Send hostile bodies while chats hang, then wait until the chats are answered."""
    endless = EndlessChats(address, chats)
    return {
        "hostile_bodies": send_hostile_bodies(address, bodies),
        "two_lengths": send_two_lengths(address, bodies),
        "chats": {"tried": chats, "refused": endless.statuses().count(400)},
    }


def attack_server(clients: int, requests: int, bodies: int, chats: int) -> dict[str, Any]:
    """Attack a server with random bodies, endless chats, and clients that send lists of 100,000 invalid tokens.

    The latency of valid requests is measured alone and beside these clients, in seconds, and so is the growth of the
    server's memory. In the end the server receives SIGTERM.
    """
    flood = json.dumps({"prompt": [-1] * 100_000}).encode()
    valid = json.dumps({"prompt": "def f(x):\n", "max_tokens": 8, "seed": 1}).encode()
    with tempfile.TemporaryDirectory() as name, serving(Path(name)) as (host, port, process):

        def latencies() -> list[float]:
            taken = []
            for _ in range(requests):
                start = time.perf_counter()
                status = _post((host, port), "127.0.0.1", valid)
                if status != 200:
                    raise RuntimeError(f"a valid request was answered with {status}")
                taken.append(time.perf_counter() - start)
            return taken

        hostile = attack_readers((host, port), chats, bodies)
        latencies()
        alone, before, over, sent = latencies(), resident(process.pid), threading.Event(), [0] * clients
        wrong: set[int] = set()

        def attack(number: int) -> None:
            while not over.is_set():
                status = _post((host, port), f"127.0.0.{2 + number}", flood)
                if status not in (400, 429):
                    wrong.add(status)
                    return
                sent[number] += 1

        threads = [threading.Thread(target=attack, args=(number,), daemon=True) for number in range(clients)]
        for thread in threads:
            thread.start()
        under = latencies()
        over.set()
        for thread in threads:
            thread.join()
        if wrong or not all(sent):
            raise RuntimeError(f"lists sent by each client: {sent}; answers other than 400 and 429: {sorted(wrong)}")
        return {
            "clients": clients,
            "lists_sent": sum(sent),
            "alone": _quantiles(alone),
            "under_attack": _quantiles(under),
            "p99_ratio": round(float(np.quantile(under, 0.99) / np.quantile(alone, 0.99)), 2),
            "bytes_grown": max(0, resident(process.pid) - before),
            **hostile,
            "end": end_with_chats((host, port), process, clients),
        }


def _quantiles(seconds: list[float]) -> dict[str, float]:
    return {name: round(float(np.quantile(seconds, at)), 4) for name, at in (("p50", 0.5), ("p99", 0.99))}


LONG: dict[str, Callable[[], dict[str, Any]]] = {
    # Attacks that measure time come first, so that only the first minutes need a machine to themselves.
    "server": lambda: attack_server(8, 200, 2000, 8),
    "batch": lambda: attack_batch(1_000_000, 10, 1000),
    "hosts": lambda: attack_hosts(200, 200, 100_000),
    "templates": attack_templates,
    "checkpoints": lambda: attack_checkpoints(10_000),
    "numbers": lambda: attack_numbers(10),
    "side_files": attack_side_files,
    "replacement": lambda: attack_replacement(100),
    "outputs": attack_outputs,
    "local": attack_local,
}

# Goals of the long forms: the attack, its figure, and the largest allowed value.
_GOALS = (
    ("server", "p99_ratio", 5.0),
    ("server", "bytes_grown", 100e6),
    ("batch", "first_result_seconds", 30.0),
    ("hosts", "bytes_grown", 100e6),
)
# Counts that must equal the number of attempts, except those of random bodies, some of which are valid.
_EVERY = {"found", "refused", "reported", "ready", "verify", "convert", "whole", "one_message", "ended"}
_SOME_VALID = "hostile_bodies"
# Counts, and the exit code of the server, that must be 0.
_NONE = {"server_errors", "passed_on", "missing", "wrong_results", "code"}


def missed_goals(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each figure of the long forms' results that misses its goal."""
    late = [
        f"{attack}: {figure} is {results[attack][figure]:g}; at most {most:g} is the goal"
        for attack, figure, most in _GOALS
        if attack in results and not results[attack][figure] <= most
    ]
    return late + [said for attack, found in results.items() for said in _successes(attack, found)]


def _successes(attack: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each count that says that an attack succeeded."""
    for key, value in found.items():
        if isinstance(value, Mapping):
            yield from _successes(f"{attack}, {key}", value)
        elif key in _EVERY and not attack.endswith(_SOME_VALID) and value != found["tried"]:
            yield f"{attack}: {key} is {value}; {found['tried']} is the goal"
        elif (key in _NONE and value != 0) or (key == "named" and not value):
            yield f"{attack}: {key} is {value}; {0 if key in _NONE else True} is the goal"
        elif key == "connections" and value != found["cut_off"]:
            yield f"{attack}: cut_off is {found['cut_off']}; {value} is the goal"
