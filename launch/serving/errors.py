"""What a client is told when its request is not answered, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime import EXPOSED_PARAMETERS, InputError, ParameterError


class ApiError(Exception):
    """An answer that is no completion.

    Attributes:
      status: of HTTP.
      message: a sentence for people; never what a library said.
      code: for programs.
      param: the field that is wrong, where it is one.
      headers: to send along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON that says so."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None) -> ApiError:
    """A request that is wrong in itself."""
    return ApiError(400, message, "invalid_request", param)


def from_input_error(error: InputError) -> ApiError:
    """Our own sentence about an input, with names of parameters as bodies have them; a library's words are left out."""
    text = error.spelled(_http_name) if isinstance(error, ParameterError) else error.message
    return invalid(text, None if error.field is None else _http_name(error.field))


def _http_name(name: str) -> str:
    return EXPOSED_PARAMETERS[name].http_name if name in EXPOSED_PARAMETERS else name


def busy(seconds: int) -> ApiError:
    """The queue is full."""
    return ApiError(
        429, "too many requests are waiting; try again later", "queue_full", headers={"Retry-After": str(seconds)}
    )


def unavailable(message: str, seconds: int = 1) -> ApiError:
    """Not now: warming up, draining, or the engine is gone."""
    return ApiError(503, message, "unavailable", headers={"Retry-After": str(seconds)})


def too_late(seconds: float) -> ApiError:
    """The request's deadline has passed: OpenAI's client is told not to try again, as it would of itself."""
    return ApiError(408, f"not finished within {seconds:g} s", "deadline_exceeded", headers={"X-Should-Retry": "false"})


ENGINE_FAILED = ApiError(503, "the engine has failed; the server is going down", "engine_failed")
