"""Builds responses in OpenAI's format: completions, choices, log-probabilities and usage."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from runtime import TextTokenizer

# Decimals of log-probabilities. Further digits depend on the order of additions.
DECIMALS = 5


def answer(
    identity: str, created: int, model_name: str, choices: Sequence[dict[str, Any]], chat: bool
) -> dict[str, Any]:
    """Return the body of a completion or a chat, without its usage.

    Args:
      identity: the completion's id.
      created: seconds since 1970.
      model_name: the served model's name.
      choices: choices made by :func:`choice`.
      chat: whether this is a chat completion.
    """
    return {
        "id": identity,
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model_name,
        "choices": list(choices),
    }


def choice(
    index: int, text: str, finish_reason: str, log_probabilities: dict[str, Any] | None, chat: bool
) -> dict[str, Any]:
    """Return one entry of ``choices``: the text of one sample and why it ended."""
    said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"index": index, **said, "finish_reason": finish_reason, "logprobs": log_probabilities}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the ``usage`` of a completion: its token counts."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@functools.lru_cache(maxsize=1 << 18)
def token_text(tokenizer: TextTokenizer, token: int) -> str:
    """Return the text of a single token, cached because the same tokens occur again and again."""
    return tokenizer.decode([token], skip_special_tokens=False)


def _bytes(text: str) -> list[int] | None:
    """Return the bytes of a token's text; None if they are only a part of a character, which the text does not show."""
    return None if "\ufffd" in text else list(text.encode())


def logprobs(tokenizer: TextTokenizer, tokens: Sequence[int], values: Sequence[float], chat: bool) -> dict[str, Any]:
    """Return the ``logprobs`` of a choice: the tokens of its completion with their log-probabilities, rounded."""
    texts = [token_text(tokenizer, token) for token in tokens]
    rounded = [round(float(value), DECIMALS) for value in values]
    if chat:
        content = [
            {"token": text, "logprob": value, "bytes": _bytes(text), "top_logprobs": []}
            for text, value in zip(texts, rounded, strict=True)
        ]
        return {"content": content}
    offsets = list(itertools.accumulate(map(len, texts), initial=0))[:-1]
    return {"tokens": texts, "token_logprobs": rounded, "top_logprobs": None, "text_offset": offsets}
