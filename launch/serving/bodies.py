"""Models of request bodies: fields with their types and bounds.

Fields of decoding parameters derive from the schema in :mod:`runtime.decoding.schema`. A field that is not declared
here is refused, because ignoring it could change the answer. :mod:`launch.openai.bodies` turns fields into requests,
for the server and for batch files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticKnownError

from launch.openai.bodies import MAX_STOP, MAX_STOPS, is_read
from launch.openai.idle import NEUTRAL, Modality, ResponseType, ToolChoice, check_best_of
from launch.openai.messages import MessageType, Role, is_empty
from runtime import (
    EXPOSED_PARAMETERS,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Boolean,
    Choice,
    InputError,
    Integer,
    IntegerOrWord,
    Parameter,
    Real,
    TokenIds,
)

# Bounds that hold for every server. A server's flags set tighter ones.
MAX_N = 1024
MAX_PROMPTS = 1024
MAX_PER_ROW = 1024
MAX_MESSAGES = 4096
MAX_NAMES = 256  # per object
MAX_SECONDS = 86400.0

Text = Annotated[str, Field(max_length=1 << 24)]
Name = Annotated[str, Field(max_length=512)]
Token = Annotated[int, Field(ge=0, le=1 << 30)]
# Validation of a list stops at its first invalid entry: an error object per entry would cost seconds and gigabytes.
Tokens = Annotated[list[Token], Field(min_length=1, max_length=1 << 20, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]

# The values of unknown fields of a message that are accepted, as JSON Schema.
_EMPTY: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        {"type": "string", "maxLength": 0},
        {"type": "array", "maxItems": 0},
        {"type": "object", "maxProperties": 0},
    ]
}


def _refuse_numbers(value: Any) -> Any:
    """Refuse 0 and 0.0, which pass as ``Literal[False]`` because they equal it."""
    if value is not False:
        raise PydanticKnownError("literal_error", {"expected": "False"})
    return value


Off = Annotated[Literal[False], BeforeValidator(_refuse_numbers)]


class Body(BaseModel):
    """A strict model: it converts no types, and accepts neither unknown fields nor infinite numbers.

    A field that is null counts as absent.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, json_schema_extra={"additionalProperties": {"type": "null"}}
    )

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """Drop fields that are null, even unknown ones."""
        if not isinstance(value, dict) or None not in value.values():
            return value
        return {name: one for name, one in value.items() if one is not None}


class RequestBody(Body):
    """Fields that all requests have.

    Attributes:
      model: the served model's name.
      timeout: seconds within which the request must finish, counted from its arrival.
    """

    model: Name | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_SECONDS)] | None = None


class StreamOptions(Body):
    """Options of a stream.

    Attributes:
      include_usage: send a last chunk with the token counts.
      include_obfuscation: add random characters to chunks, which this server never does.
    """

    include_usage: bool | None = None
    include_obfuscation: Off | None = None


def annotation(parameter: Parameter, name: str | None = None) -> Any:
    """Return the type of a decoding parameter's field for pydantic, with its bounds and its description.

    ``name`` is the field's name, if it is not the one that bodies usually have.
    """
    kind: Any = parameter.request_kind
    if isinstance(kind, Integer):
        found: Any = Annotated[int, Field(ge=-1 if parameter.zero_is_none else kind.low, le=kind.high)]
        if parameter.per_row:
            found |= Annotated[list[found], Field(min_length=1, max_length=MAX_PER_ROW, fail_fast=True)]
    elif isinstance(kind, IntegerOrWord):
        word: Any = Literal[kind.word]
        found = word | Annotated[int, Field(ge=kind.integer.low, le=kind.integer.high)]
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
    same = name in (None, parameter.http_name)
    return Annotated[found | None, Field(description=parameter.help if same else f"The same as {parameter.http_name}.")]


def decoding_body(parameters: Iterable[Parameter]) -> type[RequestBody]:
    """Make a model with fields for these parameters, under each of their names, and for numbers without effect.

    A name that OpenAI's request format defines itself is left out.
    """
    neutral: Any = {name: (Annotated[float, Field(ge=one, le=one)] | None, None) for name, one in NEUTRAL.items()}
    fields: Any = {
        name: (annotation(one, name), None)
        for one in parameters
        for name in (one.name, *one.aliases)
        if one.http is not None or name != one.http_name
    }
    return create_model("Decoding", __base__=RequestBody, **neutral, **fields)


if TYPE_CHECKING:
    Decoding = RequestBody
else:
    Decoding = decoding_body(EXPOSED_PARAMETERS.values())


class Generate(Decoding):
    """Fields that requests for completions and chats share.

    Attributes:
      ignore_eos: vLLM's name for the opposite of ``early_stop``.
      canvas: add the texts of all new positions to chunks that show progress, with ``null`` for masked positions.
    """

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    # Only values without an effect are accepted.
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    store: Off | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Ignored: they change no token.
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    metadata: Annotated[dict[Name, Name], Field(max_length=16)] | None = None
    # Specific to this server.
    canvas: bool | None = None

    @model_validator(mode="after")
    def _of_streams(self) -> Generate:
        if not self.stream and (self.stream_options is not None or self.canvas):
            field = "canvas" if self.canvas else "stream_options"
            raise InputError(f"{field} requires stream: true", field=field)
        return self

    def decoding(self) -> dict[str, Any]:
        """Return the fields that the request sets and that :func:`launch.openai.bodies.read_asked` reads."""
        return {name: value for name, value in self.model_dump(exclude_unset=True).items() if is_read(name)}


class CompletionBody(Generate):
    """``POST /v1/completions``: one or more prompts, given as text or token ids.

    Attributes:
      suffix: the text that follows the completion, after every prompt. The completion is the text between
        prompt and suffix.
    """

    prompt: Text | Tokens | Annotated[list[Text | Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    echo: Off | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    suffix: Text | None = None

    @model_validator(mode="after")
    def _no_best(self) -> CompletionBody:
        check_best_of(self.best_of, self.n or 1)
        return self


class _Piece(Body):
    """A message or a part of one. Answers that a client sends back have fields such as ``refusal: null``."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": _EMPTY})

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """Drop unknown fields that say nothing."""
        if not isinstance(value, dict):
            return value
        return {name: one for name, one in value.items() if name in cls.model_fields or not is_empty(one)}


class TextPart(_Piece):
    """A text part of a message."""

    type: Literal["text"]
    text: Text


class Message(_Piece):
    """A message of a conversation. The content of an assistant's message may be null, which is an empty text."""

    role: Role
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    name: Name | None = None
    type: MessageType | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise InputError("messages: each message needs a content", field="messages")
        self.content = self.content or ""
        return self


class ResponseFormat(Body):
    """The format of a response. Only text is supported."""

    type: ResponseType


class ChatBody(Generate):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Off | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    modalities: Annotated[list[Modality], Field(max_length=1)] | None = None


class ScoreBody(RequestBody):
    """``POST /v1/score``: log-probabilities of given tokens, from one forward pass.

    Attributes:
      input: rows that the model reads, as text or token ids. For a diffusion model, mask them as your estimator needs.
      targets: rows of the same lengths, whose log-probabilities are returned. The default is the input itself.
      temperature: divides the logits. The default is 1.
    """

    input: Text | Tokens | Annotated[list[Text | Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    targets: Tokens | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)] | None = None
