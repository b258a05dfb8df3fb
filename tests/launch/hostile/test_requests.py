"""Requests generated from the OpenAPI document, and invalid bytes. Errors must be OpenAI's error objects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode

from launch.serving.app import Application
from tests.launch.hostile.sending import CONFIG, GOOD, PATHS, READ, REFUSED, check_refusal
from tests.launch.served import PATIENCE, Served


def requests_of_the_document(
    found: Served, mode: GenerationMode, examples: int, method: str = "POST", paths: Sequence[str] = PATHS
) -> set[int]:
    """Send generated requests, check the form of errors, and return the statuses of the responses."""
    schema = schemathesis.openapi.from_dict(Application("1.2.3").openapi())
    seen = set()
    with requests.Session() as session:
        for path in paths:

            @hypothesis.settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(hypothesis.HealthCheck),
                phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
            )
            @hypothesis.given(schema[path][method].as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                answer = case.call(base_url=found.url, session=session, timeout=PATIENCE)
                seen.add(answer.status_code)
                if answer.status_code != 200:
                    check_refusal(answer.status_code, answer.content)

            check()
    return seen


def test_requests_of_the_document(there: Served) -> None:
    assert 200 in requests_of_the_document(there, GenerationMode.POSITIVE, 15)
    assert requests_of_the_document(there, GenerationMode.NEGATIVE, 15) <= set(REFUSED)
    assert requests_of_the_document(there, GenerationMode.POSITIVE, 5, "GET", READ[1:]) == {200, 404}


@pytest.mark.slow
def test_many_requests_of_the_document(there: Served) -> None:
    assert 200 in requests_of_the_document(there, GenerationMode.POSITIVE, 1000)
    assert requests_of_the_document(there, GenerationMode.NEGATIVE, 1000) <= set(REFUSED)


# ---- bytes --------------------------------------------------------------------------------------------------------

BODIES: list[bytes] = [
    json.dumps(body).encode()
    for body in (
        GOOD | {"max_tokens": 4, "n": 2, "stop": ["x"], "stream_options": {"include_usage": True}, "stream": True},
        {"messages": [{"role": "user", "content": "é"}], "temperature": 0.5, "steps": 3, "timeout": 20},
        {"input": [[1, 2, 3]], "targets": [[4, 5, 6]], "temperature": 1.5},
    )
]
PIECES = (
    *(
        b"\0",
        b"\xff",
        b"\xc3",
        b"\xed\xa0\x80",
        b"\\ud800",
        b"\\u0000",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"-0",
        b"1E400",
    ),
    *(
        b"9" * 400,
        b"9" * 5000,
        b"[" * 2000,
        b'{"a":' * 2000,
        b'"',
        b"}",
        b"null",
        b"true",
        b'"seed":1,',
        b"\xef\xbb\xbf",
    ),
    *(b'{"__proto__": 1, "prompt": "x"}', b"// x\n", b"'", b"\\", b"\x1b[2J", b"\xe2\x80\xae", b"[]", b"0x10", b"1_0"),
)


def mutated(body: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for place, length, piece in changes:
        place %= len(body) + 1
        body = body[:place] + piece + body[place + length :]
    return body


@pytest.mark.parametrize("examples", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_mutated_bytes(there: Served, examples: int) -> None:
    change = st.tuples(st.integers(0, 400), st.integers(0, 8), st.sampled_from(PIECES))
    with httpx.Client(base_url=there.url, timeout=PATIENCE, headers={"content-type": "application/json"}) as client:

        @hypothesis.settings(max_examples=examples, deadline=None, database=None, derandomize=True)
        @hypothesis.given(st.sampled_from(PATHS), st.sampled_from(BODIES), st.lists(change, min_size=1, max_size=3))
        def check(path: str, body: bytes, changes: list[tuple[int, int, bytes]]) -> None:
            answer = client.post(path, content=mutated(body, changes))
            if answer.status_code != 200:
                check_refusal(answer.status_code, answer.content)

        check()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0",
        b"\xff\xfe{\0}\0",
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": 1, "seed": 1}',
        b'{"prompt": "x", "\\u0070rompt": "y"}',
        b'{"prompt": "x", "stream": true, "stream_options": {"include_usage": true, "include_usage": false}}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 40_000 + b"1" + b"}" * 40_000,
        b'{"prompt": "x", "user": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "' + b"k" * 100_000 + b'": 1}',
        b"[" + b"0," * 100_000 + b"0]",
        b'{"prompt": "x"} {"prompt": "y"}',
        b'{"prompt": "\\ud83d"}',
        b'{"prompt": "x"' + b" " * (1 << 18) + b"}",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_bodies_that_are_no_request(there: Served, body: bytes) -> None:
    answer = httpx.post(
        f"{there.url}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=PATIENCE
    )
    check_refusal(answer.status_code, answer.content)
    assert len(answer.content) < 1000


def test_text_that_is_odd_is_text(there: Served) -> None:
    for text in (
        "\0",
        "a\0b",
        "\u202e",
        "\uffff",
        "x<|mask|>",
        "<|endoftext|>",
        "\x1b[2J",
        "😀" * 5,
        "\r\n\r\nGET / HTTP",
    ):
        answer = there.post("/v1/completions", {"prompt": text, "seed": 1})
        # Where nothing sets the steps, a mask in the prompt adds one.
        config = CONFIG.replace(seed=1, steps=CONFIG.steps + text.count("<|mask|>"))
        expected = there.engine.generate([text], config)[0].text
        assert answer.json()["choices"][0]["text"] == expected
