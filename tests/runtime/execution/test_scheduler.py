"""The scheduler's policy, on simulated slots and with a simulated clock."""

from __future__ import annotations

import json

import pytest

from runtime import (
    CanvasChanged,
    DiffusionConfig,
    FirstToken,
    PoolLimits,
    PrefixGrown,
    RequestFinished,
    RequestHandle,
    RowFinished,
    RowInserted,
    RowRequest,
    RowsScored,
    SamplingConfig,
    Scheduler,
    SchedulerPolicy,
    ScorePass,
    StepPlan,
)
from runtime.execution.step_plan import BucketPlan, Insertion, PoolPlan
from tests.runtime.execution.counted_slots import (
    WIDTH,
    CountedSlots,
    drain,
    finished,
    one_bucket,
    rows,
    single,
    step,
)


def test_owners_share_the_slots() -> None:
    scheduler, slots = single(2, max_iterations=1), CountedSlots(0.01)
    greedy = [RequestHandle("greedy", rows(2, 2, 2, 2, seed=1)) for _ in range(3)]
    modest = RequestHandle("modest", rows(2, 2, seed=2))
    for handle in (*greedy, modest):
        scheduler.add(handle)
    assert scheduler.waiting == 14
    order = finished(drain(scheduler, slots))
    # Although twelve rows arrived earlier, each owner gets every other slot.
    assert [request.seed for request in slots.order[:6]] == [1, 2, 1, 2, 1, 1]
    assert order == [modest, *greedy]
    assert scheduler.stats.rows == 14
    assert scheduler.stats.tokens == 28


def test_a_free_slot_is_given_away_while_others_run() -> None:
    scheduler, slots = single(2, max_iterations=1), CountedSlots(0.01)
    scheduler.add(RequestHandle(rows=rows(9, 2, 2, 2)))
    for _ in range(2):
        step(scheduler, slots)
    assert (scheduler.running, scheduler.waiting, scheduler.usage) == (1, 2, 0.5)
    step(scheduler, slots)
    assert slots.rows() == {0: 0, 1: 2}
    drain(scheduler, slots)
    assert scheduler.stats.slot_iterations == 2 * 9
    assert scheduler.stats.utilisation == 15 / 18


def test_deadlines() -> None:
    scheduler, slots = single(1, max_iterations=1), CountedSlots(1.0)
    running, waiting, patient = (
        RequestHandle(rows=rows(9), arrived=slots.now, deadline=slots.now + seconds) for seconds in (3.0, 2.0, 60.0)
    )
    for handle in (running, waiting, patient):
        scheduler.add(handle)
    step(scheduler, slots)
    assert scheduler.expire(slots.now) == []
    step(scheduler, slots)
    assert scheduler.expire(slots.now) == [waiting]
    step(scheduler, slots)
    assert slots.rows() == {0: 0}, "running rows are not interrupted"
    assert scheduler.expire(slots.now) == [running]
    assert scheduler.expire(slots.now) == [], "once"
    # The next row gets the slot in the same step; the row that waited in between has left the queue.
    step(scheduler, slots)
    inserted = [Insertion(1, patient.rows[0])]
    assert slots.plans[-1] == PoolPlan(0, inserted, [BucketPlan(0, 1, WIDTH, [1], 1, True)])
    assert scheduler.unfinished == [patient]
    assert (scheduler.running, scheduler.waiting) == (1, 0)
    assert finished(drain(scheduler, slots)) == [patient]


def test_aborts() -> None:
    scheduler, slots = single(2, max_iterations=1), CountedSlots(0.01)
    first, second, third = (RequestHandle(owner, rows(9, 9)) for owner in "abc")
    scheduler.add(first)
    step(scheduler, slots)
    scheduler.add(second)
    scheduler.add(third)
    # An aborted row that waits is never inserted.
    assert scheduler.abort(second)
    assert scheduler.waiting == 4, "until the next step"
    step(scheduler, slots)
    assert scheduler.waiting == 2
    # An aborted row that runs is evicted, and others take its slot.
    assert scheduler.abort(first)
    assert not scheduler.abort(first)
    step(scheduler, slots)
    assert slots.rows() == {0: 2, 1: 3}
    # Without waiting rows, the slots are emptied.
    assert scheduler.abort(third)
    assert step(scheduler, slots) == []
    assert slots.plans[-1].buckets == []
    assert slots.rows() == {}
    assert (scheduler.running, scheduler.waiting, scheduler.unfinished) == (0, 0, [])
    assert scheduler.schedule(slots.now) == StepPlan()


