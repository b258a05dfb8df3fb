"""Runs ``launch.serve`` so that every row moves to another bucket before every step, or before every N-th step.

``python -m tests.launch.moving_worker ...`` takes the flags of ``launch.serve`` and ``--move_every=N``. The costs of
buckets are drawn at random for each of these steps, and no bucket is used again, so rows move even if that costs time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from absl import flags

from launch import serve
from launch.process.startup import run_launcher
from runtime.execution import scheduler
from runtime.execution.assignment import Choice, Need, OpenBucket, assign
from runtime.execution.buckets import pack


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


def moving(every: int = 1) -> Any:
    """In this context, all rows of this process move before the first step and each ``every`` steps after it."""
    steps = itertools.count()

    def one(
        there: Sequence[OpenBucket], needs: Mapping[int, Need], choice: Choice, numbers: Iterator[int]
    ) -> list[OpenBucket]:
        return (assign if next(steps) % every else shuffle)(there, needs, choice, numbers)

    return mock.patch.object(scheduler, "assign", one)


def define_flags(values: flags.FlagValues) -> None:
    serve.define_flags(values)
    flags.DEFINE_integer("move_every", 1, "Steps from one move of all rows to the next.", 1, flag_values=values)


def main(values: flags.FlagValues) -> None:
    with moving(values.move_every):
        serve.main(values)


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
