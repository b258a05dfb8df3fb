"""Text: speed of the tokenizer, and functions that pass their tests."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.demo_quality import SETS, read_held_out
from benchmarks.records import NotRunError
from benchmarks.suite.subject import Subject, request_of
from checkpoints import DEMO, open_folder
from checkpoints.demo.sandbox import run_tests
from runtime.text.tokenizer import TextTokenizer

SECTION = "tokenizer"
NAMES = ("first call", "encoding a prompt", "decoding 1 token", "decoding 100 tokens")
PROMPT = "def is_even(number):\n"
_NEW_TOKENS = 64
# Beginnings of lines that come after the function, with which a completion ends.
_NEXT_LINES = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\nassert ", "\n#", "\n@", "\n```")


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
        return tokenizer, tokenizer.encode(PROMPT), 1e3 * (time.perf_counter() - start)

    found = sheet.tried(first_call)
    if isinstance(found, str):
        for name in NAMES:
            sheet.leave_out(SECTION, name, found)
        return
    tokenizer, tokens, milliseconds = found
    sheet.value(SECTION, NAMES[0], milliseconds, "ms", {"tokens": len(tokens)})
    hundred = (tokens * 100)[:100]
    calls: dict[str, Any] = {
        NAMES[1]: lambda: tokenizer.encode(PROMPT),
        NAMES[2]: lambda: tokenizer.decode(hundred[:1]),
        NAMES[3]: lambda: tokenizer.decode(hundred),
    }
    for name, call in calls.items():
        sheet.measure(SECTION, name, lambda call=call: call)  # type: ignore[misc]


def coherence(subject: Subject) -> dict[str, Any]:
    """Complete the demo's plain functions, and count those that pass their tests in a restricted child process.

    Raises:
      NotRunError: the weights are random, there is no tokenizer, or the completions would take too long.
    """
    if subject.values.random is not None:
        raise NotRunError("random weights produce no coherent text")
    engine, tasks = subject.engine, read_held_out(DEMO, SETS["plain_tasks"])
    # One call only, where a timing has at least two.
    subject.sheet.trials(subject.expected_seconds(len(tasks), 2 * _NEW_TOKENS, _NEW_TOKENS) / 2, warmup=0)
    request = request_of(engine.config, _NEW_TOKENS, _NEW_TOKENS)
    completions = engine.generate([task["prompt"] for task in tasks], request, stop=_NEXT_LINES)
    outcomes = {
        task["name"]: run_tests(task["prompt"] + completion.text, task["tests"])
        for task, completion in zip(tasks, completions, strict=True)
    }
    passed = sum(outcome == "passed" for outcome in outcomes.values())
    return {"tasks": len(tasks), "passed": passed, "outcomes": outcomes}
