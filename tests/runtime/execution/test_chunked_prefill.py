"""Prompts that are read in chunks while other rows decode: tokens equal those after reading the prompt at once."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import (
    Executor,
    PoolShape,
    RequestHandle,
    RowFinished,
    RowRequest,
    RowResult,
    SamplingConfig,
    Scheduler,
    SchedulerPolicy,
)
from runtime.execution.autoregressive_slots import AutoregressiveSlots
from runtime.execution.pool import Pool
from runtime.execution.runner import PROMPT_CHUNKS
from runtime.execution.step_plan import BucketPlan, Insertion, PoolPlan
from tests.runtime.execution.test_offline import alone, autoregressive, qwen2, same

__all__ = ["qwen2"]

CHUNK = 8
LONG = 45


@pytest.mark.parametrize("mesh", ["tensor=1", pytest.param("data=2,sequence=2,tensor=2", marks=pytest.mark.slow)])
def test_tokens_are_those_of_a_prompt_that_is_read_whole(
    qwen2: str, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROMPT_CHUNKS, "cpu", CHUNK)
    engine, single = autoregressive(qwen2, mesh), autoregressive(qwen2, "tensor=1")
    data = engine.layout.spec.data
    generator = np.random.default_rng(0)
    config = SamplingConfig(temperature=0.8, top_p=0.95, log_probabilities=True)
    asked = [
        RowRequest(
            generator.integers(1, engine.config.vocab_size, prompt).tolist(), config.replace(max_new_tokens=new), n
        )
        for n, (prompt, new) in enumerate([(3, 18), *[(LONG, 6), (CHUNK, 4)] * data])
    ]
    executor = Executor(engine.runner, [PoolShape(config, 64, 4 * data, widths=(64,), max_programs=3)])
    scheduler = Scheduler([pool.limits for pool in executor.pools], SchedulerPolicy(2, step_seconds=None))
    handles = [RequestHandle(rows=[row]) for row in asked]
    scheduler.add(handles[0])
    beside: list[int] = []
    found: dict[int, RowResult] = {}
    for number in range(100):
        if number == 1:
            for handle in handles[1:]:
                scheduler.add(handle)
        outcome = executor.execute(scheduler.schedule(0.0))
        for event in scheduler.update(outcome, 0.0):
            if isinstance(event, RowFinished):
                found[handles.index(event.handle)] = event.result
        beside += [run.iterations for pool in outcome.pools if pool.unread for run in pool.runs]
        if not (scheduler.waiting or scheduler.running):
            break
    # The first row continues while the long prompts are read, in six chunks each.
    assert sum(iterations > 0 for iterations in beside) >= LONG // CHUNK
    for number, row in enumerate(asked):
        same(found[number], alone(single, row))
    # The first token of each row is its prefill's; an iteration makes each of the others.
    assert scheduler.stats.busy_iterations == sum(row.config.max_new_tokens - 1 for row in asked)


@pytest.mark.parametrize("mesh", ["tensor=1", pytest.param("data=2", marks=pytest.mark.slow)])
def test_prompts_are_read_in_the_order_of_their_arrival(qwen2: str, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot gets a new prompt as soon as it is free. Prompts in higher slots are read before it nevertheless."""
    monkeypatch.setitem(PROMPT_CHUNKS, "cpu", CHUNK)
    engine = autoregressive(qwen2, mesh)
    data, config = engine.layout.spec.data, SamplingConfig(max_new_tokens=1, log_probabilities=True)
    slots = AutoregressiveSlots(engine.runner, config, 32, 3 * data, 24, together=False)
    asked = [RowRequest([1 + number] * 24, config, number) for number in range(9 * data)]
    waiting, held, order = list(range(len(asked))), dict.fromkeys(range(slots.count), -1), []
    while waiting or max(held.values()) >= 0:
        free = [slot for slot, row in held.items() if row < 0][: len(waiting)]
        new = {slot: waiting.pop(0) for slot in free}
        held |= new
        slots.insert({slot: asked[row] for slot, row in new.items()})
        done = slots.run(1, chunks=1)
        for slot in [slot for slot, row in held.items() if row >= 0 and done[slot]]:
            (result,) = slots.collect({slot: (held[slot], asked[held[slot]])})
            order.append(result.number)
            same(result, alone(engine, asked[held[slot]]))
            slots.insert({slot: None})
            held[slot] = -1
    # Each shard reads one prompt after another, and no prompt waits for one that came after it.
    assert sorted(order) == list(range(len(asked)))
    assert all(abs(place - row) <= (0 if data == 1 else 3) for place, row in enumerate(order))


