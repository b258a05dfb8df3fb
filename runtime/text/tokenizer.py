"""Tokenization with the checkpoint's tokenizer and chat template. No code from the checkpoint folder is run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.folder import CheckpointFolder
from runtime.execution.left_padding import left_padded
from runtime.execution.rows import check_ids
from runtime.models.config import InfillingTokens, ModelConfig, token_ids
from runtime.models.families import find_family
from runtime.text.chat_template import RendererStartError, TemplateRenderer, TemplateTimeoutError
from runtime.text.text_growth import MAX_GROWTH, text_growth
from runtime.text.tokenizer_file import read_tokenizer_file
from sharding.errors import InputError

Item = TypeVar("Item")
Result = TypeVar("Result")

# If more conversations of a file than this time out, the chat template itself is considered broken.
_MAX_TIMEOUTS = 3
# Half of a pair of UTF-16. Python has one where an argument or a JSON text is not valid UTF-8.
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class UndecodableError(InputError):
    """The tokenizer fails on token ids, so they have no text."""

    def __init__(self, detail: object) -> None:
        super().__init__(
            "the tokenizer cannot decode these tokens; the decoder in tokenizer.json must accept every token",
            detail=detail,
        )


class TextTokenizer:
    """The tokenizer of a checkpoint."""

    def __init__(self, tokenizer: Any, name: str, renderer: TemplateRenderer | None = None) -> None:
        """Wrap a tokenizer.

        Args:
          tokenizer: a fast tokenizer of transformers, or a :class:`runtime.text.tokenizer_file.FileTokenizer`.
          name: the checkpoint's name, for messages.
          renderer: renders chat templates; a new one by default.
        """
        self._tokenizer = tokenizer
        self._name = name
        self._renderer = renderer or TemplateRenderer()

    @classmethod
    def from_folder(cls, folder: CheckpointFolder) -> TextTokenizer | None:
        """Load a folder's tokenizer from ``tokenizer.json``, or from its family's ``vocab.json`` and ``merges.txt``.

        Returns:
          The tokenizer, or None if the folder has neither.

        Raises:
          ConfigError: without ``tokenizer.json``, ``config.json`` is of a family that is not supported.
          CheckpointError: the files exist but cannot be read, are links to files outside the folder, name files for
            the tokenizer that are not in the folder, or make texts far longer.
        """
        has_json = (folder.path / "tokenizer.json").is_file()
        has_bpe = all((folder.path / file).is_file() for file in ("vocab.json", "merges.txt"))
        if not has_json and not has_bpe:
            return None
        versioned = _check_versioned_files(folder)
        name = "PreTrainedTokenizerFast" if has_json else find_family(folder.config).tokenizer_class
        try:
            found = read_tokenizer_file(folder) if has_json else None
            if found is None:
                # Not AutoTokenizer: it could load a class whose code is in the folder.
                import transformers

                files = _bpe_files(folder) if not has_json else {} if versioned else _json_file(folder)
                loader = getattr(transformers, name)
                found = loader.from_pretrained(str(folder.path), local_files_only=True, **files)
            growth = text_growth(found.backend_tokenizer)
        except BaseException as error:  # the libraries raise many exception types for a damaged file
            if not _is_library_error(error):
                raise
            raise CheckpointError(f"{folder.path}: the tokenizer cannot be read ({error!s:.300})") from error
        if growth > MAX_GROWTH:
            raise CheckpointError(
                f"{folder.path}: the normalizer, pre-tokenizer or decoder of the tokenizer can make a text more than "
                f"{MAX_GROWTH} times longer, which no model needs; look at its replacements"
            )
        return cls(found, folder.name)

    def encode(self, text: str) -> list[int]:
        """Encode a text to token ids. Special tokens written in the text are recognised; none are added.

        Raises:
          InputError: the tokenizer fails on this text.
        """
        return _guarded(lambda: self._encode([text]), _unreadable)[0]

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
            raise CheckpointError(f"{self._name}: the tokenizer has no chat template; send plain prompts")
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

    def render_batch(
        self, conversations: Sequence[Sequence[Mapping[str, str]]], timeouts: list[InputError] | None = None
    ) -> list[str | InputError]:
        """Render conversations to texts, with an error in place of each text that cannot be rendered.

        Args:
          conversations: the messages of each conversation.
          timeouts: the timeout errors of earlier calls for the same file. This call adds its own, and gives up when
            there are too many. None sets no limit.

        Raises:
          CheckpointError: there are too many timeouts.
        """

        def give_up() -> None:
            if timeouts is not None and len(timeouts) > _MAX_TIMEOUTS:
                raise CheckpointError(
                    f"{self._name}: the chat template did not finish in time for {len(timeouts)} conversations"
                )

        def render(some: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
            give_up()
            try:
                return self._render(some, True)
            except TemplateTimeoutError as error:
                if timeouts is not None and len(some) == 1:
                    timeouts.append(error)
                raise

        found = _each(render, conversations)
        give_up()
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[list[int] | InputError]:
        """Encode texts on all CPU cores, with an error in place of the ids of each text that cannot be encoded."""
        return _each(lambda some: _guarded(lambda: self._encode(some), _unreadable), texts)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        # The library's own batch call lets other Python threads run meanwhile, and computes no offsets.
        library = self._tokenizer.backend_tokenizer
        if library.truncation is not None:
            library.no_truncation()
        if library.padding is not None:
            library.no_padding()
        return [found.ids for found in library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def start_renderer(self) -> None:
        """Start the process that renders conversations, so that the first conversation need not wait for it."""
        self._renderer.start()

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids to text. Special tokens are left out by default.

        Raises:
          UndecodableError: the tokenizer fails on these ids.
        """
        return _guarded(
            # The library's call and not that of transformers, which may clean up spaces.
            lambda: self._tokenizer.backend_tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens),
            UndecodableError,
        )

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens, special ones included."""
        found: dict[str, int] = self._tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
        return found

    def known_ids(self, tokens: Sequence[str]) -> tuple[int, ...]:
        """Return the ids of those special tokens that the vocabulary has."""
        return tuple(number for token in tokens if (number := self._id(token)) is not None)

    def _id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.backend_tokenizer.token_to_id(token)
        return found

    def special_ids(self, texts: Collection[str]) -> frozenset[int]:
        """Return the ids of those texts that are special tokens, which :meth:`decode` leaves out."""
        return frozenset(self._special[text] for text in texts if text in self._special) if texts else frozenset()

    @functools.cached_property
    def _special(self) -> dict[str, int]:
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def infilling_ids(self, tokens: InfillingTokens) -> tuple[int, int, int]:
        """Return the ids of the tokens before a prompt, before its suffix, and before the text between them.

        Raises:
          InputError: the vocabulary lacks one of them.
        """
        found = [(token, self._id(token)) for token in (tokens.prefix, tokens.suffix, tokens.middle)]
        if missing := [token for token, number in found if number is None]:
            raise InputError(
                f"suffix is not available for {self._name}: its tokenizer has no {', '.join(missing)}", field="suffix"
            )
        before, between, after = (number for _, number in found if number is not None)
        return before, between, after


def _check_versioned_files(folder: CheckpointFolder) -> bool:
    """Check the files beside the weights, and that ``tokenizer_config.json`` names no others for the tokenizer.

    transformers reads one of its ``fast_tokenizer_files`` instead of ``tokenizer.json``, wherever that file is.

    Returns:
      Whether it has such a list, so that transformers chooses the file.

    Raises:
      CheckpointError: a file is too large, is a link out of the folder, or is not one of those that are checked.
    """
    names = folder.side_files()
    config = folder.read_json("tokenizer_config.json") or {}
    listed = config.get("fast_tokenizer_files") or []
    if not isinstance(listed, list):
        listed = [listed]
    for name in listed:
        if name not in names:
            raise CheckpointError(
                f"{folder.path / 'tokenizer_config.json'}: fast_tokenizer_files has {name!r:.200}; expected names of "
                f"files in this folder such as tokenizer.4.0.0.json"
            )
    if listed and config.get("tokenizer_file") is not None:
        raise CheckpointError(
            f"{folder.path / 'tokenizer_config.json'}: fast_tokenizer_files and tokenizer_file are there; expected one"
        )
    return bool(listed)


def _json_file(folder: CheckpointFolder) -> dict[str, str | None]:
    """Return the argument by which transformers reads ``tokenizer.json``.

    Otherwise, older versions prefer a path to anywhere that ``tokenizer_config.json`` has as ``tokenizer_file``.
    """
    return {"tokenizer_file": str(folder.path / "tokenizer.json")}


def _bpe_files(folder: CheckpointFolder) -> dict[str, str | None]:
    """Return arguments by which transformers reads ``vocab.json`` and ``merges.txt`` for the tokenizer, and no others.

    Otherwise, it prefers a ``tokenizer.model`` in the folder, and paths to anywhere that ``tokenizer_config.json`` has
    under the other names.
    """
    path = folder.path
    return {"vocab_file": str(path / "vocab.json"), "merges_file": str(path / "merges.txt")} | dict.fromkeys(
        ("vocab", "merges", "gguf_file", "tokenizer_file")
    )


def _is_library_error(error: BaseException) -> bool:
    """Return whether an error is an :class:`Exception` or a Rust panic, and not an interrupt or an exit.

    A Rust panic of a library is not an :class:`Exception`, and its class has no public name.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _unreadable(detail: object) -> InputError:
    return InputError("prompt: the tokenizer cannot process this text", field="prompt", detail=detail)


