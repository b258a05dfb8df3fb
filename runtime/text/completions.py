"""Turning generated tokens into completions: end tokens, stop strings, decoding, and streaming of text."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.execution.left_padding import unpadded_rows
from runtime.execution.requests import StopTest
from runtime.execution.result import DraftStats, GenerationResult
from runtime.models.config import ModelConfig
from runtime.text.tokenizer import TextTokenizer, UndecodableError
from sharding.errors import InputError

# New tokens are decoded together with this many tokens before them, because the text of a token may depend on these.
_CONTEXT = 4
# What decoders return for the bytes of a character that is not complete, which are at most three.
_INCOMPLETE = "\ufffd"
_MAX_INCOMPLETE = 3


@dataclass(frozen=True)
class Completion:
    """One completion of one prompt.

    Attributes:
      prompt: the prompt as given.
      index: index of this completion among the prompt's ``num_return_sequences``.
      text: the completion without special tokens, up to the first end token or stop string.
      tokens: the tokens of ``text``.
      finish_reason: ``stop`` if an end token or a stop string ended the completion, ``length`` otherwise.
      masks_left: number of masks left on the whole canvas.
      seed: the seed of this row; ``seed=[seed]`` in a configuration or an HTTP request reproduces the completion alone.
      filled_prompt: the prompt with its masks filled and without special tokens; None if it had no masks. With
        ``chat``, the prompt is all that the chat template made.
      suffix: the text that follows the completion, as given; empty if there is none.
      log_probabilities: log-probabilities of ``tokens``; None if they were not requested.
      drafts: the row's passes and accepted steps; None without ``draft_steps``, ``prompt_lookup`` and ``draft_tokens``.
    """

    prompt: str
    index: int
    text: str
    tokens: list[int]
    finish_reason: str
    masks_left: int
    seed: int
    filled_prompt: str | None = None
    log_probabilities: list[float] | None = None
    suffix: str = ""
    drafts: DraftStats | None = None

    @property
    def whole_text(self) -> str:
        """The prompt with its masks filled, the completion and the suffix."""
        return (self.prompt if self.filled_prompt is None else self.filled_prompt) + self.text + self.suffix


def cut_completion(
    tokenizer: TextTokenizer, tokens: Sequence[int], end_token_ids: Collection[int], stop: Sequence[str]
) -> tuple[str, list[int], str]:
    """Cut new tokens at the first end token, then at the first stop string.

    A stop string that is the text of a special token stands for this token, because the text has no special tokens.

    Returns:
      The text, the longest prefix of tokens whose text ends before the cut, and the finish reason.
    """
    kept = _before_end(tokens, {*end_token_ids, *tokenizer.special_ids(stop)})
    reason = "stop" if len(kept) < len(tokens) else "length"
    text = tokenizer.decode(kept)
    cut = _first_stop(text, stop)
    if cut is not None:
        text, reason = text[:cut], "stop"
        kept = kept[: _tokens_within(tokenizer, kept, cut)]
    return text, kept, reason


def _tokens_within(tokenizer: TextTokenizer, tokens: Sequence[int], length: int) -> int:
    """Return the largest number of tokens whose text has at most ``length`` characters."""

    def characters(count: int) -> int:
        return len(tokenizer.decode(tokens[:count]))

    found = bisect.bisect_right(range(1, len(tokens) + 1), length, key=characters)
    if tokenizer.decode(tokens[: found + 1]).endswith(_INCOMPLETE):
        # Some decoders turn all bytes since the last ordinary token into these characters until a character is whole,
        # so the lengths do not always ascend.
        return next((count for count in range(len(tokens), found, -1) if characters(count) <= length), found)
    return found


def _before_end(tokens: Sequence[int], end_token_ids: Collection[int]) -> list[int]:
    """Return the tokens before the first end token."""
    ends = set(end_token_ids)
    return list(tokens[: next((place for place, token in enumerate(tokens) if token in ends), len(tokens))])


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return the position at which the earliest stop string of a text begins; None if it has none."""
    places = [place for place in (text.find(string) for string in stop if string) if place >= 0]
    return min(places, default=None)


