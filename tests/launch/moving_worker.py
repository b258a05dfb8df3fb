"""Runs ``launch.serve`` so that every row moves to another bucket before every step, or before every N-th step.

``python -m tests.launch.moving_worker ...`` takes the flags of ``launch.serve`` and ``--move_every=N``. The costs of
buckets are drawn at random for each of these steps, and no bucket is used again, so rows move even if that costs time.
After the first step, programs that are compiled outside the background thread are reported on standard error, and at
the end the number of moves.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
from absl import flags

from launch import serve
from launch.process.startup import run_launcher
from runtime.execution import scheduler
from runtime.execution.assignment import Choice, Need, OpenBucket, assign
from runtime.execution.buckets import pack

# JAX's monitoring event for a compiled program, and the thread of runtime.execution.background.
_COMPILED = "/jax/core/compile/backend_compile_duration"
_COMPILER = "compiler"
# The beginning of a line about a program that was compiled outside this thread.
WAITED = "compiled while rows waited:"
# The beginning of the line with the number of moves of rows.
MOVED = "moves of rows:"


def shuffle(
    there: Sequence[OpenBucket], needs: Mapping[int, Need], choice: Choice, numbers: Iterator[int]
) -> list[OpenBucket]:
    """Replaces :func:`runtime.execution.assignment.assign`: each row enters a new bucket that holds it."""
    chance = random.Random(next(numbers))
    order = sorted(needs, key=lambda row: (-needs[row].wanted, chance.random()))
    prices = {bucket: chance.uniform(1.0, 4.0) * choice.price(bucket) for bucket in choice.buckets}
    groups = pack([needs[row].wanted for row in order], choice.buckets, prices.__getitem__)
    if sum(bucket.positions for bucket, _ in groups) > choice.most_positions:
        return assign(there, needs, choice, numbers)
    found = []
    for bucket, count in groups:
        one = OpenBucket(next(numbers), bucket)
        one.put(order[:count], choice.data)
        found.append(one)
        order = order[count:]
    return found


def moving(every: int = 1, steps: Steps | None = None) -> Any:
    """In this context, all rows of this process move before the first step and each ``every`` steps after it.

    Args:
      every: steps from one move to the next.
      steps: counts the steps, and the moves.
    """
    steps = steps or Steps()

    def one(
        there: Sequence[OpenBucket], needs: Mapping[int, Need], choice: Choice, numbers: Iterator[int]
    ) -> list[OpenBucket]:
        found = (shuffle if steps.count % every == 0 else assign)(there, needs, choice, numbers)
        steps.count += 1
        now = {row: bucket.number for bucket in found for row in bucket.rows}
        steps.moves += sum(now.get(row, bucket.number) != bucket.number for bucket in there for row in bucket.rows)
        return found

    return mock.patch.object(scheduler, "assign", one)


class Steps:
    """Counts steps and moves of the scheduler, and reports programs that are compiled while rows wait.

    Attributes:
      count: number of steps so far.
      moves: number of moves of rows to another bucket so far.
    """

    count = 0
    moves = 0

    def on_event(self, event: str, seconds: float, **_: Any) -> None:
        """Listener of JAX's monitoring."""
        if self.count and event == _COMPILED and threading.current_thread().name != _COMPILER:
            print(f"{WAITED} {seconds:.2f} s", file=sys.stderr, flush=True)


def define_flags(values: flags.FlagValues) -> None:
    serve.define_flags(values)
    flags.DEFINE_integer("move_every", 1, "Steps from one move of all rows to the next.", 1, flag_values=values)


def main(values: flags.FlagValues) -> None:
    steps = Steps()
    jax.monitoring.register_event_duration_secs_listener(steps.on_event)
    with moving(values.move_every, steps):
        serve.main(values)
    if steps.count:  # the other hosts have no scheduler
        print(f"{MOVED} {steps.moves}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
