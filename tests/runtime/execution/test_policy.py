"""The scheduling policy over many buckets, simulated without devices and with a simulated clock."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from runtime import (
    Bucket,
    CanvasChanged,
    PoolLimits,
    RequestFinished,
    RequestHandle,
    RowRequest,
    SamplingConfig,
    Scheduler,
    SchedulerPolicy,
    StepOutcome,
    StepPlan,
)
from runtime.execution import policy
from runtime.execution.buckets import Grid, PassCost, make_grid
from tests.runtime.execution.counted_slots import WIDTH, CountedSlots, drain, finished, one_bucket, rows, step


def laddered(slots: int = 8, **limits: object) -> Scheduler:
    """A scheduler over a grid of many buckets, with a cost model for passes."""
    grid = make_grid(slots, WIDTH, PassCost(0.0, 64.0), data=1, step=32)
    return Scheduler([PoolLimits(grid)], SchedulerPolicy(**limits))  # type: ignore[arg-type]


def shapes(plan: StepPlan) -> list[tuple[int, int]]:
    return sorted((one.rows, one.width) for pool in plan.pools for one in pool.buckets)


def test_the_policy_fits_on_one_page() -> None:
    """A page of A4 holds 90 lines of 120 characters, at 8 points.

    Moves of rows, turns of owners and deadlines are in `assignment.py`, `fair_queue.py` and `scheduler.py`.
    """
    assert policy.__file__ is not None
    assert len(Path(policy.__file__).read_text().splitlines()) <= 90


def test_a_lone_row_is_computed_alone_and_at_its_length() -> None:
    scheduler, slots = laddered(), CountedSlots(0.0, 1e-5)
    scheduler.add(RequestHandle(rows=rows(46)))
    plan = scheduler.schedule(slots.now)
    assert shapes(plan) == [(1, 64)]
    scheduler.update(slots.execute(plan), slots.now)
    drain(scheduler, slots)
    assert scheduler.stats.useful_share == 48 / 64
    assert scheduler.stats.utilisation == 1.0


def test_a_row_that_has_shown_nothing_is_looked_at_after_its_first_iteration() -> None:
    scheduler, slots = laddered(), CountedSlots(0.0001)
    for _ in range(3):
        # Also after idle steps and steps without iterations, which do not tell how long an iteration takes.
        step(scheduler, slots)
        scheduler.add(RequestHandle(rows=rows(40), stream=True))
        plan = scheduler.schedule(slots.now)
        assert [one.iterations for one in plan.pools[0].buckets] == [1]
        events = scheduler.update(slots.execute(plan), slots.now)
        assert len([event for event in events if isinstance(event, CanvasChanged)]) == 1
        step(scheduler, slots)
        assert slots.plans[-1].buckets[0].iterations > 1, "it has shown something"
        drain(scheduler, slots)


def test_rows_move_where_a_pass_becomes_cheaper_and_only_there() -> None:
    scheduler, slots = laddered(max_iterations=1), CountedSlots(0.01)
    scheduler.add(RequestHandle(rows=rows(10, 11, 12, 30, seed=1)))
    step(scheduler, slots)
    assert [(one.rows, one.width) for one in slots.plans[-1].buckets] == [(4, 32)]
    (number,) = (one.number for one in slots.plans[-1].buckets)
    for _ in range(10):
        step(scheduler, slots)
    assert [one.number for one in slots.plans[-1].buckets] == [number], "three rows of four stay where they are"
    assert scheduler.stats.moves == 0
    for _ in range(2):
        step(scheduler, slots)
    assert [(one.rows, one.width) for one in slots.plans[-1].buckets] == [(1, 32)]
    assert scheduler.stats.moves == 3, "two of them into a bucket of two, and one of those into one of its own"
    drain(scheduler, slots)


def test_rows_that_move_for_less_compute_fewer_positions() -> None:
    random = np.random.default_rng(0)
    lengths = sorted((int(length) for length in np.exp(random.normal(4.5, 0.5, 100)).clip(10, 500)), reverse=True)
    computed, moves = {}, {}
    for gain in (0.1, 0.03):
        limits = {"max_iterations": 16, "step_seconds": None, "first_tokens": False, "move_gain": gain}
        scheduler, slots = laddered(32, **limits), CountedSlots(0.01)
        scheduler.add(RequestHandle(rows=rows(*lengths)))
        drain(scheduler, slots)
        assert scheduler.stats.rows == len(lengths)
        computed[gain], moves[gain] = scheduler.stats.computed_positions, scheduler.stats.moves
    assert computed[0.03] < computed[0.1]
    assert moves[0.03] > moves[0.1]


def test_buckets_whose_programs_are_not_there_are_only_wanted() -> None:
    scheduler, slots = laddered(), CountedSlots(0.01)
    widest = Bucket(1, WIDTH)
    scheduler.restrict(0, [widest])
    scheduler.add(RequestHandle(rows=rows(46, 100)))
    step(scheduler, slots)
    assert [(one.rows, one.width) for one in slots.plans[-1].buckets] == [(1, WIDTH)] * 2
    assert set(scheduler.demand(0)) == {Bucket(1, 64), Bucket(1, 128)}
    scheduler.restrict(0, [widest, Bucket(1, 128)])
    step(scheduler, slots)
    assert [(one.rows, one.width) for one in slots.plans[-1].buckets] == [(1, 128)] * 2
    assert scheduler.stats.moves == 2
    drain(scheduler, slots)


def test_caches_of_all_buckets_stay_within_what_was_counted() -> None:
    grid = make_grid(4, WIDTH, PassCost(0.0, 200.0), data=1, step=32)
    scheduler = Scheduler([PoolLimits(grid, 4 * WIDTH)], SchedulerPolicy(max_iterations=2))
    slots, random = CountedSlots(0.0, 1e-5), np.random.default_rng(0)
    before = 0
    for _ in range(300):
        if random.random() < 0.5:
            scheduler.add(RequestHandle(rows=rows(int(random.integers(1, WIDTH - 2)))))
        plan = scheduler.schedule(slots.now)
        if plan.pools:
            now = sum(one.rows * one.width for one in plan.pools[0].buckets)
            assert now <= 4 * WIDTH
            assert now + before <= 2 * 4 * WIDTH, "while rows move both are there"
            before = now
        scheduler.update(slots.execute(plan), slots.now)


# ---- the policy, simulated ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Arrival:
    """A request and its arrival time."""

    at: float
    handle: RequestHandle


def simulate(scheduler: Scheduler, slots: CountedSlots, arrivals: list[Arrival]) -> dict[RequestHandle, float]:
    """Simulate the requests, and return the seconds from each one's arrival to its end."""
    waiting, latency, start = sorted(arrivals, key=lambda one: one.at), {}, slots.now
    while waiting or scheduler.waiting or scheduler.running:
        if not (scheduler.waiting or scheduler.running):
            slots.now = max(slots.now, start + waiting[0].at)
        while waiting and start + waiting[0].at <= slots.now:
            one = waiting.pop(0)
            one.handle.arrived = start + one.at
            scheduler.add(one.handle)
        for event in step(scheduler, slots):
            if isinstance(event, RequestFinished):
                latency[event.handle] = event.seconds
    return latency