def _guarded(work: Callable[[], Result], failed: Callable[[object], InputError]) -> Result:
    """Call ``work`` and return its result.

    Raises:
      InputError: the tokenizers library raises an error or panics; ``failed`` makes the error from that one.
    """
    try:
        return work()
    except BaseException as error:
        if not _is_library_error(error):
            raise
        raise failed(error) from error


def _each(work: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]) -> list[Result | InputError]:
    """Return ``work(items)``. If it fails, call it once for each item, and return the item's result or its error."""
    if not items:
        return []
    try:
        return list(work(items))
    except RendererStartError:
        raise  # it is not of an item
    except InputError as error:
        if len(items) == 1:  # a second call would fail too
            return [error]
    return [found for item in items for found in _each(work, [item])]


class EncodedPrompts(NamedTuple):
    """Tokenized prompts.

    Attributes:
      ids: int32 ``[B, S]``, left-padded rows: the tokens before the new tokens.
      mask: int32 ``[B, S]``, their attention mask.
      suffixes: for each row, the tokens after the new tokens, on the canvas of a diffusion model.
    """

    ids: np.ndarray
    mask: np.ndarray
    suffixes: Sequence[Sequence[int]]


def encode_prompts(
    tokenizer: TextTokenizer,
    prompts: str | Sequence[str],
    model: ModelConfig,
    *,
    suffixes: str | Sequence[str] = (),
    chat: bool = False,
) -> EncodedPrompts:
    """Tokenize one or more prompts, and the texts that follow their new tokens.

    Args:
      tokenizer: the checkpoint's tokenizer.
      prompts: one text or several.
      model: the model's configuration.
      suffixes: for each prompt, the text that follows its new tokens, empty for none; see :func:`place_suffix`.
      chat: apply the chat template to each prompt.

    Raises:
      InputError: there are no prompts, one is not a string, one has no tokens or one that the model does not know,
        there is not one suffix for each prompt, ``chat`` is set with a suffix, or the model has no way to see a suffix.
      CheckpointError: ``chat`` is set, but the checkpoint has no chat template.
    """
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(prompts, Sequence) or not prompts or not all(isinstance(text, str) for text in prompts):
        raise InputError("prompts: expected a string, or a non-empty list of strings")
    if broken := [number for number, text in enumerate(prompts) if _LONE_SURROGATE.search(text)]:
        raise InputError(f"prompt {broken[0]} is not valid UTF-8", field="prompt")
    encoded = [tokenizer.encode_chat(text) if chat else tokenizer.encode(text) for text in prompts]
    empty = [number for number, tokens in enumerate(encoded) if not tokens]
    if empty:
        raise InputError(f"prompt {empty[0]} is empty; expected at least one token")
    suffixes = [suffixes] if isinstance(suffixes, str) else suffixes
    if suffixes is None or (isinstance(suffixes, Sequence) and not suffixes):
        suffixes = [""] * len(prompts)
    if (
        not isinstance(suffixes, Sequence)
        or len(suffixes) != len(prompts)
        or not all(isinstance(text, str) for text in suffixes)
    ):
        raise InputError(f"suffixes: expected a string for each of the {len(prompts)} prompts", field="suffix")
    if broken := [number for number, text in enumerate(suffixes) if _LONE_SURROGATE.search(text)]:
        raise InputError(f"suffix {broken[0]} is not valid UTF-8", field="suffix")
    texts = zip(encoded, map(tokenizer.encode, suffixes), strict=True)
    placed = [place_suffix(tokenizer, model, prompt, suffix, chat=chat) for prompt, suffix in texts]
    for number, (row, after) in enumerate(placed):
        try:
            check_ids([*row, *after], model)
        except InputError as error:
            raise InputError(f"prompt {number}: {error}", field="prompt") from error
    return EncodedPrompts(*left_padded([row for row, _ in placed], model.pad_token_id), [row for _, row in placed])


