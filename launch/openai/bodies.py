"""Reads requests in OpenAI's format: lines of a batch file and bodies of HTTP requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from launch.openai.idle import IGNORE_EOS, early_stop
from launch.openai.messages import read_messages
from runtime import (
    EXPOSED_PARAMETERS,
    MAX_SAMPLES,
    CompletionBuilder,
    DiffusionConfig,
    InputError,
    Integer,
    ModelConfig,
    ParameterError,
    RowRequest,
    SamplingConfig,
    TextTokenizer,
    check_given,
    check_ids,
    check_kind,
    check_row,
    default_steps,
    dependents,
    own_names,
    place_suffix,
    read_stop,
    with_model_blocks,
    with_steps_for_masks,
)

MAX_STOPS, MAX_STOP = 16, 1024

# No token has more characters than this, so a text with more characters per position cannot fit.
_LONGEST_TOKEN = 256

# Fields of a request beside the decoding parameters.
_SAMPLES, _SAMPLES_NAME = Integer(1, MAX_SAMPLES), "num_return_sequences"
_TEXTS = {"prompt", "messages", "suffix"}
_READ = {*_TEXTS, "stop", _SAMPLES_NAME, *EXPOSED_PARAMETERS}
_OWN_NAMES = {"n": _SAMPLES_NAME, IGNORE_EOS: "early_stop"}
_OWN_NAMES |= {alias: one.name for one in EXPOSED_PARAMETERS.values() for alias in one.aliases}
_SEED: Any = EXPOSED_PARAMETERS["seed"].request_kind
# What a request's configuration is made of. Each of its rows has a seed of its own.
_SHARED = {name: one for name, one in EXPOSED_PARAMETERS.items() if not one.per_row}
_MAX_CONFIGS = 1024
# The configuration of a request, its seed, its number of samples and its stop strings.
Settings = tuple[DiffusionConfig | SamplingConfig, int, int, tuple[str, ...]]
# Fields of a body that change no token.
_SILENT = ("model", "user", "safety_identifier", "prompt_cache_key", "metadata", "store", "service_tier")


@dataclass(frozen=True)
class Defaults:
    """The model, its tokenizer, and the values of fields that a request does not set.

    Attributes:
      model_name: the model's name in the API.
      model: the model's architecture.
      tokenizer: the checkpoint's tokenizer.
      config: the default decoding parameters.
      steps_follow_tokens: whether a request that sets ``max_new_tokens`` but not ``steps`` gets one step per new token.
      end_token_ids: tokens that end a completion.
      seed: the default seed.
      chat: whether a plain prompt is treated as a user's message in a chat.
      samples: the default number of completions per prompt.
      stop: the default strings that end a completion.
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
        """Return the decoding parameters of a request. Requests with equal parameters share one configuration object.

        Raises:
          InputError: a parameter is invalid, or this model does not have it.
        """
        said = json.dumps({name: fields[name] for name in fields if name in _SHARED})
        # Several threads read requests, and another one may clear the cache at any time.
        made = self._configs.get(said)
        if made is None:
            if len(self._configs) >= _MAX_CONFIGS:
                self._configs.clear()
            made = read_config(fields, self).with_end_tokens(self.end_token_ids, default=True)
            check_kind(self.model, made)
            self._configs[said] = made
        return made

    @cached_property
    def settings(self) -> Settings:
        """Settings of a request with only prompt, messages or suffix; cached: most lines of a batch are like that."""
        return _settings({}, self)

    @property
    def completions(self) -> CompletionBuilder:
        """Turns finished rows into completions."""
        return CompletionBuilder(self.tokenizer, self.model.mask_token_id, self.end_token_ids)


@dataclass(slots=True)  # not frozen: a batch makes millions of these, which would take seven times as long
class Asked:
    """A validated and tokenized request.

    Attributes:
      prompt: the text of the prompt, empty for a chat.
      tokens: the token ids before the new tokens.
      suffix: the token ids after the new tokens, see :func:`runtime.text.tokenizer.place_suffix`.
      config: the decoding parameters.
      seed: the seed of the request, or the default.
      samples: the number of completions.
      stop: strings that end a completion.
      chat: whether the prompt was rendered with the chat template.
    """

    prompt: str
    tokens: list[int]
    suffix: list[int]
    config: DiffusionConfig | SamplingConfig
    seed: int
    samples: int
    stop: tuple[str, ...]
    chat: bool

    def request(self, seed: int) -> RowRequest:
        """Return the row of one sample of this request, which has its own seed."""
        return RowRequest(self.tokens, self.config, seed, self.suffix)


