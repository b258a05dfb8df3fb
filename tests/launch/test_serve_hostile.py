"""Requests that mean harm, or that nobody meant: refused in OpenAI's shape, and the next good one answered right."""

from __future__ import annotations

import ast
import base64
import http.client
import io
import json
import pickle
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import jax
import numpy as np
import pytest
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode

from launch.serving.keys import Keys
from launch.serving.limits import Limits
from launch.serving.openapi import document
from runtime import DiffusionConfig, Engine
from runtime.decoding.parameters import MAX_SEED
from tests.launch.served import PATIENCE, Served, served
from tests.launch.tiny import write_tiny_checkpoint

ROOT = Path(__file__).parents[2]
CONFIG = DiffusionConfig.published(8, 0.8)
GOOD = {"prompt": "def is_even(number):\n", "seed": 7}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/score")
READ = [path for path, methods in document("1.2.3")["paths"].items() if "get" in methods]
KEY = "key-of-somebody-1"
# Of a server that has a mistake in it, or has lost something.
REFUSED = (400, 401, 403, 404, 405, 408, 413, 414, 415, 431)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with code in it that must not run."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    code = f"open({str(folder / 'it_ran')!r}, 'w')\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py"):
        (folder / name).write_text(code)
    for name, more in (
        ("config.json", {"AutoModel": "modeling_evil.Evil", "AutoConfig": "configuration_evil.Evil"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}),
    ):
        old = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(old | {"auto_map": more, "trust_remote_code": True}))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / "it_ran")))
    return folder


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


@pytest.fixture(scope="module")
def there(folder: Path) -> Iterator[Served]:
    limits = Limits(body=1 << 18, read_seconds=1.0, request_seconds=PATIENCE)
    engine = Engine.load(folder, "tensor=1", devices=jax.devices()[:1])
    with served(engine, CONFIG, canvas=(128,), limits=limits, names=("127.0.0.1", "localhost")) as one:
        yield one


@pytest.fixture(scope="module")
def right(there: Served) -> str:
    return there.engine.generate([GOOD["prompt"]], CONFIG.replace(seed=7))[0].text


@pytest.fixture(autouse=True)
def _still_right(there: Served, right: str) -> Iterator[None]:
    yield
    answer = there.post("/v1/completions", GOOD)
    assert answer.json()["choices"][0]["text"] == right
    assert there.get("/health").json() == {"status": "ready"}


def check_refusal(status: int, content: bytes) -> None:
    assert status in REFUSED, content[:200]
    error = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for said in ("Traceback", "Error(", "pydantic", "jax", "/launch/", "site-packages"):
        assert said not in content.decode()


def port(found: Served) -> int:
    return int(found.url.rpartition(":")[2])


def raw(found: Served, *parts: bytes, pause: float = 0.0) -> tuple[int, bytes]:
    """Status and body of the answer to bytes on a socket; 0 where the server hangs up without one."""
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


# ---- what the document describes, and what it does not ------------------------------------------------------------


def requests_of_the_document(
    found: Served, mode: GenerationMode, examples: int, method: str = "POST", paths: Sequence[str] = PATHS
) -> set[int]:
    """The statuses of answers, refusals in their shape."""
    schema = schemathesis.openapi.from_dict(document("1.2.3"))
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
    assert requests_of_the_document(there, GenerationMode.POSITIVE, 5, "GET", READ) == {200, 404}


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
        expected = there.engine.generate([text], CONFIG.replace(seed=1))[0].text
        assert answer.json()["choices"][0]["text"] == expected


# ---- sockets ------------------------------------------------------------------------------------------------------


def test_bodies_in_small_parts(there: Served, right: str) -> None:
    body = json.dumps(GOOD).encode()
    whole = post_head("/v1/completions", f"Content-Length: {len(body)}") + body
    chunked = [b"%x\r\n%c\r\n" % (1, byte) for byte in body]
    for parts in (
        [bytes([byte]) for byte in whole],
        [post_head("/v1/completions", "Transfer-Encoding: chunked"), *chunked, b"0\r\n\r\n"],
    ):
        status, answer = raw(there, *parts, pause=0.0005)
        assert status == 200
        assert json.loads(answer)["choices"][0]["text"] == right


