"""Runs ``launch.serve`` so that every row moves to another bucket before every step.

``python -m tests.launch.moving_worker ...`` takes the flags of ``launch.serve``. The costs of buckets are drawn at
random for each step, and no bucket is used twice in a row, so rows move even if that costs time.
"""

from __future__ import annotations

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


def moving() -> Any:
    """In this context, all rows of this process move before every step."""
    return mock.patch.object(scheduler, "assign", shuffle)


def main(values: flags.FlagValues) -> None:
    with moving():
        serve.main(values)


if __name__ == "__main__":
    run_launcher(main, serve.define_flags, __doc__ or "")
