"""Rows that end at a stop string: same text as without early stop, and at most one step too many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from checkpoints import DEMO
from runtime import (
    CanvasChanged,
    DiffusionConfig,
    Engine,
    Executor,
    GenerationResult,
    PoolShape,
    RequestHandle,
    RowFinished,
    RowRequest,
    RowResult,
    SamplingConfig,
    Scheduler,
    SchedulerPolicy,
    StopTest,
    TextStream,
)
from tests import golden_cases
from tests.launch.served import timed
from tests.runtime.decoding.block_rows import BASE, BLOCK, ragged_rows
from tests.runtime.test_early_stop import GOLDEN

PROMPTS = ["def is_even(number):\n", "def add(a, b):\n"]
STOP = [" %", " +"]
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "dual": {"cache": "dual", "block_length": 8, "parallel": "threshold"},
    "prefix": {"cache": "prefix", "block_length": 8},
    "threshold": {"parallel": "threshold"},
}


@pytest.fixture(scope="module")
def demo() -> Engine:
    return Engine.load(DEMO, "tensor=1")


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.slow if mode in ("prefix", "threshold") else ()) for mode in MODES]
)
def test_texts_are_those_of_the_full_canvas(demo: Engine, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[GenerationResult] = []
    generate_tokens = demo.generate_tokens

    def keep(*arguments: Any, **more: Any) -> GenerationResult:
        made.append(generate_tokens(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(demo, "generate_tokens", keep)
    config = DiffusionConfig.published(64, seed=[1, 2], early_stop=False, **MODES[mode])
    full = demo.generate(PROMPTS, config)
    cut = demo.generate(PROMPTS, config, stop=STOP)
    whole, found = made
    assert [one.text for one in cut] == [min((one.text.split(stop)[0] for stop in STOP), key=len) for one in full]
    assert [one.finish_reason for one in cut] == ["stop", "stop"]
    assert [one.tokens for one in cut] == [own.tokens[: len(one.tokens)] for one, own in zip(cut, full, strict=True)]
    assert [one.masks_left for one in cut] == [0, 0]
    assert found.stats.tokens == sum(len(one.tokens) for one in cut)
    assert found.stats.forwards < whole.stats.forwards / 2
    streamed = "".join(demo.stream(PROMPTS[0], config.replace(seed=[1]), stop=STOP))
    assert streamed == cut[0].text


def test_a_stream_is_not_generated_beyond_its_stop_string(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    stream_tokens = demo.stream_tokens

    def count(*arguments: Any, **more: Any) -> Any:
        for one in stream_tokens(*arguments, **more):
            looks.append(one)
            yield one

    monkeypatch.setattr(demo, "stream_tokens", count)
    config = DiffusionConfig.published(32, block_length=8, early_stop=False)
    assert "".join(demo.stream(PROMPTS[0], config, stop=[" %"])).endswith("number")
    assert len(looks) < 16
    # A string is one stop string, not a set of characters.
    assert "".join(demo.stream(PROMPTS[0], config, stop=" %")).endswith("number")
    (completion,) = demo.generate(PROMPTS[0], config, stop=" %")
    assert completion.finish_reason == "stop"
    assert completion.text.endswith("number")


def test_the_text_of_a_special_token_ends_a_row(demo: Engine) -> None:
    assert demo.tokenizer.special_ids(["<|im_end|>", "<|im_end", "def"]) == {*demo.tokenizer.known_ids(["<|im_end|>"])}
    config = DiffusionConfig.published(32, block_length=8, early_stop=False)
    ids, mask = demo.encode(PROMPTS[0])
    whole = demo.generate_tokens(ids, mask, config)
    found = demo.generate_tokens(ids, mask, config, stop_tests=demo.stop_tests([["<|endoftext|>"]]))
    (completion,) = demo.completions(PROMPTS[0], ids, mask, whole)
    assert found.stats.tokens == len(completion.tokens) < whole.stats.tokens
    assert found.stats.forwards < whole.stats.forwards
    (ended,) = demo.completions(PROMPTS[0], ids, mask, found, stop="<|endoftext|>")
    assert (ended.text, ended.finish_reason) == (completion.text, "stop")


def ends_after(count: int) -> StopTest:
    return lambda tokens, whole: count - 1 if len(tokens) >= count else None


def check_tokens(engine: Engine, config: DiffusionConfig | SamplingConfig) -> None:
    """Check a model without a tokenizer, token by token: rows of a batch end one after another, or not at all."""
    ids, mask = ragged_rows()
    whole = engine.generate_tokens(ids, mask, config)
    counts = [3, 6, None, 9]
    tests = [None if count is None else ends_after(count) for count in counts]
    found = engine.generate_tokens(ids, mask, config, stop_tests=tests)
    width = ids.shape[1]
    for row, count in enumerate(counts):
        end = width + (config.max_new_tokens if count is None else count)
        np.testing.assert_array_equal(found.sequences[row, :end], whole.sequences[row, :end])
        never = found.commit_steps[row, width:] < 0
        assert never.any() == (count is not None)
        assert (found.sequences[row, width:][never] == engine.config.pad_token_id).all()
    new = [config.max_new_tokens if count is None else count - 1 for count in counts]
    assert found.stats.tokens == sum(new) + int((whole.commit_steps[:, :width] >= 0).sum())
    assert found.stats.positions < whole.stats.positions
    # If the rows are watched, the run ends when the last row has ended.
    seen: list[int] = []
    tests = [ends_after(count) for count in (3, 6, 2, 5)]
    watched = engine.generate_tokens(ids, mask, config, stop_tests=tests, watch=lambda done, _: seen.append(done))
    assert len(seen) < whole.stats.forwards
    np.testing.assert_array_equal(watched.sequences[:, : width + 2], whole.sequences[:, : width + 2])
    assert watched.stats.masks_left == 0
    assert watched.stats.tokens == 2 + 5 + 1 + 4 + int((whole.commit_steps[:, :width] >= 0).sum())
    # With few slots, so that rows that have ended are replaced by others.
    requests = [RowRequest(ids[row, mask[row] > 0].tolist(), config, seed) for row, seed in enumerate(whole.seeds)]
    results: dict[int, RowResult] = {}
    tests = [None if count is None else ends_after(count) for count in counts]
    for some in engine.scheduler(requests, 1, tests).run():
        results |= {one.number: one for one in some}
    for row, count in enumerate(counts):
        length = len(requests[row].tokens) + (config.max_new_tokens if count is None else count)
        own = whole.sequences[row, ids.shape[1] - len(requests[row].tokens) :]
        np.testing.assert_array_equal(results[row].sequence[:length], own[:length])


@pytest.mark.parametrize(
    "changes",
    [
        {"cache": "dual", "block_length": BLOCK},
        pytest.param({"block_length": BLOCK}, marks=pytest.mark.slow),
        pytest.param({"cache": "prefix", "block_length": BLOCK, "parallel": "factor"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_diffusion_rows_of_a_batch_end_one_by_one(changes: dict[str, Any]) -> None:
    check_tokens(golden_cases.engine(), BASE.replace(**changes))


@pytest.mark.parametrize("use_cache", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_autoregressive_rows_of_a_batch_end_one_by_one(use_cache: bool) -> None:
    config = SamplingConfig(max_new_tokens=22, temperature=0.9, use_cache=use_cache, seed=3)
    check_tokens(golden_cases.engine(folder=GOLDEN / "qwen3_tiny"), config)


def serve_alone(
    engine: Engine, config: DiffusionConfig, stop: tuple[str, ...] = ()
) -> tuple[list[tuple[int, str]], RowFinished, list[int]]:
    """Stream one request through slots like the server, with simulated iterations of 2 ms.

    Returns:
      Pieces of text with the iterations until each, the row's result, and the iterations per step.
    """
    executor = Executor(engine.runner, [PoolShape(config, 64, 1, max_programs=1)])
    scheduler = Scheduler([pool.limits for pool in executor.pools], SchedulerPolicy())
    tokens = engine.tokenizer.encode(PROMPTS[0])
    request = RowRequest(tokens, config.with_end_tokens(engine.end_token_ids, default=True), 0)
    tests = engine.stop_tests([stop])
    scheduler.add(RequestHandle(rows=[request], stream=True, stop_tests=tests))
    text = TextStream(engine.tokenizer, engine.end_token_ids, stop)
    pieces, steps, now = [], [], 0.0
    while True:
        plan = scheduler.schedule(now)
        outcome = executor.execute(plan)
        # Time of the simulated clock.
        outcome = timed(outcome, 0.002)
        ran = sum(run.iterations for pool in outcome.pools for run in pool.runs)
        steps.append(ran)
        now += 0.002 * ran
        for event in scheduler.update(outcome, now):
            if isinstance(event, CanvasChanged):
                new = event.canvas.tolist()
                pieces.append((sum(steps), text.push(new[: new.index(-1)] if -1 in new else new)))
            if isinstance(event, RowFinished):
                pieces.append((sum(steps), text.push(event.result.sequence[len(tokens) :].tolist(), whole=True)))
                return [(at, piece) for at, piece in pieces if piece], event, steps


def test_the_first_text_of_a_stream_is_there_after_an_iteration_or_two(demo: Engine) -> None:
    config = DiffusionConfig.published(32, block_length=8)
    pieces, row, steps = serve_alone(demo, config)
    assert steps[0] == 1
    first, text = pieces[0]
    assert first <= 2
    assert text
    assert len(pieces) > 1
    ids = [demo.tokenizer.encode(PROMPTS[0])]
    whole = demo.generate_tokens(ids, None, config.replace(early_stop=False))
    (expected,) = demo.completions(PROMPTS[:1], np.array(ids), np.ones_like(ids), whole)
    assert "".join(piece for _, piece in pieces) == expected.text
    assert row.tokens == len(expected.tokens) + 1
    # Text arrives after the first committed position, because each iteration commits a token.
    steps_made = whole.commit_steps[0, len(ids[0]) :]
    assert first == (np.unique(steps_made) <= steps_made[0]).sum()


def test_a_stop_string_frees_its_slot_a_step_after_it_has_come(demo: Engine) -> None:
    config = DiffusionConfig.published(32, block_length=8, early_stop=False)
    whole, _, _ = serve_alone(demo, config)
    pieces, row, steps = serve_alone(demo, config, (" %",))
    text = "".join(piece for _, piece in whole)
    assert "".join(piece for _, piece in pieces) == text[: text.index(" %")]
    # Nothing runs after the step in which the stop string was found; the next plan frees the slot.
    assert steps[-1] == 0
    assert sum(steps) < 32
    assert row.tokens < (row.result.commit_steps >= 0).sum()


def test_the_history_of_a_row_that_a_stop_string_ends(demo: Engine) -> None:
    """Its last canvas is the result: padding follows the end."""
    config = DiffusionConfig.published(32, block_length=4)
    ids, mask = demo.encode("def is_even(number):")
    result = demo.generate_tokens(ids, mask, config, history=True, stop_tests=demo.stop_tests([["%"]]))
    assert result.history is not None
    assert result.stats.masks_left == 0
    np.testing.assert_array_equal(result.history[-1], result.sequences)
    last = result.commit_steps.max()
    whole = demo.generate_tokens(ids, mask, config, history=True)
    assert whole.history is not None
    np.testing.assert_array_equal(result.history[:last], whole.history[:last])
