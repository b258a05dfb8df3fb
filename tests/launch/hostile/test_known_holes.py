"""Known classes of vulnerabilities of LLM servers, which this server must not have."""

from __future__ import annotations

import ast
import base64
import io
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from launch.serving.keys import Keys
from runtime.decoding.parameters import MAX_SEED
from tests.launch.hostile.sending import CONFIG, GOOD, KEY, PATHS, READ, ROOT, Bomb, check_refusal, raw
from tests.launch.served import PATIENCE, Served, served


def test_no_pickle_on_a_socket(there: Served, tmp_path: Path) -> None:
    """Processes exchange JSON only, and no module of the server imports a module that can unpickle."""
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
    # In a message, and in a stop string, they are plain text.
    for text in (loop[:30], "{{ 7 * 7 }}", "{{ messages }}", "{{ ''.__class__ }}", "{#"):
        body = {"messages": [{"role": "user", "content": text}], "seed": 3, "stop": ["(a+)+$", ".*", "[", "\\"]}
        prompt, config = f"user: {text}\ndef answer(", CONFIG.replace(seed=3)
        expected = there.engine.generate([prompt], config, stop=body["stop"])[0].text
        answer = there.post("/v1/chat/completions", body).json()
        assert answer["choices"][0]["message"]["content"] == expected


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
    (folder / "it_ran").unlink()
