"""What a prompt or a chat with decoding parameters beside it asks for: checked, and by our names.

One reader for lines of a file and for bodies of the server, plain or in OpenAI's form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.decoding.parameters import MAX_SEED, MAX_STEPS, DiffusionConfig, SamplingConfig
from runtime.execution.row_request import RowRequest
from runtime.execution.rows import MAX_SAMPLES, check_request
from runtime.models.config import ModelConfig
from runtime.text.tokenizer import TextTokenizer
from sharding.errors import InputError

MAX_STOPS, MAX_STOP = 16, 1024

# Fields that set the field of the same name of a configuration; of diffusion's alone, and those of OpenAI's
# that have another name here.
_COMMON = ("max_new_tokens", "temperature", "top_p", "top_k")
_DIFFUSION = (
    *("steps", "algorithm", "alg_temp", "eps", "confidence_dtype", "suppress_mask"),
    *("block_length", "cache", "refresh_interval", "refresh_blocks", "parallel", "threshold", "factor"),
)
# What is of one cache or of one rule alone: another one starts without it.
_OF = {"cache": ("refresh_interval", "refresh_blocks"), "parallel": ("threshold", "factor")}
_ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "alg": "algorithm",
    "n": "num_return_sequences",
    "logprobs": "log_probabilities",
}
_OWN = ("seed", "stop", "num_return_sequences", "log_probabilities", "early_stop")
# What a body may say that changes no token.
_SILENT = ("model", "user", "metadata", "store", "service_tier")


@dataclass(frozen=True)
class Defaults:
    """What requests start from, and what they are read with.

    Attributes:
      model_name: how OpenAI's records call it.
      model: the architecture.
      tokenizer: the checkpoint's.
      config: the decoding parameters of the flags.
      steps_follow_tokens: a request with its own number of new tokens takes as many steps.
      end_token_ids: tokens that end a completion.
      seed: of a request that has none.
      chat: plain prompts are a user's messages.
      samples: completions of each prompt.
      stop: strings that end a completion.
    """

    model_name: str
    model: ModelConfig
    tokenizer: TextTokenizer
    config: DiffusionConfig | SamplingConfig
    steps_follow_tokens: bool
    end_token_ids: tuple[int, ...]
    seed: int
    chat: bool
    samples: int
    stop: tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """What is asked for.

    Attributes:
      prompt: its text, empty for a chat.
      tokens: what the model is given.
      config: its decoding parameters.
      seed: its own, or the default one.
      samples: completions wanted.
      stop: strings that end a completion.
    """

    prompt: str
    tokens: list[int]
    config: DiffusionConfig | SamplingConfig
    seed: int
    samples: int
    stop: tuple[str, ...]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InputError("an object says a name twice")
    return found


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object from bytes.

    Raises:
      InputError: not UTF-8, not JSON, not an object, or an object that says something twice.
    """
    try:
        record = json.loads(raw.decode("utf-8"), object_pairs_hook=_once)
        # Half a character, written as an escape, is no text.
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except InputError:
        raise
    except UnicodeError as error:
        raise InputError(f"not UTF-8 ({error})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise InputError("expected an object")
    return record


def by_our_names(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body by our names; null says nothing.

    Raises:
      InputError: it says something by two names.
    """
    found: dict[str, Any] = {}
    for name, value in body.items():
        own = _ALIASES.get(name, name)
        if own in found:
            raise InputError(f"{name}: it says {own} twice")
        if value is not None:
            found[own] = value
    return found


def known(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body, by our names, that say something to the decoder."""
    names = {"prompt", "messages", *_COMMON, *_DIFFUSION, *_OWN}
    return {name: value for name, value in changes.items() if name in names}


def read_asked(fields: Mapping[str, Any], defaults: Defaults) -> Asked:
    """What a body asks for.

    Args:
      fields: as :func:`known` gives them.
      defaults: what it starts from.

    Raises:
      InputError: a field that is wrong, or a request that the model cannot be given.
    """
    config = read_config(fields, defaults)
    samples = fields.get("num_return_sequences", defaults.samples)
    _check_integer("n", samples, 1, MAX_SAMPLES)
    seed = fields.get("seed", defaults.seed)
    _check_integer("seed", seed, 0, MAX_SEED)
    prompt, tokens = _prompt(fields, defaults)
    try:
        check_request(RowRequest(tokens, config, 0).rows, defaults.model, config)
    except InputError as error:
        raise InputError(str(error).removeprefix("row 0: ")) from error
    return Asked(prompt, tokens, config, seed, samples, _stops(fields, defaults))


def nothing_else(fields: Mapping[str, Any], silent: str = " ".join(_SILENT)) -> None:
    """Check that fields which nobody reads ask for nothing; those named in ``silent`` change no token anyway.

    Raises:
      InputError: they do.
    """
    # A switch that is off or a list that is empty asks for nothing that could be missed.
    asked = [name for name, value in fields.items() if value and name not in silent.split()]
    if asked:
        raise InputError(f"{', '.join(asked):.200}: not supported")


def read_config(changes: Mapping[str, Any], defaults: Defaults) -> DiffusionConfig | SamplingConfig:
    """The decoding parameters of a body, over the default ones.

    Raises:
      InputError: one that is wrong, or that this model's decoder does not have.
    """
    config = defaults.config
    wrong = [name for name in (*_DIFFUSION, "early_stop") if name in changes]
    if isinstance(config, SamplingConfig) and wrong:
        raise InputError(f"{', '.join(wrong)}: for diffusion models, and this checkpoint is autoregressive")
    fields = {name: changes[name] for name in (*_COMMON, *_DIFFUSION) if name in changes}
    if fields.get("top_k") == 0:
        fields["top_k"] = None
    for name in ("suppress_mask", "early_stop"):
        if not isinstance(changes.get(name, False), bool):
            raise InputError(f"{name} is {changes[name]!r:.80}; expected true or false")
    if "early_stop" in changes:
        fields["stop_token_ids"] = defaults.end_token_ids if changes["early_stop"] else ()
    if "log_probabilities" in changes:
        # OpenAI's completions give the number of alternatives, 0 for none: the chosen token's is what there is.
        wanted = changes["log_probabilities"]
        if not isinstance(wanted, (bool, int)) or (wanted is not True and wanted != 0):
            raise InputError(f"logprobs is {wanted!r:.80}; expected true, false, or 0: there are no alternatives")
        fields["log_probabilities"] = wanted is not False
    if isinstance(config, DiffusionConfig):
        for name, own in _OF.items():
            if name in fields and fields[name] != getattr(config, name):
                fields = {one: getattr(DiffusionConfig(), one) for one in own} | fields
    tokens = fields.get("max_new_tokens")
    follows = defaults.steps_follow_tokens and isinstance(config, DiffusionConfig)
    if follows and "steps" not in fields and isinstance(tokens, int):
        fields["steps"] = min(MAX_STEPS, max(1, tokens))
    made = config.replace(**fields)
    if isinstance(made, DiffusionConfig):
        if "steps" in changes or "eps" in changes:
            made.check_schedule()
        if changes.get("alg_temp") and made.algorithm == "origin":
            raise InputError("alg_temp is of algorithms that rank positions; 'origin' draws them by its schedule")
    return made


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(f"{name} is {value!r:.80}; expected an integer from {low} to {high}")


def _stops(changes: Mapping[str, Any], defaults: Defaults) -> tuple[str, ...]:
    found = changes.get("stop", defaults.stop)
    found = [found] if isinstance(found, str) else found
    texts = isinstance(found, (list, tuple)) and all(isinstance(one, str) and 0 < len(one) <= MAX_STOP for one in found)
    if not texts or len(found) > MAX_STOPS:
        raise InputError(f"stop: expected a text, or at most {MAX_STOPS}, of 1 to {MAX_STOP} characters")
    return tuple(found)


def _prompt(changes: Mapping[str, Any], defaults: Defaults) -> tuple[str, list[int]]:
    """The prompt's text and its tokens."""
    if ("prompt" in changes) == ("messages" in changes):
        raise InputError("expected either a prompt or messages")
    tokenizer, vocabulary = defaults.tokenizer, defaults.model.vocab_size
    if "messages" in changes:
        return "", _not_empty(tokenizer.encode_messages(_messages(changes["messages"])))
    prompt = changes["prompt"]
    if isinstance(prompt, list):
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                raise InputError(f"prompt: {token!r:.80} is no token; expected one text, or ids below {vocabulary}")
        return tokenizer.decode(_not_empty(prompt), skip_special_tokens=False), list(prompt)
    if not isinstance(prompt, str):
        raise InputError("prompt: expected a text or a list of token ids")
    encode: Callable[[str], list[int]] = tokenizer.encode_chat if defaults.chat else tokenizer.encode
    _not_empty(prompt)
    return prompt, _not_empty(encode(prompt))


def _not_empty(prompt: Any) -> Any:
    if not len(prompt):
        raise InputError("the prompt is empty: it has at least one token")
    return prompt


def _messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise InputError('messages: expected a list like [{"role": "user", "content": "..."}]')
    found = []
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
            texts = [part for part in parts if isinstance(part, str)]
            content = "".join(texts) if len(texts) == len(content) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise InputError("messages: each has a role and a content, both texts")
        named = {"name": message["name"]} if message.get("name") is not None else {}
        if not all(isinstance(name, str) for name in named.values()):
            raise InputError("messages: a name is a text")
        found.append({"role": role, "content": content, **named})
    return found
