"""Offer a server ten times the requests that it can answer; time its refusals, ``/health``, and its recovery.

  python -m benchmarks.overload

The server's capacity is measured first. Then requests arrive as a Poisson process at ten times that rate. Meanwhile
another process sends one request after another and reads ``/health`` and ``/metrics``, because the process that
generates the load measures late. The record has the times of refusals, of ``/health`` and ``/metrics``, the largest
queue, and the seconds until a request was answered again.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from absl import flags

from benchmarks.overload_tables import overload_table
from benchmarks.records import (
    NO_HTTPX,
    build_record,
    check_one_host,
    define_record_flags,
    load_notes,
    write_record,
)
from checkpoints import DEMO, open_folder
from launch.process.startup import fail, run_launcher

try:
    import httpx

    from benchmarks.load import Answer, Ask, Client, closed_loop, open_loop, percentiles
    from benchmarks.serve.processes import TIMEOUT, Checkout, metric, server
except ModuleNotFoundError as missing:
    if missing.name != "httpx" or __name__ != "__main__":
        raise
    fail(NO_HTTPX)

TIMES = 10
# Requests that measure the capacity, and users that send them
_FIRST, _USERS = 60, 8
# Goals in milliseconds for the 99th percentiles
_REFUSAL_MS, _HEALTH_MS = 100, 200
_ATTEMPTS = 3
_PROBE = {"prompt": "x", "max_tokens": 1, "stream": True}


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    flags.DEFINE_string("checkpoint", str(DEMO), "Model folder.", flag_values=values)
    flags.DEFINE_integer("tokens", 8, "New tokens per request.", 1, flag_values=values)
    flags.DEFINE_integer("queue", 16, "Value of --max_queue for the server.", 1, flag_values=values)
    flags.DEFINE_float("seconds", 8.0, "Seconds during which requests arrive.", 0.1, flag_values=values)


@dataclass(frozen=True)
class Watched:
    """Measurements of a process that runs beside the load. Times are in seconds.

    Attributes:
      refusals: times of its own requests that were refused with 429.
      health: times of ``/health`` and ``/metrics``.
      waiting: largest number of waiting requests that ``/metrics`` reported.
    """

    refusals: list[float]
    health: list[float]
    waiting: int


@dataclass(frozen=True)
class Overload:
    """Measurements of an overload.

    Attributes:
      capacity: requests per second before the overload.
      offered: requests per second that arrived.
      answers: answers to all requests that arrived.
      watched: the measurements of the other process.
      recovered: seconds from the last arrival until a new request was answered.
    """

    capacity: float
    offered: float
    answers: list[Answer]
    watched: Watched
    recovered: float

    def count(self, status: int) -> int:
        """Return the number of answers with an HTTP status."""
        return sum(answer.status == status for answer in self.answers)


def watch(address: str, seconds: float) -> Watched:
    """Send requests and read ``/health`` and ``/metrics`` one after another. Runs in a process of its own.

    Raises:
      httpx.HTTPStatusError: ``/health`` or ``/metrics`` did not answer with 200.
    """
    found, end = Watched([], [], 0), time.monotonic() + seconds
    waiting = 0.0
    with httpx.Client(base_url=address, timeout=TIMEOUT) as client:
        while time.monotonic() < end:
            for path in ("/health", "/metrics"):
                start = time.perf_counter()
                client.get(path).raise_for_status()
                found.health.append(time.perf_counter() - start)
            waiting = max(waiting, metric(address, "num_requests_waiting"))
            start = time.perf_counter()
            # The head of a stream comes at once; leaving cancels the request.
            with client.stream("POST", "/v1/completions", json=_PROBE) as answer:
                if answer.status_code == 429:
                    answer.read()
                    found.refusals.append(time.perf_counter() - start)
            time.sleep(0.02)
    return Watched(found.refusals, found.health, int(waiting))


async def overload(address: str, seconds: float, asks: Sequence[Ask], least: float = 0.0) -> Overload:
    """Send :data:`TIMES` times the requests that a server can answer.

    Args:
      address: URL of the server.
      seconds: how long requests arrive.
      asks: requests; the load takes as many as its rate requires.
      least: minimum arrivals per second.
    """
    context = multiprocessing.get_context("spawn")
    async with Client(address, None, TIMEOUT) as client:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(pool, watch, address, 0.0)  # the process starts before the load
            start = time.perf_counter()
            await closed_loop(client, asks[:_FIRST], _USERS)
            capacity = _FIRST / (time.perf_counter() - start)
            rate = max(TIMES * capacity, least)
            watched = loop.run_in_executor(pool, watch, address, seconds)
            load = asyncio.create_task(open_loop(client, asks[: int(rate * seconds)], rate, seed=0))
            await asyncio.sleep(seconds)
            start = time.perf_counter()
            while (await client.send(Ask("x", 4, 0, stream=True), start)).status != 200:
                await asyncio.sleep(0.05)
            recovered = time.perf_counter() - start
            return Overload(capacity, rate, await load, await watched, recovered)


def summarize(found: Overload, queue: int, seconds: float) -> dict[str, Any]:
    """Return the results of a record, with a row for each goal."""
    answered, refused = found.count(200), found.count(429)
    refusals, health = percentiles(found.watched.refusals), percentiles(found.watched.health)
    # A new request is answered once the queue is empty: at most twice the time that the server needed for as many.
    recovery = 2 * seconds * (queue + 1) / max(answered - queue, 1)
    goals = [
        ("requests offered, as a multiple of those answered", (answered + refused) / max(answered - queue, 1), ">=", 8),
        ("answers that are neither 200 nor 429", len(found.answers) - answered - refused, "<=", 0),
        ("largest queue", found.watched.waiting, "<=", queue),
        ("p99 of a refusal, ms", refusals["p99"] if refusals else None, "<=", _REFUSAL_MS),
        ("p99 of /health and /metrics, ms", health["p99"] if health else None, "<=", _HEALTH_MS),
        ("seconds from the planned end of the load until a request is answered", found.recovered, "<=", recovery),
    ]
    return {
        "capacity_per_second": round(found.capacity, 2),
        "offered_per_second": round(found.offered, 2),
        "answered": answered,
        "refused": refused,
        "refusal_ms": refusals,
        "health_ms": health,
        "goals": [
            {
                "what": what,
                "value": value if value is None else round(value, 2),
                "goal": f"{sign} {round(bound, 2):g}",
                "met": value is not None and (value <= bound if sign == "<=" else value >= bound),
            }
            for what, value, sign, bound in goals
        ],
    }


def main(values: flags.FlagValues) -> None:
    """Overload a server, print the table, and write the record."""
    check_one_host()
    open_folder(values.checkpoint)
    notes = load_notes()
    arguments = [f"--checkpoint={values.checkpoint}", "--mesh=tensor=1", f"--max_queue={values.queue}"]
    arguments += ["--max_rows=1", "--slots=4", "--canvas=128"]
    asks = [Ask("x", values.tokens, number, {"early_stop": False}, stream=True) for number in range(20_000)]
    with server(Checkout.this(), arguments) as there:
        there.wait_for_programs()
        # The load is a multiple of the capacity measured just before. If the machine has become faster, measure again.
        for _ in range(_ATTEMPTS):
            found = asyncio.run(overload(there.address, values.seconds, asks))
            results = summarize(found, values.queue, values.seconds)
            if results["goals"][0]["met"]:
                break
            there.wait_until_idle()
    settings = {name: values[name].value for name in ("tokens", "queue", "seconds")}
    record = build_record("overload", kind="measured", settings=settings, results=results, notes=notes)
    print(overload_table(record))
    print(write_record(record, values.output_dir, values.record))


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
