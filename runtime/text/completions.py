"""From generated tokens to completions: where they end and what they say."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.execution.requests import StopTest
from runtime.execution.result import GenerationResult
from runtime.text.tokenizer import TextTokenizer

# Tokens before new ones that are decoded with them: how a token reads may depend on those before it.
_CONTEXT = 4


@dataclass(frozen=True)
class Completion:
    """One completion of one prompt.

    Attributes:
      prompt: the prompt as given.
      index: which of the prompt's ``num_return_sequences`` this is.
      text: the completion, cut at the first end token or stop string, without special tokens.
      tokens: the tokens of ``text``, cut there too.
      finish_reason: ``stop`` where it was cut, ``length`` where the canvas ended first.
      masks_left: positions of the whole canvas that are still masked.
      seed: the seed that repeats it.
      filled_prompt: the prompt with its masks filled, where it had any.
      log_probabilities: of ``tokens``, where they were asked for.
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


def cut_completion(
    tokenizer: TextTokenizer, tokens: Sequence[int], end_token_ids: Collection[int], stop: Sequence[str]
) -> tuple[str, list[int], str]:
    """Cut new tokens at the first end token, then at the first stop string.

    Returns:
      Text, the longest run of tokens whose text lies before the cut, and the finish reason.
    """
    kept = _before_end(tokens, end_token_ids)
    reason = "stop" if len(kept) < len(tokens) else "length"
    text = tokenizer.decode(kept)
    cut = _first_stop(text, stop)
    if cut is not None:
        text, reason = text[:cut], "stop"
        kept = kept[: _tokens_within(tokenizer, kept, cut)]
    return text, kept, reason


def _tokens_within(tokenizer: TextTokenizer, tokens: Sequence[int], length: int) -> int:
    """The most tokens whose text has no more than ``length`` characters."""
    counts = range(1, len(tokens) + 1)
    return bisect.bisect_right(counts, length, key=lambda count: len(tokenizer.decode(tokens[:count])))


