"""The routes of the server.

FastAPI would parse JSON and validate it on the event loop, where one large body delays every other request. The routes
therefore take their body from a dependency that reads it in a reader thread (:meth:`Backend.read`), and declare its
model with ``openapi_extra``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse

from launch.display.pages import content_security_policy, page_template
from launch.openai.answers import DECIMALS
from launch.serving.answering import Answering
from launch.serving.backend import Backend, ReadRequest
from launch.serving.bodies import ChatBody, CompletionBody, ScoreBody
from launch.serving.errors import RESPONSES
from launch.serving.openapi import request_body
from launch.serving.reading import Reading
from launch.serving.response_stream import ResponseStream
from runtime import RequestHandle, ScorePass

# The errors of all routes are declared here once, for the OpenAPI document.
router = APIRouter(responses=RESPONSES)
_GENERATED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The completions; with `stream: true`, server-sent events.",
        "content": {"text/event-stream": {}},
    }
}


async def _backend(request: Request) -> Backend:
    backend: Backend = request.app.state.backend
    return backend


Server = Annotated[Backend, Depends(_backend)]
Generation = ReadRequest[Any, Reading]
Scoring = ReadRequest[ScoreBody, tuple[list[list[int]], list[ScorePass]]]


def _generation(kind: type[CompletionBody] | type[ChatBody]) -> Callable[..., Awaitable[Generation]]:
    async def dependency(request: Request, server: Server) -> Generation:
        return await server.read(request, kind, server.reader.generation, chat=kind is ChatBody)

    return dependency


async def _scoring(request: Request, server: Server) -> Scoring:
    return await server.read(request, ScoreBody, server.reader.scoring)


# ---- about the server ---------------------------------------------------------------------------------------------


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


_PAGE = _page()


@router.get("/", response_class=HTMLResponse)
async def page() -> Response:
    """A web page to try the model in a browser."""
    return _PAGE


@router.get("/health")
async def health(server: Server) -> Response:
    """200 while the server can be expected to answer requests, 503 otherwise."""
    healthy, body = server.health()
    return JSONResponse(body, 200 if healthy else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(server: Server) -> Response:
    """Metrics in Prometheus format."""
    return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/version")
async def version(server: Server) -> Response:
    """The installed version of diffumesh."""
    return JSONResponse({"version": server.version})


@router.get("/v1/models")
async def models(server: Server) -> Response:
    """A list that contains the served model, the only one of this server."""
    return JSONResponse({"object": "list", "data": [server.model()]})


@router.get("/v1/models/{name:path}")
async def model(name: str, server: Server) -> Response:
    """The served model. Any other name is not found."""
    server.reader.check_model(name)
    return JSONResponse(server.model())


# ---- work for the engine --------------------------------------------------------------------------------------------


@router.post("/v1/completions", openapi_extra=request_body(CompletionBody), responses=_GENERATED)
async def completions(
    request: Request, server: Server, read: Annotated[Generation, Depends(_generation(CompletionBody))]
) -> Response:
    """Complete one or more prompts."""
    return await _generate(request, server, read, chat=False)


@router.post("/v1/chat/completions", openapi_extra=request_body(ChatBody), responses=_GENERATED)
async def chat_completions(
    request: Request, server: Server, read: Annotated[Generation, Depends(_generation(ChatBody))]
) -> Response:
    """Answer a conversation."""
    return await _generate(request, server, read, chat=True)


async def _generate(request: Request, server: Backend, read: Generation, chat: bool) -> Response:
    body, reading, streamed = read.body, read.reading, bool(read.body.stream)
    handle = RequestHandle(
        owner=request.state.owner,
        arrived=read.arrived,
        deadline=read.deadline,
        pool=reading.pool,
        rows=reading.rows,
        stream=streamed,
        stop_tests=reading.stop_tests(server.defaults),
    )
    responses = ResponseStream(read.arrived, read.deadline)
    answering = Answering(reading, responses, server.defaults, server.metrics, chat)
    server.serving.submit(handle, responses)
    if not streamed:
        return JSONResponse(await server.unless_gone(request, handle, answering.whole()))
    options = body.stream_options
    events = answering.stream(bool(options and options.include_usage), bool(body.canvas))
    return _Stream(events, lambda: server.serving.abort(handle))


class _Stream(StreamingResponse):
    """A response of server-sent events. It calls ``over`` when it ends, for whatever reason."""

    def __init__(self, events: AsyncIterator[bytes], over: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._over = over

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            self._over()


@router.post("/v1/score", openapi_extra=request_body(ScoreBody))
async def score(request: Request, server: Server, read: Annotated[Scoring, Depends(_scoring)]) -> Response:
    """Log-probabilities of given tokens."""
    rows, passes = read.reading
    responses = ResponseStream(read.arrived, read.deadline)
    handle = RequestHandle(owner=request.state.owner, arrived=read.arrived, deadline=read.deadline, score_passes=passes)
    server.serving.submit(handle, responses)

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
            "model": server.defaults.model_name,
            "data": data,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }

    return JSONResponse(await server.unless_gone(request, handle, scored()))
