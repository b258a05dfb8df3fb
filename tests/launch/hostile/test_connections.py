"""Requests in small parts, malformed or oversized heads, and several requests on one connection."""

from __future__ import annotations

import http.client
import json
import socket

import httpx
import pytest

from launch.serving.app import Application
from tests.launch.hostile.sending import GOOD, port, post_head, raw
from tests.launch.served import PATIENCE, Served


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


def test_a_body_byte_by_byte_gets_no_more_time(there: Served) -> None:
    """The server ends the connection long before the client, which could go on for 30 seconds, has sent its bytes."""
    ended, received = False, b""
    with socket.create_connection(("127.0.0.1", port(there)), timeout=PATIENCE) as connection:
        connection.sendall(post_head("/v1/completions", "Content-Length: 500"))
        connection.settimeout(0.1)  # the pause between two bytes, unless the server answers
        for _ in range(300):
            try:
                connection.sendall(b" ")
                received = connection.recv(1 << 16)
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            ended = True
            break
    assert ended
    assert received.startswith(b"HTTP/1.1 408 ") or not received


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
    assert str(status) in Application("1.2.3").openapi()["paths"]["/health"]["get"]["responses"]


def test_two_lengths_of_one_body(there: Served) -> None:
    """A request after a body with two lengths is not answered, because a proxy may see a different request there."""
    smuggled = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for length in (0, 5, 5 + len(smuggled)):
        head = post_head("/v1/completions", f"Content-Length: {length}", "Transfer-Encoding: chunked")
        with socket.create_connection(("127.0.0.1", port(there)), timeout=PATIENCE) as connection:
            connection.sendall(head + b"0\r\n\r\n" + smuggled)
            received = b""
            while part := connection.recv(1 << 16):
                received += part
        assert received.startswith(b"HTTP/1.1 400 ")
        assert received.count(b"HTTP/1.1") == 1


def test_two_requests_at_once_on_a_connection(there: Served, right: str) -> None:
    body = json.dumps(GOOD).encode()
    one = post_head("/v1/completions", f"Content-Length: {len(body)}") + body
    with socket.create_connection(("127.0.0.1", port(there)), timeout=PATIENCE) as connection:
        connection.sendall(one + one)
        for _ in range(2):
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert json.loads(answer.read(int(answer.headers["content-length"])))["choices"][0]["text"] == right


def test_bytes_that_are_not_http_after_a_request(there: Served) -> None:
    with socket.create_connection(("127.0.0.1", port(there)), timeout=PATIENCE) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n\x16\x03\x01\r\n\r\n")
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    first, second = received.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200 ")
    assert second.startswith(b"400 ")
    assert json.loads(second.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_head_is_get_without_a_body(there: Served) -> None:
    for path in ("/health", "/v1/models"):
        answer = httpx.head(f"{there.url}{path}", timeout=PATIENCE)
        assert answer.status_code == 200
        assert int(answer.headers["content-length"]) == len(there.get(path).content)
        assert not answer.content
    assert httpx.head(f"{there.url}/v1/completions", timeout=PATIENCE).status_code == 405


def test_heads_are_bounded(there: Served) -> None:
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    for size in (20_000, 60_000, 200_000, 3_000_000):
        for line in (b"X: " + b"a" * size, b"X: 1\r\n" * (size // 6) + b"Y: 1", b"a" * size + b": 1"):
            for parts in ([get + line + b"\r\n\r\n"], [get, line[: size // 2], line[size // 2 :] + b"\r\n\r\n"]):
                assert raw(there, *parts)[0] in (0, 400, 431), (size, line[:6])
        assert raw(there, b"GET /" + b"a" * size + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] in (0, 400, 414, 431)
