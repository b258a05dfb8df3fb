"""The server: the official client, the same answers alone, under load and offline, and whatever goes wrong."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import jax
import openai
import pytest
import torch
import transformers

from checkpoints import DEMO, CheckpointFolder
from launch.model_flags import default_name
from launch.serving.engine import ServingEngine, follow
from launch.serving.errors import ENGINE_FAILED, ApiError
from launch.serving.keys import Keys
from launch.serving.limits import Limits
from launch.serving.metrics import Metrics
from launch.serving.openapi import document
from launch.serving.response_stream import ResponseStream
from runtime import DiffusionConfig, Engine, Executor, PoolShape, SamplingConfig, SchedulerPolicy, StepOutcome, StepPlan
from runtime.decoding.parameters import MAX_SEED
from sharding.errors import InputError
from tests.launch.served import PATIENCE, OneHost, Served, demo, served, wait_for
from tests.launch.tiny import write_tiny_checkpoint

TEMPLATE = (
    "{% for message in messages %}{{ message.name or message.role }}: {{ message.content }}\n{% endfor %}def answer("
)
CONFIG = DiffusionConfig.published(12, 0.8)
DUAL = CONFIG.replace(cache="dual", block_length=8, parallel="threshold")
COMPILED = {"cache": "dual", "block_length": 8, "parallel": "threshold"}
PROMPT = "def is_even(number):\n"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return demo()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """One that is compiled in no time."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return Engine.load(folder, "tensor=1", devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def there(engine: Engine) -> Iterator[Served]:
    with served(engine, CONFIG, [DUAL], template=TEMPLATE) as found:
        yield found


def offline(found: Served, prompts: list[str], **changes: Any) -> list[Any]:
    """What the engine makes of the same parameters."""
    own = dict(changes)
    samples, stop = own.pop("n", 1), own.pop("stop", ())
    if "max_new_tokens" in own:
        own.setdefault("steps", own["max_new_tokens"])
    config = found.defaults.config.replace(**own)
    return found.engine.generate(prompts, config, num_return_sequences=samples, stop=stop)


def test_completions_are_those_of_the_engine(there: Served) -> None:
    client = there.client()
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    prompts = [PROMPT, "import os"]
    found = client.completions.create(
        model="demo", prompt=prompts, n=2, seed=7, max_tokens=10, logprobs=0, temperature=0.9, stop=["\n\n"]
    )
    same = {"n": 2, "seed": 7, "max_new_tokens": 10, "temperature": 0.9, "stop": ["\n\n"], "log_probabilities": True}
    expected = offline(there, prompts, **same)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    for choice, other in zip(found.choices, expected, strict=True):
        assert choice.text == other.text
        assert choice.finish_reason == other.finish_reason
        assert choice.model_dump()["seed"] == other.seed
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(other.log_probabilities, abs=1e-4)
    assert found.usage is not None
    assert found.usage.completion_tokens == sum(len(other.tokens) for other in expected)
    # Without a seed each request draws one, and says which.
    one, two = (client.completions.create(model="demo", prompt=PROMPT).choices[0].model_dump() for _ in range(2))
    assert one["seed"] != two["seed"]
    again = offline(there, [PROMPT], seed=[one["seed"]])[0]
    assert again.text == one["text"]


def test_token_ids_infilling_and_masks_left(there: Served) -> None:
    tokenizer = there.engine.tokenizer
    ids = tokenizer.encode(PROMPT)
    client = there.client()
    by_ids = client.completions.create(model="demo", prompt=ids, seed=1).choices[0]
    assert by_ids.text == client.completions.create(model="demo", prompt=PROMPT, seed=1).choices[0].text
    masked = there.engine.config.mask_token_id
    body = {"prompt": [ids[0], masked, *ids[2:]], "max_tokens": 0, "steps": 2, "seed": 2}
    filled = there.post("/v1/completions", body).json()["choices"][0]
    assert filled["text"] == ""
    assert filled["masks_left"] == 0
    assert len(tokenizer.encode(filled["filled_prompt"])) > 0