def test_positions_of_aborted_rows_stay_counted() -> None:
    """Useful positions are shown beside computed ones, whose sum does not fall either."""
    scheduler, slots = single(2, max_iterations=4), CountedSlots(0.001)
    kept, given_up = RequestHandle(rows=rows(9)), RequestHandle(rows=rows(100))
    scheduler.add(kept)
    scheduler.add(given_up)
    seen = [0]
    for _ in range(3):
        step(scheduler, slots)
        seen.append(scheduler.stats.useful_positions)
    scheduler.abort(given_up)
    step(scheduler, slots)
    seen.append(scheduler.stats.useful_positions)
    drain(scheduler, slots)
    seen.append(scheduler.stats.useful_positions)
    assert seen == sorted(seen)
    assert scheduler.stats.in_flight_positions == 0
    assert scheduler.stats.useful_share <= 1
    assert scheduler.stats.utilisation <= 1


def test_a_request_that_is_aborted_in_its_last_step_is_not_finished() -> None:
    scheduler, slots = single(1), CountedSlots(0.01)
    handle = RequestHandle(rows=rows(1))
    scheduler.add(handle)
    outcome = slots.execute(scheduler.schedule(slots.now))
    scheduler.abort(handle)
    events = scheduler.update(outcome, slots.now)
    assert [type(event) for event in events] == [RowInserted, FirstToken, RowFinished]
    assert scheduler.running == 0
    assert not scheduler.abort(handle)


def test_a_long_prompt_is_read_in_chunks_beside_rows_that_decode() -> None:
    scheduler, slots = single(2, max_iterations=4), CountedSlots(0.01, chunk=8)
    scheduler.add(RequestHandle(rows=rows(60)))
    for _ in range(3):
        step(scheduler, slots)
    long = RequestHandle(rows=[RowRequest([7] * 40, SamplingConfig(max_new_tokens=4), 0)], arrived=slots.now)
    scheduler.add(long)
    events = [step(scheduler, slots) for _ in range(5)]
    # The first step shows whether the new row has tokens; then the other row continues as if it were alone.
    assert [plan.buckets[0].iterations for plan in slots.plans[3:]] == [1, 4, 4, 4, 4]
    assert all(plan.buckets[0].chunks == 1 for plan in slots.plans)
    assert not any(isinstance(event, FirstToken) for step in events[:4] for event in step)
    # Its prompt has five chunks, and its tokens are generated in the step that reads the last chunk.
    [last] = [event for event in events[4] if isinstance(event, RowFinished)]
    assert (last.handle, last.tokens) == (long, 4)
    # If no other row is running, prompts are read at once.
    whole, slots = single(2, chunks=None), CountedSlots(0.01, chunk=8)
    whole.add(RequestHandle(rows=long.rows))
    assert any(isinstance(event, FirstToken) for event in step(whole, slots))


@pytest.mark.parametrize(("seconds", "iterations"), [(0.0005, 16), (0.005, 10), (0.03, 1), (10.0, 1)])
def test_a_step_takes_about_as_long_whatever_an_iteration_takes(seconds: float, iterations: int) -> None:
    scheduler, slots = single(2), CountedSlots(seconds)
    scheduler.add(RequestHandle(rows=rows(100, 100)))
    for _ in range(3):
        step(scheduler, slots)
    assert [plan.buckets[0].iterations for plan in slots.plans] == [1, iterations, iterations]
    scheduler.policy = SchedulerPolicy(max_iterations=3, step_seconds=None)
    step(scheduler, slots)
    assert slots.plans[-1].buckets[0].iterations == 3


