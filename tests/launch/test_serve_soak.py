"""A server under long load, overload and shutdown: it leaks nothing, answers every request and cuts no stream."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jax
import pytest
from absl import flags

from benchmarks.faults import HostProcesses
from benchmarks.load import Ask, Client, open_loop
from benchmarks.overload import overload
from benchmarks.serve import __main__ as serve
from benchmarks.serve.processes import metric
from benchmarks.serve.workload import SIZES
from launch.serving.limits import Limits
from runtime import DiffusionConfig, Engine
from tests.compilation import optimized
from tests.launch.moving_worker import MOVED, WAITED, moving
from tests.launch.served import PATIENCE, Served, served, wait_for
from tests.launch.test_serve_processes import started, streams
from tests.launch.tiny import write_tiny_checkpoint

CONFIG = DiffusionConfig.published(16, 0.8)
DUAL = {"cache": "dual", "block_length": 8, "parallel": "threshold"}
PROMPT = "def is_even(number):\n"
PLAIN = 8
# Every third kind of request has a stop string from the middle of its text.
STOPPED = 3
QUEUE = 16
# Bytes by which a host may grow over twenty requests: buffers that later requests use again.
MEMORY_OF_A_MOMENT = 64 << 20


class GoneError(Exception):
    """The client disconnects."""


@pytest.fixture(scope="module", autouse=True)
def _optimized_programs() -> Iterator[None]:
    with optimized():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder, "tensor=1", devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def there(engine: Engine) -> Iterator[Served]:
    with moving(), served(engine, CONFIG, [CONFIG.replace(**DUAL)], slots=4, programs=3) as found:
        yield found


class Asked:
    """Different requests, simple ones first, with the texts that the engine generates for them offline."""

    def __init__(self, engine: Engine, kinds: int) -> None:
        self._engine, self.stopped = engine, 0
        self._made = [self._make(number) for number in range(kinds)]

    def draw(self, chance: random.Random) -> tuple[dict[str, Any], list[str]]:
        return chance.choice(self._made)

    def _make(self, number: int) -> tuple[dict[str, Any], list[str]]:
        chance, plain = random.Random(number), number < PLAIN
        # The lengths are log-uniform: most answers are short, because the test sends ten thousand requests.
        tokens, temperature = int(41 ** chance.random()), 0.5 if plain else chance.choice([0.0, 0.5, 1.0])
        prompt, samples = chance.choice([PROMPT, "import os\n", "x"]), 1 if plain else chance.choice([1, 1, 3])
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": temperature, "seed": number, "n": samples}
        body |= {"stream": True} if number % 2 else {}
        more = {"steps": chance.randint(1, 20)} if plain or number % 3 else DUAL
        config = {"steps": tokens, "max_new_tokens": tokens} | more
        offline = CONFIG.replace(**config, temperature=temperature, seed=number)
        texts = [one.text for one in self._engine.generate([prompt], offline, num_return_sequences=samples)]
        if number % STOPPED == 0 and (middle := len(texts[0]) // 2):
            body["stop"] = [texts[0][middle : middle + 2]]
            stopped = self._engine.generate([prompt], offline, num_return_sequences=samples, stop=body["stop"])
            assert len(stopped[0].text) <= middle
            texts = [one.text for one in stopped]
            self.stopped += 1
        return body | more, texts


async def ask(client: httpx.AsyncClient, body: dict[str, Any], leave: bool = False) -> list[str]:
    """Return the texts of an answer, streamed or not. With ``leave``, disconnect after the first text."""
    texts = [""] * body["n"]
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if data and data != "[DONE]":
                for choice in json.loads(data)["choices"]:
                    texts[choice["index"]] += choice["text"]
                if leave:
                    raise GoneError
    return texts


async def soak(url: str, asked: Asked, count: int, seed: int, users: int = 12) -> tuple[int, int]:
    """Send requests of users who often disconnect. Return the numbers of answered and of cancelled requests."""
    chance, outcomes = random.Random(seed), [0, 0]
    left = iter(range(count))
    # While programs are compiled on a busy machine, an answer may take longer than a minute.
    most = 5 * PATIENCE
    async with httpx.AsyncClient(base_url=url, timeout=most) as client:

        async def user() -> None:
            for _ in left:
                body, expected = asked.draw(chance)
                patience, leave = chance.choice([(chance.uniform(0, 0.3), False), (most, True), (most, False)])
                try:
                    async with asyncio.timeout(patience):
                        assert await ask(client, body, leave) == expected
                    outcomes[0] += 1
                except (TimeoutError, GoneError):
                    assert leave or patience < most, f"not answered within {most} s: {body}"
                    outcomes[1] += 1

        await asyncio.gather(*[user() for _ in range(users)])
    return outcomes[0], outcomes[1]


def settled(found: Served) -> None:
    """Wait until no request is left, and check that all slots are free."""
    wait_for(lambda: found.metric("num_requests_running") + found.metric("num_requests_waiting") == 0)
    scheduler, executor = found.server.serving.scheduler, found.server.serving.executor
    assert scheduler is not None
    assert not scheduler.unfinished
    assert not scheduler.running
    assert executor is not None
    assert not any(pool.held for pool in executor.pools)


def group_of(process: Path) -> int | None:
    """Return the process group of a folder in /proc; None if the process has ended."""
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[2])
    except OSError:
        return None


class Hosts:
    """A server on two hosts: two processes of this machine that share a mesh. The first one serves HTTP."""

    def __init__(self, processes: HostProcesses) -> None:
        self.processes = processes
        said = re.compile(r"serving demo on (http://[\d.:]+)")
        wait_for(lambda: said.search(processes.text("err")[0]) is not None or not processes.running(), 4 * PATIENCE)
        found = said.search(processes.text("err")[0])
        assert found is not None, processes.text("err")
        self.url = found[1]

    def metric(self, name: str) -> float:
        return metric(self.url, name)

    def settled(self) -> None:
        """Wait until no request is left."""
        wait_for(lambda: self.metric("num_requests_running") + self.metric("num_requests_waiting") == 0)

    def resources(self) -> list[tuple[int, int, int]]:
        """Return memory in bytes, open files and threads of each host, summed over its supervisor and its worker."""
        found = []
        for group in self.processes.groups:
            own = [one for one in Path("/proc").glob("[0-9]*") if group_of(one) == group]
            found.append(
                (
                    sum(int((one / "statm").read_text().split()[1]) for one in own) * os.sysconf("SC_PAGE_SIZE"),
                    sum(len(list((one / "fd").iterdir())) for one in own),
                    sum(len(list((one / "task").iterdir())) for one in own),
                )
            )
        return found

    def end(self) -> int:
        """Stop the server, check that both hosts exit with 0, and return how often rows moved to another bucket."""
        self.processes.send(0, signal.SIGTERM)
        assert self.processes.wait(PATIENCE) == [0, 0], self.processes.text("err")
        moves = re.search(rf"^{MOVED} (\d+)$", self.processes.text("err")[0], re.MULTILINE)
        assert moves is not None, self.processes.text("err")
        return int(moves[1])


@contextmanager
def two_hosts(checkpoint: Path, logs: Path, *more: str) -> Iterator[Hosts]:
    """Run a server on two hosts with one device each. All its rows move before every step, if no flag differs."""
    command = [sys.executable, "-m", "tests.launch.moving_worker", f"--checkpoint={checkpoint}"]
    command += [
        "--served_model_name=demo",
        "--port=0",
        "--mesh=data=2",
        "--canvas=128",
        "--slots=4",
        "--max_new_tokens=16",
    ]
    command += [f"--mode={','.join(f'{name}={value}' for name, value in DUAL.items())}", *more]
    with HostProcesses([command] * 2, logs) as processes:
        yield Hosts(processes)


def test_requests_that_are_cancelled_leave_nothing(there: Served) -> None:
    asked = Asked(there.engine, PLAIN)
    assert asked.stopped >= 2
    done, cancelled = asyncio.run(soak(there.url, asked, 60, seed=1))
    assert done + cancelled == 60
    assert done > 20
    assert cancelled > 5
    settled(there)
    scheduler = there.server.serving.scheduler
    assert scheduler is not None
    assert scheduler.stats.moves > 100


def test_the_benchmark_of_a_server(there: Served, folder: Path, tmp_path: Path) -> None:
    values = flags.FlagValues()
    serve.define_flags(values)
    values(["serve", f"--address={there.url}", f"--checkpoint={folder}", "--size=short", f"--output_dir={tmp_path}"])
    serve.main(values)
    results = json.loads((tmp_path / "serve.json").read_text())["results"]
    assert (tmp_path / "serve.png").stat().st_size > 0
    assert results["capacity"]["new"]["answers"] == SIZES["short"].saturated
    assert results["capacity"]["new"]["requests_per_second"] > 0
    for found in results["loads"].values():
        assert (found["completed"], found["failed"]) == (SIZES["short"].requests, 0)
        assert 0 < found["e2e_ms"]["p50"] <= found["e2e_ms"]["p99"]
    settled(there)
    asks = [
        Ask(PROMPT, tokens, seed, {"steps": tokens}, seed % 2 == 0) for seed, tokens in enumerate((12, 3, 7, 9, 4, 12))
    ]
    expected = [
        there.engine.generate([PROMPT], CONFIG.replace(max_new_tokens=n, steps=n, seed=ask.seed))[0].text
        for ask in asks
        for n in [ask.max_tokens]
    ]

    async def texts() -> list[str]:
        async with Client(there.url, None, PATIENCE) as client:
            return [answer.text for answer in await open_loop(client, asks, 50.0, seed=0)]

    assert asyncio.run(texts()) == expected


def test_two_hosts_for_a_moment(folder: Path, engine: Engine, tmp_path: Path) -> None:
    """A short form of :func:`test_ten_thousand_requests`, with the programs of a few buckets."""
    asked = Asked(engine, PLAIN + 4)
    assert asked.stopped >= 3
    with two_hosts(folder, tmp_path, "--max_programs=2") as hosts:
        # The other programs are compiled in the background meanwhile.
        done, cancelled = asyncio.run(soak(hosts.url, asked, 20, seed=1))
        wait_for(lambda: hosts.metric("programs_remaining") == 0, 4 * PATIENCE)
        hosts.settled()
        before = hosts.resources()
        counts = asyncio.run(soak(hosts.url, asked, 20, seed=2))
        hosts.settled()
        after = hosts.resources()
        assert hosts.end() > 50
        assert WAITED not in hosts.processes.text("err")[0]
    assert done + cancelled + sum(counts) == 40
    assert done + counts[0] > 5
    assert cancelled + counts[1] > 2
    for (memory, files, threads), (memory_after, files_after, threads_after) in zip(before, after, strict=True):
        assert memory_after <= memory + MEMORY_OF_A_MOMENT, (before, after)
        assert files_after <= files + 2, (before, after)
        assert threads_after <= threads + 2, (before, after)


@pytest.mark.slow
def test_two_hosts_that_have_been_there_before(folder: Path, tmp_path: Path, compiled: str) -> None:
    """XLA loses the order of collectives in programs from the compilation cache; the server must work anyway."""
    for _ in range(2):
        with two_hosts(folder, tmp_path, f"--compile_cache={compiled}") as hosts:
            hosts.end()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_ten_thousand_requests(folder: Path, engine: Engine, tmp_path: Path) -> None:
    asked = Asked(engine, 40)
    done = cancelled = 0
    seen = []
    # Many rows at a time: the hosts wait for each other in each pass, whatever the number of its rows.
    with two_hosts(folder, tmp_path, "--move_every=8", "--slots=8", "--max_queue=128") as hosts:
        for part in range(10):
            counts = asyncio.run(soak(hosts.url, asked, 1000, seed=part, users=32))
            done, cancelled = done + counts[0], cancelled + counts[1]
            hosts.settled()
            seen.append(hosts.resources())
            print(done, cancelled, seen[-1], flush=True)
        assert hosts.end() > 3_000
        assert WAITED not in hosts.processes.text("err")[0]
    assert done + cancelled == 10_000
    assert done > 3_000
    assert cancelled > 500
    # The first fifth warms up.
    for (memory, files, threads), last in zip(seen[1], seen[-1], strict=True):
        assert last[0] <= 1.02 * memory, seen
        assert last[1] <= files + 2, seen
        assert last[2] <= threads, seen


def overloaded(url: str, seconds: float, tokens: int, count: int) -> None:
    """Overload a server with a queue of :data:`QUEUE`. The benchmark checks times; these checks hold everywhere."""
    asks = [Ask("x", tokens, number, stream=True) for number in range(count)]
    # Send at least so many that not all fit into the queue.
    found = asyncio.run(overload(url, seconds, asks, least=6 * QUEUE / seconds))
    assert found.count(200) + found.count(429) == len(found.answers)
    assert found.count(429) > 0
    assert found.count(200) > 0
    assert found.watched.health
    assert found.watched.waiting <= QUEUE


def test_ten_times_too_much_for_a_moment(engine: Engine) -> None:
    # Few enough connections that both ends of each can be open in this process.
    with served(engine, CONFIG, canvas=(128,), slots=4, limits=Limits(queue=QUEUE, rows=1)) as found:
        overloaded(found.url, 1.0, 16, 300)
        settled(found)


@pytest.mark.slow
def test_ten_times_too_much(folder: Path, tmp_path: Path) -> None:
    flags = [f"--checkpoint={folder}", "--served_model_name=demo", "--mesh=tensor=1"]
    flags += [f"--max_queue={QUEUE}", "--max_rows=1", "--slots=4", "--canvas=128"]
    with started(tmp_path, *flags) as (url, _, _):
        overloaded(url, 8.0, 100, 10_000)


@pytest.mark.slow
def test_a_hundred_streams_at_the_end(folder: Path, engine: Engine, tmp_path: Path) -> None:
    flags = [f"--checkpoint={folder}", "--served_model_name=demo", "--mesh=tensor=1", "--max_queue=128"]
    with started(tmp_path, *flags) as (url, process, log):

        def accepted() -> float:
            text = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
            names = ("diffumesh:num_requests_waiting{", "diffumesh:request_queue_time_seconds_count{")
            return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(names))

        threads, texts = streams(url, 100, 48)
        wait_for(lambda: accepted() == 100)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(PATIENCE)
        assert process.wait(PATIENCE) == 0, log.read_text()
    for seed, text in enumerate(texts):
        assert text.rstrip().endswith("data: [DONE]")
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        whole = "".join(choice["text"] for event in events for choice in event["choices"])
        config = DiffusionConfig.published(48, 0.2, seed=seed, block_length=4)
        assert whole == engine.generate([PROMPT], config)[0].text
