"""Text: speed of the tokenizer, and coherence of completions."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.demo_quality import parses
from benchmarks.records import NotRunError
from benchmarks.suite.subject import Subject, request_of
from checkpoints import open_folder
from runtime.text.tokenizer import TextTokenizer

SECTION = "tokenizer"
NAMES = ("first call", "encoding a prompt", "decoding 1 token", "decoding 100 tokens")
PROMPTS = (
    "def is_even(number):\n",
    "def add(first, second):\n",
    "def read_lines(path):\n",
    "def largest(values):\n",
)
_NEW_TOKENS = 64


def measure_tokenizer(subject: Subject) -> None:
    """Measure the first call with everything that it loads, later calls, and decoding."""
    sheet, values = subject.sheet, subject.values
    if values.random is not None:
        for name in NAMES:
            sheet.leave_out(SECTION, name, "random weights have no tokenizer")
        return

    def first_call() -> tuple[TextTokenizer, list[int], float]:
        folder = open_folder(values.checkpoint)
        start = time.perf_counter()
        tokenizer = TextTokenizer.from_folder(folder)
        if tokenizer is None:
            raise NotRunError("the checkpoint has no tokenizer")
        return tokenizer, tokenizer.encode(PROMPTS[0]), 1e3 * (time.perf_counter() - start)

    found = sheet.tried(first_call)
    if isinstance(found, str):
        for name in NAMES:
            sheet.leave_out(SECTION, name, found)
        return
    tokenizer, tokens, milliseconds = found
    sheet.value(SECTION, NAMES[0], milliseconds, "ms", {"tokens": len(tokens)})
    hundred = (tokens * 100)[:100]
    calls: dict[str, Any] = {
        NAMES[1]: lambda: tokenizer.encode(PROMPTS[0]),
        NAMES[2]: lambda: tokenizer.decode(hundred[:1]),
        NAMES[3]: lambda: tokenizer.decode(hundred),
    }
    for name, call in calls.items():
        sheet.measure(SECTION, name, lambda call=call: call)  # type: ignore[misc]


def coherence(subject: Subject) -> dict[str, Any]:
    """Complete a few prompts and count the valid Python programs.

    Raises:
      NotRunError: the weights are random, or there is no tokenizer.
    """
    if subject.values.random is not None:
        raise NotRunError("random weights produce no coherent text")
    engine = subject.engine
    request = request_of(engine.config, _NEW_TOKENS, _NEW_TOKENS)
    completions = engine.generate(PROMPTS, request)
    texts = [prompt + completion.text for prompt, completion in zip(PROMPTS, completions, strict=True)]
    return {"prompts": len(PROMPTS), "parsed": sum(map(parses, texts)), "texts": texts}
