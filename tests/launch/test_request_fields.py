"""Bodies as clients of OpenAI and vLLM send them: the server and batches read the same, or refuse the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from pydantic import ValidationError

from checkpoints import DEMO, open_folder
from launch.batches.lines import read_batch
from launch.openai.bodies import Asked, Defaults, by_our_names, read_asked
from launch.serving.bodies import ChatBody, CompletionBody
from launch.serving.errors import ApiError, from_input_error, from_validation_error
from runtime import DiffusionConfig, parse_config
from runtime.text.tokenizer import TextTokenizer
from sharding.errors import InputError

USER = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def defaults() -> Defaults:
    folder = open_folder(DEMO)
    tokenizer = TextTokenizer.from_folder(folder)
    assert tokenizer is not None
    tokenizer.chat_template = "{% for one in messages %}{{ one | tojson }}\n{% endfor %}"
    config = DiffusionConfig(max_new_tokens=4, steps=4, early_stop=True)
    return Defaults("demo", parse_config(folder.config), tokenizer, config, True, (), 0, False, 1, ())


def by_the_server(body: dict[str, Any], defaults: Defaults) -> Asked | ApiError:
    """What the server reads from a body, or the error that it answers."""
    kind = ChatBody if "messages" in body else CompletionBody
    try:
        return read_asked(by_our_names(kind.model_validate(body).decoding()), defaults)
    except ValidationError as error:
        return from_validation_error(error)
    except InputError as error:
        return from_input_error(error)


def by_a_batch(body: dict[str, Any], defaults: Defaults, tmp_path: Path) -> Asked | str:
    """What a batch reads from an OpenAI batch request with this body, or the reason why the line is bad."""
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"custom_id": "a", "body": body}))
    found = read_batch(path, defaults)
    if found.bad:
        return found.bad[0].message
    (line,) = found.lines
    return Asked(**{field.name: getattr(line, field.name) for field in dataclasses.fields(Asked)})


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, "tool_calls: "),
        ({"role": "tool", "content": "4", "tool_call_id": "1"}, "role"),
        (USER | {"weight": 0}, "weight: "),
        (USER | {"content": [{"type": "text", "text": "x", "cache_control": {"type": "x"}}]}, "cache_control: "),
        (USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content"),
        (USER | {"content": None}, "content"),
        (USER | {"type": "image"}, "type: "),
        (USER | {"name": 3}, "name"),
    ],
    ids=str,
)
def test_what_a_message_says_is_never_lost(
    message: dict[str, Any], said: str, defaults: Defaults, tmp_path: Path
) -> None:
    body = {"messages": [USER, message]}
    server, batch = by_the_server(body, defaults), by_a_batch(body, defaults, tmp_path)
    assert isinstance(server, ApiError)
    assert isinstance(batch, str)
    assert server.param == "messages"
    assert batch.startswith("messages: ")
    assert said in batch


@pytest.mark.parametrize(
    ("message", "read"),
    [
        (ChatCompletionMessage(role="assistant", content="y").model_dump(), {"role": "assistant", "content": "y"}),
        (
            ChatCompletionMessage(role="assistant", content=None, tool_calls=[]).model_dump(),
            {"role": "assistant", "content": ""},
        ),
        (USER | {"type": "text"}, USER),  # as lm-evaluation-harness writes it
        (USER | {"name": None, "type": None, "reasoning_content": "", "extra": {}}, USER),
        (USER | {"name": "ann"}, USER | {"name": "ann"}),
        (
            USER | {"content": [{"type": "text", "text": "a", "annotations": []}, {"type": "text", "text": "b"}]},
            USER | {"content": "ab"},
        ),
    ],
    ids=str,
)
def test_empty_fields_of_a_message_are_left_out(
    message: dict[str, Any], read: dict[str, str], defaults: Defaults, tmp_path: Path
) -> None:
    """An answer of the server can be sent back as a message."""
    server = by_the_server({"messages": [message]}, defaults)
    assert isinstance(server, Asked), server.message
    assert by_a_batch({"messages": [message]}, defaults, tmp_path) == server
    assert json.loads(defaults.tokenizer.decode(server.tokens)) == read
