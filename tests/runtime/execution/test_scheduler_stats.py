"""What the scheduler counts, with real rows: steps whose tokens are not in the result are steps too."""

from __future__ import annotations

from pathlib import Path

import jax

from runtime import (
    DiffusionConfig,
    Engine,
    Executor,
    PoolShape,
    RequestHandle,
    RowFinished,
    RowRequest,
    Scheduler,
    SchedulerPolicy,
    with_model_blocks,
)
from tests.runtime.models.test_dreamon import lively_folder


def test_steps_whose_tokens_are_not_in_the_result_are_counted(tmp_path: Path) -> None:
    """A canvas that grows replaces a mask by two, and one that shrinks drops a position, in a pass of its own."""
    engine = Engine.load(lively_folder(tmp_path), "tensor=1", devices=jax.devices()[:1])
    config = with_model_blocks(DiffusionConfig(9, steps=9, algorithm="entropy", initial_masks=3), engine.config)
    executor = Executor(engine.runner, [PoolShape(config, 64, 2, max_programs=2)])
    scheduler = Scheduler([pool.limits for pool in executor.pools], SchedulerPolicy(max_iterations=5))
    for number in range(5):
        scheduler.add(RequestHandle(rows=[RowRequest([5 + number, 6, 7], config, number)]))
    steps = passes = 0
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule(0.0)
        outcome = executor.execute(plan)
        for planned, made in zip(plan.pools, outcome.pools, strict=True):
            rows = {one.number: sum(row is not None for row in one.slots) for one in planned.buckets}
            passes += sum(run.iterations * rows[run.number] for run in made.runs)
        steps += sum(event.steps for event in scheduler.update(outcome, 0.0) if isinstance(event, RowFinished))
    assert steps == passes == scheduler.stats.busy_iterations
    assert steps > scheduler.stats.tokens
    assert scheduler.stats.useful_share <= 1