def test_chats(there: Served) -> None:
    client = there.client()
    messages: Any = [{"role": "user", "content": "add two"}]
    found = client.chat.completions.create(
        model="demo", messages=messages, max_completion_tokens=9, seed=5, logprobs=True
    )
    expected = offline(there, ["user: add two\ndef answer("], max_new_tokens=9, seed=5, log_probabilities=True)[0]
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].logprobs is not None
    assert [one.logprob for one in found.choices[0].logprobs.content or []] == pytest.approx(
        expected.log_probabilities, abs=1e-4
    )
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=messages,
            max_completion_tokens=9,
            seed=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    assert chunks[-2].choices[0].finish_reason == expected.finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(expected.tokens)
    # What a name is for is the template's to say.
    named = there.post("/v1/chat/completions", {"messages": [messages[0] | {"name": "ann"}], "seed": 5}).json()
    expected = offline(there, ["ann: add two\ndef answer("], seed=5)[0]
    assert named["choices"][0]["message"]["content"] == expected.text


@pytest.mark.parametrize(
    "changes",
    [
        {"block_length": 4},
        {"cache": "dual", "block_length": 8, "parallel": "threshold", "early_stop": True},
        {"temperature": 0, "stop": ["e", "return"]},
    ],
    ids=str,
)
def test_pieces_of_a_stream_are_the_text(there: Served, changes: dict[str, Any]) -> None:
    named = {name: changes.pop(name) for name in ("stop", "temperature") if name in changes}
    common: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "n": 2, "seed": 11, **named}
    client = there.client()
    whole = client.completions.create(**common, extra_body=changes)
    texts, shown = ["", ""], [[], []]
    for chunk in client.completions.create(**common, stream=True, extra_body=changes | {"canvas": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if (canvas := choice.model_dump().get("canvas")) is not None:
                shown[choice.index].append(canvas)
    assert texts == [choice.text for choice in whole.choices]
    for canvases in shown:
        assert all(len(canvas) == 40 for canvas in canvases)
        masks = [canvas.count(None) for canvas in canvases]
        assert masks == sorted(masks, reverse=True), "what stands stays"


def test_answers_do_not_depend_on_who_else_is_served(there: Served) -> None:
    common = {"model": "demo", "prompt": PROMPT}
    asked: list[dict[str, Any]] = [
        {"seed": number, "max_tokens": 4 + 3 * (number % 8), "temperature": (number % 3) / 2}
        | ({"top_p": 1.0} if number % 5 == 0 else {})
        | ({"stream": True} if number % 2 else {})
        | ({"extra_body": {"steps": 1 + number, "alg_temp": number / 10}} if number % 4 == 0 else {})
        | ({"extra_body": {"cache": "dual", "block_length": 8, "parallel": "threshold"}} if number % 4 == 1 else {})
        for number in range(12)
    ]
    client = there.client()

    def text(answer: Any) -> str:
        return answer.choices[0].text if hasattr(answer, "usage") else "".join(c.choices[0].text for c in answer)

    alone = [text(client.completions.create(**common, **one)) for one in asked]
    compiled = there.engine.compiled_programs

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{there.url}/v1", api_key="none", max_retries=0) as many:

            async def one(arguments: dict[str, Any]) -> str:
                answer = await many.completions.create(**common, **arguments)
                if not arguments.get("stream"):
                    return text(answer)
                return "".join([chunk.choices[0].text async for chunk in answer])

            return await asyncio.gather(*map(one, asked))

    assert asyncio.run(all_at_once()) == alone
    assert there.engine.compiled_programs == compiled, "nothing is compiled once the server is ready"
    assert there.metric("programs_compiled") == compiled
    assert offline(there, [PROMPT], seed=2, max_new_tokens=10, temperature=1.0)[0].text == alone[2]


def test_scores_are_those_of_the_engine(there: Served) -> None:
    tokenizer, masked = there.engine.tokenizer, there.engine.config.mask_token_id
    rows = [tokenizer.encode(PROMPT), tokenizer.encode("import os\n"), [5, 6, 7, 8]]
    noised = [[masked if place % 2 else token for place, token in enumerate(row)] for row in rows]
    body = {"model": "demo", "input": noised, "targets": rows, "temperature": 0.7}
    compiled = there.engine.compiled_programs
    found = there.post("/v1/score", body).json()
    for one, row, target in zip(found["data"], noised, rows, strict=True):
        expected = there.engine.score([row], [target], temperature=0.7, width=128, batch=2)[0]
        assert one["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)
    assert there.engine.compiled_programs == compiled
    texts = there.post("/v1/score", {"input": "import os\n"}).json()
    assert len(texts["data"][0]["token_logprobs"]) == len(rows[1])


WRONG: list[tuple[str, Any, int, str]] = [
    ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "model_not_found"),
    ("/v1/completions", {"model": "demo"}, 400, "prompt: missing"),
    ("/v1/completions", {"prompt": ""}, 400, "the prompt is empty"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [9**9]}, 400, "is no token"),
    ("/v1/completions", {"prompt": "x", "wait": 1}, 400, "wait: not supported"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ("/v1/completions", {"prompt": "x", "echo": True}, 400, "echo"),
    ("/v1/completions", {"prompt": "x", "logprobs": 3}, 400, "logprobs"),
    ("/v1/completions", {"prompt": "x", "presence_penalty": 0.1}, 400, "presence_penalty"),
    ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, "best_of"),
    ("/v1/completions", {"prompt": "x", "n": 33}, 400, "at most 32 a request"),
    ("/v1/completions", {"prompt": "x", "n": "2"}, 400, "n: "),
    ("/v1/completions", {"prompt": "x", "max_tokens": 500}, 400, "has room for 128"),
    ("/v1/completions", {"prompt": "word " * 20000}, 400, "too long"),
    ("/v1/completions", {"prompt": "word " * 200}, 400, "has room for 128"),
    ("/v1/completions", {"prompt": "x", "seed": MAX_SEED + 1}, 400, "seed"),
    ("/v1/completions", {"prompt": "x", "temperature": 1e-9}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "algorithm": "origin"}, 400, "no such programs are compiled here"),
    ("/v1/completions", {"prompt": "x", "cache": "dual"}, 400, "no such programs are compiled here"),
    (
        "/v1/completions",
        {"prompt": "x", **COMPILED, "refresh_blocks": 4},
        400,
        "refresh_blocks=4, parallel=threshold: no such programs",
    ),
    (
        "/v1/completions",
        {"prompt": "x", **COMPILED, "refresh_blocks": 0},
        400,
        "refresh_blocks=0, parallel=threshold: no such programs",
    ),
    ("/v1/completions", {"prompt": "x", "steps": 65}, 400, "at most 64"),
    ("/v1/completions", {"prompt": "x", **COMPILED, "steps": 4}, 400, "steps requires parallel=none"),
    ("/v1/completions", {"prompt": "x", **COMPILED, "eps": 0.1}, 400, "eps requires parallel=none"),
    (
        "/v1/completions",
        {"prompt": "x", "algorithm": "origin", "alg_temp": 0.5},
        400,
        "alg_temp requires algorithm=maskgit_plus",
    ),
    ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n: expected at least 1"),
    ("/v1/completions", {"prompt": "x", "temperature": "1"}, 400, "temperature: expected a number"),
    ("/v1/completions", {"prompt": "x", "cache": "both"}, 400, "cache: expected 'none', 'prefix' or 'dual'"),
    ("/v1/completions", {"prompt": "x", "user": "u" * 513}, 400, "user: expected at most 512 characters"),
    ("/v1/completions", {"prompt": "x", "threshold": 0.5}, 400, "threshold requires parallel=threshold"),
    ("/v1/completions", {"prompt": "x", **COMPILED, "factor": 2.0}, 400, "factor requires parallel=factor"),
    (
        "/v1/completions",
        {"prompt": "x", "refresh_interval": 3},
        400,
        "refresh_interval requires cache=dual or cache=prefix",
    ),
    ("/v1/completions", {"prompt": "x", "canvas": True}, 400, "canvas requires stream: true"),
    ("/v1/completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400, "tools"),
    ("/v1/score", {"input": [[1, 2]], "targets": [[1]]}, 400, "targets"),
    ("/v1/score", {"input": [[1] * 200]}, 400, "room for 128"),
    ("/v1/nothing", {}, 404, "not_found"),
    ("/health", {}, 405, "method_not_allowed"),
]


def test_what_is_refused_says_why(there: Served) -> None:
    for path, body, status, said in WRONG:
        answer = there.post(path, body)
        assert answer.status_code == status, (path, body, answer.text)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert said in f"{error['message']} {error['code']}", (body, error)
    raw: list[tuple[bytes, str, int]] = [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"prompt": "x", "prompt": "y"}', "application/json", 400),
        (b'{"prompt": "x", "temperature": NaN}', "application/json", 400),
        (b'{"prompt": "\\ud800"}', "application/json", 400),
        (b'{"prompt": "\xff"}', "application/json", 400),
        (b'{"prompt": ' + b"[" * 100_000, "application/json", 400),
        (b'{"prompt": "x", "n": 1' + b"0" * 5000 + b"}", "application/json", 400),
        (b'{"prompt": "x"}', "text/plain", 415),
        (b'{"prompt": "' + b"x" * (2 << 20) + b'"}', "application/json", 413),
    ]
    for content, kind, status in raw:
        answer = httpx.post(
            f"{there.url}/v1/completions", content=content, headers={"content-type": kind}, timeout=PATIENCE
        )
        assert answer.status_code == status, (content[:50], answer.text)
        assert "Exceeds the limit" not in answer.text
        assert "codec" not in answer.text
    # And after all of that it answers.
    assert there.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_about_the_server(there: Served) -> None:
    assert there.get("/health").json() == {"status": "ready"}
    assert there.get("/version").json() == {"version": "1.2.3"}
    assert there.get("/openapi.json").json() == document("1.2.3")
    before = there.metric("request_success_total")
    assert there.post("/v1/completions", {"prompt": "def f(x):", "max_tokens": 4}).status_code == 200
    wait_for(lambda: there.metric("request_success_total") == before + 1)


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
        compiled = tiny.compiled_programs
        for blocks in (4, 0, 2, 1):
            body = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "refresh_blocks": blocks}
            text = found.post("/v1/completions", body).json()["choices"][0]["text"]
            assert tiny.compiled_programs == compiled
            assert text == offline(found, [PROMPT], max_new_tokens=40, seed=3, refresh_blocks=blocks)[0].text
            compiled = tiny.compiled_programs


