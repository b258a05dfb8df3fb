"""Reads requests, a prompt or a chat with decoding parameters: lines of a batch and bodies of the server alike."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from runtime import (
    AUTOREGRESSIVE_PARAMETERS,
    EXPOSED_PARAMETERS,
    MAX_SAMPLES,
    MAX_SEED,
    MAX_STEPS,
    CompletionBuilder,
    DiffusionConfig,
    InputError,
    Integer,
    ModelConfig,
    RowRequest,
    SamplingConfig,
    TextTokenizer,
    check_given,
    check_request,
    dependents,
    with_model_blocks,
)

MAX_STOPS, MAX_STOP = 16, 1024

# No token has more characters than this: a text that is longer than so many for each position does not fit.
_LONGEST_TOKEN = 256
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

# Fields of a request that are no decoding parameters.
_SAMPLES, _SAMPLES_NAME = Integer(1, MAX_SAMPLES), "num_return_sequences"
_READ = {"prompt", "messages", "stop", _SAMPLES_NAME, *EXPOSED_PARAMETERS}
_OWN_NAMES = {"n": _SAMPLES_NAME} | {alias: one.name for one in EXPOSED_PARAMETERS.values() for alias in one.aliases}
# A request has a single seed, which is kept beside its configuration.
_SEED = Integer(0, MAX_SEED)
_MAX_CONFIGS = 1024
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
    _configs: dict[str, DiffusionConfig | SamplingConfig] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def decoding(self, fields: Mapping[str, Any]) -> DiffusionConfig | SamplingConfig:
        """The decoding parameters of a body. Bodies that say the same of them share one object.

        Raises:
          InputError: a parameter is wrong, or this model's decoder does not have it.
        """
        said = json.dumps({name: fields[name] for name in fields if name in EXPOSED_PARAMETERS and name != "seed"})
        if said not in self._configs:
            if len(self._configs) >= _MAX_CONFIGS:
                self._configs.clear()
            self._configs[said] = read_config(fields, self).with_end_tokens(self.end_token_ids, default=True)
        return self._configs[said]

    @property
    def completions(self) -> CompletionBuilder:
        """What turns a finished row into a completion."""
        return CompletionBuilder(self.tokenizer, self.model.mask_token_id, self.end_token_ids)


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


def _once(pairs: list[tuple[str, Any]], most: int | None = None) -> dict[str, Any]:
    if most is not None and len(pairs) > most:
        raise InputError(f"an object has {len(pairs)} names; at most {most}")
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InputError("an object says a name twice")
    return found


def parse_object(raw: bytes, names: int | None = None) -> dict[str, Any]:
    """A JSON object from bytes.

    Args:
      raw: UTF-8.
      names: that an object may have at most; None for any number.

    Raises:
      InputError: not UTF-8, not JSON, not an object, an object that says something twice, or one with too many names.
    """
    try:
        record = json.loads(raw.decode("utf-8"), object_pairs_hook=partial(_once, most=names))
        # Half a character, which only an escape can write, is no text.
        if _SURROGATE.search(raw):
            json.dumps(record, ensure_ascii=False).encode("utf-8")
    except InputError:
        raise
    except UnicodeError as error:
        raise InputError("not UTF-8", detail=error) from error
    except (ValueError, RecursionError) as error:
        raise InputError("not JSON", detail=error) from error
    if not isinstance(record, dict):
        raise InputError("expected an object")
    return record


def by_our_names(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body with aliases replaced by the names of our parameters, and without fields that are null.

    Raises:
      InputError: one parameter is given by two names.
    """
    found: dict[str, Any] = {}
    for name, value in body.items():
        own = _OWN_NAMES.get(name, name)
        if own in found:
            raise InputError(f"{name}: {own} is given twice", field=name)
        if value is not None:
            found[own] = value
    return found