def test_bodies_that_do_not_come(there: Served) -> None:
    assert raw(there, post_head("/v1/completions", "Content-Length: 50"), b"{")[0] == 408
    assert raw(there, b"POST /v1/completions HTTP/1.1\r\nHost: loc")[0] == 0
    # Whoever drips has no longer than whoever stalls.
    dripping = [post_head("/v1/completions", "Content-Length: 500"), *[b" "] * 8]
    assert raw(there, *dripping, pause=0.2)[0] in (0, 408)


HEADS: list[tuple[bytes, tuple[int, ...]]] = [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64, (400,)),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\n X: folded\r\n\r\n", (400,)),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n", (400,)),
    (b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n", (200, 400)),
    (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", (400,)),
    (b"GET /health\r\n\r\n", (400,)),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 404)),
    (b"GET /health HTTP/1.1\r\n\r\n", (400,)),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n", (400,)),
    (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", (403,)),
    (b"GET /health HTTP/1.1\r\nHost: localhost@evil.example\r\n\r\n", (400,)),
    (b"GET /health HTTP/1.1\r\nHost: localhost/v1\r\n\r\n", (400,)),
    (b"GET /health HTTP/1.1\r\nHost: localhost:99999999\r\n\r\n", (400,)),
    (b"GET /health HTTP/1.1\r\nHost: [::1\r\n\r\n", (400,)),
    (b"GET /health HTTP/1.1\r\nHost: " + b"a" * 5000 + b"\r\n\r\n", (400,)),
    (b"GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n", (400, 404)),
    (b"CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", (400, 404, 405)),
    (b"DELETE /health HTTP/1.1\r\nHost: localhost\r\n\r\n", (405,)),
    (post_head("/v1/completions", "Content-Length: -1"), (400,)),
    (post_head("/v1/completions", "Content-Length: 5", "Content-Length: 6"), (400,)),
    (post_head("/v1/completions", "Content-Length: 9999999999"), (413,)),
    (post_head("/v1/completions", "Content-Length: " + "9" * 30), (400, 413)),
    (post_head("/v1/completions", "Transfer-Encoding: chunked") + b"zz\r\n", (400,)),
    (post_head("/v1/completions", "Transfer-Encoding: chunked") + b"ffffffffffffffffff\r\n", (400, 408, 413)),
    (post_head("/v1/completions", "Transfer-Encoding: gzip"), (400,)),
    (post_head("/v1/completions", "Content-Encoding: gzip", "Content-Length: 2") + b"{}", (400, 415)),
]


@pytest.mark.parametrize(("head", "expected"), HEADS, ids=lambda value: repr(value)[:60])
def test_heads_that_are_odd(there: Served, head: bytes, expected: tuple[int, ...]) -> None:
    status, body = raw(there, head)
    assert status in expected, body
    assert status == 200 or set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert str(status) in document("1.2.3")["paths"]["/health"]["get"]["responses"]


def test_two_requests_at_once_on_a_connection(there: Served, right: str) -> None:
    body = json.dumps(GOOD).encode()
    one = post_head("/v1/completions", f"Content-Length: {len(body)}") + body
    with socket.create_connection(("127.0.0.1", port(there)), timeout=PATIENCE) as connection:
        connection.sendall(one + one)
        for _ in range(2):
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert json.loads(answer.read(int(answer.headers["content-length"])))["choices"][0]["text"] == right


# ---- known classes of holes in LLM servers ------------------------------------------------------------------------