def log_normal(count: int, seed: int) -> list[tuple[int, int]]:
    """Prompts of 20 to 200 tokens and answers of 8 to 256."""
    random = np.random.default_rng(seed)

    def draw(low: int, high: int) -> list[int]:
        middle, spread = (np.log(low) + np.log(high)) / 2, (np.log(high) - np.log(low)) / 4
        return [int(value) for value in np.clip(np.exp(random.normal(middle, spread, count)), low, high)]

    return list(zip(draw(20, 200), draw(8, 256), strict=True))


def poisson(load: float, seconds_per_position: float, count: int = 300) -> list[Arrival]:
    """Poisson arrivals that use a given fraction of the capacity."""
    lengths = log_normal(count, 1)
    work = [(prompt + new) * new for prompt, new in lengths]
    gap = np.mean(work) * seconds_per_position / load
    times = np.cumsum(np.random.default_rng(2).exponential(gap, count))
    requests = [RowRequest([7] * prompt, SamplingConfig(max_new_tokens=new), 0) for prompt, new in lengths]
    return [Arrival(float(at), RequestHandle(rows=[one])) for at, one in zip(times, requests, strict=True)]


def test_at_sixty_percent_load_four_in_five_positions_are_of_use() -> None:
    scheduler, slots = laddered(), CountedSlots(0.0, 6e-5)
    latency = simulate(scheduler, slots, poisson(0.6, 6e-5))
    assert len(latency) == 300
    assert scheduler.stats.useful_share >= 0.8