@dataclass(frozen=True)
class CompletionBuilder:
    """Builds completions from finished rows.

    Attributes:
      tokenizer: the model's tokenizer.
      mask_token_id: the model's mask token; -1 if it has none.
      end_token_ids: tokens that end a completion.
    """

    tokenizer: TextTokenizer
    mask_token_id: int
    end_token_ids: Collection[int]

    def build(
        self,
        sequence: np.ndarray,
        prompt_tokens: Sequence[int],
        *,
        prompt: str = "",
        suffix: str = "",
        index: int = 0,
        seed: int = 0,
        stop: Sequence[str] = (),
        log_probabilities: np.ndarray | None = None,
        drafts: DraftStats | None = None,
    ) -> Completion:
        """Build the completion of one row.

        Args:
          sequence: int32 ``[S]``, prompt and new tokens without padding.
          prompt_tokens: tokens before the new tokens as they were given, with masks that were not filled yet.
          prompt: text of the prompt.
          suffix: text that follows the completion; empty for none.
          index: index of the completion among those of the prompt.
          seed: the row's seed.
          stop: strings that end a completion.
          log_probabilities: float32 ``[S]``, one per token of ``sequence``; None if they were not requested.
          drafts: the row's passes and accepted steps, or None.
        """
        width = len(prompt_tokens)
        text, tokens, reason = cut_completion(self.tokenizer, sequence[width:].tolist(), self.end_token_ids, stop)
        kept = None if log_probabilities is None else log_probabilities[width : width + len(tokens)]
        infilled = self.mask_token_id in prompt_tokens
        return Completion(
            prompt=prompt,
            index=index,
            text=text,
            tokens=tokens,
            finish_reason=reason,
            masks_left=int((sequence == self.mask_token_id).sum()),
            seed=seed,
            filled_prompt=self.tokenizer.decode(sequence[:width].tolist()) if infilled else None,
            log_probabilities=None if kept is None else [float(value) for value in kept],
            suffix=suffix,
            drafts=drafts,
        )

    def build_batch(
        self,
        prompts: Sequence[str],
        ids: np.ndarray,
        mask: np.ndarray,
        result: GenerationResult,
        stop: Sequence[str] = (),
        suffixes: Sequence[str] = (),
        interrupted: bool = False,
    ) -> list[Completion]:
        """Build all completions of a result, ordered by prompt: all completions of the first prompt come first.

        Args:
          prompts: texts of the prompts.
          ids: int32 ``[B, S]``, left-padded tokens before the new tokens.
          mask: ``[B, S]``, attention mask of the prompts.
          result: the generated rows, with the same number of rows for each prompt.
          stop: strings that end a completion.
          suffixes: for each prompt, the text that follows its completions; empty for none.
          interrupted: the rows may have been ended while they had open positions: of a row's new tokens, those before
            the first open position count.
        """
        samples, given = len(result.sequences) // len(prompts), unpadded_rows(ids, mask)
        kept = None if result.log_probabilities is None else unpadded_rows(result.log_probabilities, mask)
        found = []
        steps = unpadded_rows(result.commit_steps, mask) if interrupted else []
        for row, sequence in enumerate(unpadded_rows(result.sequences, mask)):
            source = row // samples
            if interrupted:
                is_open = steps[row][len(given[source]) :] < 0
                sequence = sequence[: len(given[source]) + int(np.append(is_open, True).argmax())]
            found.append(
                self.build(
                    sequence,
                    given[source].tolist(),
                    prompt=prompts[source],
                    suffix=suffixes[source] if suffixes else "",
                    index=row % samples,
                    seed=result.seeds[row],
                    stop=stop,
                    log_probabilities=None if kept is None else kept[row],
                    drafts=result.drafts[row] if result.drafts else None,
                )
            )
        return found


