"""The server as a whole: slots, limits, deadlines, keys, failing clients and engines, and shutdown."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jax
import openai
import pytest
import torch
import transformers

from checkpoints import DEMO, CheckpointFolder
from launch.flags.model import default_name
from launch.serving.engine import ServingEngine, follow
from launch.serving.errors import ENGINE_FAILED
from launch.serving.keys import Keys
from launch.serving.limits import Limits
from launch.serving.metrics import Metrics
from launch.serving.turns import Turns
from runtime import DiffusionConfig, Engine, Executor, PoolShape, SamplingConfig, StepPlan
from runtime.execution.runner import weight_bytes
from sharding.errors import InputError
from tests.launch.hostile.sending import port, post_head
from tests.launch.served import PATIENCE, OneHost, Served, demo, offline, served, slowly, wait_for
from tests.launch.tiny import write_tiny_checkpoint

CONFIG = DiffusionConfig.published(12, 0.8)
DUAL = CONFIG.replace(cache="dual", block_length=8, parallel="threshold")
PROMPT = "def is_even(number):\n"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return demo()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine whose programs compile fast."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return Engine.load(folder, "tensor=1", devices=jax.devices()[:1])


def test_a_model_of_the_hub_is_called_by_its_whole_name(
    tiny: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    whole = "apple/DiffuCoder-7B-cpGRPO"
    names = {
        whole: whole,
        "mine/model": "model",  # a local folder wins over the Hub
        "mine/model/": "model",
        str(tmp_path / "mine" / "model"): "model",
        ".": tmp_path.name,
        "gs://bucket/folder/model/": "model",
    }
    for text, name in names.items():
        assert default_name(CheckpointFolder(tmp_path, text)) == name
    with served(tiny, CONFIG, name=whole) as found:
        client = found.client()
        assert client.models.retrieve(whole).id == client.models.list().data[0].id == whole
        assert client.completions.create(model=whole, prompt="a").model == whole
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="DiffuCoder-7B-cpGRPO", prompt="a")


@pytest.mark.slow
def test_blocks_that_are_entered_without_a_refresh(tiny: Engine) -> None:
    config = CONFIG.replace(cache="dual", block_length=4, refresh_blocks=4)
    with served(tiny, config) as found:
        # Programs that score rows are compiled after the server is ready.
        wait_for(lambda: found.get("/health").json()["programs_remaining"] == 0)
        compiled = tiny.compiled_programs
        for blocks in (4, 0, 2, 1):
            body = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "refresh_blocks": blocks}
            text = found.post("/v1/completions", body).json()["choices"][0]["text"]
            assert tiny.compiled_programs == compiled
            assert text == offline(found, [PROMPT], max_new_tokens=40, seed=3, refresh_blocks=blocks)[0].text
            compiled = tiny.compiled_programs


def test_blocks_of_any_length_where_a_rule_decides(tiny: Engine) -> None:
    # The canvas is rounded up, and the step tables have as many entries as the rounded canvas has positions.
    with served(tiny, CONFIG.replace(parallel="threshold"), canvas=(100,), steps=None) as found:
        assert found.server.serving.executor is not None
        assert found.server.serving.executor.pools[0].max_steps > 100
        for more in ({}, {"block_length": 8}, {"block_length": 100}, {"block_length": 1000}):
            answer = found.post("/v1/completions", {"prompt": PROMPT, "seed": 3} | more)
            assert answer.status_code == 200, answer.text


def test_slots_of_several_kinds_fit_beside_one_another(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [PoolShape(config, width, 8, 64) for config in (CONFIG, DUAL) for width in (64, 128)]
    cached = [shape.config.cache != "none" for shape in shapes]
    alone = [tiny.runner.memory(8, shape.canvas, keeps) for shape, keeps in zip(shapes, cached, strict=True)]
    weights = weight_bytes(tiny.layout, tiny.dtype)
    # While rows move between two buckets, the caches of both exist.
    kept = [
        (1 + keeps) * (sum(one.bytes for one in memory.resident) - weights)
        for memory, keeps in zip(alone, cached, strict=True)
    ]
    peak = [sum(one.bytes for one in memory.peak) for memory in alone]
    monkeypatch.setattr(tiny.runner, "room", lambda: weights + max(map(sum, zip(kept, peak, strict=True))))
    for shape in shapes:
        assert Executor(tiny.runner, [shape]).pools[0].count == 8
    with pytest.raises(InputError, match=r"slots of 4 modes need 0\.0 GB per device"):
        Executor(tiny.runner, shapes)
    monkeypatch.setattr(tiny.runner, "room", lambda: weights + sum(kept) + max(peak))
    Executor(tiny.runner, shapes)
    monkeypatch.setattr(tiny.runner, "room", lambda: weights + kept[-1] + peak[-1] - 1)
    assert Executor(tiny.runner, shapes[-1:]).pools[0].count == 7


def test_steps_of_the_defaults_fit(tiny: Engine) -> None:
    with pytest.raises(InputError, match=r"^max_steps is 64; by default a block of 128 positions has 128 steps"):
        Executor(tiny.runner, [PoolShape(CONFIG.replace(parallel="factor"), 128, 2, 64)])
    with pytest.raises(InputError, match=r"^max_steps is 8; by default a block of 128 positions has 12 steps"):
        Executor(tiny.runner, [PoolShape(CONFIG, 128, 2, 8)])
    assert Executor(tiny.runner, [PoolShape(CONFIG.replace(steps=1000), 128, 2, None)]).pools[0].max_steps == 1000


def test_told_to_end_while_it_warms_up(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, host = Executor(tiny.runner, [PoolShape(config, 64, 2, 64) for config in (CONFIG, DUAL)]), OneHost()
    ready: list[bool] = []
    serving = ServingEngine(host, Metrics("demo"), max_queue=4, grace_period=1.0)
    # Warm-up opens and closes one bucket of each pool, and then runs a scoring pass.
    for asked, steps in enumerate((0, 2, 4, 5)):
        for run in (
            lambda: serving.run(executor, lambda: True, lambda: ready.append(True)),
            lambda: follow(executor, host),
        ):
            made: list[StepPlan] = []
            monkeypatch.setattr(executor, "execute", made.append)
            told = iter([False] * asked + [True])
            monkeypatch.setattr(Turns, "draining", lambda turns, told=told: next(told))
            run()
            assert len(made) == steps
    assert not ready
    assert serving.state == "draining"


def test_an_idle_time_says_nothing_about_when_to_try_again(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, real = [0.0], time.monotonic
    clock = SimpleNamespace(monotonic=lambda: real() + passed[0])
    with served(tiny, CONFIG, limits=Limits(queue=5, rows=5, request_seconds=3600.0)) as found:
        monkeypatch.setattr("launch.serving.engine.time", clock)
        for _ in range(2):
            assert found.post("/v1/completions", {"prompt": PROMPT}).status_code == 200
            passed[0] += 100.0
        long = {"prompt": PROMPT, "max_tokens": 40, "steps": 40, "stream": True, "n": 5}
        with (
            slowly(found, monkeypatch),
            httpx.stream("POST", f"{found.url}/v1/completions", json=long, timeout=PATIENCE),
        ):
            wait_for(lambda: found.metric("num_requests_waiting") == 3)
            refused = found.post("/v1/completions", {"prompt": ["a", "b", "c"]})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) <= 2


def test_another_host_has_failed(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tiny, CONFIG) as found, monkeypatch.context() as changed:
        # Keep the socket open for the checks below.
        changed.setattr(found.server.http, "stop", lambda: None)
        found.server.fail()
        health = found.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "dead"})
        answer = found.post("/v1/completions", {"prompt": "a"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == ENGINE_FAILED.code


def test_a_chat_with_a_model_that_has_no_template(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tiny, CONFIG) as found, monkeypatch.context() as changed:
        changed.setattr(tiny.tokenizer, "chat_template", None)
        answer = found.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        assert answer.status_code == 400
        assert (
            answer.json()["error"]["message"] == "messages: The model has no usable chat template. Use /v1/completions."
        )


def test_who_waits_to_be_read_is_refused_unread(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tiny, CONFIG) as found:
        reader, serving, gate = found.server.reader, found.server.serving, threading.Event()
        read, checked, real, check = [], [], reader.generation, serving.check_room

        def generation(body: Any) -> Any:
            read.append(body.prompt)
            assert gate.wait(PATIENCE)
            return real(body)

        def check_room() -> None:
            checked.append(True)
            check()

        statuses: list[int] = []
        monkeypatch.setattr(reader, "generation", generation)
        monkeypatch.setattr(serving, "check_room", check_room)
        threads = [
            threading.Thread(target=lambda: statuses.append(found.post("/v1/completions", {"prompt": "x"}).status_code))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        # Each request is checked when it arrives, and the two that are being read are checked again.
        wait_for(lambda: len(checked) == 8)
        serving.state = "draining"
        gate.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert statuses == [503] * 6
        assert len(read) == 2, "the other bodies are not read"


def test_rooms_and_deadlines(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(engine, CONFIG, limits=Limits(queue=5, rows=5)) as found:
        client = found.client()
        long = {"prompt": PROMPT, "max_tokens": 40, "steps": 40, "stream": True}
        with slowly(found, monkeypatch) as gate:
            with httpx.stream("POST", f"{found.url}/v1/completions", json=long | {"n": 5}, timeout=PATIENCE):
                wait_for(lambda: found.metric("num_requests_running") == 2)
                assert found.metric("num_requests_waiting") == 3
                with pytest.raises(openai.RateLimitError) as refused:
                    client.completions.create(model="demo", prompt=["a", "b", "c"])
                assert int(refused.value.response.headers["retry-after"]) >= 1
                # The header keeps OpenAI's client from trying again.
                trying = client.with_options(max_retries=2)
                with pytest.raises(openai.APIStatusError) as late:
                    trying.completions.create(model="demo", prompt="a", extra_body={"timeout": 0.01})
                assert late.value.status_code == 408
            # The client has disconnected, and its rows are evicted.
            wait_for(lambda: found.metric("num_requests_running") + found.metric("num_requests_waiting") == 0)
            assert found.metric("request_given_up_total") == 2
            assert found.metric("request_refused_total") == 1
            gate.set()
            expected = offline(found, ["a"], seed=3)[0].text
            assert client.completions.create(model="demo", prompt="a", seed=3).choices[0].text == expected
            # After SIGTERM the server finishes accepted requests and refuses new ones.
            gate.clear()
            with httpx.stream("POST", f"{found.url}/v1/completions", json=long | {"n": 3}, timeout=PATIENCE) as stream:
                wait_for(lambda: found.metric("num_requests_running") == 2)
                found.host.end()
                wait_for(lambda: found.server.serving.state == "draining")
                assert found.post("/v1/completions", {"prompt": "a"}).status_code == 503
                health = found.get("/health")
                assert (health.status_code, health.json()) == (503, {"status": "draining"})
                gate.set()
                lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        ends = [choice["finish_reason"] for line in lines[:-1] for choice in _choices(line)]
        assert len([end for end in ends if end]) == 3
        found.thread.join(PATIENCE)
        with pytest.raises(httpx.ConnectError):
            found.get("/health")


def test_a_client_that_goes_after_stray_bytes_frees_its_slot(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(engine, CONFIG) as found, slowly(found, monkeypatch):
        body = json.dumps({"prompt": PROMPT, "max_tokens": 60, "steps": 60}).encode()
        for stray in (b"", b"\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port(found)), timeout=PATIENCE) as client:
                client.sendall(post_head("/v1/completions", f"Content-Length: {len(body)}") + body)
                wait_for(lambda: found.metric("num_requests_running") == 1)
                client.sendall(stray)
                time.sleep(0.1)  # makes it arrive in a separate packet
            gone = time.monotonic()
            wait_for(lambda: found.metric("num_requests_running") == 0)
            assert time.monotonic() - gone < 10, "it would have taken three times as long"


def test_stray_bytes_do_not_disturb_a_stream(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(engine, CONFIG) as found, slowly(found, monkeypatch, PATIENCE) as gate:
        body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", port(found)), timeout=PATIENCE) as client:
            client.sendall(post_head("/v1/completions", f"Content-Length: {len(body)}", "Connection: close") + body)
            wait_for(lambda: found.metric("num_requests_running") == 1)
            client.sendall(b"\r\nstray")
            time.sleep(0.1)
            gate.set()
            received = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert received.count(b"HTTP/1.1 ") == 1
        assert b"data: [DONE]" in received


def _choices(line: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(line.removeprefix("data: "))["choices"]
    return found


def test_an_engine_that_fails_says_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr("threading.excepthook", lambda arguments: seen.append(arguments.exc_value))
    with served(engine, CONFIG) as found:
        executor = found.server.serving.executor
        assert executor is not None
        execute = executor.execute

        def fail(plan: Any) -> Any:
            if not plan.pools:  # the request has not arrived
                return execute(plan)
            raise RuntimeError("the device is on fire")

        # Keep the socket open for the checks below.
        stop = found.server.http.stop
        monkeypatch.setattr(found.server.http, "stop", lambda: None)
        monkeypatch.setattr(executor, "execute", fail)
        answer = found.post("/v1/completions", {"prompt": "a"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_failed"
        assert "fire" not in answer.text
        health = found.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "dead"})
        assert found.metric("request_given_up_total") == 1
        stop()
    assert [str(one) for one in seen] == ["the device is on fire"]


def test_an_engine_that_stands_still_says_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        served(engine, CONFIG, limits=Limits(stall_seconds=1.0)) as found,
        slowly(found, monkeypatch, PATIENCE) as gate,
    ):
        assert found.get("/health").status_code == 200
        body = {"prompt": PROMPT, "stream": True}
        with httpx.stream("POST", f"{found.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            wait_for(lambda: found.get("/health").status_code == 503)
            assert found.get("/health").json() == {"status": "stalled"}
            assert found.get("/metrics").status_code == 200
            gate.set()
            assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"
        wait_for(lambda: found.get("/health").status_code == 200)


def test_clients_that_do_not_read_and_too_many_of_them(engine: Engine) -> None:
    with served(engine, CONFIG, limits=Limits(connections=3, write_seconds=0.5, read_seconds=PATIENCE)) as found:
        there = ("127.0.0.1", int(found.url.rpartition(":")[2]))
        request, most = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n", 64 << 20
        with socket.create_connection(there, timeout=PATIENCE) as deaf, pytest.raises(ConnectionError):  # noqa: PT012
            for _ in range(most // len(request)):
                deaf.sendall(request)  # never reads: the socket buffers fill up, then the server closes the connection
        with ExitStack() as several:
            held = [several.enter_context(socket.create_connection(there, timeout=PATIENCE)) for _ in range(3)]
            for one in held:
                one.sendall(request)
                assert one.recv(12) == b"HTTP/1.1 200"
            refused = several.enter_context(socket.create_connection(there, timeout=PATIENCE))
            with suppress(ConnectionError):
                assert refused.recv(1) == b""
        wait_for(lambda: _answers(found))


def _answers(found: Served) -> bool:
    try:
        return found.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_keys_names_and_slow_clients(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nkey-of-somebody-1\n\nkey-of-somebody-2\n")
    for mode in (0o644, 0o640, 0o604):
        file.chmod(mode)
        with pytest.raises(InputError, match="other users can read this file; run chmod 600"):
            Keys.read(file)
    file.chmod(0o600)
    limits = Limits(read_seconds=1.0)
    with served(engine, CONFIG, keys=Keys.read(file), names=("127.0.0.1", "localhost"), limits=limits) as found:
        right = {"authorization": "Bearer key-of-somebody-2"}
        for path in ("/", "/health", "/metrics", "/version", "/v1/models", "/openapi.json", "/nothing", "//v1/models"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "key-of-somebody-2"}):
                answer = found.get(path, headers=headers)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["code"] == "invalid_api_key"
            assert found.get(path, headers=right).status_code in (200, 404)
        assert found.get("/health", auth=("anybody", "key-of-somebody-1")).status_code == 200
        client = openai.OpenAI(base_url=f"{found.url}/v1", api_key="key-of-somebody-1", max_retries=0)
        assert client.completions.create(model="demo", prompt="a").choices
        for name in ("evil.example", "127.0.0.1.evil.example", "/v1/models?x=", "a b"):
            assert found.get("/health", headers={**right, "host": name}).status_code in (400, 403)
        assert found.get("/health", headers={**right, "host": "LOCALHOST:80"}).status_code == 200
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer key-of-somebody-1\r\n"
        slow = head + b"content-type: application/json\r\ncontent-length: 20\r\n\r\n{"
        for sent, expected in ((head, b""), (slow, b"HTTP/1.1 408 "), (b"x" * 20000, b"HTTP/1.1 400 ")):
            with socket.create_connection(("127.0.0.1", port(found)), timeout=PATIENCE) as connection:
                connection.sendall(sent)
                start, answer = time.monotonic(), b""
                try:
                    while part := connection.recv(1 << 16):
                        answer += part
                except ConnectionResetError:
                    pass
            assert answer.startswith(expected)
            assert bool(answer) == bool(expected), "an incomplete head gets no answer"
            assert time.monotonic() - start < PATIENCE / 2
        assert found.get("/health", headers=right).status_code == 200


def test_an_autoregressive_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    vocabulary = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    engine = Engine.load(folder, "tensor=1", devices=demo().layout.mesh.devices.flat[:1])  # type: ignore[union-attr]
    base = engine.with_end_tokens(SamplingConfig(max_new_tokens=16, temperature=0.8))
    with served(engine, base, canvas=(64, 128)) as found:
        client = found.client()
        asked: list[dict[str, Any]] = [{"seed": n, "max_tokens": 3 + 13 * n, "temperature": n / 3} for n in range(7)]
        alone = [client.completions.create(model="demo", prompt=PROMPT, **one).choices[0].text for one in asked]

        async def streamed(one: dict[str, Any], many: openai.AsyncOpenAI) -> str:
            chunks = await many.completions.create(model="demo", prompt=PROMPT, stream=True, **one)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        async def all_at_once() -> list[str]:
            async with openai.AsyncOpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as many:
                return await asyncio.gather(*[streamed(one, many) for one in asked])

        assert asyncio.run(all_at_once()) == alone
        expected = engine.generate([PROMPT], base.replace(max_new_tokens=16, seed=1, temperature=1 / 3))[0]
        assert expected.text == alone[1]
        assert "which is autoregressive" in found.post("/v1/completions", {"prompt": "x", "steps": 3}).text
