"""Bodies of HTTP requests: their fields with types and bounds; those of decoding come from the parameter schema.

:mod:`launch.openai.bodies` reads what the fields mean, for files and for the server. A field that is not declared here
is refused: nothing is ignored that would change an answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from launch.openai.bodies import MAX_STOP, MAX_STOPS, is_read
from runtime import (
    EXPOSED_PARAMETERS,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Boolean,
    Choice,
    InputError,
    Integer,
    Parameter,
    Real,
    Seeds,
    TokenIds,
)

# Absolute bounds; the server's own, from its flags, are tighter.
MAX_N = 1024
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_NAMES = 256  # of an object
MAX_SECONDS = 86400.0

Text = Annotated[str, Field(max_length=1 << 24)]
Name = Annotated[str, Field(max_length=512)]
Token = Annotated[int, Field(ge=0, le=1 << 30)]
# The first entry that is wrong ends the validation of a list: an error for each would cost seconds and gigabytes.
Tokens = Annotated[list[Token], Field(min_length=1, max_length=1 << 20, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]


class Body(BaseModel):
    """Strict: no field is taken for another type, none is unknown, no number is infinite."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class RequestBody(Body):
    """Fields of every request.

    Attributes:
      model: the served model's name.
      timeout: seconds after the arrival of the request in which it must be finished.
    """

    model: Name | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_SECONDS)] | None = None


class StreamOptions(Body):
    """How a stream is sent.

    Attributes:
      include_usage: a last piece says what the answer cost.
    """

    include_usage: bool | None = None


def annotation(parameter: Parameter) -> Any:
    """The type of a decoding parameter in a body, with its bounds and its help."""
    kind: Any = parameter.kind
    if isinstance(kind, Seeds):
        kind = kind.seed
    if isinstance(kind, Integer):
        found: Any = Annotated[int, Field(ge=0 if parameter.zero_is_none else kind.low, le=kind.high)]
    elif isinstance(kind, Real):
        bounds = Field(gt=kind.low, lt=kind.high) if kind.exclusive else Field(ge=kind.low, le=kind.high)
        found = Annotated[float, bounds]
    elif isinstance(kind, Choice):
        found = Literal[kind.choices]
    elif isinstance(kind, Boolean):
        found = bool
    else:
        assert isinstance(kind, TokenIds)
        found = Annotated[list[Annotated[int, Field(ge=0, le=kind.high)]], Field(max_length=kind.count, fail_fast=True)]
    return Annotated[found | None, Field(description=parameter.help)]


def decoding_body(parameters: Iterable[Parameter]) -> type[RequestBody]:
    """A body with a field for every parameter that OpenAI's request formats do not define themselves."""
    fields: Any = {one.http_name: (annotation(one), None) for one in parameters if one.http is not None}
    return create_model("Decoding", __base__=RequestBody, **fields)


if TYPE_CHECKING:
    Decoding = RequestBody
    Count = int | None
else:
    Decoding = decoding_body(EXPOSED_PARAMETERS.values())
    Count = annotation(EXPOSED_PARAMETERS["max_new_tokens"])


class Generate(Decoding):
    """Fields of completions and chats beside the decoding parameters. None is the same as no field.

    Attributes:
      canvas: each piece of a stream shows all new positions, ``null`` where nothing stands yet.
    """

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Said by clients of habit; only the values that ask for nothing.
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    # Changes no token.
    user: Name | None = None
    # The server's own.
    canvas: bool | None = None

    @model_validator(mode="after")
    def _of_streams(self) -> Generate:
        if not self.stream and (self.stream_options is not None or self.canvas):
            field = "canvas" if self.canvas else "stream_options"
            raise InputError(f"{field} requires stream: true", field=field)
        return self

    def decoding(self) -> dict[str, Any]:
        """The fields that :func:`launch.openai.bodies.read_asked` reads."""
        return {name: value for name, value in self.model_dump(exclude_unset=True).items() if is_read(name)}


class CompletionBody(Generate):
    """``POST /v1/completions``: one prompt or several, texts or token ids."""

    prompt: Text | Tokens | Annotated[list[Text | Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _no_best(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InputError("best_of: not supported; every completion is returned", field="best_of")
        return self


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    name: Name | None = None


class ResponseFormat(Body):
    """Text is what there is."""

    type: Literal["text"]


class ChatBody(Generate):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Count = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    metadata: Annotated[dict[Name, Name], Field(max_length=16)] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class ScoreBody(RequestBody):
    """``POST /v1/score``: log-probabilities of given tokens, in one forward pass.

    Attributes:
      input: rows that the model reads, texts or token ids; for a diffusion model noised as the estimator wants them.
      targets: as many rows of as many tokens, whose probabilities are wanted; default the input itself.
      temperature: divides the logits; default 1.
    """

    input: Text | Tokens | Annotated[list[Text | Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    targets: Tokens | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)] | None = None