def final_prefixes(
    canvases: Iterable[tuple[int, np.ndarray]], width: int, mask_token_id: int | None
) -> Iterator[list[list[int]]]:
    """Yield each row's new tokens before its first mask, for each streamed canvas; after the last one, all new tokens.

    The prefix is final, because committed tokens do not change.

    Args:
      canvases: pairs of the number of steps done and the canvas int32 ``[B, S + N]``.
      width: S, length of the padded prompts.
      mask_token_id: the mask token; None for an autoregressive model, which generates one token per step.
    """
    new: list[list[int]] = []
    for done, canvas in canvases:
        new = canvas[:, width:].tolist()
        if mask_token_id is None:
            yield [row[:done] for row in new]
        else:
            yield [row[: row.index(mask_token_id)] if mask_token_id in row else row for row in new]
    yield new


class _IncrementalDecoder:
    """Decodes tokens that arrive a few at a time. Each token is decoded once, together with a few tokens before it.

    A character is held back until all of its bytes have arrived.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # last tokens whose text has been returned completely
        self._before = ""  # their text
        self._open: list[int] = []  # tokens after them, whose last character may be incomplete
        self._given = 0  # characters of the open tokens that have been returned

    def push(self, tokens: Sequence[int], last: bool) -> str:
        """Return the text that these tokens add. With ``last``, this includes text that was held back."""
        self._open += tokens
        text = self._tokenizer.decode([*self._context, *self._open])[len(self._before) :]
        whole = text if last else text.rstrip(_INCOMPLETE)
        piece = whole[self._given :]
        if len(whole) == len(text):
            self._set_context([*self._context, *self._open])
            self._open, self._given = [], 0
        else:
            self._given = len(whole)
        return piece

    def _set_context(self, tokens: list[int]) -> None:
        """Keep the last few tokens, from the beginning of a character: some decoders read no byte after half of one."""
        last = max(0, len(tokens) - _CONTEXT)
        for start in range(last, max(-1, last - _MAX_INCOMPLETE - 1), -1):
            self._context = tokens[start:]
            self._before = self._tokenizer.decode(self._context) if self._context else ""
            if not self._before.startswith(_INCOMPLETE):
                return


class TextStream:
    """Converts growing prefixes of a completion's tokens to pieces of text.

    Together, the pieces equal the text of :func:`cut_completion`. Text that could still change is held back: a
    character whose bytes are incomplete, and the beginning of a possible stop string. Each token is decoded and
    searched once.

    Attributes:
      ended: whether the text is complete, because an end token or a stop string was found.
      stopped: whether a stop string was found, or the special token that it is the text of.
      length: number of characters returned so far.
    """

    def __init__(self, tokenizer: TextTokenizer, end_token_ids: Collection[int], stop: Sequence[str]) -> None:
        """Create a stream; see :func:`cut_completion` for the arguments."""
        self._decoder, self._stop = _IncrementalDecoder(tokenizer), stop
        self._special = tokenizer.special_ids(stop)
        self._ends = {*end_token_ids, *self._special}
        self._margin = max((len(string) for string in stop), default=1) - 1
        self._tokens = self.length = 0
        self._held = ""
        self.ended = self.stopped = False

    def push(self, tokens: Sequence[int], whole: bool = False) -> str:
        """Return the next piece of text, which may be empty.

        Args:
          tokens: all new tokens that are final so far.
          whole: whether there will be no more tokens.
        """
        if self.ended or (len(tokens) == self._tokens and not whole):
            return ""
        new, self._tokens = tokens[self._tokens :], len(tokens)
        kept = _before_end(new, self._ends)
        at_end = len(kept) < len(new)
        last = at_end or whole
        text = self._held + self._decoder.push(kept, last)
        sure = len(text) if last else self._final_length(text)
        cut = _first_stop(text, self._stop)
        # With several stop strings, one that begins earlier may not be complete yet, so wait until this is ruled out.
        is_cut = cut is not None and cut <= sure
        self.stopped = is_cut or (at_end and new[len(kept)] in self._special)
        self.ended = at_end or self.stopped
        piece = text[: cut if is_cut else sure]
        self._held = text[len(piece) :]
        self.length += len(piece)
        return piece

    def _final_length(self, text: str) -> int:
        """Return the number of final characters of a text: all but a possible beginning of a stop string at its end."""
        places = range(max(0, len(text) - self._margin), len(text))
        return next((place for place in places if any(own.startswith(text[place:]) for own in self._stop)), len(text))


class StopSearch:
    """A :data:`StopTest` that searches the new tokens of one row for stop strings while they are generated.

    If the tokenizer cannot decode the tokens, the search ends and the row continues: the error belongs to the caller
    that builds the row's completion, not to the loop that runs all rows.
    """

    def __init__(self, tokenizer: TextTokenizer, end_token_ids: Collection[int], stop: Sequence[str]) -> None:
        """Create a search in one row; see :func:`cut_completion` for the arguments."""
        self._tokenizer, self._stop = tokenizer, stop
        self._ends = {*end_token_ids, *tokenizer.special_ids(stop)}
        self._begin()

    def _begin(self) -> None:
        self._stream = TextStream(self._tokenizer, self._ends, self._stop)
        self._tokens: list[int] = []
        self._found: int | None = None
        self._over = False

    def __call__(self, tokens: Sequence[int], whole: bool) -> int | None:
        """Return how many new tokens precede the first stop string, or None if none has been found yet.

        Args:
          tokens: all new tokens that are final so far. If they do not extend those of the previous call, the search
            starts again: it is used for another generation.
          whole: whether there will be no more tokens.
        """
        given = list(tokens)
        if given[: len(self._tokens)] != self._tokens:
            self._begin()
        self._tokens = given
        if not self._over:
            try:
                self._stream.push(tokens, whole)
                if self._stream.stopped:
                    self._found = _tokens_within(self._tokenizer, _before_end(tokens, self._ends), self._stream.length)
                self._over = self._stream.ended
            except UndecodableError:
                self._over = True
        return self._found


def read_stop(stop: Any, model: ModelConfig, prompts: Iterable[Sequence[int] | np.ndarray] = ()) -> list[str]:
    """Return a call's stop strings as a list: from a string, several, or None.

    Args:
      stop: the string or strings that end a completion.
      model: the model's configuration.
      prompts: tokens of the prompts that the strings are for.

    Raises:
      InputError: ``stop`` is anything else; or a prompt has masks that may become more or fewer tokens, so that where
        the completion begins in the result is not known.
    """
    found = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(found, Sequence) or not all(isinstance(text, str) for text in found):
        raise InputError(f"stop: expected a string or several, not {stop!r:.100}", field="stop")
    if any(found) and model.family.variable_length and any(model.mask_token_id in tokens for tokens in prompts):
        raise InputError(
            f"stop: the masks of the prompt may become more or fewer tokens in {model.family.name} models, so stop "
            "strings are not searched for; leave them out",
            field="stop",
        )
    return list(found)


def stop_tests(
    tokenizer: TextTokenizer, end_token_ids: Collection[int], stops: Iterable[Sequence[str]]
) -> list[StopTest | None]:
    """Return a :class:`StopSearch` for each row that has stop strings, and None for the others."""
    return [StopSearch(tokenizer, end_token_ids, stop) if stop else None for stop in stops]


def stream_texts(
    tokenizer: TextTokenizer,
    prefixes: Iterable[Sequence[Sequence[int]]],
    end_token_ids: Collection[int],
    stop: Sequence[str],
) -> Iterator[tuple[str, ...]]:
    """Yield the next piece of text of every row, whenever any row has one; see :class:`TextStream`.

    Once all texts are complete, no more prefixes are consumed.
    """
    streams: list[TextStream] = []
    rows: Sequence[Sequence[int]] = ()
    for rows in prefixes:
        streams = streams or [TextStream(tokenizer, end_token_ids, stop) for _ in rows]
        if any(pieces := tuple(stream.push(tokens) for stream, tokens in zip(streams, rows, strict=True))):
            yield pieces
        if streams and all(stream.ended for stream in streams):
            return
    if any(pieces := tuple(stream.push(tokens, whole=True) for stream, tokens in zip(streams, rows, strict=True))):
        yield pieces
