"""The FastAPI application: routes, errors and the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from launch.serving.backend import Backend
from launch.serving.errors import ApiError, as_api_error
from launch.serving.openapi import complete
from launch.serving.routes import router
from runtime import InputError


class Application(FastAPI):
    """A FastAPI application with the server's routes, which returns every error in OpenAI's format."""

    def __init__(self, version: str) -> None:
        """Declare the routes. Requests need a backend, which :func:`application` sets."""
        handled = (ApiError, InputError, ValidationError, HTTPException, ClientDisconnect, Exception)
        handlers: dict[Any, Any] = dict.fromkeys(handled, _refuse)
        super().__init__(
            title="diffumesh",
            version=version,
            docs_url=None,
            redoc_url=None,
            # A redirect would go to an address taken from the Host header, which the client chooses.
            redirect_slashes=False,
            exception_handlers=handlers,
        )
        self.include_router(router)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, generated on first use and cached."""
        if self.openapi_schema is None:
            self.openapi_schema = complete(super().openapi())
        return self.openapi_schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a route. HEAD runs the route of GET, and uvicorn leaves out the body."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await super().__call__(scope, receive, send)


def application(backend: Backend) -> Application:
    """Return an application that serves ``backend``, without the checks of :mod:`launch.serving.guard`."""
    app = Application(backend.version)
    app.state.backend = backend
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    """Return the response to a request that raised an exception."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)
    refusal = as_api_error(error)
    return JSONResponse(refusal.body(), refusal.status, refusal.headers)