def test_blocks_of_any_length_where_a_rule_decides(tiny: Engine) -> None:
    # A canvas that is rounded up, and tables for as many steps as it has positions then.
    with served(tiny, CONFIG.replace(parallel="threshold"), canvas=(100,), steps=None) as found:
        assert found.server.serving.executor is not None
        assert found.server.serving.executor.pools[0].max_steps > 100
        for more in ({}, {"block_length": 8}, {"block_length": 100}, {"block_length": 1000}):
            answer = found.post("/v1/completions", {"prompt": PROMPT, "seed": 3} | more)
            assert answer.status_code == 200, answer.text


def test_slots_of_several_kinds_fit_beside_one_another(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [PoolShape(config, width, 8, 64) for config in (CONFIG, DUAL) for width in (64, 128)]
    alone = [tiny.runner.memory(8, shape.width, shape.config.cache != "none") for shape in shapes]
    monkeypatch.setattr(tiny.runner, "room", lambda: max(memory.total for memory in alone))
    for shape in shapes:
        Executor(tiny.runner, [shape])
    with pytest.raises(InputError, match=r"slots of 4 kinds need 0\.0 GB of each device"):
        Executor(tiny.runner, shapes)
    monkeypatch.setattr(tiny.runner, "room", lambda: sum(memory.total for memory in alone))
    Executor(tiny.runner, shapes)


def test_steps_of_the_defaults_fit(tiny: Engine) -> None:
    with pytest.raises(InputError, match=r"max_steps=64: by default a block of 128 positions has 128 steps"):
        Executor(tiny.runner, [PoolShape(CONFIG.replace(parallel="factor"), 128, 2, 64)])
    with pytest.raises(InputError, match=r"max_steps=8: by default a block of 128 positions has 12 steps"):
        Executor(tiny.runner, [PoolShape(CONFIG, 128, 2, 8)])
    assert Executor(tiny.runner, [PoolShape(CONFIG.replace(steps=1000), 128, 2, None)]).pools[0].max_steps == 1000


def test_told_to_end_while_it_warms_up(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, host = Executor(tiny.runner, [PoolShape(CONFIG, width, 2, 64) for width in (64, 128)]), OneHost()
    ready: list[bool] = []
    serving = ServingEngine(host, Metrics("demo"), max_queue=4, grace_period=1.0)
    for programs in range(5):
        for run in (
            lambda: serving.run(executor, lambda: True, lambda: ready.append(True)),
            lambda: follow(executor, host),
        ):
            made: list[StepPlan] = []
            monkeypatch.setattr(executor, "execute", made.append)
            monkeypatch.setattr(host, "draining", iter([False] * programs + [True]).__next__)
            run()
            assert len(made) == programs
    assert not ready
    assert serving.state == "draining"


def test_another_host_has_failed(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tiny, CONFIG) as found, monkeypatch.context() as changed:
        # The socket closes a moment later.
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
        assert answer.json()["error"]["message"] == "messages: this model has no chat template; see /v1/completions"


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
        # All when they come, and the two that are read now once more.
        wait_for(lambda: len(checked) == 8)
        serving.state = "draining"
        gate.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert statuses == [503] * 6
        assert len(read) == 2, "the others are not looked at"


@contextmanager
def slowly(found: Served, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.5) -> Iterator[threading.Event]:
    """While the event is not set, a step takes so long and makes one iteration."""
    executor, scheduler, gate = found.server.serving.executor, found.server.serving.scheduler, threading.Event()
    assert executor is not None
    assert scheduler is not None
    real = executor.execute

    def execute(plan: StepPlan) -> StepOutcome:
        if plan.pools:
            gate.wait(seconds)
        return real(plan)

    with monkeypatch.context() as changed:
        changed.setattr(executor, "execute", execute)
        changed.setattr(scheduler, "policy", SchedulerPolicy(max_iterations=1))
        yield gate
        gate.set()


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
                # A client that tries again after what it thinks may pass is told that this does not.
                trying = client.with_options(max_retries=2)
                with pytest.raises(openai.APIStatusError) as late:
                    trying.completions.create(model="demo", prompt="a", extra_body={"timeout": 0.01})
                assert late.value.status_code == 408
            # The client has gone, and with it its rows.
            wait_for(lambda: found.metric("num_requests_running") + found.metric("num_requests_waiting") == 0)
            assert found.metric("request_given_up_total") == 2
            assert found.metric("request_refused_total") == 1
            gate.set()
            expected = offline(found, ["a"], seed=3)[0].text
            assert client.completions.create(model="demo", prompt="a", seed=3).choices[0].text == expected
            # Told to end, it finishes what is there and takes nothing new.
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
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        for stray in (b"", b"\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", int(found.url.rpartition(":")[2])), timeout=PATIENCE) as client:
                client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
                wait_for(lambda: found.metric("num_requests_running") == 1)
                client.sendall(stray)
                time.sleep(0.1)  # so that it is read by itself
            gone = time.monotonic()
            wait_for(lambda: found.metric("num_requests_running") == 0)
            assert time.monotonic() - gone < 10, "it would have taken three times as long"


def _choices(line: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(line.removeprefix("data: "))["choices"]
    return found


def test_an_engine_that_fails_says_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr("threading.excepthook", lambda arguments: seen.append(arguments.exc_value))
    with served(engine, CONFIG) as found:
        executor = found.server.serving.executor
        assert executor is not None

        def fail(plan: Any) -> Any:
            raise RuntimeError("the device is on fire")

        # The socket closes a moment later.
        stop = found.server.http.stop
        monkeypatch.setattr(found.server.http, "stop", lambda: None)
        monkeypatch.setattr(executor, "execute", fail)
        answer = found.post("/v1/completions", {"prompt": "a"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_failed"
        assert "fire" not in answer.text
        health = found.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "dead"})
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


def test_who_waits_for_an_engine_that_says_nothing_is_told_the_timeout() -> None:
    async def waiting() -> None:
        now = time.monotonic()
        await ResponseStream(now - 5, now - 3).wait()

    with pytest.raises(ApiError, match="not finished within 2 s"):
        asyncio.run(waiting())


def test_clients_that_do_not_read_and_too_many_of_them(engine: Engine) -> None:
    with served(engine, CONFIG, limits=Limits(connections=3, write_seconds=0.5, read_seconds=PATIENCE)) as found:
        there = ("127.0.0.1", int(found.url.rpartition(":")[2]))
        request, most = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n", 64 << 20
        with socket.create_connection(there, timeout=PATIENCE) as deaf, pytest.raises(ConnectionError):  # noqa: PT012
            for _ in range(most // len(request)):
                deaf.sendall(request)  # and never reads: what the sockets hold fills up, then the server hangs up
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
        with pytest.raises(InputError, match="others can read it"):
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
        port = int(found.url.rpartition(":")[2])
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer key-of-somebody-1\r\n"
        slow = head + b"content-type: application/json\r\ncontent-length: 20\r\n\r\n{"
        for sent, expected in ((head, b""), (slow, b" 408 "), (b"x" * 20000, b" 400 ")):
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
                connection.sendall(sent)
                start, answer = time.monotonic(), b""
                try:
                    while part := connection.recv(1 << 16):
                        answer += part
                except ConnectionResetError:
                    pass
            assert expected in answer
            assert time.monotonic() - start < PATIENCE / 2
        assert found.get("/health", headers=right).status_code == 200


@pytest.mark.slow
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
        assert "for diffusion models" in found.post("/v1/completions", {"prompt": "x", "steps": 3}).text
