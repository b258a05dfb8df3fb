"""Builds responses from generated rows: whole completions and chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from launch.openai.answers import answer, choice, logprobs, token_text, usage
from launch.openai.bodies import Defaults
from launch.serving.errors import ApiError, as_api_error
from launch.serving.metrics import Metrics
from launch.serving.reading import Reading
from launch.serving.response_stream import ResponseStream
from runtime import Completion, DiffusionConfig, InputError, RowResult, TextStream

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Answering:
    """Builds the response to one generation request."""

    def __init__(
        self, reading: Reading, responses: ResponseStream, defaults: Defaults, metrics: Metrics, chat: bool
    ) -> None:
        """Answer the request ``reading`` with the results that arrive in ``responses``."""
        self._reading, self._responses, self._chat = reading, responses, chat
        self._defaults, self._metrics = defaults, metrics
        self._identity = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._made = 0

    async def whole(self) -> dict[str, Any]:
        """Wait for all rows and return the whole response.

        Raises:
          ApiError: the request ended with an error.
          UndecodableError: the tokenizer cannot decode a row's tokens.
        """
        rows = self._reading.rows
        while len(self._responses.results) < len(rows):
            await self._responses.wait()
        choices = [self._choice(row, self._completion(row, self._responses.results[row])) for row in range(len(rows))]
        return self._answer(choices) | {"usage": self._usage()}

    async def stream(self, include_usage: bool, canvas: bool) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events. If the request fails, the last event is the error.

        Args:
          include_usage: whether to end with a chunk that contains the token counts.
          canvas: whether to add the texts of all new positions to each chunk. They are empty after the end of a row.
        """
        reading, responses = self._reading, self._responses
        texts = [self._text_stream(row) for row in range(len(reading.rows))]
        nothing: dict[str, Any] = {"usage": None} if include_usage else {}
        if self._chat:
            first = [self._piece(row, {"role": "assistant", "content": ""}) for row in range(len(texts))]
            yield event(self._chunk(first) | nothing)
        left = set(range(len(texts)))
        try:
            while left:
                await responses.wait()
                canvases, responses.canvases = responses.canvases, {}
                for row in sorted(left & canvases.keys() - responses.results.keys()):
                    over = texts[row].ended
                    text = texts[row].push(certain(canvases[row]))
                    # Positions after the end of a row are not sent, even while the row still occupies its slot.
                    shown = canvas and not texts[row].ended
                    if (text or shown) and not over:
                        more = {"canvas": self._shown(canvases[row])} if shown else {}
                        yield event(self._chunk([self._piece(row, self._said(text)) | more]) | nothing)
                for row in sorted(left & responses.results.keys()):
                    left.remove(row)
                    for piece in self._last(row, texts[row], canvas):
                        yield event(self._chunk([piece]) | nothing)
        except (ApiError, InputError) as error:  # InputError: the tokenizer cannot decode a row's tokens
            yield event(as_api_error(error).body())
            return
        if include_usage:
            yield event(self._chunk([]) | {"usage": self._usage()})
        yield DONE

    # ---- parts ------------------------------------------------------------------------------------------------

    def _text_stream(self, row: int) -> TextStream:
        stop = self._reading.of(row).stop
        return TextStream(self._defaults.tokenizer, self._defaults.end_token_ids, stop)

    def _new_tokens(self, row: int, result: RowResult) -> list[int]:
        return result.sequence[len(self._reading.rows[row].tokens) :].tolist()

    def _last(self, row: int, text: TextStream, canvas: bool) -> list[dict[str, Any]]:
        """Return the choices of a row's last chunks: the rest of its text, then its finish reason."""
        result = self._responses.results[row]
        completion, tokens = self._completion(row, result), self._new_tokens(row, result)
        whole = self._choice(row, completion)
        rest = text.push(tokens, whole=True)
        pieces = []
        if rest or canvas:
            end = self._end(row, completion, tokens)
            shown = {"canvas": self._shown(np.array(tokens[:end])) + [""] * (len(tokens) - end)} if canvas else {}
            pieces.append(self._piece(row, self._said(rest)) | shown)
        more = {name: value for name, value in whole.items() if name not in ("message", "text", "index")}
        return [*pieces, self._piece(row, self._said("", empty=True)) | more]

    def _end(self, row: int, completion: Completion, tokens: list[int]) -> int:
        """Return the number of new tokens up to the end of a row: before its stop string, or after its end token.

        All new tokens count if the row has neither, or if it has an end token and ``early_stop`` is false.
        """
        kept = len(completion.tokens)
        if completion.finish_reason != "stop":
            return len(tokens)
        if tokens[kept] not in self._defaults.end_token_ids:  # the row ended at a stop string
            return kept
        return kept + 1 if self._reading.of(row).config.early_stop else len(tokens)

    def _said(self, text: str, empty: bool = False) -> dict[str, Any]:
        if not self._chat:
            return {"text": text}
        return {} if empty else {"content": text}

    def _piece(self, row: int, said: dict[str, Any]) -> dict[str, Any]:
        place = {"delta": said} if self._chat else said
        return {"index": row, **place, "finish_reason": None, "logprobs": None}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._answer(choices)
        if self._chat:
            chunk["object"] = "chat.completion.chunk"
        return chunk

    def _answer(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return answer(self._identity, self._created, self._defaults.model_name, choices, self._chat)

    def _usage(self) -> dict[str, int]:
        return usage(sum(one.request(one.seed).given for one in self._reading.asked), self._made)

    def _completion(self, row: int, result: RowResult) -> Completion:
        asked, request = self._reading.of(row), self._reading.rows[row]
        is_kept = asked.config.log_probabilities
        return self._defaults.completions.build(
            result.sequence,
            asked.tokens,
            seed=request.seed,
            stop=asked.stop,
            log_probabilities=result.log_probabilities if is_kept else None,
            drafts=result.drafts,
        )

    def _choice(self, row: int, completion: Completion) -> dict[str, Any]:
        """Return the entry of ``choices`` for a finished row, and count the row in the metrics."""
        asked, request, defaults = self._reading.of(row), self._reading.rows[row], self._defaults
        self._made += len(completion.tokens)
        self._metrics.completed(completion.finish_reason, len(completion.tokens))
        values = completion.log_probabilities
        kept = None if values is None else logprobs(defaults.tokenizer, completion.tokens, values, self._chat)
        found = choice(row, completion.text, completion.finish_reason, kept, self._chat)
        # Fields that OpenAI's API does not have: the seed, and the number of tokens of the text.
        found |= {"seed": request.seed, "completion_tokens": len(completion.tokens)}
        if isinstance(asked.config, DiffusionConfig):
            found["masks_left"] = completion.masks_left
        if completion.drafts is not None:
            found["passes"], found["accepted_steps"] = completion.drafts.passes, completion.drafts.accepted
        if completion.filled_prompt is not None:
            found["filled_prompt"] = completion.filled_prompt
        return found

    def _shown(self, canvas: np.ndarray) -> list[str | None]:
        """Return the text of each position of a canvas; None for a masked one."""
        tokenizer, open_places = self._defaults.tokenizer, (-1, self._defaults.model.mask_token_id)
        return [None if token in open_places else token_text(tokenizer, token) for token in canvas.tolist()]


def certain(canvas: np.ndarray) -> list[int]:
    """Return the tokens before the first open position, which no later step changes."""
    tokens: list[int] = canvas.tolist()
    return tokens[: tokens.index(-1)] if -1 in tokens else tokens
