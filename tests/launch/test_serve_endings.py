"""Ends of rows: end tokens and stop strings free slots. Streams send chunks during decoding."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from runtime import DiffusionConfig, StepOutcome, StepPlan
from tests.launch.served import Served, demo, offline, served, timed, wait_for

PROMPT = "def is_even(number):\n"
CONFIG = DiffusionConfig.published(32, 0.2)
COUNTERS = ("forwards_total", "committed_tokens_total", "generation_tokens_total")


@pytest.fixture(scope="module")
def there() -> Iterator[Served]:
    with served(demo(), CONFIG) as found:
        yield found


@pytest.fixture
def steps(there: Served, monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepPlan, StepOutcome]]:
    """The steps of the scheduler while a test runs, in which an iteration takes 10 ms by the scheduler's clock."""
    made: list[tuple[StepPlan, StepOutcome]] = []
    executor = there.server.serving.executor
    assert executor is not None
    execute = executor.execute

    def record(plan: StepPlan) -> StepOutcome:
        outcome = timed(execute(plan), 0.01)
        if any(one.buckets or one.finish for one in plan.pools):  # otherwise slots are closed after the last row
            made.append((plan, outcome))
            time.sleep(0.02)  # gives the stream's reader time
        return outcome

    monkeypatch.setattr(executor, "execute", record)
    return made


def ask(found: Served, **body: Any) -> tuple[dict[str, Any], list[float]]:
    """Return an answer and the increase of the counters."""
    before = [found.metric(name) for name in COUNTERS]
    answer = found.post("/v1/completions", {"prompt": PROMPT, "seed": 1} | body)
    assert answer.status_code == 200, answer.text
    wait_for(lambda: found.metric("num_requests_running") == 0)
    return answer.json(), [found.metric(name) - old for name, old in zip(COUNTERS, before, strict=True)]


def stream(found: Served, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    lines = found.post("/v1/completions", {"prompt": PROMPT, "seed": 1, "stream": True} | body).text.splitlines()
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_the_stream_of_the_readme_streams(there: Served, steps: list[tuple[StepPlan, StepOutcome]]) -> None:
    (expected,) = offline(there, [PROMPT], max_new_tokens=32, block_length=8, seed=1)
    for _ in range(2):  # the first request, and one after a pause
        del steps[:]
        events = stream(there, max_tokens=32, block_length=8)
        pieces = [text for event in events if (text := event["choices"][0]["text"])]
        assert "".join(pieces) == expected.text
        assert len(pieces) > 1
        # The stream is observed after the first iteration, and again after the second if nothing was shown.
        iterations = [sum(run.iterations for run in outcome.pools[0].runs) for _, outcome in steps]
        looks = [canvas for _, outcome in steps for canvas in outcome.pools[0].canvases.values()]
        assert iterations[0] == 1
        prompt = len(looks[0]) - 32
        shown = next(number for number, canvas in enumerate(looks) if canvas[prompt] >= 0)
        assert sum(iterations[: shown + 1]) <= 2
        assert max(iterations) == 5, "50 ms"


def test_an_end_token_frees_the_slot(there: Served) -> None:
    early, (forwards, committed, generated) = ask(there)
    full, (all_forwards, all_committed, same_generated) = ask(there, early_stop=False)
    assert early["choices"][0] == full["choices"][0]
    assert early["choices"][0]["finish_reason"] == "stop"
    assert early["usage"] == full["usage"]
    assert generated == same_generated == early["usage"]["completion_tokens"]
    assert forwards < all_forwards / 2
    assert committed == generated + 1, "with the end token"
    assert all_committed == 32


def test_a_stop_string_frees_the_slot(there: Served, steps: list[tuple[StepPlan, StepOutcome]]) -> None:
    (expected,) = offline(there, [PROMPT], max_new_tokens=32, early_stop=False, stop=[" %"], seed=1)
    del steps[:]
    answer, (forwards, committed, generated) = ask(there, early_stop=False, stop=" %", logprobs=0)
    (found,) = answer["choices"]
    assert (found["text"], found["finish_reason"]) == (expected.text, "stop")
    assert "%" not in found["text"]
    assert answer["usage"]["completion_tokens"] == len(expected.tokens) == committed == generated
    assert len(found["logprobs"]["tokens"]) == len(expected.tokens)
    assert (found["masks_left"], forwards < 16) == (0, True)
    # The slot is freed one step after the canvas contained the stop string.
    tokenizer = there.engine.tokenizer
    finished = [number for number, (plan, _) in enumerate(steps) if plan.pools[0].finish]
    assert finished == [len(steps) - 1]
    prompt = len(tokenizer.encode(PROMPT))
    texts = []
    for _, outcome in steps[:-1]:
        (canvas,) = outcome.pools[0].canvases.values()
        new = canvas[prompt:].tolist()
        texts.append(tokenizer.decode(new[: new.index(-1)]))
    assert ["%" in text for text in texts] == [False] * (len(texts) - 1) + [True]


@pytest.mark.parametrize("body", [{"stop": [" %"], "early_stop": False}, {}], ids=["stop string", "end token"])
def test_nothing_after_the_end_is_sent(there: Served, body: dict[str, Any]) -> None:
    (expected,) = offline(there, [PROMPT], max_new_tokens=32, seed=1, stop=body.get("stop", ()))
    events = stream(there, canvas=True, block_length=8, **body)
    canvases = [canvas for event in events if (canvas := event["choices"][0].get("canvas"))]
    end = len(expected.tokens) + (0 if body else 1)
    assert expected.text.startswith("".join(canvases[-1][: len(expected.tokens)]))
    assert None not in canvases[-1][:end]
    assert canvases[-1][end:] == [""] * (32 - end)
    assert "".join(event["choices"][0]["text"] for event in events) == expected.text
    whole = stream(there, canvas=True, early_stop=False)
    assert "" not in whole[-2]["choices"][0]["canvas"], "the whole canvas where it was asked for"
