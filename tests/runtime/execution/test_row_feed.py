"""Batches of rows that are all known in advance, simulated without devices and with a simulated clock."""

from __future__ import annotations

import pytest

from runtime import (
    Bucket,
    Grid,
    PoolLimits,
    RequestHandle,
    RowFinished,
    RowRequest,
    SamplingConfig,
    Scheduler,
    SchedulerPolicy,
)
from runtime.execution import row_feed
from runtime.execution.buckets import PassCost, all_buckets
from runtime.execution.row_feed import RowFeed
from runtime.execution.selection import RowClass, Work, divide
from tests.runtime.execution.counted_slots import CountedSlots
from tests.runtime.execution.test_policy import log_normal

COST = PassCost(0.0, 64.0)
SLOTS, CANVAS = 32, 512


def run(requests: list[RowRequest], classes: list[RowClass], slots: CountedSlots) -> tuple[Scheduler, list[int]]:
    """Run rows as the offline scheduler does; return the numbers of the rows in the order in which they ended."""
    buckets = tuple(dict.fromkeys((Bucket(SLOTS, CANVAS), *(one.bucket for one in classes))))
    policy = SchedulerPolicy(step_seconds=None, first_tokens=False, chunks=None, move_gain=0.03)
    scheduler = Scheduler([PoolLimits(Grid(SLOTS, CANVAS, buckets, COST))], policy)
    feed = RowFeed(classes, lambda numbers: RequestHandle(rows=[requests[number] for number in numbers]))
    found: list[int] = []
    while True:
        feed.top_up(scheduler, SLOTS)
        if not scheduler.waiting and not scheduler.running:
            return scheduler, found
        scheduler.policy = SchedulerPolicy(**(vars(policy) | {"most_rows": feed.most_rows}))
        plan = scheduler.schedule(slots.now)
        events = scheduler.update(slots.execute(plan), slots.now)
        found += [feed.finish(event) for event in events if isinstance(event, RowFinished)]


def workload(lengths: list[tuple[int, int]]) -> tuple[list[RowRequest], list[Work]]:
    """Requests with these numbers of prompt tokens and new tokens, and their work."""
    requests = [RowRequest([7] * prompt, SamplingConfig(max_new_tokens=new), 0) for prompt, new in lengths]
    return requests, [Work(prompt + new, new) for prompt, new in lengths]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("compiling", "most"), [(0.0, 1.15), (8e3, 1.18), (3.2e4, 1.25)])
def test_a_batch_of_mixed_length_computes_little_padding(compiling: float, most: float, seed: int) -> None:
    """The lengths are those of benchmarks.serve; a program costs nothing, is read from the cache, or is compiled."""
    requests, work = workload(log_normal(200, seed))
    classes = divide(work, all_buckets(SLOTS, CANVAS, data=1, step=16), COST, lambda bucket: compiling)
    seconds = 40e-6
    slots = CountedSlots(64 * seconds, seconds)
    start = slots.now
    scheduler, found = run(requests, classes, slots)
    assert sorted(found) == list(range(200))
    stats, useful = scheduler.stats, sum(row.length * row.iterations for row in work)
    assert stats.useful_positions == useful
    assert stats.computed_positions <= most * useful
    # Beside padding, the fixed cost of a pass counts: small buckets are no way out.
    assert slots.now - start <= 1.1 * most * useful * seconds
    # One bucket for all rows, and one per width with all slots, compute more.
    whole, _ = run(requests, [RowClass(Bucket(SLOTS, CANVAS), list(range(200)))], CountedSlots(0.0))
    assert whole.stats.computed_positions > 2.5 * stats.computed_positions


def test_as_many_rows_run_as_the_bucket_of_their_class_holds() -> None:
    requests, _ = workload([(100, 50), (100, 20), (10, 9), (10, 9), (10, 9), (10, 4)])
    classes = [RowClass(Bucket(1, 256), [0, 1]), RowClass(Bucket(2, 64), [2, 3, 4, 5])]
    slots = CountedSlots(0.01)
    scheduler, found = run(requests, classes, slots)
    assert found == [0, 1, 2, 3, 5, 4]
    shapes = [
        [(one.rows, one.width, sum(row is not None for row in one.slots)) for one in p.buckets] for p in slots.plans
    ]
    assert [shape for step, shape in enumerate(shapes) if shape not in shapes[:step]] == [
        [(1, 256, 1)],
        [(2, 64, 2)],
        [(2, 64, 1)],
    ]
    assert scheduler.stats.moves == 0


def test_rows_of_the_next_class_take_slots_that_are_free() -> None:
    requests, _ = workload([(100, 50), (100, 10), *[(10, 10)] * 6])
    classes = [RowClass(Bucket(2, 256), [0, 1]), RowClass(Bucket(4, 64), [2, 3, 4, 5, 6, 7])]
    slots = CountedSlots(0.01)
    scheduler, found = run(requests, classes, slots)
    # The second slot is never free while the long row runs: four of the short rows run beside it, one after another.
    assert found == [1, 2, 3, 4, 0, 5, 6, 7]
    assert scheduler.stats.slot_iterations == 2 * 50 + 4 * 10


@pytest.mark.parametrize("together", [1, 2, 100])
def test_rows_that_are_left_out_and_queued_in_parts(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_feed, "QUEUED_ROWS", together)
    requests, _ = workload([(10, 3)] * 7)
    made: list[list[int]] = []

    def handle(numbers: list[int]) -> RequestHandle:
        made.append(list(numbers))
        return RequestHandle(rows=[requests[number] for number in numbers])

    classes = [RowClass(Bucket(2, 64), [6, 2, 4]), RowClass(Bucket(4, 64), [0, 1, 3, 5])]
    feed = RowFeed(classes, handle, skip={2, 0, 5})  # type: ignore[arg-type]
    assert len(feed) == 4
    scheduler = Scheduler([PoolLimits(Grid(4, 64, (Bucket(4, 64),), COST))], SchedulerPolicy(step_seconds=None))
    feed.top_up(scheduler, 2)
    assert scheduler.waiting == min(4, max(2, together))
    feed.top_up(scheduler, 100)
    assert [number for part in made for number in part] == [6, 4, 1, 3]
    assert max(map(len, made)) <= together
    assert feed.most_rows == 2
    slots = CountedSlots(0.01)
    ended = []
    while scheduler.waiting or scheduler.running:
        events = scheduler.update(slots.execute(scheduler.schedule(slots.now)), slots.now)
        ended += [feed.finish(event) for event in events if isinstance(event, RowFinished)]
    assert ended == [6, 4, 1, 3]
    assert feed.most_rows == 4