def test_no_pickle_on_a_socket(there: Served, tmp_path: Path) -> None:
    """Between processes there is JSON; nothing that a server imports can even unpickle."""
    for content_type in ("application/octet-stream", "application/x-pickle", "application/json", "text/plain"):
        content = pickle.dumps(Bomb(tmp_path / "it_ran"))
        for path in PATHS:
            answer = httpx.post(
                f"{there.url}{path}", content=content, headers={"content-type": content_type}, timeout=PATIENCE
            )
            check_refusal(answer.status_code, answer.content)
    assert not (tmp_path / "it_ran").exists()
    unpickling = {
        "pickle",
        "cPickle",
        "_pickle",
        "dill",
        "cloudpickle",
        "marshal",
        "shelve",
        "joblib",
        "multiprocessing",
    }
    for path in [
        file for name in ("launch", "runtime", "sharding", "checkpoints") for file in (ROOT / name).rglob("*.py")
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not unpickling & {name.partition(".")[0] for name in names}, path
            assert not (isinstance(node, ast.keyword) and node.arg == "allow_pickle" and _says_true(node.value)), path


def _says_true(node: ast.expr) -> bool:
    return not (isinstance(node, ast.Constant) and node.value is False)


ADDRESSES = (
    *(path.replace("{name}", "demo") for path in (*READ, *PATHS)),
    *(
        "/docs",
        "/redoc",
        "/favicon.ico",
        "/static/x",
        "//health",
        "/health/",
        "/./health",
        "/v1/../health",
        "/%2e/health",
    ),
    *(
        "/health;x",
        "/health?x=/v1",
        "/health%00",
        "/HEALTH",
        "/v1/models/../../health",
        "/ping",
        "/%68ealth",
        "/v1%2fmodels",
    ),
)


def test_every_route_asks_for_the_key_whatever_host_and_path_say(there: Served) -> None:
    with served(there.engine, CONFIG, canvas=(128,), keys=Keys([KEY]), names=("localhost",)) as found:
        for target in (*ADDRESSES, "*", "http://localhost/health", "http://localhost:8000/health?x", "localhost:80"):
            for method in ("GET", "HEAD", "POST", "OPTIONS", "X"):
                head = f"{method} {target} HTTP/1.1\r\nHost: localhost:1\r\nConnection: close\r\n"
                status, _ = raw(found, f"{head}\r\n".encode())
                assert status in (400, 401), head
        get = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        basic = base64.b64encode(f"x:{KEY}".encode()).decode()
        for line, expected in (
            (f"Authorization: Bearer {KEY}", 200),
            (f"authorization:bearer {KEY}", 200),
            (f"Authorization: Basic {basic}", 200),
            (f"Authorization: Bearer {KEY}x", 401),
            (f"Authorization: Bearer {KEY[:-1]}", 401),
            ("Authorization: Bearer", 401),
            ("Authorization: Bearer ", 401),
            (f"Authorization: {KEY}", 401),
            (f"Authorization: Basic {basic[:-4]}", 401),
            (f"Authorization: Basic {KEY}", 401),
            (f"Authorization: Bearer x\r\nAuthorization: Bearer {KEY}", 401),
            (f"X-Api-Key: {KEY}", 401),
            (f"Cookie: key={KEY}", 401),
            ("X-Forwarded-For: 127.0.0.1\r\nX-Original-URL: /health\r\nX-Rewrite-URL: /health", 401),
        ):
            status, body = raw(found, f"{get}{line}\r\n\r\n".encode())
            assert status == expected, line
            assert KEY not in body.decode()
        for host in (f"localhost/?x={KEY}", "localhost/health", "localhost#", "localhost\\@x", "evil.example"):
            head = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            for line in ("", f"Authorization: Bearer {KEY}\r\n"):
                assert raw(found, f"{head}{line}\r\n".encode())[0] in (400, 403)


def test_numbers_of_completions_are_bounded(there: Served) -> None:
    for more in (
        *({"n": n} for n in (0, -1, 33, 1025, 10**9, 10**30, 1.5, True, "9")),
        {"n": 32, "prompt": ["x", "y"]},
        {"best_of": 10**9},
        {"prompt": ["x"] * 33},
        {"prompt": [[5]] * 10_000},
        {"max_tokens": 10**9},
        {"steps": 10**9},
        {"top_k": 10**30},
        {"seed": MAX_SEED + 1},
        {"block_length": 10**12},
        {"refresh_interval": 10**12},
        {"logprobs": 10**6},
        {"timeout": 1e300},
        {"stop": ["x"] * 17},
        {"stop": "x" * 1025},
    ):
        answer = there.post("/v1/completions", GOOD | more)
        check_refusal(answer.status_code, answer.content)
    for more in ({"input": [[5]] * 33}, {"temperature": 1e-300}, {"temperature": 9e-5}, {"temperature": 1e300}):
        answer = there.post("/v1/score", {"input": [[5, 6]]} | more)
        check_refusal(answer.status_code, answer.content)
    assert there.post("/v1/score", {"input": [[5, 6]], "temperature": 1e-4}).status_code == 200


def test_templates_and_patterns_of_clients_are_not_used(there: Served) -> None:
    loop = "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}"
    pattern = "(a+)+$"
    for more in (
        {"chat_template": loop},
        {"chat_template_kwargs": {"x": loop}},
        {"guided_regex": pattern},
        {"guided_json": {"pattern": pattern}},
        {"guided_grammar": "root ::= root root"},
        {"structured_outputs": {"regex": pattern}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": pattern}}}},
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"pattern": pattern}}}]},
        {"bad_words": [pattern]},
        {"logits_processors": ["os.system"]},
        {"logit_bias": {"1": 100}},
    ):
        answer = there.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]} | more)
        check_refusal(answer.status_code, answer.content)
    # In a message they are text, and so is a pattern in a stop.
    for text in (loop[:30], "{{ 7 * 7 }}", "{{ messages }}", "{{ ''.__class__ }}", "{#"):
        body = {"messages": [{"role": "user", "content": text}], "seed": 3, "stop": ["(a+)+$", ".*", "[", "\\"]}
        expected = there.engine.generate([f"user: {text}\ndef answer("], CONFIG.replace(seed=3))[0].text
        answer = there.post("/v1/chat/completions", body).json()
        assert answer["choices"][0]["message"]["content"] == expected


