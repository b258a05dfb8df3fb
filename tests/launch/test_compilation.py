"""Compilation during serving: the most needed program comes first, and is used when every host has compiled it."""

from __future__ import annotations

import re
import threading
from collections import Counter
from typing import Any

import pytest

from launch.hosts.host import Host
from launch.serving.compilation import Compilation
from launch.serving.engine import HostStep, load_cached
from launch.serving.turns import Turns
from runtime import (
    Bucket,
    DiffusionConfig,
    Executor,
    Grid,
    PoolLimits,
    Programs,
    RequestHandle,
    RowRequest,
    Scheduler,
    StepPlan,
)
from runtime.execution.buckets import PassCost
from tests.launch.served import wait_for

BUCKETS = (Bucket(1, 128), Bucket(1, 64), Bucket(1, 32), Bucket(2, 64))


class FakePool:
    """A pool that has only a grid of buckets."""

    grid = Grid(2, 128, BUCKETS, PassCost(0.0, 64.0))


class FakeExecutor:
    """Simulates compilation: it waits for the gate, except for the first ``cached`` programs."""

    def __init__(self, cached: int = 0) -> None:
        """Create an executor with a closed gate."""
        self.cached_programs, self._cached = min(1, cached), cached
        self.pools = [FakePool()]
        self.warmed_up = {Programs(0, BUCKETS[0]): 2.5, Programs(None, Bucket(1, 128)): 1.0}
        self.later = [*(Programs(0, bucket) for bucket in BUCKETS[1:]), Programs(None, Bucket(1, 64))]
        self.gate = threading.Event()
        self.score_widths = [128]
        self.ran: list[Programs] = []

    def run_once(self, programs: Programs) -> None:
        self.ran.append(programs)

    def compile(self, programs: Programs) -> str:
        assert self.gate.wait(60)
        self._cached -= 1
        self.cached_programs += self._cached >= 0
        if programs.bucket == Bucket(1, 32):
            raise MemoryError("too little")
        return str(programs)

    def allow_scoring(self, width: int) -> None:
        self.score_widths.append(width)


@pytest.fixture
def executor() -> Executor:
    return FakeExecutor()  # type: ignore[return-value]


def test_the_most_wanted_first_and_used_when_every_host_has_it(executor: Executor) -> None:
    scheduler, said = Scheduler([PoolLimits(FakePool.grid)]), []
    compilation = Compilation(executor)
    compilation.restrict(scheduler)
    listed = compilation.list_programs()
    assert "compile cache: mode 0: 1 x 128 in 2.5 s, scores: 1 x 128 in 1.0 s; compiled while" in listed
    assert listed.endswith("requests are served: mode 0: 1 x 64, mode 0: 1 x 32, mode 0: 2 x 64, scores: 1 x 64")
    scheduler.demand(0).update(Counter({Bucket(2, 64): 3, Bucket(1, 32): 1}))
    wanted = []
    while (chosen := compilation.choose(scheduler)) is not None or compilation.remaining:
        if chosen is not None:
            wanted.append(chosen)
            executor.gate.clear()  # type: ignore[attr-defined]
            compilation.begin(chosen)
            assert compilation.choose(scheduler) is None, "one at a time, so that what is wanted later counts"
        executor.gate.set()  # type: ignore[attr-defined]
        wait_for(lambda: len(compilation.report) == len(wanted))
        # Another host has not compiled it yet.
        compilation.settle([compilation.report, compilation.report[:-1]], scheduler, said.append)
        assert compilation.remaining == 5 - len(wanted)
        compilation.settle([compilation.report] * 2, scheduler, said.append)
        assert compilation.remaining == 4 - len(wanted)
    assert [one.bucket for one in wanted] == [Bucket(2, 64), Bucket(1, 32), Bucket(1, 64), Bucket(1, 64)]
    assert wanted[-1].pool is None
    assert executor.score_widths == [128, 64]
    failed, finished = said
    assert "failed on host 0, host 1: mode 0: 1 x 32: MemoryError: too little" in failed
    assert finished.startswith("all programs are compiled; background compilation took ")
    assert re.search(r"took \d+ s: mode 0: 2 x 64 in \d+\.\d s, .*scores: 1 x 64 in \d+\.\d s$", finished)
    compilation.stop(60)


@pytest.mark.parametrize(("own", "other", "loaded"), [(0, True, 0), (2, True, 3), (2, False, 0), (9, True, 4)])
def test_what_is_cached_is_loaded_before_requests_come(own: int, other: bool, loaded: int) -> None:
    executor: Any = FakeExecutor(own)
    executor.gate.set()
    scheduler, compilation = Scheduler([PoolLimits(FakePool.grid)]), Compilation(executor)

    class TwoHosts(Turns):
        def gather(self, value: Any) -> list[Any]:
            return [value, other if value is True else value]

    compilation.restrict(scheduler)
    reports = load_cached(compilation, TwoHosts(Host()))
    # The first program that is not in the cache ends the loading; it is compiled.
    assert list(map(len, reports)) == [loaded, loaded]
    # Each runs once, except for the one whose compilation fails.
    assert executor.ran == [one for one in FakeExecutor().later[:loaded] if one.bucket != Bucket(1, 32)]
    said: list[str] = []
    compilation.settle(reports, scheduler, said.append)
    assert compilation.remaining == 4 - loaded
    # What is compiled before the server is ready is in the list alone.
    assert not [one for one in said if one.startswith("all programs")]
    assert len(re.findall(r" in \d+\.\d s\b", compilation.list_programs())) == 2 + loaded
    scheduler.add(RequestHandle(rows=[RowRequest([1] * 40, DiffusionConfig(max_new_tokens=8), 0)]))
    [bucket] = scheduler.schedule(0.0).pools[0].buckets
    assert bucket.width == (64 if loaded else 128)
    compilation.stop(60)


def test_hosts_with_different_programs(executor: Executor) -> None:
    scheduler, compilation = Scheduler([PoolLimits(FakePool.grid)]), Compilation(executor)
    executor.gate.set()  # type: ignore[attr-defined]
    compilation.begin(Programs(0, Bucket(1, 64)))
    wait_for(lambda: len(compilation.report) == 1)
    with pytest.raises(RuntimeError, match="different programs: mode 0: 1 x 64"):
        compilation.settle([compilation.report, ["another"]], scheduler, print)
    compilation.stop(60)


def test_steps_as_json() -> None:
    for programs in (None, Programs(0, Bucket(2, 64)), Programs(None, Bucket(1, 64))):
        step = HostStep(StepPlan(), programs, report=True)
        assert HostStep.from_json(step.to_json()) == step
