"""When the scheduler first fetches a row's canvas, and how a stop test ends a row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime import (
    FirstToken,
    RequestHandle,
    RowFinished,
    RowRequest,
    SamplingConfig,
    SchedulerPolicy,
    StepOutcome,
    StepPlan,
    StopTest,
)
from runtime.execution.step_plan import BucketPlan, BucketRun, Insertion, PoolOutcome, PoolPlan
from tests.runtime.execution.counted_slots import (
    PROMPT,
    WIDTH,
    CountedSlots,
    drain,
    finished,
    rows,
    single,
    step,
)


def test_an_outcome_without_a_forward_pass_says_nothing_about_how_long_one_takes() -> None:
    scheduler, slots = single(1), CountedSlots(0.02)
    first = RequestHandle(rows=rows(9))
    scheduler.add(first)
    scheduler.schedule(slots.now)
    scheduler.abort(first)
    # This happens if the row was done before its first iteration.
    scheduler.update(StepOutcome([PoolOutcome(0, [], {}, [BucketRun(0, 0, 0, 0.001)])]), slots.now)
    scheduler.policy = SchedulerPolicy(first_tokens=False)
    scheduler.add(RequestHandle(rows=rows(9)))
    assert scheduler.schedule(slots.now).pools[0].buckets[0].iterations == 1


def test_a_row_is_looked_at_after_its_first_iterations_until_it_has_shown_something() -> None:
    """A streamed row that starts among others, or after a pause, does not wait for a full step of the others."""
    for hidden, looks in ((0, 1), (1, 2), (5, 2)):
        scheduler, slots = single(2), CountedSlots(0.0005, hidden=hidden)
        scheduler.add(RequestHandle(rows=rows(99)))
        for _ in range(4):
            step(scheduler, slots)
        assert [plan.buckets[0].iterations for plan in slots.plans[looks:]] == [16] * (4 - looks)
        streamed = RequestHandle(rows=rows(40), stream=True, arrived=slots.now)
        scheduler.add(streamed)
        del slots.plans[:]
        events = [step(scheduler, slots) for _ in range(3)]
        assert [plan.buckets[0].iterations for plan in slots.plans] == [1] * looks + [16] * (3 - looks)
        shown = [any(isinstance(event, FirstToken) and event.handle is streamed for event in some) for some in events]
        assert shown.index(True) == (looks - 1 if hidden < 2 else looks)


def test_a_stop_token_frees_the_slot_in_that_iteration() -> None:
    """Also among other rows: no iteration computes a row that has ended, while another one waits for its slot."""
    scheduler, slots = single(2, step_seconds=None, first_tokens=False), CountedSlots(0.01, ends={1: 3, 2: 20})
    handles = [RequestHandle(rows=rows(90, seed=seed)) for seed in (1, 2, 3, 4)]
    for handle in handles:
        scheduler.add(handle)
    assert finished(drain(scheduler, slots)) == handles
    # Row 1 ends after 3 iterations, and row 2 after 17 more, of which a step has at most 16. Then nobody waits.
    assert [plan.buckets[0].until_ended for plan in slots.plans[:4]] == [1, 1, 1, 0]
    assert [slots.plans[2].buckets[0].slots, slots.plans[3].buckets[0].slots] == [[2, 1], [2, 3]]
    assert scheduler.stats.slot_iterations == 2 * (3 + 17 + 90)


@pytest.mark.parametrize(("step_seconds", "ended"), [(None, 2), (10.0, 1)])
def test_rows_of_a_large_batch_start_together_if_nobody_waits_for_one(step_seconds: float | None, ended: int) -> None:
    """20 rows end after 1, 2, ... iterations, and as many others wait. A server starts each of them at once."""
    ends = {seed: seed for seed in range(1, 21)}
    scheduler = single(20, step_seconds=step_seconds, first_tokens=False)
    slots = CountedSlots(0.01, ends=ends)
    for seed in (*range(1, 21), *[99] * 20):
        scheduler.add(RequestHandle(rows=rows(90, seed=seed)))
    drain(scheduler, slots)
    (first,) = slots.plans[1].buckets
    assert first.until_ended == ended
    assert len(slots.plans[2].insert) == ended


def after(count: int, kept: int) -> StopTest:
    """A stop test that ends a row once it has ``count`` tokens."""
    return lambda tokens, whole: kept if len(tokens) >= count else None


def test_a_stop_test_frees_the_slot_at_the_next_decision() -> None:
    scheduler, slots = single(2, max_iterations=4, step_seconds=None, first_tokens=False), CountedSlots(0.01)
    stopped, other = RequestHandle(rows=rows(50), stop_tests=[after(6, 5)]), RequestHandle(rows=rows(50))
    waiting = RequestHandle(rows=rows(50, seed=2))
    for handle in (stopped, other, waiting):
        scheduler.add(handle)
    assert not [event for _ in range(2) for event in step(scheduler, slots) if isinstance(event, RowFinished)]
    assert [plan.buckets[0].canvases for plan in slots.plans] == [True, True]
    plan = scheduler.schedule(slots.now)
    # The row that ended has no slot while its result is on its way.
    assert (scheduler.running, scheduler.occupied, scheduler.usage) == (3, 2, 1.0)
    events = scheduler.update(slots.execute(plan), slots.now)
    # Eight tokens were generated when the test fired; the next row gets the slot in the same step.
    inserted = [Insertion(2, waiting.rows[0])]
    assert slots.plans[-1] == PoolPlan(0, inserted, [BucketPlan(0, 2, WIDTH, [2, 1], 4, False)], [0])
    assert slots.rows() == {0: 2, 1: 1}
    (row,) = (event for event in events if isinstance(event, RowFinished))
    assert (row.handle, row.tokens, row.steps) == (stopped, 5, 8)
    assert (row.result.commit_steps >= 0).sum() == 8
    assert finished(events) == [stopped]
    assert (scheduler.stats.rows, scheduler.stats.tokens) == (1, 5)
    assert scheduler.running == 2
    assert finished(drain(scheduler, slots)) == [other, waiting]


def test_a_stop_in_the_last_step_of_a_row_is_counted_too() -> None:
    scheduler, slots = single(1, max_iterations=16), CountedSlots(0.0001)
    scheduler.add(RequestHandle(rows=rows(9), stop_tests=[after(9, 3)]))
    events = drain(scheduler, slots)
    assert [event.tokens for event in events if isinstance(event, RowFinished)] == [3]
    assert not any(plan.finish for plan in slots.plans)


def test_what_follows_a_stop_token_is_not_counted() -> None:
    scheduler, slots = single(1), CountedSlots(0.01)
    ending = SamplingConfig(max_new_tokens=9, stop_token_ids=[4])
    scheduler.add(RequestHandle(rows=[RowRequest(PROMPT, ending, 4)]))
    events = drain(scheduler, slots)
    assert [event.tokens for event in events if isinstance(event, RowFinished)] == [1]
    assert scheduler.stats.tokens == 1


def test_a_stopped_row_that_is_aborted_is_evicted_without_a_result() -> None:
    scheduler, slots = single(1, max_iterations=4, step_seconds=None), CountedSlots(0.01)
    scheduler.add(handle := RequestHandle(rows=rows(50), stop_tests=[after(1, 1)]))
    step(scheduler, slots)
    scheduler.abort(handle)
    assert step(scheduler, slots) == []
    assert (slots.plans[-1].buckets, slots.plans[-1].finish, scheduler.running) == ([], [], 0)
    # Aborted during the step that returns its result.
    scheduler.add(handle := RequestHandle(rows=rows(50), stop_tests=[after(1, 1)]))
    step(scheduler, slots)
    outcome = slots.execute(scheduler.schedule(slots.now))
    scheduler.abort(handle)
    assert finished(scheduler.update(outcome, slots.now)) == []
    assert (scheduler.running, scheduler.schedule(slots.now)) == (0, StepPlan())


def test_no_text_is_searched_before_the_masks_of_a_prompt_are_filled() -> None:
    scheduler, slots = single(1, max_iterations=1), CountedSlots(0.01, hidden=3)
    seen: list[int] = []

    def look(tokens: Sequence[int], whole: bool) -> None:
        seen.append(len(tokens))

    scheduler.add(RequestHandle(rows=rows(6), stop_tests=[look]))
    drain(scheduler, slots)
    assert seen == [0, 0, 0, 1, 2, 6]


def test_a_row_whose_prompt_has_masks_ends_when_it_is_told_to() -> None:
    """As after Ctrl-C: the test that ends it needs no text."""
    scheduler, slots = single(1, max_iterations=1), CountedSlots(0.01, hidden=30)
    told: list[bool] = []
    scheduler.add(RequestHandle(rows=rows(50), stop_tests=[lambda tokens, whole: len(tokens) if told else None]))
    for _ in range(3):
        step(scheduler, slots)
    assert scheduler.running == 1
    told.append(True)
    for _ in range(2):
        step(scheduler, slots)
    assert scheduler.running == 0