def test_a_long_canvas_does_not_starve_short_ones() -> None:
    per_position = 1e-4
    scheduler, slots = laddered(slots=2), CountedSlots(64 * per_position, per_position)
    # Something has run before, so the time of a pass is known.
    simulate(scheduler, slots, [Arrival(0.0, RequestHandle(rows=rows(30)))])
    long = [Arrival(0.0, RequestHandle(rows=rows(500))) for _ in range(6)]
    short = [Arrival(0.5 + 2 * number, RequestHandle(rows=rows(30))) for number in range(10)]
    latency = simulate(scheduler, slots, [*long, *short])
    alone = 500 * (WIDTH + 64) * per_position
    assert len(latency) == 16
    # Two long rows occupy the slots when the short ones arrive; the other four long rows start after the short ones.
    assert max(latency[one.handle] for one in short) < 2.2 * alone
    assert sum(latency[one.handle] > 2.2 * alone for one in long) == 4
    # A short row gets half of the device time while a long row runs in another slot.
    scheduler, slots = laddered(slots=8), CountedSlots(64 * per_position, per_position)
    latency = simulate(
        scheduler, slots, [Arrival(at, RequestHandle(rows=rows(new))) for at, new in ((0, 500), (1, 30))]
    )
    assert min(latency.values()) < 3 * 30 * (32 + 64) * per_position


@pytest.mark.parametrize("estimated", [True, False])
def test_the_first_burst_is_ordered_by_estimates(estimated: bool) -> None:
    """Nothing has been measured yet: without an estimate, rows are in the order of their arrival."""
    cost = PassCost(0.0, 64.0, unit_seconds=1e-4 if estimated else 0.0)
    scheduler = Scheduler([PoolLimits(make_grid(1, WIDTH, cost, data=1, step=32))])
    long, short, middle = handles = [RequestHandle(rows=rows(new)) for new in (400, 30, 100)]
    for handle in handles:
        scheduler.add(handle)
    order = finished(drain(scheduler, CountedSlots(0.0, 1e-4)))
    assert order == ([short, middle, long] if estimated else handles)


@pytest.mark.parametrize("chunk", [0, 128])
def test_a_long_prompt_counts_in_the_order(chunk: int) -> None:
    """A row of few new tokens is not short if its prompt must be read first."""
    cost = PassCost(0.0, 8.0, window=1.0, unit_seconds=1e-4)
    scheduler = Scheduler([PoolLimits(make_grid(1, WIDTH, cost, data=1, step=32), prompt_chunk=chunk)])
    long_prompt = RequestHandle(rows=[RowRequest([7] * 400, SamplingConfig(max_new_tokens=8), 0)])
    long_answer = RequestHandle(rows=rows(20))
    for handle in (long_prompt, long_answer):
        scheduler.add(handle)
    order = finished(drain(scheduler, CountedSlots(0.0, 1e-4)))
    # 8 iterations of 9 units, and 4 chunks of 136; 20 iterations of 9 units, and one chunk.
    assert order == ([long_answer, long_prompt] if chunk else [long_prompt, long_answer])


