"""Tokenization with the checkpoint's tokenizer and chat template. No code from the checkpoint folder is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.folder import CheckpointFolder
from runtime.execution.left_padding import left_padded
from runtime.models.config import ModelConfig, token_ids
from runtime.text.chat_template import TemplateRenderer, TemplateTimeoutError
from sharding.errors import InputError

Item = TypeVar("Item")
Result = TypeVar("Result")

# These tokens end a completion, if the checkpoint's vocabulary has them.
END_TOKENS = ("<|im_end|>", "<|dlm_pad|>", "<|endoftext|>")


# If more conversations than this time out, the chat template itself is considered broken.
_MAX_TIMEOUTS = 3


class TextTokenizer:
    """The tokenizer of a checkpoint."""

    def __init__(self, tokenizer: Any, name: str, renderer: TemplateRenderer | None = None) -> None:
        """Wrap a fast tokenizer of transformers; ``name`` is the checkpoint's name, for messages."""
        self._tokenizer = tokenizer
        self._name = name
        self._renderer = renderer or TemplateRenderer()
        self._timeouts = 0

    @classmethod
    def from_folder(cls, folder: CheckpointFolder) -> TextTokenizer | None:
        """Load a folder's tokenizer from ``tokenizer.json``, or from Qwen2's ``vocab.json`` and ``merges.txt``.

        Returns:
          The tokenizer, or None if the folder has neither.

        Raises:
          CheckpointError: the files exist but cannot be read, or are links to files outside the folder.
        """
        has_json = (folder.path / "tokenizer.json").is_file()
        has_bpe = all((folder.path / file).is_file() for file in ("vocab.json", "merges.txt"))
        if not has_json and not has_bpe:
            return None
        folder.side_files()  # raises if a file is too large, or is a link out of the folder
        # Not AutoTokenizer: it could load a class whose code is in the folder.
        from transformers import PreTrainedTokenizerFast, Qwen2TokenizerFast

        loader = PreTrainedTokenizerFast if has_json else Qwen2TokenizerFast
        try:
            return cls(loader.from_pretrained(str(folder.path), local_files_only=True), folder.name)
        except BaseException as error:  # the library raises many kinds for a damaged file
            if not _is_library_error(error):
                raise
            raise CheckpointError(f"{folder.path}: the tokenizer cannot be read ({error!s:.300})") from error

    def encode(self, text: str) -> list[int]:
        """Encode a text to token ids. Special tokens written in the text are recognised; none are added.

        Raises:
          InputError: the tokenizer fails on this text.
        """
        # verbose=False suppresses a warning about the length, which is checked elsewhere against the model.
        ids = self._guarded(lambda: self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
        return list(ids)

    def _guarded(self, work: Callable[[], Result]) -> Result:
        """Call ``work`` and return its result.

        Raises:
          InputError: the tokenizers library raises an error or panics.
        """
        try:
            return work()
        except BaseException as error:
            if not _is_library_error(error):
                raise
            raise InputError("prompt: the tokenizer cannot process this text", field="prompt", detail=error) from error

    def encode_chat(self, text: str) -> list[int]:
        """Encode a user's message with the chat template, including the header of the assistant's answer.

        Raises:
          CheckpointError: the checkpoint has no chat template.
        """
        return self.encode_messages([{"role": "user", "content": text}])

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Encode a conversation, including the header of the assistant's answer; see :meth:`render_messages`."""
        return self.encode(self.render_messages(messages))

    @property
    def chat_template(self) -> str:
        """The checkpoint's chat template.

        Raises:
          CheckpointError: the checkpoint has none.
        """
        found = self._tokenizer.chat_template
        if isinstance(found, dict):  # named templates, of which "default" is for conversations
            found = found.get("default")
        if not found:
            raise CheckpointError(f"{self._name}: the tokenizer has no chat template; leave --chat off")
        return str(found)

    @chat_template.setter
    def chat_template(self, template: str | None) -> None:
        """Replace the chat template; None removes it."""
        self._tokenizer.chat_template = template

    def render_messages(self, messages: Sequence[Mapping[str, str]], answer: bool = True) -> str:
        """Render a conversation to text.

        Args:
          messages: the messages, each ``{"role": ..., "content": ...}``.
          answer: append the beginning of the assistant's answer.

        Raises:
          CheckpointError: the checkpoint has no chat template.
          InputError: the template rejects these messages, fails, or takes too long.
        """
        return self._render([messages], answer)[0]

    def _render(self, conversations: Sequence[Sequence[Mapping[str, str]]], answer: bool) -> list[str]:
        special = self._tokenizer.special_tokens_map
        return self._renderer.render(self.chat_template, conversations, special, answer)

    def render_batch(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[str | InputError]:
        """Render conversations to texts, with an error in place of each text that cannot be rendered.

        Raises:
          CheckpointError: rendering of several conversations did not finish in time.
        """

        def one(messages: Sequence[Mapping[str, str]]) -> str:
            if self._timeouts > _MAX_TIMEOUTS:
                raise TemplateTimeoutError("messages: rendering the chat template timed out", field="messages")
            try:
                return self.render_messages(messages)
            except TemplateTimeoutError:
                self._timeouts += 1
                raise

        found = _each(lambda: self._render(conversations, True), one, conversations)
        if self._timeouts > _MAX_TIMEOUTS:
            raise CheckpointError(
                f"{self._name}: the chat template did not finish in time for {self._timeouts} conversations"
            )
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[list[int] | InputError]:
        """Encode texts on all CPU cores, with an error in place of the ids of each text that cannot be encoded."""

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
        """Start the process that renders conversations, so that the first one does not have to wait for it."""
        self._renderer.start()

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids to text. Special tokens are left out by default.

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
        """Ids of those tokens in :data:`END_TOKENS` that the vocabulary has."""
        vocabulary = self._tokenizer.get_vocab()
        return tuple(vocabulary[token] for token in END_TOKENS if token in vocabulary)


def _is_library_error(error: BaseException) -> bool:
    """Return whether a library raised the error, by an exception or by a Rust panic.

    A Rust panic is not an :class:`Exception`, and its class has no public name.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _each(
    whole: Callable[[], list[Result]], one: Callable[[Item], Result], items: Sequence[Item]
) -> list[Result | InputError]:
    """Return ``whole()`` for all items. If it fails, return ``one(item)`` or its error for each item."""
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
    """Tokenize one or more prompts into left-padded rows: int32 ``[B, S]`` and an attention mask ``[B, S]``.

    Raises:
      InputError: there are no prompts, one is not a string, or one has no tokens.
      CheckpointError: ``chat`` is set, but the checkpoint has no chat template.
    """
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not prompts or not all(isinstance(text, str) for text in prompts):
        raise InputError("prompts: expected a string, or a non-empty list of strings")
    encoded = [tokenizer.encode_chat(text) if chat else tokenizer.encode(text) for text in prompts]
    empty = [number for number, tokens in enumerate(encoded) if not tokens]
    if empty:
        raise InputError(f"prompt {empty[0]} is empty; expected at least one token")
    return left_padded(encoded, pad_token_id)


def end_tokens(config: ModelConfig, folder: CheckpointFolder, tokenizer: TextTokenizer | None) -> tuple[int, ...]:
    """Return the tokens that end a completion, from the model and generation configs and from the tokenizer.

    Raises:
      ConfigError: the generation config names an id that is not in the vocabulary.
    """
    ids = [*config.end_token_ids, *token_ids(folder.generation_config, "eos_token_id", config.vocab_size - 1)]
    return tuple(dict.fromkeys([*ids, *(() if tokenizer is None else tokenizer.end_token_ids)]))
