"""Errors as clients receive them: OpenAI's error object with an HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from runtime import EXPOSED_PARAMETERS, NON_FINITE, InputError, ParameterError, RendererStartError, UndecodableError

# Maximum number of characters of a client's field name that an error message repeats.
_SHOWN = 100
# For a field that accepts several types: the maximum number of them that an error message describes.
_MOST_FORMS = 3


class ErrorDetail(BaseModel):
    """OpenAI's error object.

    Attributes:
      message: a sentence for people.
      type: the class of the error, such as ``invalid_request_error``.
      param: the field of the request that is wrong, if it is one field.
      code: a fixed name of the error, for programs.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of a response with an error status."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
      status: the HTTP status.
      message: a sentence for people. It never repeats the text of an internal error.
      code: a fixed name of the error, for programs.
      param: the field of the request that is wrong, if it is one field.
      headers: additional response headers.
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
        """Return the JSON body of the response."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


# The statuses that every route can return, for the OpenAPI document.
_DESCRIPTIONS: dict[int | str, str] = {
    400: "The request is invalid, or the tokenizer cannot decode its tokens (`undecodable_tokens`).",
    401: "A valid API key is required.",
    403: "The Host header names another server.",
    404: "The model does not exist.",
    405: "The path does not support this method.",
    408: "The request was not received or not finished in time.",
    413: "The body is too large.",
    415: "The body is not JSON, or is compressed.",
    429: "Too many requests are waiting.",
    431: "The request line and headers are too large.",
    500: "The server has a fault, or the model's logits are not finite (`non_finite_logits`).",
    503: "The server is warming up, shutting down, stalled or has failed.",
    "default": "Any other error.",
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": Error, "description": text} for status, text in _DESCRIPTIONS.items()
}


def invalid(message: str, param: str | None = None) -> ApiError:
    """Return a 400 error: the request itself is wrong."""
    return ApiError(400, message, "invalid_request", param)


def from_input_error(error: InputError) -> ApiError:
    """Return a 400 error for an InputError, with parameters named as in request bodies; 503 if it is the server's.

    ``error.detail``, the message of a library, is left out.
    """
    if isinstance(error, RendererStartError):
        return unavailable("Chat messages cannot be rendered now. Try again later.")
    if isinstance(error, UndecodableError):
        return ApiError(400, error.message, "undecodable_tokens")
    text = error.spelled(_http_name) if isinstance(error, ParameterError) else error.message
    return invalid(text, None if error.field is None else _http_name(error.field))


def from_validation_error(error: ValidationError) -> ApiError:
    """Return a 400 error for a body that pydantic refused.

    The message names fields and bounds, and repeats no value that the client sent.
    """
    details = error.errors(include_url=False, include_input=False)
    first = details[0]
    if first["type"] == "value_error":  # raised by a validator of launch.serving.bodies
        return from_input_error(first["ctx"]["error"])
    path = [str(part) for part in first["loc"]]
    if not path:
        return invalid(first["msg"])
    if first["type"] in ("extra_forbidden", "missing"):
        return invalid(f"{'.'.join(path):.{_SHOWN}}: {first['msg']}", path[0][:_SHOWN])
    # For a field that accepts several types, pydantic reports an error for each of them.
    said = dict.fromkeys(detail["msg"] for detail in details if detail["loc"][:1] == first["loc"][:1])
    return invalid(f"{path[0]:.{_SHOWN}}: {'; or: '.join(list(said)[:_MOST_FORMS])}", path[0][:_SHOWN])


def as_api_error(error: Exception) -> ApiError:
    """Return the error that a client receives when a route raises an exception.

    The text of an unexpected exception is not sent to the client.
    """
    match error:
        case ApiError():
            return error
        case InputError():
            return from_input_error(error)
        case ValidationError():
            return from_validation_error(error)
        case HTTPException(status_code=404):
            return ApiError(404, "This path does not exist. See /openapi.json.", "not_found")
        case HTTPException(status_code=405):
            return ApiError(405, "This path does not support this method.", "method_not_allowed", headers=error.headers)
        case HTTPException():
            return ApiError(error.status_code, HTTPStatus(error.status_code).phrase, headers=error.headers)
    return ApiError(500, "Internal server error.", "internal_error")


def _http_name(name: str) -> str:
    return EXPOSED_PARAMETERS[name].http_name if name in EXPOSED_PARAMETERS else name


def busy(seconds: int) -> ApiError:
    """Return a 429 error: the queue is full. The client may try again after ``seconds``."""
    return ApiError(
        429,
        "Too many requests are waiting. Try again later.",
        "queue_full",
        headers={"Retry-After": str(seconds)},
    )


def unavailable(message: str, seconds: int = 1) -> ApiError:
    """Return a 503 error: the server is warming up or shutting down. The client may try again after ``seconds``."""
    return ApiError(503, message, "unavailable", headers={"Retry-After": str(seconds)})


def too_late(seconds: float) -> ApiError:
    """Return a 408 error: the request was not finished within ``seconds``.

    Its header keeps OpenAI's client from trying again on its own.
    """
    return ApiError(
        408,
        f"The request was not finished within {seconds:g} s.",
        "deadline_exceeded",
        headers={"X-Should-Retry": "false"},
    )


# The cause is the checkpoint or its dtype. Without the header OpenAI's client would try again, with the same result.
NON_FINITE_LOGITS = ApiError(
    500,
    f"There is no result: {NON_FINITE}.",
    "non_finite_logits",
    headers={"X-Should-Retry": "false"},
)
ENGINE_FAILED = ApiError(503, "The engine has failed and the server is shutting down.", "engine_failed")
