"""Text to tokens and back, with the model's own tokenizer and chat template. No code from the folder is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.folder import CheckpointFolder
from runtime.models.config import ModelConfig, token_ids
from runtime.text.chat_template import TemplateRenderer, TemplateTimeoutError
from sharding.errors import InputError

Item = TypeVar("Item")
Result = TypeVar("Result")

# Tokens that end a completion, where a checkpoint's vocabulary has them.
END_TOKENS = ("<|im_end|>", "<|dlm_pad|>", "<|endoftext|>")


# Conversations of a batch that may take a chat template too long: with more of them, it is the template's fault.
_MAX_TIMEOUTS = 3


class TextTokenizer:
    """A folder's tokenizer."""

    def __init__(self, tokenizer: Any, name: str, renderer: TemplateRenderer | None = None) -> None:
        """Wrap a fast tokenizer of transformers; ``name`` is the folder's, for messages."""
        self._tokenizer = tokenizer
        self._name = name
        self._renderer = renderer or TemplateRenderer()
        self._timeouts = 0

    @classmethod
    def from_folder(cls, folder: CheckpointFolder) -> TextTokenizer | None:
        """Load a folder's tokenizer: ``tokenizer.json``, or a Qwen2 ``vocab.json`` and ``merges.txt``.

        Returns:
          None where the folder has neither.

        Raises:
          CheckpointError: the files are there and cannot be read, or are not files of the folder.
        """
        has_json = (folder.path / "tokenizer.json").is_file()
        has_bpe = all((folder.path / file).is_file() for file in ("vocab.json", "merges.txt"))
        if not has_json and not has_bpe:
            return None
        folder.side_files()  # none of what is read now is a link to elsewhere, or too large
        # Named classes, never the automatic one: a class named by the folder could be code in the folder.
        from transformers import PreTrainedTokenizerFast, Qwen2TokenizerFast

        loader = PreTrainedTokenizerFast if has_json else Qwen2TokenizerFast
        try:
            return cls(loader.from_pretrained(str(folder.path), local_files_only=True), folder.name)
        except BaseException as error:  # the library raises many kinds for a damaged file
            if not _is_of_library(error):
                raise
            raise CheckpointError(f"{folder.path}: the tokenizer cannot be read ({error!s:.300})") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised, none is added.

        Raises:
          InputError: the tokenizer fails on this text.
        """
        # Not verbose: how long a prompt may be is checked where the model is known.
        ids = self._guarded(lambda: self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
        return list(ids)

    def _guarded(self, work: Callable[[], Result]) -> Result:
        """What ``work`` returns.

        Raises:
          InputError: the tokenizers library raises an error or panics.
        """
        try:
            return work()
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise InputError("prompt: the tokenizer cannot take this text", field="prompt", detail=error) from error

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a user's message in the chat template, ready for the assistant's answer.

        Raises:
          CheckpointError: the checkpoint has no chat template.
        """
        return self.encode_messages([{"role": "user", "content": text}])

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer; see :meth:`render_messages`."""
        return self.encode(self.render_messages(messages))

    @property
    def chat_template(self) -> str:
        """The checkpoint's chat template.

        Raises:
          CheckpointError: it has none.
        """
        found = self._tokenizer.chat_template
        if isinstance(found, dict):  # several by name, of which this one is for conversations
            found = found.get("default")
        if not found:
            raise CheckpointError(f"{self._name}: the tokenizer has no chat template; leave --chat off")
        return str(found)

    @chat_template.setter
    def chat_template(self, template: str | None) -> None:
        """Use another chat template; None for none."""
        self._tokenizer.chat_template = template

    def render_messages(self, messages: Sequence[Mapping[str, str]], answer: bool = True) -> str:
        """Text of a conversation, ``{"role", "content"}`` each, with the beginning of the assistant's ``answer``.

        Raises:
          CheckpointError: the checkpoint has no chat template.
          InputError: its template refuses these messages, fails, or does not end.
        """
        return self._render([messages], answer)[0]

    def _render(self, conversations: Sequence[Sequence[Mapping[str, str]]], answer: bool) -> list[str]:
        special = self._tokenizer.special_tokens_map
        return self._renderer.render(self.chat_template, conversations, special, answer)

    def render_batch(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[str | InputError]:
        """Texts of conversations, as :meth:`render_messages` makes each, or why there is none.

        Raises:
          CheckpointError: the chat template does not end, for several of them.
        """

        def one(messages: Sequence[Mapping[str, str]]) -> str:
            if self._timeouts > _MAX_TIMEOUTS:
                raise TemplateTimeoutError("messages: the chat template does not end", field="messages")
            try:
                return self.render_messages(messages)
            except TemplateTimeoutError:
                self._timeouts += 1
                raise

        found = _each(lambda: self._render(conversations, True), one, conversations)
        if self._timeouts > _MAX_TIMEOUTS:
            raise CheckpointError(
                f"{self._name}: the chat template does not end: {self._timeouts} conversations were tried"
            )
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[list[int] | InputError]:
        """Token ids of texts, as :meth:`encode` makes each, or why there are none. All cores take part."""

        def whole() -> list[list[int]]:
            found = self._tokenizer(
                list(texts),
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            return [list(ids) for ids in found["input_ids"]]

        return _each(lambda: self._guarded(whole), self.encode, texts)

    def start_renderer(self) -> None:
        """Start what renders conversations, so that the first one need not wait for it."""
        self._renderer.start()

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, without special tokens unless asked.

        Raises:
          InputError: the tokenizer fails on these ids.
        """
        return self._guarded(
            lambda: self._tokenizer.decode(
                list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens in :data:`END_TOKENS` that the vocabulary has."""
        vocabulary = self._tokenizer.get_vocab()
        return tuple(vocabulary[token] for token in END_TOKENS if token in vocabulary)


def _is_of_library(error: BaseException) -> bool:
    """Whether a library raised it: a panic of Rust is no :class:`Exception`, and its class has no public name."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _each(
    whole: Callable[[], list[Result]], one: Callable[[Item], Result], items: Sequence[Item]
) -> list[Result | InputError]:
    """What ``whole`` makes of all items; where it fails, what ``one`` makes of each, or why it does not."""
    if not items:
        return []
    try:
        return list(whole())
    except InputError:
        found: list[Result | InputError] = []
    for item in items:
        try:
            found.append(one(item))
        except InputError as error:
            found.append(error)
    return found


def encode_prompts(
    tokenizer: TextTokenizer, prompts: str | Sequence[str], pad_token_id: int, *, chat: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenize a prompt, or several, into left-padded rows: int32 ``[B, S]`` and their attention mask ``[B, S]``.

    Raises:
      InputError: no prompts, one that is no text, or one without tokens.
      CheckpointError: ``chat``, and no chat template.
    """
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not prompts or not all(isinstance(text, str) for text in prompts):
        raise InputError("prompts: expected a text, or a list of at least one")
    encoded = [tokenizer.encode_chat(text) if chat else tokenizer.encode(text) for text in prompts]
    empty = [number for number, tokens in enumerate(encoded) if not tokens]
    if empty:
        raise InputError(f"prompt {empty[0]} is empty: a prompt has at least one token")
    width = max(map(len, encoded))
    ids = np.full((len(encoded), width), pad_token_id, np.int32)
    mask = np.zeros_like(ids)
    for row, tokens in enumerate(encoded):
        ids[row, width - len(tokens) :] = tokens
        mask[row, width - len(tokens) :] = 1
    return ids, mask


def end_tokens(config: ModelConfig, folder: CheckpointFolder, tokenizer: TextTokenizer | None) -> tuple[int, ...]:
    """Tokens that end a completion: the configurations', and the tokenizer's where there is one.

    Raises:
      ConfigError: the generation config names one that is no token.
    """
    ids = [*config.end_token_ids, *token_ids(folder.generation_config, "eos_token_id", config.vocab_size - 1)]
    return tuple(dict.fromkeys([*ids, *(() if tokenizer is None else tokenizer.end_token_ids)]))