def by_our_names(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with aliases replaced by the names of parameters, and without fields that are null.

    It is the same object if it has neither.

    Raises:
      ParameterError: two names of the same parameter have different values, or ``ignore_eos`` is no boolean.
    """
    # Most lines of a batch need no change.
    if _OWN_NAMES.keys().isdisjoint(body) and None not in body.values():
        return body
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in body.items():
        if value is None:
            continue
        own = _OWN_NAMES.get(name, name)
        if name == IGNORE_EOS:
            value = early_stop(value)
        if own in found and not (type(value) is type(found[own]) and value == found[own]):
            raise ParameterError(own, f"is set twice, as {names[own]} and as {name}, to different values")
        found[own] = value
        names[own] = name
    return found


def known(changes: dict[str, Any]) -> dict[str, Any]:
    """Return those fields of a body, after :func:`by_our_names`, that :func:`read_asked` reads."""
    return changes if changes.keys() <= _READ else {name: value for name, value in changes.items() if name in _READ}


def is_read(name: str) -> bool:
    """Return whether :func:`read_asked` reads the field of a body with this name, which may be an alias."""
    return _OWN_NAMES.get(name, name) in _READ


def read_asked(fields: Mapping[str, Any], defaults: Defaults) -> Asked:
    """Validate a request and tokenize its prompt.

    Args:
      fields: the fields of its body, as :func:`known` returns them.
      defaults: values of fields that are absent.

    Raises:
      InputError: a field is invalid, or the model cannot run the request.
    """
    draft = read_draft(fields, defaults)
    (encoded,) = encode_drafts([draft], defaults)
    return Asked(*finish(draft, encoded, defaults))


@dataclass(slots=True)
class Draft:
    """A request that was validated but not tokenized yet.

    Attributes:
      prompt: a text, token ids, or the messages of a chat.
      suffix: the text that follows the completion, empty for none.
      config, seed, samples, stop: as in :class:`Asked`.
      one_step_per_token: whether nothing sets ``steps``; then the prompt's masks count too, when they are known.
    """

    prompt: str | list[int] | list[dict[str, str]]
    suffix: str
    config: DiffusionConfig | SamplingConfig
    seed: int
    samples: int
    stop: tuple[str, ...]
    one_step_per_token: bool

    @property
    def has_tokens(self) -> bool:
        """Whether the prompt is a list of token ids."""
        return isinstance(self.prompt, list) and isinstance(self.prompt[0], int)

    def is_chat(self, chat: bool) -> bool:
        """Whether the prompt is rendered with the chat template: messages, or with ``chat`` a text too."""
        return chat if isinstance(self.prompt, str) else not self.has_tokens

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages of a chat. A text becomes a user's message."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return self.prompt  # type: ignore[return-value]


def read_draft(fields: Mapping[str, Any], defaults: Defaults) -> Draft:
    """Validate a request without tokenizing its prompt, which can take long.

    Raises:
      InputError: a field is invalid.
    """
    settings = defaults.settings if fields.keys() <= _TEXTS else _settings(fields, defaults)
    suffix = _suffix(fields["suffix"], defaults) if "suffix" in fields else ""
    return Draft(_prompt(fields, defaults), suffix, *settings, defaults.steps_follow_tokens and "steps" not in fields)


def _settings(fields: Mapping[str, Any], defaults: Defaults) -> Settings:
    return (
        defaults.decoding(fields),
        _SEED.read("seed", fields.get("seed", defaults.seed)),
        _SAMPLES.read("n", fields.get(_SAMPLES_NAME, defaults.samples)),
        _stops(fields, defaults),
    )


# Token ids of a prompt, and of its suffix.
Encoded = tuple[list[int], list[int]]


def encode_drafts(
    drafts: Sequence[Draft], defaults: Defaults, timeouts: list[InputError] | None = None
) -> list[Encoded | InputError]:
    """Tokenize prompt and suffix of several requests. A text that is too long gives an error in place of the token ids.

    ``timeouts`` are earlier timeouts of the chat template, see :meth:`runtime.TextTokenizer.render_batch`.

    Raises:
      CheckpointError: the chat template timed out too often.
    """
    tokenizer = defaults.tokenizer
    found: dict[int, Any] = {}
    texts: dict[int, str] = {}
    chats: dict[int, list[dict[str, str]]] = {}
    for number, draft in enumerate(drafts):
        if draft.is_chat(defaults.chat):
            chats[number] = draft.messages
        elif isinstance(draft.prompt, str):
            texts[number] = draft.prompt
        else:
            found[number] = draft.prompt
    for number, text in zip(chats, tokenizer.render_batch(list(chats.values()), timeouts), strict=True):
        try:
            if isinstance(text, InputError):
                raise text
            own = "prompt" if isinstance(drafts[number].prompt, str) else "messages"
            check_prompt_size(text, defaults.model.max_positions, own)
            texts[number] = text
        except InputError as error:
            found[number] = error
    found |= zip(texts, tokenizer.encode_batch(list(texts.values())), strict=True)
    after = {number: draft.suffix for number, draft in enumerate(drafts) if draft.suffix}
    suffixes = dict(zip(after, tokenizer.encode_batch(list(after.values())), strict=True))

    def pair(number: int) -> Encoded | InputError:
        tokens, suffix = found[number], suffixes.get(number, [])
        if isinstance(tokens, InputError):
            return tokens
        return suffix if isinstance(suffix, InputError) else (tokens, suffix)

    return [pair(number) for number in range(len(drafts))]


def finish(
    draft: Draft, encoded: Encoded | InputError, defaults: Defaults
) -> tuple[str, list[int], list[int], DiffusionConfig | SamplingConfig, int, int, tuple[str, ...], bool]:
    """Return the fields of :class:`Asked` for a draft, given the result of :func:`encode_drafts` for it.

    Raises:
      InputError: the prompt is empty, too long or has tokens that the model does not know, or the model cannot run the
        request.
    """
    if isinstance(encoded, InputError):
        raise encoded
    given, after = encoded
    tokens, suffix, chat = _not_empty(given), after, draft.is_chat(defaults.chat)
    if after:
        tokens, suffix = place_suffix(defaults.tokenizer, defaults.model, given, after, chat=chat)
    field = "prompt" if isinstance(draft.prompt, str) or draft.has_tokens else "messages"
    for ids in (tokens, suffix):
        check_ids(ids, defaults.model, field)
    config = draft.config
    if draft.one_step_per_token:
        config = with_steps_for_masks(config, defaults.model, tokens.count(defaults.model.mask_token_id))
    check_row(tokens, suffix, defaults.model, config)
    read_stop(draft.stop, defaults.model, [tokens])
    prompt = draft.prompt if isinstance(draft.prompt, str) else ""
    if draft.has_tokens:
        prompt = defaults.tokenizer.decode(given, skip_special_tokens=False)
    return prompt, tokens, suffix, config, draft.seed, draft.samples, draft.stop, chat


def nothing_else(fields: Mapping[str, Any], silent: str = " ".join(_SILENT)) -> None:
    """Check that fields which are not read are empty or off. Those named in ``silent`` may have any value.

    Raises:
      InputError: a field asks for something that is not supported.
    """
    # False and empty values request nothing, so they are allowed.
    asked = [name for name, value in fields.items() if value and name not in silent.split()]
    if asked:
        raise InputError(f"{', '.join(asked):.200}: not supported", field=asked[0])


def read_config(changes: Mapping[str, Any], defaults: Defaults) -> DiffusionConfig | SamplingConfig:
    """Return the decoding parameters of a body, with defaults for those that it does not set.

    ``early_stop`` may still be None.

    Raises:
      InputError: a parameter is invalid, or this model's decoder does not have it.
    """
    config = defaults.config
    given = {name: one.from_request(changes[name]) for name, one in _SHARED.items() if name in changes}
    if isinstance(config, DiffusionConfig) and config.variable_length and "draft_steps" in given:
        # An upper bound, which a model without drafts meets. Its bounds are checked all the same.
        _SHARED["draft_steps"].read(given.pop("draft_steps"))
    fields = own_names(type(config), given)
    if wrong := [name for name in given if name in fields and not hasattr(config, name)]:
        kind = "autoregressive" if isinstance(config, SamplingConfig) else "a diffusion model"
        raise InputError(f"{', '.join(wrong)}: not supported by this checkpoint, which is {kind}", field=wrong[0])
    # A body that changes the cache or the parallel rule starts from the default parameters of the new one.
    for name in [name for name in fields if fields[name] != getattr(config, name)]:
        fields = {one.name: one.default for one in dependents(type(config), name)} | fields
    made = with_model_blocks(config.replace(**fields), defaults.model)
    resized = "steps" not in fields and not fields.keys().isdisjoint(("max_new_tokens", "block_length"))
    if resized and isinstance(made, DiffusionConfig) and (defaults.steps_follow_tokens or made.variable_length):
        made = made.replace(steps=default_steps(defaults.model, made.max_new_tokens, made.block_length))
    check_given(made, given)
    return made


def _stops(changes: Mapping[str, Any], defaults: Defaults) -> tuple[str, ...]:
    found = changes.get("stop", defaults.stop)
    found = [found] if isinstance(found, str) else found
    texts = isinstance(found, (list, tuple)) and all(isinstance(one, str) and 0 < len(one) <= MAX_STOP for one in found)
    if not texts or len(found) > MAX_STOPS:
        raise InputError(
            f"stop: expected a string or at most {MAX_STOPS} strings, each of 1 to {MAX_STOP} characters", field="stop"
        )
    return tuple(found)


def exceeds(prompt: str | Sequence[int], positions: int) -> bool:
    """Whether a text or token ids certainly have more tokens than ``positions``. The text is not tokenized."""
    least = len(prompt) // _LONGEST_TOKEN if isinstance(prompt, str) else len(prompt)
    return least > positions


def check_prompt_size(prompt: str | Sequence[int], positions: int, field: str = "prompt") -> None:
    """Refuse a prompt or suffix, a text or token ids, that is too long. This avoids tokenizing a very long text.

    Args:
      prompt: the text or the token ids.
      positions: the number of positions that the prompt must fit into.
      field: the field of the request that contains the text.

    Raises:
      InputError: the prompt certainly has more tokens than ``positions``.
    """
    if exceeds(prompt, positions):
        raise InputError(
            f"the {'suffix' if field == 'suffix' else 'prompt'} is too long; prompt and new tokens must fit into "
            f"{positions} positions",
            field=field,
        )


def _prompt(changes: Mapping[str, Any], defaults: Defaults) -> Any:
    """Return the prompt of a request (a text, token ids or messages), checked as far as possible before tokenizing."""
    prompt = changes.get("prompt")
    if (prompt is None) != ("messages" in changes):
        raise InputError("expected either a prompt or messages", field="prompt")
    if prompt is None:
        return read_messages(changes["messages"])
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        (prompt,) = prompt  # a list of prompts that has one
    if not isinstance(prompt, (str, list)):
        raise InputError("prompt: expected a string or a list of token ids", field="prompt")
    check_prompt_size(_not_empty(prompt), defaults.model.max_positions)
    vocabulary = defaults.model.vocab_size
    if isinstance(prompt, list):
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                raise InputError(
                    f"prompt: {token!r:.80} is not a token id; expected a string, or integers below {vocabulary}",
                    field="prompt",
                )
    return prompt


def _suffix(suffix: Any, defaults: Defaults) -> str:
    """Return the text that follows the completion, checked as far as possible before tokenizing."""
    if not isinstance(suffix, str):
        raise InputError("suffix: expected a string", field="suffix")
    check_prompt_size(suffix, defaults.model.max_positions, "suffix")
    return suffix


def _not_empty(prompt: Any) -> Any:
    if not len(prompt):
        raise InputError("the prompt is empty; it needs at least one token", field="prompt")
    return prompt