def test_canvases_are_looked_at_for_streams_and_first_tokens_alone() -> None:
    scheduler, slots = single(2, max_iterations=1), CountedSlots(0.5)
    streamed = RequestHandle(rows=rows(4, seed=5), arrived=slots.now - 2, stream=True)
    scheduler.add(streamed)
    events = drain(scheduler, slots)
    assert events[0] == RowInserted(streamed, 0, 2.0)
    assert [event.seconds for event in events if isinstance(event, FirstToken)] == [2.5]
    assert [event.seconds for event in events if isinstance(event, PrefixGrown)] == [0.5] * 3
    canvases = [event.canvas.tolist() for event in events if isinstance(event, CanvasChanged)]
    assert canvases == [[5, -1, -1, -1], [5, 5, -1, -1], [5, 5, 5, -1]]
    last = next(event for event in events if isinstance(event, RowFinished))
    assert (last.tokens, last.steps, last.seconds, last.seconds_per_token) == (4, 4, 2.0, 0.5)
    assert events[-1] == RequestFinished(streamed, 4.0)
    # The canvas of a row that is not streamed is fetched until its first token is seen.
    scheduler.add(RequestHandle(rows=rows(4)))
    del slots.plans[:]
    events = drain(scheduler, slots)
    assert [plan.buckets[0].canvases for plan in slots.plans] == [True, False, False, False]
    assert not [event for event in events if isinstance(event, (CanvasChanged, PrefixGrown))]
    # No request streams canvases.
    scheduler.policy = SchedulerPolicy(first_tokens=False)
    scheduler.add(RequestHandle(rows=rows(4)))
    del slots.plans[:]
    drain(scheduler, slots)
    assert not any(plan.buckets[0].canvases for plan in slots.plans)


def test_score_passes_take_turns_beside_the_rows() -> None:
    scheduler, slots = single(1, max_iterations=1), CountedSlots(0.01)
    passes = [ScorePass([[1, 2, 3], [4]], [[1, 2, 3], [4]], 1.0, 64, 2), ScorePass([[5, 6]], [[5, 6]], 1.0, 64, 2)]
    long, short = RequestHandle("a", score_passes=passes), RequestHandle("b", score_passes=passes[1:])
    scheduler.add(RequestHandle("a", rows(5)))
    scheduler.add(long)
    scheduler.add(short)
    assert scheduler.waiting == 4
    events = drain(scheduler, slots)
    scored = [
        (event.handle, event.first, list(map(len, event.scores))) for event in events if isinstance(event, RowsScored)
    ]
    assert scored == [(long, 0, [3, 1]), (short, 0, [2]), (long, 2, [2])]
    assert finished(events)[:2] == [short, long]
    assert scheduler.stats.forwards == 5 + 3
    scheduler.add(doomed := RequestHandle("a", score_passes=passes))
    scheduler.abort(doomed)
    assert scheduler.schedule(slots.now) == StepPlan()
    assert scheduler.waiting == 0


def test_pools_do_not_wait_for_one_another() -> None:
    scheduler, slots = Scheduler([PoolLimits(one_bucket(1)), PoolLimits(one_bucket(1))]), CountedSlots(0.01)
    narrow, wide = RequestHandle(rows=rows(3, 3)), RequestHandle(rows=rows(3), pool=1)
    scheduler.add(narrow)
    scheduler.add(wide)
    plan = scheduler.schedule(slots.now)
    assert [(one.pool, [row.row for row in one.insert]) for one in plan.pools] == [(0, [0]), (1, [1])]
    scheduler.update(slots.execute(plan), slots.now)
    assert finished(drain(scheduler, slots)) == [wide, narrow]


def test_without_admission_rows_in_slots_are_the_last() -> None:
    scheduler, slots = single(2, max_iterations=1), CountedSlots(0.01)
    scheduler.add(RequestHandle(rows=rows(2, 3, 3)))
    step(scheduler, slots)
    done = []
    while (plan := scheduler.schedule(slots.now, admit=False)).pools:
        events = scheduler.update(slots.execute(plan), slots.now)
        done += [event.index for event in events if isinstance(event, RowFinished)]
    assert done == [0, 1]
    assert (scheduler.running, scheduler.waiting) == (0, 1)


def test_plans_as_json() -> None:
    diffusion = DiffusionConfig(max_new_tokens=3, stop_token_ids=(1, 2), cache="dual", parallel="threshold")
    sampling = SamplingConfig(max_new_tokens=3, temperature=0.5, stop_token_ids=(4,))
    inserted = [Insertion(n, RowRequest([1, n], config, n)) for n, config in enumerate((diffusion, sampling))]
    plan = StepPlan(
        [PoolPlan(1, inserted, [BucketPlan(3, 2, 64, [None, 2], 3, True)])], ScorePass([[1]], [[2]], 0.5, 64, 4)
    )
    assert StepPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert StepPlan.from_json(json.loads(json.dumps(StepPlan().to_json()))) == StepPlan([])