def known(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body, by our names, that :func:`read_asked` reads."""
    return {name: value for name, value in changes.items() if name in _READ}


def is_read(name: str) -> bool:
    """Whether :func:`read_asked` reads a field of a body, given by any of its names."""
    return _OWN_NAMES.get(name, name) in _READ


def read_asked(fields: Mapping[str, Any], defaults: Defaults) -> Asked:
    """Check a request and tokenize its prompt.

    Args:
      fields: of its body, as :func:`known` returns them.
      defaults: values of what it does not say.

    Raises:
      InputError: a field is wrong, or the model cannot run the request.
    """
    draft = read_draft(fields, defaults)
    (tokens,) = encode_drafts([draft], defaults)
    return finish(draft, tokens, defaults)


@dataclass(frozen=True)
class Draft:
    """A request that is checked, but for what only the tokens of its prompt can tell.

    Attributes:
      prompt: a text, or token ids; a chat's is its messages.
      config, seed, samples, stop: as in :class:`Asked`.
    """

    prompt: str | list[int] | list[dict[str, str]]
    config: DiffusionConfig | SamplingConfig
    seed: int
    samples: int
    stop: tuple[str, ...]

    @property
    def has_tokens(self) -> bool:
        """Whether the prompt is token ids."""
        return isinstance(self.prompt, list) and isinstance(self.prompt[0], int)

    def messages(self, chat: bool) -> list[dict[str, str]] | None:
        """The conversation, which a plain prompt begins if it is a ``chat``; None where there is none."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}] if chat else None
        return None if self.has_tokens else self.prompt  # type: ignore[return-value]


def read_draft(fields: Mapping[str, Any], defaults: Defaults) -> Draft:
    """Check a request without tokenizing its prompt, which may take long.

    Raises:
      InputError: a field is wrong.
    """
    return Draft(
        config=defaults.decoding(fields),
        samples=_SAMPLES.read("n", fields.get(_SAMPLES_NAME, defaults.samples)),
        seed=_SEED.read("seed", fields.get("seed", defaults.seed)),
        stop=_stops(fields, defaults),
        prompt=_prompt(fields, defaults),
    )


def encode_drafts(drafts: Sequence[Draft], defaults: Defaults) -> list[list[int] | InputError]:
    """Token ids of the prompts of several requests, or why one has none.

    Raises:
      CheckpointError: the chat template does not end.
    """
    tokenizer, positions = defaults.tokenizer, defaults.model.max_positions
    found: dict[int, Any] = {number: draft.prompt for number, draft in enumerate(drafts)}
    chats = {number: told for number, draft in enumerate(drafts) if (told := draft.messages(defaults.chat))}
    found |= zip(chats, tokenizer.render_batch(list(chats.values())), strict=True)
    texts = {}
    for number, text in found.items():
        if isinstance(text, str):
            try:
                check_prompt_size(text, positions)
                texts[number] = text
            except InputError as error:
                found[number] = error
    found |= zip(texts, tokenizer.encode_batch(list(texts.values())), strict=True)
    return list(found.values())


def finish(draft: Draft, tokens: list[int] | InputError, defaults: Defaults) -> Asked:
    """The request of a draft, from what :func:`encode_drafts` returns for it.

    Raises:
      InputError: it has no tokens, or the model cannot run it.
    """
    if isinstance(tokens, InputError):
        raise tokens
    # Most requests need no more than this: millions of lines are checked so.
    room = defaults.model.max_positions - len(_not_empty(tokens))
    if not 0 < draft.config.max_new_tokens <= room:
        check_request(RowRequest(tokens, draft.config, 0).rows, defaults.model, draft.config)
    prompt = draft.prompt if isinstance(draft.prompt, str) else ""
    if draft.has_tokens:
        prompt = defaults.tokenizer.decode(tokens, skip_special_tokens=False)
    return Asked(prompt, list(tokens), draft.config, draft.seed, draft.samples, draft.stop)


def nothing_else(fields: Mapping[str, Any], silent: str = " ".join(_SILENT)) -> None:
    """Check that fields which are not read are empty or off; those named in ``silent`` change no token anyway.

    Raises:
      InputError: one of them is not.
    """
    # A switch that is off or a list that is empty asks for nothing that could be missed.
    asked = [name for name, value in fields.items() if value and name not in silent.split()]
    if asked:
        raise InputError(f"{', '.join(asked):.200}: not supported", field=asked[0])


def read_config(changes: Mapping[str, Any], defaults: Defaults) -> DiffusionConfig | SamplingConfig:
    """The decoding parameters of a body, over the defaults; ``early_stop`` is not decided yet.

    Raises:
      InputError: a parameter is wrong, or this model's decoder does not have it.
    """
    config = defaults.config
    given = [name for name in EXPOSED_PARAMETERS if name in changes and name != "seed"]
    wrong = [name for name in given if name not in AUTOREGRESSIVE_PARAMETERS]
    if isinstance(config, SamplingConfig) and wrong:
        raise InputError(
            f"{', '.join(wrong)}: for diffusion models, and this checkpoint is autoregressive", field=wrong[0]
        )
    fields = {name: EXPOSED_PARAMETERS[name].from_request(changes[name]) for name in given}
    if "log_probabilities" in fields:
        fields["log_probabilities"] = _log_probabilities(fields["log_probabilities"])
    # Parameters of one cache or one parallel rule do not carry over to another one.
    for name in [name for name in fields if fields[name] != getattr(config, name)]:
        fields = {one.name: one.default for one in dependents(type(config), name)} | fields
    tokens = fields.get("max_new_tokens")
    follows = defaults.steps_follow_tokens and isinstance(config, DiffusionConfig)
    if follows and "steps" not in fields and isinstance(tokens, int):
        fields["steps"] = min(MAX_STEPS, max(1, tokens))
    made = with_model_blocks(config.replace(**fields), defaults.model)
    check_given(made, given)
    return made


def _log_probabilities(wanted: Any) -> bool:
    # OpenAI's completions give the number of alternatives, 0 for none: the chosen token's is what there is.
    if not isinstance(wanted, (bool, int)) or (wanted is not True and wanted != 0):
        raise InputError(
            f"logprobs is {wanted!r:.80}; expected true, false, or 0: there are no alternatives", field="logprobs"
        )
    return wanted is not False


def _stops(changes: Mapping[str, Any], defaults: Defaults) -> tuple[str, ...]:
    found = changes.get("stop", defaults.stop)
    found = [found] if isinstance(found, str) else found
    texts = isinstance(found, (list, tuple)) and all(isinstance(one, str) and 0 < len(one) <= MAX_STOP for one in found)
    if not texts or len(found) > MAX_STOPS:
        raise InputError(f"stop: expected a text, or at most {MAX_STOPS}, of 1 to {MAX_STOP} characters", field="stop")
    return tuple(found)


def check_prompt_size(prompt: Any, positions: int) -> None:
    """Refuse a prompt, a text or token ids, that cannot fit. It costs no time, and tokenizing a long text does.

    Raises:
      InputError: it has more tokens than there are positions.
    """
    least = len(prompt) // _LONGEST_TOKEN if isinstance(prompt, str) else len(prompt)
    if least > positions:
        raise InputError(
            f"the prompt is too long; there is room for {positions} tokens, new ones included", field="prompt"
        )


def _prompt(changes: Mapping[str, Any], defaults: Defaults) -> Any:
    """The prompt of a request, a text, token ids or messages, checked as far as it can be before it is tokenized."""
    if ("prompt" in changes) == ("messages" in changes):
        raise InputError("expected either a prompt or messages", field="prompt")
    if "messages" in changes:
        return _messages(changes["messages"])
    prompt, vocabulary = changes["prompt"], defaults.model.vocab_size
    if not isinstance(prompt, (str, list)):
        raise InputError("prompt: expected a text or a list of token ids", field="prompt")
    check_prompt_size(_not_empty(prompt), defaults.model.max_positions)
    if isinstance(prompt, list):
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                raise InputError(
                    f"prompt: {token!r:.80} is no token; expected one text, or ids below {vocabulary}", field="prompt"
                )
    return prompt


def _not_empty(prompt: Any) -> Any:
    if not len(prompt):
        raise InputError("the prompt is empty: it has at least one token", field="prompt")
    return prompt


def _messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise InputError('messages: expected a list like [{"role": "user", "content": "..."}]', field="messages")
    found = []
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
            texts = [part for part in parts if isinstance(part, str)]
            content = "".join(texts) if len(texts) == len(content) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise InputError("messages: each has a role and a content, both texts", field="messages")
        named = {"name": message["name"]} if message.get("name") is not None else {}
        if not all(isinstance(name, str) for name in named.values()):
            raise InputError("messages: a name is a text", field="messages")
        found.append({"role": role, "content": content, **named})
    return found
