"""The sections of the record ``serve.json``, with a function that measures each.

Rates are in positions per second: a forward pass over a row of S positions counts S. Requests turn early stop off, so
the old and the new server, the loop over ``engine.generate`` and ``diffumesh batch`` all do the same work. A row of n
new tokens takes n - 1 forward passes, because the original schedule with n steps commits nothing in its first step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.load import Answer, Ask, Client, Saturated, open_loop, percentiles, saturate, summary
from benchmarks.records import Timing
from benchmarks.serve.processes import TIMEOUT, Checkout, GenerateLoop, Server, metric, run_batch, server
from benchmarks.serve.workload import Sizes
from launch.process.startup import this_host
from sharding.errors import InputError

# Share of the older server's capacity at which both servers are compared.
COMPARED_SHARE = 0.3
# Maximum wait in seconds while the server is idle, see :func:`benchmarks.load.open_loop`.
LONGEST_IDLE = 0.1
_STREAMED_TOKENS = 16
_BLOCK_LENGTHS = (1, 8)

Result = TypeVar("Result")


def run(address: str, key: str | None, call: Callable[[Client], Coroutine[Any, Any, Result]]) -> Result:
    """Run ``call`` with a client of a server."""

    async def connected() -> Result:
        async with Client(address, key, TIMEOUT) as client:
            return await call(client)

    async def with_marks() -> Result:
        # A load is slow, but does not hang.
        task = asyncio.ensure_future(connected())
        while not (await asyncio.wait([task], timeout=1.0))[0]:
            this_host().mark()
        return task.result()

    return asyncio.run(with_marks())


def checked(answers: Sequence[Answer]) -> Sequence[Answer]:
    """Return the answers, if all requests succeeded.

    Raises:
      InputError: a request failed.
    """
    if wrong := [answer.status for answer in answers if answer.status != 200]:
        raise InputError(f"{len(wrong)} of {len(answers)} requests failed (HTTP {wrong[0]}; 0 if the connection broke)")
    return answers


def lone(address: str, ask: Ask) -> Answer:
    """Return the answer to a request on an idle server."""
    return checked([run(address, None, lambda client: client.send(ask, time.perf_counter()))])[0]


def timing(seconds: Sequence[float]) -> Timing:
    """Return a timing without processor times, which are unknown for other processes."""
    return Timing.of(seconds, [0.0])


# ---- start --------------------------------------------------------------------------------------------------------


def started(found: Server) -> dict[str, Any]:
    """Wait until a server has compiled all programs, and return the times and program counts of its start."""
    seconds = found.wait_for_programs()
    return {
        "seconds_to_ready": round(found.seconds_to_ready, 2),
        "programs_at_ready": found.programs_at_ready,
        "programs_remaining_at_ready": found.remaining_at_ready,
        "seconds_to_all_programs": round(seconds, 2),
        "programs": int(found.metric("programs_compiled")),
        # Earlier versions do not report how many of these were read from the compile cache.
        "programs_cached": int(found.metric("programs_cached")) if found.reports("programs_cached") else None,
    }


def measure_starts(
    checkouts: Sequence[Checkout],
    arguments: Mapping[str, Sequence[str]],
    loop: GenerateLoop,
    asks: Sequence[Ask],
    starts: int,
) -> dict[str, Any]:
    """Measure starts of each server: one with an empty compile cache, then with the cache that it filled.

    This checkout's server is started ``starts`` times with the warm cache, and the older one once. This checkout's
    server then gets single requests right after it is ready, because by then it has read all programs from the cache.
    ``engine.generate`` runs each of them right after it, because the processor's speed varies within minutes.
    """
    found: dict[str, Any] = {one.name: {"cold": None, "warm": []} for one in checkouts}
    served: dict[str, list[float]] = {str(ask.max_tokens): [] for ask in asks}
    generated: dict[str, list[float]] = {str(ask.max_tokens): [] for ask in asks}
    for ask in asks:
        loop.generate(ask.prompt, ask.max_tokens, ask.seed)  # compiles the program
    for one in checkouts:
        with server(one, arguments[one.name]) as cold:
            found[one.name]["cold"] = started(cold)
    for number in range(starts):
        for one in checkouts:
            if one.name == "old" and number:
                continue
            with server(one, arguments[one.name]) as warm:
                # Read before the requests, whose time would count otherwise
                found[one.name]["warm"].append(started(warm))
                if one.name == "new":
                    for ask in asks:
                        served[str(ask.max_tokens)].append(round(1e3 * lone(warm.address, ask).end, 2))
                        alone = loop.generate(ask.prompt, ask.max_tokens, ask.seed)["seconds"]
                        generated[str(ask.max_tokens)].append(round(1e3 * alone, 2))
    return {"starts": found, "lone_from_ready_ms": served, "generate_beside_ms": generated}


def measure_while_compiling(
    start: Callable[[Sequence[str]], AbstractContextManager[Server]], ask: Ask, repeats: int
) -> dict[str, Any]:
    """Measure a request, sent again and again, while a server compiles programs in the background, and without that.

    Until the program of its own bucket is compiled, which its repetition puts first, a request runs in the widest
    bucket. A second server has only the widest bucket, and runs it while nothing is compiled.

    Args:
      start: starts a server with an empty compile cache and these flags more.
      ask: the request.
      repeats: number of requests while nothing is compiled.

    Returns:
      Percentiles in milliseconds: ``compiling``; ``widest``, of the second server; ``compiled``, of the first one when
      it has all programs. ``requests``: how many were sent while programs were compiled. ``repeats``: how many were
      sent to each server while nothing was compiled.
    """
    with start([]) as found:
        compiling = [lone(found.address, ask).end]
        while found.remaining():
            compiling.append(lone(found.address, ask).end)
        compiled = [lone(found.address, ask).end for _ in range(repeats)]
    with start(["--max_programs=1"]) as found:
        found.wait_for_programs()
        widest = [lone(found.address, ask).end for _ in range(repeats)]
    times = {"compiling": compiling, "widest": widest, "compiled": compiled}
    return {
        "new_tokens": ask.max_tokens,
        "requests": len(compiling),
        "repeats": repeats,
        **{f"{name}_ms": percentiles(each) for name, each in times.items()},
    }


# ---- one request --------------------------------------------------------------------------------------------------


def measure_lone(
    servers: Mapping[str, Server], loop: GenerateLoop, asks: Sequence[Ask], sizes: Sizes
) -> list[dict[str, Any]]:
    """Measure the time to the last token of single requests, alternating with ``engine.generate`` for the same row.

    This checkout's server answers each request without and with streaming. The older server gets only the requests of
    ``sizes.old_lone``, once each, because each takes up to a minute.
    """
    rows = []
    for ask in asks:
        seconds: dict[str, list[float]] = {"generate": [], "new": [], "streamed": []}
        texts = {}

        def generated(ask: Ask = ask) -> tuple[float, str]:
            answer = loop.generate(ask.prompt, ask.max_tokens, ask.seed)
            return answer["seconds"], answer["text"]

        def served(name: str, ask: Ask = ask) -> tuple[float, str]:
            streams = name == "streamed"
            one = servers["new" if streams else name]
            answer = lone(one.address, dataclasses.replace(ask, stream=streams))
            return answer.end, answer.text

        generated()  # compiles the program
        for number in range(sizes.repeats):
            for name in tuple(seconds)[:: 1 if number % 2 else -1]:
                took, texts[name] = generated() if name == "generate" else served(name)
                seconds[name].append(took)
        if "old" in servers and ask.max_tokens in sizes.old_lone:
            took, texts["old"] = served("old")
            seconds["old"] = [took]
        timings = {name: timing(each) for name, each in seconds.items()}
        ratios = {
            name: [ours / theirs for ours, theirs in zip(seconds[name], seconds["generate"], strict=True)]
            for name in ("new", "streamed")
        }
        rows.append(
            {
                "new_tokens": ask.max_tokens,
                **{f"{name}_ms": one for name, one in timings.items()},
                "times_generate": round(statistics.median(ratios["new"]), 3),
                "streamed_times_generate": round(statistics.median(ratios["streamed"]), 3),
                "same_text": len(set(texts.values())) == 1,
            }
        )
    return rows


def measure_first_text(servers: Mapping[str, Server], ask: Ask) -> list[dict[str, Any]]:
    """Measure when the first text of a single stream arrives.

    With blocks of one position, each forward pass commits the next position. The number of tokens on the first streamed
    canvas is then the number of iterations until the first text. With longer blocks, the model chooses the order.
    """
    rows = []
    for (name, one), length in itertools.product(servers.items(), _BLOCK_LENGTHS):
        fields = {**ask.fields, "block_length": length, "canvas": True}
        answer = lone(one.address, dataclasses.replace(ask, max_tokens=_STREAMED_TOKENS, fields=fields, stream=True))
        rows.append(
            {
                "server": name,
                "block_length": length,
                "new_tokens": _STREAMED_TOKENS,
                "committed_at_first_text": answer.committed_at_first,
                "first_text_ms": round(1e3 * answer.first, 2),
                "last_text_ms": round(1e3 * answer.end, 2),
                "pieces": answer.pieces,
            }
        )
    return rows


# ---- loads --------------------------------------------------------------------------------------------------------


def measure_capacities(
    servers: Mapping[str, Server], asks: Sequence[Ask], counts: Mapping[str, int], users: int, turns: int
) -> dict[str, dict[str, Any]]:
    """Measure the capacities of both servers, which take turns; see :func:`measure_capacity`."""
    parts: dict[str, list[Saturated]] = {name: [] for name in servers}
    for turn in range(turns):
        for name in sorted(servers, reverse=bool(turn % 2)):
            servers[name].wait_until_idle()
            count = -(-counts[name] // turns)
            parts[name].append(_saturated(servers[name].address, None, asks, turn * count, count, users))
    return {name: _capacity(found, asks, users) for name, found in parts.items()}


def measure_capacity(address: str, key: str | None, asks: Sequence[Ask], count: int, users: int) -> dict[str, Any]:
    """Measure the capacity of a server: requests per second while more requests are open than it has slots.

    ``users`` requests are open at any time. The result is the new tokens per second over ``count`` answers, divided by
    the mean number of new tokens of all requests, so it depends less on which requests were answered.
    """
    return _capacity([_saturated(address, key, asks, 0, count, users)], asks, users)


def _saturated(address: str, key: str | None, asks: Sequence[Ask], first: int, count: int, users: int) -> Saturated:
    """Saturate a server with the requests from number ``first`` on, until ``count`` answers count."""
    part = list(itertools.islice(itertools.cycle(asks), first, first + users // 2 + count + users - 1))
    found: Saturated = run(address, key, lambda client: saturate(client, part, users, users // 2))
    checked(found.answers)
    return found


def _capacity(parts: Sequence[Saturated], asks: Sequence[Ask], users: int) -> dict[str, Any]:
    seconds = sum(part.seconds for part in parts)
    tokens_per_second = sum(part.tokens_per_second * part.seconds for part in parts) / seconds
    mean = statistics.mean(ask.max_tokens for ask in asks)
    return {
        "requests_per_second": round(tokens_per_second / mean, 4),
        "new_tokens_per_second": round(tokens_per_second, 2),
        "answers": sum(len(part.answers) for part in parts),
        "seconds": round(seconds, 2),
        "users": users,
    }


def measure_same_arrivals(
    servers: Mapping[str, Server], asks: Sequence[Ask], rate: float, turns: int, seed: int
) -> dict[str, Any]:
    """Measure the old and the new server with the same requests and arrival times, taking turns after each part."""
    answers: dict[str, list[Answer]] = {name: [] for name in servers}
    size = -(-len(asks) // turns)
    for turn, start in enumerate(range(0, len(asks), size)):
        part = asks[start : start + size]
        for name in sorted(servers, reverse=bool(turn % 2)):

            async def arrive(client: Client, part: Sequence[Ask] = part, turn: int = turn) -> list[Answer]:
                return await open_loop(client, part, rate, seed + turn, LONGEST_IDLE)

            servers[name].wait_until_idle()
            answers[name] += checked(run(servers[name].address, None, arrive))
    found: dict[str, Any] = {name: summary(each) for name, each in answers.items()}
    pairs = zip(answers["old"], answers["new"], strict=True)
    return {
        "offered_requests_per_second": round(rate, 4),
        **found,
        "times_lower_p50": round(found["old"]["e2e_ms"]["p50"] / found["new"]["e2e_ms"]["p50"], 2),
        "texts_that_differ": sum(one.text != other.text for one, other in pairs),
    }


def measure_load(
    address: str, key: str | None, asks: Sequence[Ask], rate: float, seed: int, texts: Sequence[str] | None
) -> dict[str, Any]:
    """Measure one load: requests that arrive as a Poisson process.

    Args:
      address: the server's URL.
      key: its API key.
      asks: the requests.
      rate: arrivals per second.
      seed: seed of the arrival times.
      texts: the texts from :func:`measure_loop`, to compare with; None if it was not called.

    Returns:
      Latencies, the number of positions that the server computed, the share of useful ones among them (those of
      unfinished rows, up to the row's length), and the number of texts that differ. Number and share of positions are
      None if the server has no such metrics.
    """
    names = ("useful_positions", "computed_positions")
    before = [metric(address, name) for name in names]

    async def arrive(client: Client) -> list[Answer]:
        return await open_loop(client, asks, rate, seed, LONGEST_IDLE)

    answers = run(address, key, arrive)
    useful, computed = (metric(address, name) - old for name, old in zip(names, before, strict=True))
    return {
        "offered_requests_per_second": round(rate, 4),
        **summary(answers),
        "computed_positions": int(computed) or None,
        "useful_share": round(useful / computed, 4) if computed else None,
        "texts_that_differ": None
        if texts is None
        else sum(answer.text != text for answer, text in zip(answers, texts, strict=True)),
    }


def measure_loop(loop: GenerateLoop, asks: Sequence[Ask]) -> tuple[dict[str, Any], list[str]]:
    """Measure the same requests through ``engine.generate``, one at a time without padding. Return also their texts."""
    answers = [loop.generate(ask.prompt, ask.max_tokens, ask.seed) for ask in asks]
    seconds = [answer["seconds"] for answer in answers]
    found = {
        "requests": len(asks),
        "requests_per_second": round(len(asks) / sum(seconds), 4),
        "e2e_ms": percentiles(seconds),
        "prompt_tokens": statistics.mean(answer["prompt_tokens"] for answer in answers),
        "new_tokens": statistics.mean(ask.max_tokens for ask in asks),
    }
    return found, [answer["text"] for answer in answers]


# ---- a batch ------------------------------------------------------------------------------------------------------


def useful_work(
    asks: Sequence[Ask], count_tokens: Callable[[str], int], rates: Mapping[str, float], sizes: Sizes
) -> tuple[int, float]:
    """Return the positions of all forward passes of each row, and their seconds at the best rate of its canvas."""
    of_canvas = {canvas: max(rates[f"{rows} x {canvas}"] for rows in sizes.rate_rows) for canvas in sizes.rate_canvases}
    useful, seconds = 0, 0.0
    for ask in asks:
        length = count_tokens(ask.prompt) + ask.max_tokens
        work = length * max(1, ask.max_tokens - 1)
        useful += work
        seconds += work / of_canvas[min((one for one in of_canvas if one >= length), default=max(of_canvas))]
    return useful, seconds


def measure_batch(
    checkout: Checkout,
    arguments: Sequence[str],
    loop: GenerateLoop,
    asks: Sequence[Ask],
    count_tokens: Callable[[str], int],
    sizes: Sizes,
) -> dict[str, Any]:
    """Compare the time of ``diffumesh batch`` with the time of its useful work at the best measured rate.

    The useful work of a row is its number of positions times its forward passes. There are two readings of the best
    rate. ``useful_seconds_at_best``: all work at the fastest rate of all combinations of ``sizes.rate_rows`` and
    ``sizes.rate_canvases`` with full rows. ``useful_seconds_at_best_of_canvas``: each row's work at the fastest rate of
    the narrowest of these canvases that holds it, because attention over a wide canvas takes longer for each position.
    The batch runs with an empty compile cache and then with a warm one; the second run is compared. Its wall time is
    that of the whole process: start, loading, programs, generation, and writing of results. A rate is the median of
    three, measured before, between and after the two runs, because the processor's speed varies within minutes.
    """
    shapes = list(itertools.product(sizes.rate_rows, sizes.rate_canvases))
    measured: dict[str, list[float]] = {f"{rows} x {canvas}": [] for rows, canvas in shapes}

    def measure_rates() -> None:
        for rows, canvas in shapes:
            measured[f"{rows} x {canvas}"].append(loop.rate(rows, canvas))

    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "prompts.jsonl"
        lines = [
            {"id": str(number), "prompt": ask.prompt, "max_tokens": ask.max_tokens, "seed": ask.seed, **ask.fields}
            for number, ask in enumerate(asks)
        ]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        measure_rates()
        runs = {}
        for cache in ("cold", "warm"):
            runs[cache] = run_batch(
                checkout, [*arguments, f"--input={source}", f"--output_dir={Path(temporary) / cache}"]
            )
            measure_rates()
    rates = {shape: round(statistics.median(each)) for shape, each in measured.items()}
    best = max(rates, key=lambda shape: rates[shape])
    useful, by_canvas = useful_work(asks, count_tokens, rates, sizes)
    seconds = useful / rates[best]
    return {
        "prompts": len(asks),
        "useful_positions": useful,
        "positions_per_second": rates,
        "positions_per_second_each": {shape: [round(one) for one in each] for shape, each in measured.items()},
        "best": best,
        "useful_seconds_at_best": round(seconds, 3),
        "useful_seconds_at_best_of_canvas": round(by_canvas, 3),
        **runs,
        "wall_times_useful": round(runs["warm"]["wall"] / seconds, 3),
        "generating_times_useful": round(runs["warm"]["generating"] / seconds, 3),
        "wall_times_useful_of_canvas": round(runs["warm"]["wall"] / by_canvas, 3),
        "generating_times_useful_of_canvas": round(runs["warm"]["generating"] / by_canvas, 3),
    }
