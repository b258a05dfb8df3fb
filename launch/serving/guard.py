"""Checks every request before it is routed: the Host header, the API key, and the size and speed of head and body.

This wraps the whole application instead of being a dependency of routes. A path that does not exist requires the key
too, and a request without a key is refused before its path is looked at.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launch.serving.errors import ApiError
from launch.serving.keys import Keys
from launch.serving.limits import Limits

_HOST = re.compile(rb"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9_.-]{1,253})(?::[0-9]{1,5})?")


async def send_error(error: ApiError, send: Send) -> None:
    """Send an error as a whole response, then close the connection."""
    body = json.dumps(error.body()).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    lines = [(name.lower().encode(), value.encode()) for name, value in (headers | error.headers).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


class Guard:
    """An ASGI application that checks each request, then passes it to another application."""

    def __init__(self, app: ASGIApp, keys: Keys, limits: Limits, hosts: Collection[str]) -> None:
        """Guard ``app``. ``hosts`` are the accepted names in the Host header; if empty, any name is accepted."""
        self._app, self._keys, self._limits = app, keys, limits
        self._hosts = {host.lower().encode() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, then run the application with the request's owner (key or address) in ``state.owner``."""
        if scope["type"] != "http":
            return
        state: dict[str, bool] = {"read": False}
        headers = scope["headers"]

        async def closing_send(message: Message) -> None:
            # A client that is answered before its body was read must not send the rest on this connection.
            if message["type"] == "http.response.start" and not state["read"] and _has_body(headers):
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        try:
            owner = self._check(scope, headers)
        except ApiError as error:
            await send_error(error, send)
            return
        scope["state"] = {**scope.get("state", {}), "owner": owner}
        await self._app(scope, self._limited(receive, state), closing_send)

    def _check(self, scope: MutableMapping[str, Any], headers: list[tuple[bytes, bytes]]) -> object:
        # h11 limits the size of incomplete heads only. A head that arrives in a single packet is measured here.
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) + len(": \r\n") for name, value in headers)
        if size > self._limits.headers:
            raise ApiError(
                431, f"The request line and headers are larger than {self._limits.headers} bytes.", "head_too_large"
            )
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) > 1 or (hosts and not _HOST.fullmatch(hosts[0])):
            raise ApiError(400, "The Host header is not a valid name.", "invalid_request")
        if self._hosts and hosts and _name(hosts[0]) not in self._hosts:
            raise ApiError(403, "The Host header names another server; see --allowed_hosts.", "wrong_host")
        owner: object = (scope.get("client") or ("",))[0]
        if self._keys.wanted:
            given = [value for name, value in headers if name == b"authorization"]
            owner = self._keys.whose(given[0] if len(given) == 1 else None)
            if owner is None:
                raise ApiError(
                    401,
                    "A valid API key is required: Authorization: Bearer KEY.",
                    "invalid_api_key",
                    headers={"WWW-Authenticate": 'Basic realm="diffumesh"'},
                )
        lengths = [value for name, value in headers if name == b"content-length"]
        if lengths and any(name == b"transfer-encoding" for name, _ in headers):
            # A proxy that uses one of them and a server that uses the other would see different requests.
            raise ApiError(400, "A request must not have both Content-Length and Transfer-Encoding.", "invalid_http")
        if any(not value.isdigit() or len(value) > 18 or int(value) > self._limits.body for value in lengths):
            raise self._too_large()
        return owner

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._limits.body} bytes.", "body_too_large")

    def _limited(self, receive: Receive, state: dict[str, bool]) -> Receive:
        read, by = 0, asyncio.get_running_loop().time() + self._limits.read_seconds

        async def limited() -> Message:
            nonlocal read
            if state["read"]:
                return await receive()
            try:
                async with asyncio.timeout_at(by):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "The body did not arrive in time.", "body_too_slow") from None
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                if read > self._limits.body:
                    raise self._too_large()
                state["read"] = not message.get("more_body", False)
            return message

        return limited


def _has_body(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") and value != b"0" for name, value in headers)


def _name(host: bytes) -> bytes:
    name = host.lower()
    return name[: name.index(b"]") + 1] if name.startswith(b"[") else name.partition(b":")[0]