def place_suffix(
    tokenizer: TextTokenizer, model: ModelConfig, prompt: Sequence[int], suffix: Sequence[int], *, chat: bool
) -> tuple[list[int], list[int]]:
    """Place the tokens of a suffix where the model sees them while it generates the tokens before it.

    For a diffusion model, they are on the canvas after the new tokens. An autoregressive model reads them in its
    prompt, between the tokens of fill-in-the-middle training (Bavarian et al., 2022). An empty suffix is ignored.

    Returns:
      The tokens before and after the new tokens.

    Raises:
      InputError: the prompt is a chat, or the model is autoregressive and its family or its tokenizer has no tokens for
        it.
    """
    if suffix and chat:
        raise InputError("suffix is not available for a chat, which has nothing after the answer", field="suffix")
    if not suffix or model.objective != "autoregressive":
        return list(prompt), list(suffix)
    if model.family.infilling is None:
        raise InputError(f"suffix is not available for {model.family.name} models", field="suffix")
    before, between, after = tokenizer.infilling_ids(model.family.infilling)
    return [before, *prompt, between, *suffix, after], []


def end_tokens(config: ModelConfig, folder: CheckpointFolder, tokenizer: TextTokenizer | None) -> tuple[int, ...]:
    """Return the tokens that end a completion, from the model and generation configs and from the tokenizer.

    Raises:
      ConfigError: the generation config names an id that is not in the vocabulary.
    """
    ids = [*config.end_token_ids, *token_ids(folder.generation_config, "eos_token_id", config.vocab_size - 1)]
    if tokenizer is not None:
        infilling = config.family.infilling
        ids += tokenizer.known_ids(config.family.end_tokens)
        ids += tokenizer.known_ids(infilling.ends if infilling is not None else ())
    return tuple(dict.fromkeys(ids))