def test_heads_are_bounded(there: Served) -> None:
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    for size in (20_000, 60_000, 200_000, 3_000_000):
        for line in (b"X: " + b"a" * size, b"X: 1\r\n" * (size // 6) + b"Y: 1", b"a" * size + b": 1"):
            for parts in ([get + line + b"\r\n\r\n"], [get, line[: size // 2], line[size // 2 :] + b"\r\n\r\n"]):
                assert raw(there, *parts)[0] in (0, 400, 431), (size, line[:6])
        assert raw(there, b"GET /" + b"a" * size + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] in (0, 400, 414, 431)


def test_tensors_of_clients_are_refused(there: Served) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.full((1, 4), 1 << 30))
    packed = base64.b64encode(buffer.getvalue()).decode()
    for path, body in (
        ("/v1/completions", {"prompt": "x", "prompt_embeds": packed}),
        ("/v1/completions", {"prompt_embeds": packed}),
        ("/v1/completions", {"prompt": [[0.5, 0.5]]}),
        ("/v1/completions", {"prompt": [[[1, 2]]]}),
        ("/v1/completions", {"prompt": [-1]}),
        ("/v1/completions", {"prompt": [1 << 31]}),
        ("/v1/completions", {"prompt": [10**40]}),
        ("/v1/completions", {"prompt": {"dtype": "float32", "shape": [1 << 40], "data": packed}}),
        ("/v1/completions", {"prompt": "x", "multi_modal_data": {"image": packed}}),
        ("/v1/completions", {"prompt": "x", "kv_transfer_params": {}}),
        ("/v1/completions", {"prompt": "x", "lora_request": {"path": "/etc"}}),
        ("/v1/score", {"input": [[1, 2]], "targets": [[1, -1]]}),
        ("/v1/score", {"input": [[1, 1 << 29]]}),
        ("/v1/score", {"input": [[1, 2]], "targets": packed}),
        ("/v1/score", {"input": [1, [2]]}),
    ):
        answer = there.post(path, body)
        check_refusal(answer.status_code, answer.content)


def test_nothing_is_fetched_for_a_client(there: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        address = f"http://127.0.0.1:{trap.getsockname()[1]}/x"
        for url in (address, "file:///etc/passwd", "gs://bucket/x", "data:image/png;base64,AAAA"):
            parts: list[dict[str, Any]] = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
                {"type": "video_url", "video_url": {"url": url}},
                {"type": "file", "file": {"file_id": url}},
                {"type": "text", "text": "x", "url": url},
            ]
            for part in parts:
                answer = there.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
                check_refusal(answer.status_code, answer.content)
            for more in ({"model": url}, {"media_io_kwargs": {"url": url}}, {"webhook": url}, {"adapter": url}):
                answer = there.post("/v1/completions", GOOD | more)
                check_refusal(answer.status_code, answer.content)
            assert there.post("/v1/completions", {"prompt": url}).status_code == 200
        trap.settimeout(0.2)
        with pytest.raises(TimeoutError):
            trap.accept()


def test_no_code_of_the_model_folder_has_run(there: Served, folder: Path) -> None:
    assert there.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}).status_code == 200
    assert not (folder / "it_ran").exists()
    assert not [name for name in sys.modules if "evil" in name]
    pickle.loads((folder / "pytorch_model.bin").read_bytes()).close()
    assert (folder / "it_ran").exists(), "the bomb is one"
