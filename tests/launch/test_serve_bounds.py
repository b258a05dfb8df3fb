"""Bounds of a server: the queue's last places, reads that hang, and rows that only a bucket has room for."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import httpx
import jax
import openai
import pytest

from checkpoints import DEMO
from launch.serving.backend import Backend
from launch.serving.connections import Connection
from launch.serving.http import HttpServer, listen
from launch.serving.keys import Keys
from launch.serving.limits import Limits
from runtime import DiffusionConfig, Engine
from tests.launch.served import PATIENCE, demo, served, slowly, wait_for

CONFIG = DiffusionConfig.published(12, 0.8)
PROMPT = "def is_even(number):\n"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return demo()


def test_one_key_cannot_lock_out_another(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with waiting rows leaves an eighth of the queue to those that have none."""
    texts = [f"key-of-{name}-which-is-long" for name in "ab"]
    with (
        served(engine, CONFIG, limits=Limits(queue=16, rows=16), keys=Keys(texts)) as found,
        slowly(found, monkeypatch),
    ):
        clients = [found.client().with_options(api_key=key) for key in texts]

        def ask(number: int, count: int) -> Iterator[Any]:
            prompts = [PROMPT] * count
            more = {"timeout": PATIENCE}
            return iter(clients[number].completions.create(model="demo", prompt=prompts, stream=True, extra_body=more))

        held = [ask(0, 4)]
        scheduler = found.server.serving.scheduler
        assert scheduler is not None
        wait_for(lambda: scheduler.waiting == 2)
        held.append(ask(0, 12))
        assert scheduler.waiting == 14
        with pytest.raises(openai.RateLimitError):
            ask(0, 1)
        held.append(ask(1, 2))
        assert scheduler.waiting == 16
        with pytest.raises(openai.RateLimitError):
            ask(1, 1)


def test_requests_that_outlast_the_grace_period_are_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[httpx.Response] = []
    body = {"prompt": PROMPT, "max_tokens": 60, "steps": 60}
    with (
        served(engine, CONFIG, limits=Limits(grace_period=0.0)) as found,
        slowly(found, monkeypatch),
    ):
        threads = [
            threading.Thread(target=lambda: answers.append(found.post("/v1/completions", body))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: found.metric("num_requests_running") + found.metric("num_requests_waiting") == 3)
        found.host.end()
        for thread in threads:
            thread.join(PATIENCE)
        found.thread.join(PATIENCE)
        assert [answer.status_code for answer in answers] == [503] * 3
        assert found.server.serving.cut_short == 3
        text = found.server.serving.metrics.text().decode()
        assert 'request_given_up_total{model_name="demo",reason="grace period"} 3.0' in text


def test_a_reader_that_hangs_is_not_waited_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(engine, CONFIG, limits=Limits(request_seconds=0.5)) as found, monkeypatch.context() as changed:
        gate = threading.Event()
        changed.setattr(found.server.reader, "generation", lambda body: gate.wait(PATIENCE))
        answer = found.post("/v1/completions", {"prompt": "x"})
        gate.set()
        assert answer.status_code == 408
        assert answer.json()["error"]["code"] == "deadline_exceeded"


def test_a_bucket_that_is_wider_than_the_model(tmp_path: Path) -> None:
    """A row that fits into the bucket, but not into the model, is refused, also for scores."""
    folder, longest = tmp_path / "model", 100
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "*.jsonl", "__pycache__", "*.manifest.json"))
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": longest}
    (folder / "config.json").write_text(json.dumps(config))
    with served(Engine.load(folder, "data=1", devices=jax.devices()[:1]), CONFIG, canvas=(longest,)) as found:
        assert found.server.serving.executor is not None
        assert found.server.serving.executor.pools[0].width > longest
        assert found.get("/v1/models").json()["data"][0]["max_model_len"] == longest
        for length, status in ((longest, 200), (longest + 1, 400)):
            assert found.post("/v1/score", {"input": [5] * length}).status_code == status
        assert found.get("/health").status_code == 200


@pytest.mark.parametrize(("size", "at_once"), [(12 << 20, 1 << 19), (6 << 20, 1 << 14)])
def test_who_reads_slowly_and_steadily_gets_everything(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, size: int, at_once: int
) -> None:
    """Each pause is shorter than the time limit, and the whole response takes much longer.

    The slower one reads 800 KB within the limit, in which the server's kernel would by default show no progress.
    """
    with served(engine, CONFIG, limits=Limits(write_seconds=1.0)) as found, monkeypatch.context() as changed:
        changed.setattr(Backend, "model", lambda backend: {"id": "x" * size})
        there = ("127.0.0.1", int(found.url.rpartition(":")[2]))
        with socket.create_connection(there, timeout=PATIENCE) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            slow.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            got = 0
            while data := slow.recv(at_once):
                got += len(data)
                time.sleep(0.02)
        assert got > size


@pytest.mark.parametrize("unsent", [1, 1 << 16])
def test_who_stops_reading_shortly_before_the_end_is_not_waited_for(unsent: int) -> None:
    """The rest that the client leaves unread is so small that asyncio would not call it a full buffer."""

    class Answer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            there = cast(asyncio.Transport, transport)
            while not there.get_write_buffer_size():
                there.write(b"x")
            there.write(b"x" * (unsent - 1))

        def connection_lost(self, exc: Exception | None) -> None:
            lost.set()

    lost = asyncio.Event()

    async def answered() -> None:
        own, deaf = socket.socketpair()
        limits = Limits(write_seconds=0.1, read_seconds=2 * PATIENCE)
        with deaf:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: Connection(Answer(), {}, limits), own)
            await asyncio.wait_for(lost.wait(), PATIENCE / 10)

    asyncio.run(answered())


def test_two_connections_from_one_port_of_the_client() -> None:
    """To two addresses of the server: an operating system gives the same port to both."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            begun.set()
            assert await asyncio.to_thread(ready.wait, PATIENCE)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    begun, ready = threading.Event(), threading.Event()
    own = listen("0.0.0.0", 0)
    server, port = HttpServer(app, own, Limits(read_seconds=0.5)), own.getsockname()[1]
    server.start()
    try:
        with (
            closing(connected(port, "127.0.0.1", 0)) as one,
            closing(connected(port, "127.0.0.2", one.getsockname()[1])) as other,
        ):
            one.sendall(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
            assert begun.wait(PATIENCE)
            assert other.recv(1) == b"", "it is closed when no head arrives"
            ready.set()
            assert one.recv(1 << 12).startswith(b"HTTP/1.1 200")
    finally:
        ready.set()
        server.stop()


def connected(port: int, address: str, own: int) -> socket.socket:
    """Connect to the server's ``address`` from this machine's port ``own``; 0 for any."""
    made = socket.socket()
    made.settimeout(PATIENCE)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", own))
    made.connect((address, port))
    return made
