"""Reads the messages of a chat: those of a batch line and those of an HTTP body."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

from runtime import InputError

Role = Literal["system", "developer", "user", "assistant"]
# Some clients name the type of a whole message, as that of a part.
MessageType = Literal["text"]


def is_empty(value: Any) -> bool:
    """Return whether a field of a message says nothing: null, or an empty text, list or object."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def read_messages(messages: Any) -> list[dict[str, str]]:
    """Return the role, the content and, if it has one, the name of each message. Parts of a content are joined.

    Raises:
      InputError: there is no message, or one has an unknown role, no content, or fields that are not supported.
    """
    if not isinstance(messages, list) or not messages:
        raise InputError('messages: expected a list like [{"role": "user", "content": "..."}]', field="messages")
    return [_message(message if isinstance(message, dict) else {}) for message in messages]


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    role, content, name = message.get("role"), message.get("content"), message.get("name")
    if role == "assistant" and content is None and "content" in message:
        content = ""  # as in an answer with nothing but tool calls or a refusal, which are refused below
    if isinstance(content, list):
        content = _joined(content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise InputError("messages: each message needs a role and a content, both strings", field="messages")
    if role not in get_args(Role):
        raise InputError(
            f"messages: the role {role!r:.80} is not supported; expected one of {', '.join(get_args(Role))}",
            field="messages",
        )
    if len(message) > 2:
        _check_rest(message, ("role", "content", "name"))
    if name is None:
        return {"role": role, "content": content}
    if not isinstance(name, str):
        raise InputError("messages: a name must be a string", field="messages")
    return {"role": role, "content": content, "name": name}


def _joined(parts: list[Any]) -> str | None:
    """Return the text of all parts of a content; None if a part is no text."""
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts) or any(part.get("type") != "text" for part in parts):
        return None
    for part in parts:
        _check_rest(part, ("text",))
    return "".join(texts)


def _check_rest(fields: Mapping[str, Any], known: Collection[str]) -> None:
    """Check that the other fields of a message or of a part are empty, or say that it is a text.

    Raises:
      InputError: a field says something that would be lost.
    """
    for name, value in fields.items():
        text = name == "type" and value in get_args(MessageType)
        if name not in known and not text and not is_empty(value):
            raise InputError(f"messages: {name:.80}: not supported", field="messages")
