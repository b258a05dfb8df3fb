"""Batches that are interrupted, on one host and on several: results equal those of an uninterrupted run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.faults import HostProcesses, names_host
from launch.batches.records import DIGEST, is_sealed
from runtime.execution.rows import row_seed
from tests.compilation import optimized
from tests.launch.small_batches import arguments, launch, results, write

SLOTS = 2


@pytest.fixture(scope="module", autouse=True)
def _optimized_programs() -> Iterator[None]:
    with optimized():
        yield


def some_prompts(path: Path, count: int) -> Path:
    """Write a file of prompts whose rows have different lengths."""
    lengths = np.random.default_rng(0).integers(1, 9, count)
    return write(
        path,
        [
            {"id": f"p{number}", "prompt": f"def f{number}(x):\n", "max_tokens": int(length), "steps": 8}
            for number, length in enumerate(lengths)
        ],
    )


def wait_for(condition: Callable[[], bool], processes: Callable[[], bool], limit: float = 180.0) -> None:
    """Wait until a condition is true or the processes have ended."""
    deadline = time.monotonic() + limit
    while not condition() and processes():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@dataclass
class Interrupted:
    """A batch that is started repeatedly, and interrupted each time.

    Attributes:
      begun: by id, how many times each row entered a slot.
      lost: number of rows that were in a slot at the end of a run but not in its results.
    """

    source: Path
    output: Path
    compiled: str
    prompts: int

    def __post_init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.lost = 0
        self._log = self.output.with_name("begun")
        self._of_seed = {row_seed(0, f"p{number}"): f"p{number}" for number in range(self.prompts)}

    def _start(self, *more: str) -> subprocess.Popen[str]:
        own = [f"--begun={self._log}", f"--slots={SLOTS}", *more]
        command = [sys.executable, "-m", "tests.launch.batch_worker"]
        return subprocess.Popen(
            [*command, *arguments(self.source, self.output, self.compiled, *own)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )

    def run(self, how: str, wanted: int, wait: float) -> None:
        """Start the batch, and interrupt it ``wait`` seconds after ``wanted`` new results.

        Args:
          how: ``kill`` (SIGKILL), ``drain`` (SIGTERM), ``full`` (the result file cannot grow), or ``early`` (SIGKILL
            ``wait`` seconds after the start, and no later than at the first new result).
          wanted: number of new results to wait for.
          wait: time to wait, in seconds.
        """
        before = {record["id"] for record in results(self.output)}
        self._log.write_text("")
        size = (self.output / "results.jsonl").stat().st_size if before else 0
        process = self._start(*([f"--largest_file={size + 500}"] if how == "full" else []))

        def running() -> bool:
            return process.poll() is None

        def written(count: int) -> bool:
            return len(results(self.output)) >= len(before) + count

        if how in ("kill", "drain"):
            wait_for(lambda: written(wanted), running)
            time.sleep(wait)
        if how == "early":
            end = time.monotonic() + wait
            wait_for(lambda: time.monotonic() >= end or written(1), running)
        if how != "full":
            process.send_signal(signal.SIGTERM if how == "drain" else signal.SIGKILL)
        _, err = process.communicate(timeout=180)
        assert process.returncode == {"drain": 42, "full": 2}.get(how, -signal.SIGKILL), err
        assert {"drain": "run the same command again", "full": "Results so far are intact"}.get(how, "") in err

        after = {record["id"] for record in results(self.output)}
        entered = [self._of_seed[int(line)] for line in self._log.read_text().splitlines()]
        assert before <= after
        assert len(after) < self.prompts, "it was interrupted"
        assert not before & set(entered), "what is there is not computed again"
        assert after - before <= set(entered)
        in_flight = len(entered) - len(after - before)
        assert in_flight <= (0 if how == "drain" else SLOTS)
        self.begun.update(entered)
        self.lost += in_flight


@pytest.mark.parametrize(
    ("ways", "prompts"),
    [
        (["kill", "full", "drain"], 24),
        pytest.param(
            ["kill", *random.Random(0).sample([*["kill"] * 29, *["drain"] * 5, *["full"] * 3, *["early"] * 5], 42)],
            400,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["short", "long"],
)
def test_kills_and_restarts(tmp_path: Path, compiled: str, ways: list[str], prompts: int) -> None:
    generator = random.Random(1)
    source, reference = some_prompts(tmp_path / "in.jsonl", prompts), tmp_path / "reference"
    # Interrupted runs use one device, the reference and the last run two: a batch may continue on another mesh.
    launch(source, reference, compiled, "--slots=2", "--mesh=data=2")
    interrupted = Interrupted(source, tmp_path / "out", compiled, prompts)
    for number, how in enumerate(ways):
        room = (prompts - len(results(interrupted.output))) // (len(ways) - number + 1)
        wait = generator.uniform(0.0, 5.0) if how == "early" else generator.uniform(0.0, 0.05)
        interrupted.run(how, generator.randint(1, max(1, room)), wait)
    there = len(results(interrupted.output))
    launch(source, interrupted.output, compiled, "--slots=2", "--mesh=data=2")
    assert (interrupted.output / "sorted.jsonl").read_bytes() == (reference / "sorted.jsonl").read_bytes()
    assert len(results(interrupted.output)) == prompts, "nothing twice"
    # Only rows that were in flight at the end of a run were computed again.
    begun = sum(interrupted.begun.values())
    assert begun == there + interrupted.lost
    assert interrupted.lost <= SLOTS * sum(how != "drain" for how in ways)
    if len(ways) > 10:
        assert interrupted.lost > 0, "no kill met a row in flight"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_several_hosts_write_what_one_does(tmp_path: Path, compiled: str, processes: int) -> None:
    """Several hosts write the same results as one, also after the loss of a host and after SIGTERM."""
    prompts = 60
    source, one, many = some_prompts(tmp_path / "in.jsonl", prompts), tmp_path / "one", tmp_path / "many"
    more = ("--mesh=data=2,tensor=2", f"--slots={SLOTS}", "--log_probabilities")
    launch(source, one, compiled, *more)
    command = [sys.executable, "-m", "launch.batch", *arguments(source, many, compiled, *more)]
    for how in ("lose", "drain", "end"):
        folder = tmp_path / how
        folder.mkdir()
        before = len(results(many))
        with HostProcesses([command] * processes, folder, devices=4 // processes) as hosts:
            if how != "end":
                wait_for(lambda before=before: len(results(many)) >= before + 3, hosts.running)
                hosts.send(1, signal.SIGKILL if how == "lose" else signal.SIGTERM)
            codes, err = hosts.wait(), hosts.text("err")
        if how == "lose":
            assert codes == [42, 137, *[42] * (processes - 2)], err
            assert all(names_host(log, 1) for number, log in enumerate(err) if number != 1)
        elif how == "drain":
            assert codes == [42] * processes, err
            assert "SIGTERM: finishing work in flight" in err[1]
            assert "run the same command again" in err[0]
        else:
            assert codes == [0] * processes, err
        assert (len(results(many)) == prompts) == (how == "end")
    for found, expected in zip(sorted_records(many), sorted_records(one), strict=True):
        assert found[0] == expected[0]
        np.testing.assert_allclose(found[1], expected[1], atol=2e-5)
    assert json.loads((many / "run.json").read_text()) == json.loads((one / "run.json").read_text())


def sorted_records(output: Path) -> list[tuple[dict[str, Any], list[float]]]:
    """Sort records, and return their log-probabilities separately: the last digit depends on the order of additions.

    Without their digests, which cover the log-probabilities.
    """
    lines = (output / "sorted.jsonl").read_bytes().splitlines(keepends=True)
    records = [json.loads(line) for line in lines]
    assert all(map(is_sealed, lines, records))
    for record in records:
        del record[DIGEST]
    return [(record, record.pop("log_probabilities")) for record in records]
