"""A server under load: throughput, and how long clients wait.

  python -m benchmarks.serve                              starts one with the demo checkpoint; some minutes on 2 cores
  python -m benchmarks.serve --checkpoint=... --slots=16 --server_flag=--mesh=tensor=8
  python -m benchmarks.serve --address=http://host:8000   one that is there: any with OpenAI's completions

Closed loop: so many users who wait for their answers. Open loop: requests that arrive as a Poisson process, at shares
of the highest closed-loop rate, whatever becomes of those before. Where the server is its own, also, before that: the
same requests, all due at once, with continuous batching, in fixed batches as large as there are slots (the next one
begins when the last row is done), and one at a time (a second server with one slot), in turn; all three must give the
same texts. Requests are streams of uneven lengths. Written to benchmarks/results/serve.json, with a plot beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from benchmarks.load import Answer, Ask, Client, closed_loop, fixed_batches, open_loop, percentiles, summary
from benchmarks.offline_scheduler import read_prompts
from benchmarks.records import (
    build_record,
    check_output,
    define_record_flags,
    integers,
    load_notes,
    write_record,
)
from checkpoints import DEMO
from launch.profiling import check_profiling, define_profiling_flags, given_profiling
from launch.startup import run_launcher
from sharding.errors import InputError

_PATIENCE = 600.0
_LEAST_TOKENS = 8
_SERVING = re.compile(r"^serving .* on (http://\S+) ", re.MULTILINE)
WAYS = ("continuous", "fixed batches", "one at a time")


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    define_profiling_flags(values)
    flags.DEFINE_string("address", None, "A server that is there. Default: one is started.", flag_values=values)
    flags.DEFINE_string("api_key_file", None, "File whose first line is the key for --address.", flag_values=values)
    flags.DEFINE_string("checkpoint", str(DEMO), "Model folder.", flag_values=values)
    flags.DEFINE_multi_string(
        "server_flag",
        ["--canvas=128", "--cache=dual", "--block_length=16", "--parallel=threshold"],
        "Of the server that is started; repeatable.",
        flag_values=values,
    )
    flags.DEFINE_integer("slots", 8, "Of the server that is started, and rows of a fixed batch.", 1, flag_values=values)
    flags.DEFINE_string("prompts", str(DEMO / "held_out.jsonl"), "Lines with a prompt in each.", flag_values=values)
    flags.DEFINE_integer("requests", 160, "Requests of each load.", 2, 1 << 16, flag_values=values)
    flags.DEFINE_integer(
        "max_new_tokens", 64, f"New tokens at most; drawn from {_LEAST_TOKENS} up.", _LEAST_TOKENS, flag_values=values
    )
    flags.DEFINE_list("users", ["1", "4", "8", "16"], "Of the closed loops.", flag_values=values)
    flags.DEFINE_list(
        "loads", ["0.5", "0.8", "1.0", "1.3"], "Of the open loops: shares of the best closed loop.", flag_values=values
    )
    flags.DEFINE_integer("repeats", 3, "Timed runs of each way in the comparison.", 1, flag_values=values)
    flags.DEFINE_float("good_ttft", 1000.0, "A good request: milliseconds to the first text.", 0, flag_values=values)
    flags.DEFINE_float("good_tpot", 50.0, "A good request: milliseconds a token after that.", 0, flag_values=values)
    flags.DEFINE_integer("seed", 0, "Of lengths, arrivals and requests.", 0, flag_values=values)
    flags.DEFINE_string("plot", None, "Where to draw it. Default: beside the record.", flag_values=values)


def make_asks(prompts: Sequence[str], longest: int, seed: int) -> list[Ask]:
    """A request for each prompt, of uneven lengths."""
    lengths = np.random.default_rng(seed).integers(_LEAST_TOKENS, longest + 1, len(prompts)).tolist()
    return [Ask(prompt, length, seed + row) for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))]


@contextlib.contextmanager
def server(checkpoint: str, slots: int, queue: int, more: Sequence[str]) -> Iterator[str]:
    """Start a server, hand out its address, end it.

    Raises:
      InputError: it does not start.
    """
    command = [sys.executable, "-m", "launch.serve", f"--checkpoint={checkpoint}", "--port=0", f"--slots={slots}"]
    command += [f"--max_queue={queue}", "--max_rows=1", *more]
    with tempfile.TemporaryFile() as log:

        def said() -> str:
            log.seek(0)
            return log.read().decode(errors="replace")

        process = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL)
        try:
            by = time.monotonic() + _PATIENCE
            while (found := _SERVING.search(said())) is None:
                if process.poll() is not None or time.monotonic() > by:
                    raise InputError(f"the server has not started:\n{said()[-2000:]}")
                time.sleep(0.1)
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_PATIENCE)  # a trace takes a while to write
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def profile(values: flags.FlagValues, asks: Sequence[Ask]) -> None:
    """Some of the requests once more, for a server of their own that is traced and writes its programs, if flags ask.

    The servers that are timed are not traced.
    """
    more = given_profiling(values)
    if not more:
        return

    async def ask(address: str) -> None:
        async with Client(address, None, _PATIENCE) as client:
            await closed_loop(client, asks[: 2 * values.slots], values.slots)

    with server(values.checkpoint, values.slots, len(asks), [*values.server_flag, *more]) as address:
        asyncio.run(ask(address))


async def compare(addresses: dict[str, str], asks: Sequence[Ask], slots: int, repeats: int) -> dict[str, Any]:
    """The same requests, all due at once, each way in turn."""
    calls: dict[str, Callable[[Client], Coroutine[Any, Any, list[Answer]]]] = {
        "continuous": lambda client: closed_loop(client, asks, len(asks), due_at_once=True),
        "fixed batches": lambda client: fixed_batches(client, asks, slots),
        "one at a time": lambda client: closed_loop(client, asks, 1, due_at_once=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    whole: dict[str, list[float]] = {name: [] for name in WAYS}
    texts: dict[str, list[str]] = {}
    tokens = 0
    for turn in range(1 + repeats):  # the first one warms up
        for name in WAYS:
            async with Client(addresses[name], None, _PATIENCE) as client:
                start = time.perf_counter()
                answers = await calls[name](client)
                took = time.perf_counter() - start
            if wrong := [answer.status for answer in answers if answer.status != 200]:
                raise InputError(f"{name}: {len(wrong)} requests were not answered (HTTP {wrong[0]})")
            texts[name], tokens = [answer.text for answer in answers], sum(answer.tokens for answer in answers)
            if turn:
                seconds[name].append(took)
                whole[name] += [1e3 * answer.end for answer in answers]
    found: dict[str, Any] = {
        name: {
            "requests_per_second": round(len(asks) / statistics.median(seconds[name]), 3),
            "output_tokens_per_second": round(tokens / statistics.median(seconds[name]), 2),
            "seconds": [round(one, 3) for one in seconds[name]],
            "e2e_ms": percentiles(np.array(whole[name])),
        }
        for name in WAYS
    }
    for name in WAYS[1:]:
        pairs = zip(texts["continuous"], texts[name], strict=True)
        found[name] |= {
            "texts_that_differ": sum(one != other for one, other in pairs),
            "throughput_ratio": round(statistics.median(seconds[name]) / statistics.median(seconds["continuous"]), 3),
            "p99_ratio": round(found[name]["e2e_ms"]["p99"] / found["continuous"]["e2e_ms"]["p99"], 3),
        }
    return found


async def load(address: str, key: str | None, asks: Sequence[Ask], values: flags.FlagValues) -> dict[str, Any]:
    """All closed loops, then all open ones."""
    closed, opened = {}, {}
    limits = values.good_ttft, values.good_tpot
    async with Client(address, key, _PATIENCE) as client:
        await closed_loop(client, asks[: 2 * values.slots], values.slots)
        for users in integers("users", values.users):
            start = time.perf_counter()
            answers = await closed_loop(client, asks, users)
            closed[str(users)] = found = summary(answers, time.perf_counter() - start, *limits)
            print(f"{users} users: {line(found)}", flush=True)
        best = max(found["requests_per_second"] for found in closed.values())
        for share in shares(values.loads):
            start = time.perf_counter()
            answers = await open_loop(client, asks, share * best, values.seed)
            found = summary(answers, time.perf_counter() - start, *limits)
            opened[f"{share:g}"] = found | {"offered_requests_per_second": round(share * best, 3)}
            print(f"{share * best:.2f} requests/s: {line(found)}", flush=True)
    return {"closed_loop": closed, "open_loop": opened}


def shares(texts: Sequence[str]) -> list[float]:
    """Positive numbers of --loads.

    Raises:
      InputError: something else.
    """
    try:
        found = [float(text) for text in texts]
    except ValueError:
        found = []
    if not found or not all(0 < share <= 100 for share in found):
        raise InputError(f"--loads={','.join(texts)}: expected numbers from 0 to 100 separated by commas")
    return found


def line(found: dict[str, Any]) -> str:
    """A load in one line."""
    e2e, first = found["e2e_ms"] or {}, found["ttft_ms"] or {}
    return (
        f"{found['requests_per_second']:.2f} requests/s ({found['goodput_requests_per_second']:.2f} good), "
        f"{found['output_tokens_per_second']:.1f} tokens/s, first text {first.get('p50')} / {first.get('p99')} ms, "
        f"whole {e2e.get('p50')} / {e2e.get('p99')} ms (p50 / p99), "
        f"{found['refused']} refused, {found['failed']} failed"
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """Waiting against arrivals; and the three ways, where they were compared."""
    from matplotlib.figure import Figure

    ways = results.get("comparison")
    figure = Figure(figsize=(12 if ways else 6, 4.5), layout="constrained")
    panels = figure.subplots(1, 2 if ways else 1, squeeze=False)[0]
    axes = panels[0]
    points = [point for point in results["open_loop"].values() if point["e2e_ms"]]
    offered = [point["offered_requests_per_second"] for point in points]
    for name, rank, style in (("e2e_ms", "p99", "-o"), ("e2e_ms", "p50", "--o"), ("ttft_ms", "p99", "-s")):
        label = f"{'whole' if name == 'e2e_ms' else 'first text'}, {rank}"
        axes.plot(offered, [point[name][rank] / 1e3 for point in points], style, label=label)
    axes.set(xlabel="requests a second that arrive (Poisson)", ylabel="seconds", title="Open loop", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    if ways:
        rates, tails = panels[1], panels[1].twinx()
        places = np.arange(len(ways))
        rates.bar(places - 0.2, [way["output_tokens_per_second"] for way in ways.values()], 0.4, color="tab:blue")
        tails.bar(places + 0.2, [way["e2e_ms"]["p99"] / 1e3 for way in ways.values()], 0.4, color="tab:orange")
        rates.set_xticks(places, list(ways))
        rates.set_ylabel("output tokens a second", color="tab:blue")
        tails.set_ylabel("p99, seconds", color="tab:orange")
        rates.set_title("The same requests, all due at once")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def read_key(path: str | None) -> str | None:
    """The first line of a file of keys.

    Raises:
      InputError: it cannot be read.
    """
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="ascii").split()[0]
    except (OSError, ValueError, IndexError) as error:
        raise InputError(f"--api_key_file={path}: no key in it ({error})") from error


def main(values: flags.FlagValues) -> None:
    """Load the server, print a line a load, write the record and the plot."""
    integers("users", values.users)
    shares(values.loads)
    check_profiling(values)
    if values.address is not None and given_profiling(values):
        raise InputError("--profile_dir and --dump_hlo are of a server that is started here, not of one at --address")
    if values.plot is not None:
        check_output("plot", Path(values.plot), is_file=True)
    key = read_key(values.api_key_file)
    asks = make_asks(read_prompts(values.prompts, values.requests), values.max_new_tokens, values.seed)
    notes = load_notes()
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        address = values.address
        if address is None:
            common = values.checkpoint, values.slots, len(asks), values.server_flag
            address = stack.enter_context(server(*common))
            with server(values.checkpoint, 1, len(asks), values.server_flag) as single:
                addresses = dict.fromkeys(WAYS, address) | {"one at a time": single}
                results["comparison"] = asyncio.run(compare(addresses, asks, values.slots, values.repeats))
            for name, way in results["comparison"].items():
                print(
                    f"{name}: {way['output_tokens_per_second']:.1f} tokens/s, p99 {way['e2e_ms']['p99']:.0f} ms"
                    + (f", {way['texts_that_differ']} texts differ" if "texts_that_differ" in way else ""),
                    flush=True,
                )
        results |= asyncio.run(load(address.rstrip("/"), key, asks, values))
    names = ("address", "slots", "requests", "max_new_tokens", "users", "loads", "repeats", "good_ttft", "good_tpot")
    settings = {name: values[name].value for name in (*names, "seed", "server_flag")}
    if values.address is None:
        settings["checkpoint"] = Path(values.checkpoint).name
    record = build_record("serve", kind="measured", settings=settings, results=results, devices=(), notes=notes)
    path = write_record(record, values.output_dir, values.record)
    print(path)
    plot = Path(values.plot) if values.plot else path.with_suffix(".png")
    draw(results, plot)
    print(plot)
    profile(values, asks)


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