def _before_end(tokens: Sequence[int], end_token_ids: Collection[int]) -> list[int]:
    """Tokens before the first that ends a completion."""
    ends = set(end_token_ids)
    return list(tokens[: next((place for place, token in enumerate(tokens) if token in ends), len(tokens))])


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the first stop string begins."""
    places = [place for place in (text.find(string) for string in stop if string) if place >= 0]
    return min(places, default=None)


@dataclass(frozen=True)
class CompletionBuilder:
    """Builds the completion of a finished row, for every caller: text, JSON, batches and HTTP.

    Attributes:
      tokenizer: the model's.
      mask_token_id: the model's, -1 for none.
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
        index: int = 0,
        seed: int = 0,
        stop: Sequence[str] = (),
        log_probabilities: np.ndarray | None = None,
    ) -> Completion:
        """The completion of one row.

        Args:
          sequence: int32 ``[S]``, prompt and new tokens without padding.
          prompt_tokens: the prompt as it was given.
          prompt: its text.
          index: which of the prompt's samples this is.
          seed: of the row.
          stop: strings that end a completion.
          log_probabilities: float32 ``[S]``, where they were asked for.
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
        )

    def build_batch(
        self,
        prompts: Sequence[str],
        ids: np.ndarray,
        mask: np.ndarray,
        result: GenerationResult,
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """The completions of a whole result, prompt by prompt, sample by sample.

        Args:
          prompts: texts.
          ids: int32 ``[B, S]``, their left-padded rows.
          mask: ``[B, S]``, the rows' attention mask.
          result: of those rows, with as many samples of each.
          stop: strings that end a completion.
        """
        samples, kept = len(result.sequences) // len(prompts), result.log_probabilities
        lengths = mask.astype(bool).sum(axis=1)
        found = []
        for row, sequence in enumerate(result.sequences):
            source = row // samples
            start = ids.shape[1] - int(lengths[source])
            found.append(
                self.build(
                    sequence[start:],
                    ids[source, start:].tolist(),
                    prompt=prompts[source],
                    index=row % samples,
                    seed=result.seeds[row],
                    stop=stop,
                    log_probabilities=None if kept is None else kept[row, start:],
                )
            )
        return found


def certain_prefixes(
    canvases: Iterable[tuple[int, np.ndarray]], width: int, mask_token_id: int | None
) -> Iterator[list[list[int]]]:
    """New tokens of each row that will not change any more, as they are generated, and at last all of them.

    Args:
      canvases: (steps done, canvas int32 ``[B, S + N]``).
      width: S.
      mask_token_id: what is still open; None for an autoregressive model, which makes a token a step.
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
    """Text of tokens that come a few at a time; each is decoded when it comes, beside a few before it.

    A character whose bytes are not all there is held back until they are.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # whole characters, handed out
        self._open: list[int] = []  # its last character may not be whole
        self._given = 0  # characters of the open tokens that are handed out

    def push(self, tokens: Sequence[int], last: bool) -> str:
        """The characters that these tokens add; ``last`` hands out what is held back too."""
        self._open += tokens
        before = self._tokenizer.decode(self._context) if self._context else ""
        text = self._tokenizer.decode([*self._context, *self._open])[len(before) :]
        whole = text if last else text.rstrip("\ufffd")
        piece = whole[self._given :]
        if len(whole) == len(text):
            self._context = [*self._context, *self._open][-_CONTEXT:]
            self._open, self._given = [], 0
        else:
            self._given = len(whole)
        return piece


class TextStream:
    """Text of growing prefixes of a completion's tokens, in pieces that together are :func:`cut_completion`'s text.

    What could still change is held back: a character whose bytes are not all there, and the beginning of a stop string.
    Tokens are decoded and searched once, when they come.

    Attributes:
      ended: whether the text is all there, because an end token or a stop string has come.
      stopped: whether a stop string has.
      length: characters of the pieces so far.
    """

    def __init__(self, tokenizer: TextTokenizer, end_token_ids: Collection[int], stop: Sequence[str]) -> None:
        """Take what :func:`cut_completion` takes."""
        self._decoder, self._ends, self._stop = _IncrementalDecoder(tokenizer), end_token_ids, stop
        self._margin = max((len(string) for string in stop), default=1) - 1
        self._tokens = self.length = 0
        self._held = ""
        self.ended = self.stopped = False

    def push(self, tokens: Sequence[int], whole: bool = False) -> str:
        """The next piece, often empty, now that these tokens are certain; ``whole`` says that there will be no more."""
        if self.ended or (len(tokens) == self._tokens and not whole):
            return ""
        new, self._tokens = tokens[self._tokens :], len(tokens)
        kept = _before_end(new, self._ends)
        at_end = len(kept) < len(new)
        last = at_end or whole
        text = self._held + self._decoder.push(kept, last)
        sure = len(text) if last else self._sure(text)
        cut = _first_stop(text, self._stop)
        # Of several stop strings a longer one may still turn out to begin before the one that is there.
        self.stopped = cut is not None and cut <= sure
        self.ended = at_end or self.stopped
        piece = text[: cut if self.stopped else sure]
        self._held = text[len(piece) :]
        self.length += len(piece)
        return piece

    def _sure(self, text: str) -> int:
        """Characters of a text before the first with which a stop string may begin that goes on after the text."""
        places = range(max(0, len(text) - self._margin), len(text))
        return next((place for place in places if any(own.startswith(text[place:]) for own in self._stop)), len(text))


class StopSearch:
    """Looks for stop strings in the new tokens of one row as they become certain; see :data:`StopTest`."""

    def __init__(self, tokenizer: TextTokenizer, end_token_ids: Collection[int], stop: Sequence[str]) -> None:
        """Take what :func:`cut_completion` takes."""
        self._tokenizer, self._ends = tokenizer, end_token_ids
        self._stream = TextStream(tokenizer, end_token_ids, stop)
        self._found: int | None = None

    def __call__(self, tokens: Sequence[int], whole: bool) -> int | None:
        """How many of the new tokens come before the first stop string, None while there is none.

        Args:
          tokens: those that will not change any more: each time those of the last time, and more.
          whole: whether there will be no more.
        """
        if not self._stream.ended:
            self._stream.push(tokens, whole)
            if self._stream.stopped:
                self._found = _tokens_within(self._tokenizer, _before_end(tokens, self._ends), self._stream.length)
        return self._found


def stop_tests(
    tokenizer: TextTokenizer, end_token_ids: Collection[int], stops: Iterable[Sequence[str]]
) -> list[StopTest | None]:
    """A :class:`StopSearch` for each row that has stop strings, None for the others."""
    return [StopSearch(tokenizer, end_token_ids, stop) if stop else None for stop in stops]


def stream_texts(
    tokenizer: TextTokenizer,
    prefixes: Iterable[Sequence[Sequence[int]]],
    end_token_ids: Collection[int],
    stop: Sequence[str],
) -> Iterator[tuple[str, ...]]:
    """The pieces of a :class:`TextStream` for each row of these prefixes, whenever there is one of any row.

    No prefixes are asked for once all texts are complete.
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