def test_new_rows_do_not_starve_old_ones_of_another_bucket() -> None:
    """An iteration takes longer than a step, and one mode always has a row that has shown nothing yet."""
    pools = [PoolLimits(one_bucket(1)), PoolLimits(one_bucket(1))]
    scheduler, slots = Scheduler(pools, SchedulerPolicy()), CountedSlots(0.1)
    scheduler.add(long := RequestHandle(rows=rows(40)))
    scheduler.add(RequestHandle(rows=rows(*[1] * 100), pool=1))
    done: list[RequestHandle] = []
    steps = 0
    while long not in done:
        done += finished(step(scheduler, slots))
        steps += 1
        assert steps <= 2 * 40 + 10, "it gets every other step"
    assert scheduler.waiting > 40, "as the new ones do"


def test_a_new_request_waits_about_a_step() -> None:
    scheduler, slots = laddered(), CountedSlots(0.0, 1e-4)
    scheduler.add(RequestHandle(rows=rows(*[200] * 7)))
    for _ in range(20):
        step(scheduler, slots)
    for _ in range(10):
        before = slots.now
        step(scheduler, slots)
        # A step takes at least as long as a pass of the widest bucket.
        assert slots.now - before <= max(SchedulerPolicy().step_seconds or 0, 1e-4 * 256) * 1.01
    scheduler.add(late := RequestHandle(rows=rows(4), stream=True))
    seen = [event for _ in range(2) for event in step(scheduler, slots) if isinstance(event, CanvasChanged)]
    assert [event.handle for event in seen] == [late] * len(seen)
    assert seen


def delayed(outcome: StepOutcome, seconds: float, bucket: int, *, prefill: bool) -> StepOutcome:
    """Add ``seconds`` to what one bucket's iterations, or its reading of prompts, took."""
    (pool,) = outcome.pools
    name = "prefill_seconds" if prefill else "seconds"
    runs = [
        dataclasses.replace(run, **{name: getattr(run, name) + seconds}) if run.number == bucket else run  # type: ignore[arg-type]
        for run in pool.runs
    ]
    return dataclasses.replace(outcome, pools=[dataclasses.replace(pool, runs=runs)])


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("seconds", [0.005, 0.06], ids=["short iterations", "iterations longer than a step"])
def test_a_pause_of_the_machine_is_no_time_that_rows_received(seconds: float, prefill: bool) -> None:
    """A step of a long row's bucket takes half a minute once, and the row goes on beside a bucket of short rows."""
    grid = Grid(8, WIDTH, (Bucket(1, WIDTH), Bucket(8, 128)), PassCost(0.0, 0.0))
    scheduler, slots = Scheduler([PoolLimits(grid)]), CountedSlots(seconds)
    scheduler.add(RequestHandle("long", rows(500)))
    scheduler.add(RequestHandle("short", rows(*[100] * 500)))

    def next_step(pause: float = 0.0) -> int:
        """Take a step, and return the iterations of the long row in it."""
        plan = scheduler.schedule(slots.now)
        outcome = slots.execute(plan)
        (wide,) = (one for one in plan.pools[0].buckets if one.width == WIDTH)
        scheduler.update(delayed(outcome, pause, wide.number, prefill=prefill), slots.now)
        return next((run.iterations for run in outcome.pools[0].runs if run.number == wide.number), 0)

    for _ in range(10):
        next_step()
    usual = sum(next_step() for _ in range(20))
    assert usual
    while not next_step(30.0):
        pass
    # The pause counts as a few steps, of which the 7 short rows get one each.
    for _ in range(40):
        next_step()
    assert sum(next_step() for _ in range(20)) > usual / 2
