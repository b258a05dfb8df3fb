"""Fields of OpenAI's and vLLM's requests of which only values without effect are accepted, and a name of vLLM's.

They are the same for the server and for batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from runtime import InputError, ParameterError

# Numbers that many clients send, each with the only value that is accepted.
NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0}
# vLLM's opposite of early_stop.
IGNORE_EOS = "ignore_eos"
# The accepted values of fields of a chat.
ResponseType = Literal["text"]
ToolChoice = Literal["none", "auto"]
Modality = Literal["text"]
_IDLE: dict[str, list[Any]] = {
    "response_format": [{"type": one} for one in get_args(ResponseType)],
    "tool_choice": list(get_args(ToolChoice)),
    "modalities": [[one] for one in get_args(Modality)],
}


def early_stop(ignore_eos: Any) -> bool:
    """Return the ``early_stop`` that a request asks for with ``ignore_eos``.

    Raises:
      ParameterError: the value is neither true nor false.
    """
    if not isinstance(ignore_eos, bool):
        raise ParameterError(IGNORE_EOS, f"is {ignore_eos!r:.80}; expected true or false")
    return not ignore_eos


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
    fields = {name: value for name, value in fields.items() if not _is_neutral(name, value)}
    if not chat:
        # Empty values count as absent.
        check_best_of(fields.get("best_of") or None, samples)
        return {name: value for name, value in fields.items() if name != "best_of"}
    return {name: value for name, value in fields.items() if value not in _IDLE.get(name, ())}


def _is_neutral(name: str, value: Any) -> bool:
    return name in NEUTRAL and type(value) in (int, float) and value == NEUTRAL[name]
