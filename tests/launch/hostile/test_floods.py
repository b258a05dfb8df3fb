"""Requests and checkpoints that could keep the server busy: long lists of errors, endless chat templates."""

from __future__ import annotations

import json
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from launch.openai.objects import parse_object
from launch.serving import backend
from launch.serving.bodies import MAX_NAMES, Body, ChatBody, CompletionBody, ScoreBody
from launch.serving.errors import from_validation_error
from launch.serving.limits import Limits
from runtime.text.tokenizer import TextTokenizer
from tests.launch.hostile.sending import CONFIG, GOOD, check_refusal
from tests.launch.served import PATIENCE, Served, served, wait_for
from tests.runtime.text.test_chat_template import ENDLESS

MANY = 100_000
USER: dict[str, Any] = {"role": "user", "content": "x"}
NAMES = {f"k{number}": 1 for number in range(MANY)}
# Bodies with very many errors.
FLOODS: list[tuple[type[Body], dict[str, Any]]] = [
    (CompletionBody, {"prompt": [1.5] * MANY}),
    (CompletionBody, {"prompt": [-1] * MANY}),
    (CompletionBody, {"prompt": [1, "x"] * (MANY // 2)}),
    (CompletionBody, {"prompt": [[-1] * 97] * 1024}),
    (CompletionBody, {"prompt": "x", "stop": [1] * MANY}),
    (ScoreBody, {"input": [None] * MANY}),
    (ScoreBody, {"input": "x", "targets": [[None] * 97] * 1024}),
    (ChatBody, {"messages": [1] * MANY}),
    (ChatBody, {"messages": [{"role": "x"}] * 4096}),
    (ChatBody, {"messages": [USER | {"content": [1] * MANY}]}),
    (ChatBody, {"messages": [USER | {"content": [{"type": "text"}] * 4096}]}),
    (ChatBody, {"messages": [USER | {f"k{number}": 1 for number in range(20)}] * 4096}),
    (ChatBody, {"messages": [USER], "tools": [1] * MANY}),
    (ChatBody, {"messages": [USER], "modalities": ["x"] * MANY}),
]


@pytest.mark.parametrize(("kind", "body"), FLOODS, ids=lambda value: str(value)[:40])
def test_the_first_mistake_ends_the_validation(kind: type[Body], body: dict[str, Any]) -> None:
    """Collecting every error took up to 4 s and 2 GB per request."""
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError) as raised:
            kind.model_validate(body)
        refusal = from_validation_error(raised.value)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert refusal.status == 400
    assert refusal.param in body


@pytest.mark.parametrize("body", [NAMES, {"messages": [USER | NAMES]}, {"metadata": NAMES}, {"logit_bias": NAMES}])
def test_objects_of_many_names_are_refused(there: Served, body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="keys; at most 256"):
        parse_object(json.dumps(body).encode(), MAX_NAMES)
    few = dict(list(NAMES.items())[: MAX_NAMES + 1])
    answer = there.post("/v1/completions", GOOD | few)
    check_refusal(answer.status_code, answer.content)
    assert "at most 256" in answer.json()["error"]["message"]


def test_bodies_are_parsed_one_at_a_time(there: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    parsing: list[bytes] = []
    together: list[int] = []

    def slow(raw: bytes, names: int | None = None) -> dict[str, Any]:
        parsing.append(raw)
        together.append(len(parsing))
        time.sleep(0.05)
        parsing.pop()
        return parse_object(raw, names)

    monkeypatch.setattr(backend, "parse_object", slow)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: there.post("/v1/completions", GOOD), range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert together == [1] * 4


def test_rows_are_counted_before_they_are_tokenized(there: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []
    for name in ("encode", "encode_batch"):
        encode = getattr(TextTokenizer, name)

        def counted(self: TextTokenizer, text: Any, encode: Any = encode) -> Any:
            encoded.extend(text)
            return encode(self, text)

        monkeypatch.setattr(TextTokenizer, name, counted)
    too_long = "x " * (300 * 128 // 2)
    for path, body in (
        ("/v1/score", {"input": ["x"] * 33}),
        ("/v1/completions", {"prompt": ["x"] * 33}),
        ("/v1/score", {"input": too_long}),
        ("/v1/completions", {"prompt": too_long}),
        ("/v1/chat/completions", {"messages": [USER | {"content": too_long[: len(too_long) // 2]}] * 3}),
    ):
        answer = there.post(path, body)
        check_refusal(answer.status_code, answer.content)
        assert not encoded
    assert there.post("/v1/completions", GOOD).status_code == 200
    assert encoded


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    return thread, found


def test_a_template_that_does_not_end(there: Served) -> None:
    """An endless template must not block the reader threads or the end of the process."""
    own = there.engine.tokenizer.chat_template
    with served(there.engine, CONFIG, canvas=(128,), template=ENDLESS) as found:
        chats = [in_background(lambda: found.post("/v1/chat/completions", {"messages": [USER]})) for _ in range(2)]
        while any(thread.is_alive() for thread, _ in chats):
            assert found.post("/v1/completions", GOOD).status_code == 200
            assert found.post("/v1/score", {"input": "x = 1"}).status_code == 200
            assert found.get("/health").json()["status"] == "ready"
            time.sleep(0.2)
        for _, answers in chats:
            check_refusal(answers[0].status_code, answers[0].content)
            assert answers[0].json()["error"]["param"] == "messages"
        in_background(lambda: found.post("/v1/chat/completions", {"messages": [USER]}))
        # Leaving the block stops the server and waits for its end.
    there.engine.tokenizer.chat_template = own


def test_readers_that_hang_show_and_do_not_keep_the_server(there: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    encode = TextTokenizer.encode_batch

    def hang(self: TextTokenizer, texts: Any) -> Any:
        if "hang" in texts:
            released.wait(PATIENCE)
        return encode(self, texts)

    monkeypatch.setattr(TextTokenizer, "encode_batch", hang)
    try:
        with served(there.engine, CONFIG, canvas=(128,), limits=Limits(stall_seconds=1.0)) as found:
            assert found.get("/health").json()["status"] == "ready"
            for _ in range(2):
                in_background(lambda: httpx.post(f"{found.url}/v1/completions", json={"prompt": "hang"}, timeout=60))
            wait_for(lambda: found.get("/health").status_code == 503)
            assert found.get("/health").json() == {"status": "stalled"}
        assert not released.is_set(), "the server has ended all the same"
    finally:
        released.set()


def test_bounds_are_numbers_as_people_write_them(there: Served) -> None:
    for path, body, said in (
        ("/v1/completions", {"max_tokens": 10**9}, "Input should be less than or equal to 1048576"),
        ("/v1/completions", {"timeout": 0}, "Input should be greater than 0"),
        ("/v1/completions", {"timeout": 1e7}, "Input should be less than or equal to 86400"),
        ("/v1/score", {"temperature": 0.00001}, "Input should be greater than or equal to 0.0001"),
        ("/v1/score", {"temperature": 1e300}, "Input should be less than or equal to "),
    ):
        message = there.post(path, {"input" if "score" in path else "prompt": "x"} | body).json()["error"]["message"]
        assert said in message
        assert "e+" not in message
        assert "e-" not in message
