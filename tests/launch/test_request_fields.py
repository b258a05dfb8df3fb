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


CHAT = {"messages": [USER]}
TEXT = {"prompt": "x"}


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        # The load tests of vLLM and of guidellm.
        (TEXT | {"repetition_penalty": 1.0, "ignore_eos": False, "min_p": 0.0, "top_k": -1}, {"early_stop": True}),
        (
            CHAT | {"max_tokens": 2, "max_completion_tokens": 2, "ignore_eos": True, "stop": None},
            {"max_new_tokens": 2, "steps": 2, "early_stop": False},
        ),
        (TEXT | {"top_k": -1, "top_p": 1.0, "frequency_penalty": 0, "repetition_penalty": 1}, {"top_p": 1.0}),
        (TEXT | {"max_new_tokens": 2, "max_tokens": 2}, {"max_new_tokens": 2, "steps": 2}),
        # Fields that change no token.
        (CHAT | {"parallel_tool_calls": False, "functions": [], "tools": [], "service_tier": "auto"}, {}),
        (TEXT | {"metadata": {"a": "b"}, "store": False, "service_tier": "default"}, {}),
        (TEXT | {"safety_identifier": "me", "prompt_cache_key": "k", "user": "u"}, {}),
        (CHAT | {"safety_identifier": "me", "prompt_cache_key": "k", "metadata": {"a": "b"}}, {}),
        (TEXT | {"reasoning_effort": None, "stream_options": None, "seed": None}, {}),
        (CHAT | {"reasoning_effort": None, "audio": None, "temperature": None}, {}),
    ],
    ids=str,
)
def test_fields_of_other_servers_without_effect(
    body: dict[str, Any], changes: dict[str, Any], defaults: Defaults, tmp_path: Path
) -> None:
    server = by_the_server(body, defaults)
    assert isinstance(server, Asked), server.message
    assert server.config == defaults.config.replace(**changes)
    assert by_a_batch(body, defaults, tmp_path) == server


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"repetition_penalty": True}, "repetition_penalty"),
        ({"min_p": 0.1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"ignore_eos": True, "early_stop": True}, "early_stop"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"max_tokens": 5, "max_new_tokens": 6}, "max_tokens"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"functions": [{}]}, "functions"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
    ids=str,
)
def test_fields_of_other_servers_with_an_effect(
    changes: dict[str, Any], param: str, defaults: Defaults, tmp_path: Path
) -> None:
    for body in (CHAT | changes, TEXT | changes):
        server, batch = by_the_server(body, defaults), by_a_batch(body, defaults, tmp_path)
        assert isinstance(server, ApiError)
        assert server.param == param
        assert isinstance(batch, str)
        assert param in batch.replace("max_new_tokens", "max_tokens")


def test_null_counts_as_absent_in_every_object() -> None:
    """Also the option of OpenAI's streams that adds random characters is accepted where it is off."""
    options = {"include_usage": None, "include_obfuscation": False, "other": None}
    body = CompletionBody.model_validate(TEXT | {"stream": True, "stream_options": options, "wait": None})
    assert body.model_dump(exclude_unset=True) == TEXT | {
        "stream": True,
        "stream_options": {"include_obfuscation": False},
    }
    for wrong in ({"include_obfuscation": True}, {"include_obfuscation": 0}, {"other": False}):
        with pytest.raises(ValidationError):
            CompletionBody.model_validate(TEXT | {"stream": True, "stream_options": wrong})
