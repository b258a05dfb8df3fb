"""The routes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from launch.display.pages import content_security_policy, page_template
from launch.openai.answers import DECIMALS
from launch.openai.bodies import Defaults, parse_object
from launch.serving.answering import Answering
from launch.serving.bodies import MAX_NAMES, Body, ChatBody, CompletionBody, ScoreBody, validate
from launch.serving.engine import ServingEngine
from launch.serving.errors import ApiError, from_input_error
from launch.serving.limits import Limits
from launch.serving.metrics import Metrics
from launch.serving.openapi import document
from launch.serving.readers import Readers
from launch.serving.reading import Reader
from launch.serving.response_stream import ResponseStream
from runtime import InputError, RequestHandle

# Threads that read bodies. Chats have their own: a template of the checkpoint's that does not end holds up chats alone.
_READERS, _CHAT_READERS = 2, 2

Kind = TypeVar("Kind", bound=Body)
Read = TypeVar("Read")


class Routes:
    """What answers requests."""

    def __init__(
        self,
        serving: ServingEngine,
        reader: Reader,
        defaults: Defaults,
        metrics: Metrics,
        limits: Limits,
        version: str,
    ) -> None:
        """Take the parts of the server."""
        self._serving, self._reader, self._defaults = serving, reader, defaults
        self._metrics, self._limits, self._version = metrics, limits, version
        self._started = int(time.time())
        self._page = _page()
        self._readers = Readers(_READERS, limits.queue, "reader")
        self._chat_readers = Readers(_CHAT_READERS, limits.queue, "chat-reader")

    def application(self) -> Starlette:
        """The application, without a guard."""
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
            Route("/openapi.json", self.openapi),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/score", self.score, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {
            ApiError: _api_error,
            InputError: _input_error,
            HTTPException: _http_error,
            ClientDisconnect: _nobody_there,
            Exception: _our_mistake,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        # A redirect would be to an address made from the Host header.
        app.router.redirect_slashes = False
        return app

    def close(self) -> None:
        """Read no more bodies."""
        for readers in (self._readers, self._chat_readers):
            readers.close()

    # ---- about the server -------------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        """For people."""
        return self._page

    async def health(self, request: Request) -> Response:
        """200 while requests can be expected to be read and answered; and how many buckets are still compiled."""
        state = self._serving.state
        busy = max(readers.busy_seconds() for readers in (self._readers, self._chat_readers))
        healthy = self._serving.healthy(self._limits.stall_seconds) and busy < self._limits.stall_seconds
        if state in ("ready", "draining") and not healthy:
            state = "stalled"  # type: ignore[assignment]
        if healthy and state == "ready":
            return JSONResponse({"status": state, "programs_remaining": self._serving.remaining})
        return JSONResponse({"status": state}, 503)

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        """The installed version."""
        return JSONResponse({"version": self._version})

    async def openapi(self, request: Request) -> Response:
        """The document of all routes."""
        return JSONResponse(document(self._version))

    async def models(self, request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The one model, by its name."""
        if request.path_params["name"] != self._defaults.model_name:
            raise ApiError(404, "there is no such model here; see /v1/models", "model_not_found", "model")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._defaults.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "diffumesh",
            "max_model_len": self._reader.widest or None,
            "chat_template": self._reader.can_chat,
            "modes": self._reader.modes,
        }

    # ---- work for the engine ----------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """Prompts."""
        return await self._generate(request, CompletionBody, chat=False)

    async def chat(self, request: Request) -> Response:
        """Conversations."""
        return await self._generate(request, ChatBody, chat=True)

    async def _generate(self, request: Request, kind: type[Any], chat: bool) -> Response:
        arrived = time.monotonic()
        readers = self._chat_readers if chat else self._readers
        body, reading = await self._read(request, readers, kind, self._reader.generation)
        streamed = bool(body.stream)
        deadline = self._deadline(arrived, body.timeout)
        handle = RequestHandle(
            owner=request.state.owner,
            arrived=arrived,
            deadline=deadline,
            pool=reading.pool,
            rows=reading.rows,
            stream=streamed,
            stop_tests=reading.stop_tests(self._defaults),
        )
        responses = ResponseStream(arrived, deadline)
        answering = Answering(reading, responses, self._defaults, self._metrics, chat)
        self._serving.submit(handle, responses)
        if not streamed:
            return JSONResponse(await self._unless_gone(request, handle, answering.whole()))
        options = body.stream_options
        events = answering.stream(bool(options and options.include_usage), bool(body.canvas))
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return _Stream(events, lambda: self._serving.abort(handle), headers)

    async def score(self, request: Request) -> Response:
        """Log-probabilities of given tokens."""
        arrived = time.monotonic()
        body, (rows, passes) = await self._read(request, self._readers, ScoreBody, self._reader.scoring)
        deadline = self._deadline(arrived, body.timeout)
        responses = ResponseStream(arrived, deadline)
        handle = RequestHandle(owner=request.state.owner, arrived=arrived, deadline=deadline, score_passes=passes)
        self._serving.submit(handle, responses)

        async def scored() -> dict[str, Any]:
            while len(responses.scores) < len(rows):
                await responses.wait()
            data = [
                {
                    "object": "score",
                    "index": row,
                    "token_logprobs": [round(v, DECIMALS) for v in responses.scores[row].tolist()],
                }
                for row in range(len(rows))
            ]
            count = sum(map(len, rows))
            return {
                "object": "list",
                "model": self._defaults.model_name,
                "data": data,
                "usage": {"prompt_tokens": count, "total_tokens": count},
            }

        return JSONResponse(await self._unless_gone(request, handle, scored()))

    def _deadline(self, arrived: float, wanted: float | None) -> float:
        longest = self._limits.request_seconds
        return arrived + (longest if wanted is None else min(wanted, longest))

    async def _read(
        self, request: Request, readers: Readers, kind: type[Kind], read: Callable[[Kind], Read]
    ) -> tuple[Kind, Read]:
        # Read first, so that the connection of whoever is refused can be used again.
        raw = await request.body()
        self._serving.check_room()
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(415, "say Content-Type: application/json", "unsupported_media_type")

        def parse() -> tuple[Kind, Read]:
            # Again: it may have waited here behind large ones.
            self._serving.check_room()
            try:
                body = validate(kind, parse_object(raw, MAX_NAMES))
            except InputError as error:
                raise from_input_error(error) from None
            return body, read(body)

        return await readers.run(request.state.owner, parse)

    async def _unless_gone(self, request: Request, handle: RequestHandle, work: Coroutine[Any, Any, Any]) -> Any:
        """The outcome of ``work``; when the client goes away before, the request is aborted."""
        working = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            return working.result()
        finally:
            self._serving.abort(handle)
            for task in (working, gone):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task


def _page() -> Response:
    template = page_template("launch.serving", "page.html")
    policy = f"{content_security_policy(template)}; connect-src 'self'; frame-ancestors 'none'"
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(template, headers=headers)


class _Stream(StreamingResponse):
    """Events; however the response ends, ``over`` is called."""

    def __init__(self, events: AsyncIterator[bytes], over: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._over = over

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            self._over()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _api_error(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


async def _input_error(request: Request, error: InputError) -> Response:
    return await _api_error(request, from_input_error(error))


async def _http_error(request: Request, error: HTTPException) -> Response:
    """What the framework refuses: no such route, no such method."""
    said = {404: "there is no such address here", 405: "this address does not take that method"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    text, code = said.get(error.status_code, "refused"), codes.get(error.status_code)
    made = ApiError(error.status_code, text, code, headers=error.headers)
    return await _api_error(request, made)


async def _nobody_there(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=400)


async def _our_mistake(request: Request, error: Exception) -> Response:
    # What it was goes to the log alone.
    return await _api_error(request, ApiError(500, "the server has made a mistake", "internal_error"))
