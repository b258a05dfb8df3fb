"""Fields of OpenAI's requests of which only values without effect are accepted, by the server and in batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from runtime import InputError

# The accepted values of fields of a chat.
ResponseType = Literal["text"]
ToolChoice = Literal["none", "auto"]
Modality = Literal["text"]
_IDLE: dict[str, list[Any]] = {
    "response_format": [{"type": one} for one in get_args(ResponseType)],
    "tool_choice": list(get_args(ToolChoice)),
    "modalities": [[one] for one in get_args(Modality)],
}


def check_best_of(best_of: Any, samples: Any) -> None:
    """Check that a completion's ``best_of``, None if absent, is its number of samples.

    Raises:
      InputError: it is another value.
    """
    if best_of is not None and (type(best_of) is not int or best_of != samples):
        raise InputError("best_of must equal n: every completion is returned", field="best_of")


def without_idle(fields: Mapping[str, Any], samples: Any, chat: bool) -> dict[str, Any]:
    """Return a body's fields except those that have no effect.

    Args:
      fields: fields that are not decoding parameters.
      samples: the number of samples of the request.
      chat: whether the body is that of a chat.

    Raises:
      InputError: ``best_of`` is not the number of samples.
    """
    if not chat:
        # Empty values count as absent.
        check_best_of(fields.get("best_of") or None, samples)
        return {name: value for name, value in fields.items() if name != "best_of"}
    return {name: value for name, value in fields.items() if value not in _IDLE.get(name, ())}