@pytest.mark.parametrize("mesh", ["tensor=1", pytest.param("data=2,sequence=2,tensor=2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("successor", ["nothing", "a new row", "a row that moves", "an exchange"])
def test_a_partly_read_prompt_moves_with_what_was_read(
    qwen2: str, mesh: str, successor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever takes its slot in the same step."""
    monkeypatch.setitem(PROMPT_CHUNKS, "cpu", CHUNK)
    engine, single = autoregressive(qwen2, mesh), autoregressive(qwen2, "tensor=1")
    generator, data = np.random.default_rng(1), engine.layout.spec.data
    config = SamplingConfig(max_new_tokens=3, log_probabilities=True)
    asked = [RowRequest(generator.integers(1, engine.config.vocab_size, LONG).tolist(), config, n) for n in range(3)]
    pool = Pool.open(engine.runner, PoolShape(config, 64, 4 * data, widths=(64,)))
    rows = 2 * data
    free = [None] * (rows - 2)

    def run(insert: list[int], *slots: list[int | None]) -> dict[int, RowResult]:
        buckets = [BucketPlan(number, rows, 64, own, 1) for number, own in enumerate(slots)]
        outcome = pool.execute(PoolPlan(0, [Insertion(row, asked[row]) for row in insert], buckets))
        return {one.number: one for one in outcome.results}

    # Row 0 has read two of six chunks when it moves.
    places: list[list[int | None]] = [[0, None, *free], [1, None, *free]]
    run([0], [0, None, *free], [None, None, *free])
    assert not run([1], *places)
    insert, places = {
        "nothing": ([], [[None, None, *free], [0, 1, *free]]),
        "a new row": ([2], [[2, None, *free], [0, 1, *free]]),
        "a row that moves": ([], [[1, None, *free], [0, None, *free]]),
        "an exchange": ([], [[1, None, *free], [None, 0, *free]]),
    }[successor]
    found = run(insert, *places)
    for _ in range(60):
        places = [[None if row in found else row for row in own] for own in places]
        if not any(row is not None for own in places for row in own):
            break
        found |= run([], *places)
    assert sorted(found) == ([0, 1, 2] if insert else [0, 1])
    for number, result in found.items():
        same(result, alone(single, asked[number]))


@pytest.mark.parametrize("ends", ["max_new_tokens", "stop token"])
def test_rows_of_one_token_keep_no_other_waiting(qwen2: str, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that ends with its prompt frees its slot at once, and still the others advance in each of its steps."""
    monkeypatch.setitem(PROMPT_CHUNKS, "cpu", CHUNK)
    engine = autoregressive(qwen2, "tensor=1")
    config = SamplingConfig(max_new_tokens=24, log_probabilities=True)
    prompt = [3, 1, 4, 1, 5]
    if ends == "stop token":
        first = int(alone(engine, RowRequest(prompt, config, 0)).sequence[len(prompt)])
        short = RowRequest(prompt, config.replace(stop_token_ids=(first,)), 0)
    else:
        short = RowRequest(prompt, config.replace(max_new_tokens=1), 0)
    long = RowRequest([2, 7, 1], config, 0)
    executor = Executor(engine.runner, [PoolShape(config, 64, 2, widths=(64,), max_programs=2)])
    scheduler = Scheduler([pool.limits for pool in executor.pools], SchedulerPolicy(step_seconds=1e9))
    handle, ended, steps = RequestHandle(rows=[long]), 0, 0
    scheduler.add(handle)
    while not handle.closed:
        scheduler.add(RequestHandle(rows=[short], owner="another"))
        for event in scheduler.update(executor.execute(scheduler.schedule(float(steps))), float(steps)):
            if isinstance(event, RowFinished):
                if event.handle is handle:
                    same(event.result, alone(engine, long))
                else:
                    ended += 1
        steps += 1
        assert steps < 40, "the row does not advance"
    assert ended >= steps - 3
