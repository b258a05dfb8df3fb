"""Benchmark this checkout's server, and compare it with an older checkout's and with a loop over ``engine.generate``.

    git worktree add ../old COMMIT
    python -m benchmarks.serve --old=../old --old_python=../old/.venv/bin/python    about 40 minutes on 2 cores
    python -m benchmarks.serve --size=short                                         this checkout alone, a minute
    python -m benchmarks.serve --address=http://host:8000                           a server that already runs

Both servers run the same checkpoint (by default the demo) with default flags and those of ``--server_flag``, except
that the queue has room for all requests of a load (``--max_queue``). Each has its own compile cache. The lengths of
prompts (20 to 200 tokens) and answers (8 to 256) are log-normal, and all fit the default canvas. Requests turn early
stop off, so every answer has the requested length on both sides.

Sections: ``starts`` (programs and seconds to ready, with a cold and a warm cache, and single requests right after
ready, each followed by ``engine.generate``), ``compiling`` (a single request, sent again and again while a server
compiles its programs, beside the same request while it does not), ``lone`` (time to the last token beside
``engine.generate``, taking turns), ``first_text``, ``capacity`` (requests per second while more wait than there are
slots, for both servers in turns), ``same_arrivals`` (Poisson arrivals at 30 % of the old capacity, in turns too),
``one_at_a_time`` (the requests of the loads through ``engine.generate``), ``loads`` (Poisson arrivals at shares of this
server's capacity: 30, 60 and 90 %), ``batch`` (``diffumesh batch`` against its useful work at the best measured rate).
:mod:`benchmarks.serve.sections` defines them exactly. The older server takes up to a minute for a request, so it gets
fewer of them: two single requests, 60 Poisson arrivals, and those for its capacity.

The record benchmarks/results/serve.json is written after each section, and plots are drawn at the end. Its
``acceptance`` has a row for each expectation, with the measured value, the goal, and whether it is met.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks.records import (
    NO_HTTPX,
    build_record,
    check_one_host,
    check_output,
    define_record_flags,
    load_notes,
    write_record,
)
from benchmarks.serve.acceptance import acceptance
from benchmarks.serve.plots import draw
from benchmarks.serve.tables import acceptance_table
from checkpoints import DEMO, open_folder
from launch.process.profiling import check_profiling, define_profiling_flags, given_profiling
from launch.process.startup import fail, run_launcher
from runtime import TextTokenizer, parse_config
from sharding.errors import InputError

try:
    from benchmarks.load import Ask, Client, closed_loop
    from benchmarks.serve.processes import TIMEOUT, Checkout, GenerateLoop, Server, generate_loop, server
    from benchmarks.serve.sections import (
        COMPARED_SHARE,
        LONGEST_IDLE,
        measure_batch,
        measure_capacities,
        measure_capacity,
        measure_first_text,
        measure_load,
        measure_lone,
        measure_loop,
        measure_same_arrivals,
        measure_starts,
        measure_while_compiling,
    )
    from benchmarks.serve.workload import SIZES, Sizes, make_asks, read_functions
except ModuleNotFoundError as missing:
    if missing.name != "httpx" or __name__ != "__main__":
        raise
    fail(NO_HTTPX)

_START_SECTIONS = ("starts", "compiling")
_SERVED_SECTIONS = ("lone", "first_text", "capacity", "same_arrivals", "one_at_a_time", "loads")
# Requests of ``compiling`` while nothing is compiled, for each repetition of a single request.
_REPEATS = 4
SECTIONS = (*_START_SECTIONS, *_SERVED_SECTIONS, "batch")
_ADDRESS_SECTIONS = ("capacity", "loads")
_LEAST_QUEUE = 64


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""

    def string(name: str, default: str | None, text: str) -> None:
        flags.DEFINE_string(name, default, text, flag_values=values)

    define_record_flags(values)
    define_profiling_flags(values)
    string("old", None, "Root of the older checkout. Default: only this one is measured.")
    string("old_python", None, "Interpreter for the older checkout. Default: this one.")
    string("address", None, f"A server that already runs; measures only {', '.join(_ADDRESS_SECTIONS)}.")
    string("api_key_file", None, "File whose first line is the key for --address.")
    string("checkpoint", str(DEMO), "Model folder.")
    flags.DEFINE_multi_string(
        "server_flag", [], "Flag for the servers that are started; repeatable. Default: none.", flag_values=values
    )
    string("prompts", str(DEMO / "held_out.jsonl"), "JSONL file with the beginning of a function per line.")
    flags.DEFINE_enum("size", "full", list(SIZES), "Number and length of requests.", flag_values=values)
    flags.DEFINE_list("sections", list(SECTIONS), "Sections to measure.", flag_values=values)
    flags.DEFINE_integer("seed", 0, "Seed of lengths, arrivals and requests.", 0, flag_values=values)
    string("plot", None, "File for the plot of the loads. Default: beside the record.")


@dataclass
class Subject:
    """The checkouts, requests and results of a run.

    Attributes:
      values: the flags.
      sizes: numbers of requests and their lengths.
      asks: the requests of the loads.
      lone: single requests, of different lengths.
      batch: the requests of the batch.
      tokenizer: the checkpoint's tokenizer.
      checkouts: the older checkout, if there is one, and this one.
      folder: folder for compile caches.
      results: sections of the record.
    """

    values: flags.FlagValues
    sizes: Sizes
    asks: list[Ask]
    lone: list[Ask]
    batch: list[Ask]
    tokenizer: TextTokenizer
    checkouts: list[Checkout]
    folder: Path
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def checkpoint_flag(self) -> str:
        """The flag of the checkpoint, with an absolute path, for processes in other working folders."""
        return f"--checkpoint={Path(self.values.checkpoint).resolve()}"

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens in a prompt."""
        return len(self.tokenizer.encode(text))

    @property
    def queue(self) -> int:
        """``--max_queue`` of the servers: room for all requests of a load, from one client, which may not fill it."""
        return max(_LEAST_QUEUE, len(self.asks) * 8 // 7 + 1)

    def arguments(self, checkout: Checkout) -> list[str]:
        """Return the flags for a checkout's server."""
        return [
            self.checkpoint_flag,
            f"--compile_cache={self.folder / checkout.name}",
            f"--max_queue={self.queue}",
            *self.values.server_flag,
        ]

    def wants(self, section: str) -> bool:
        """Return whether to measure a section."""
        return section in self.values.sections


def read_subject(values: flags.FlagValues, folder: Path) -> Subject:
    """Read the checkpoint's tokenizer and the prompts, and draw the requests.

    Raises:
      InputError: a file or a flag is wrong.
    """
    sizes = SIZES[values.size]
    checkpoint = open_folder(values.checkpoint)
    tokenizer = TextTokenizer.from_folder(checkpoint)
    if tokenizer is None:
        raise InputError(f"--checkpoint={values.checkpoint}: no tokenizer in it")
    if parse_config(checkpoint.config).objective != "masked_diffusion":
        raise InputError(f"--checkpoint={values.checkpoint}: this benchmark requires a diffusion model")
    functions = read_functions(values.prompts)
    # A server that already runs may not know the field.
    fields = {"early_stop": False} if values.address is None else {}
    asks = make_asks(functions, tokenizer, sizes, sizes.requests, values.seed, fields)
    batch = make_asks(functions, tokenizer, sizes, sizes.batch, values.seed + 1, fields)
    middle = sorted(asks, key=lambda ask: len(tokenizer.encode(ask.prompt)))[len(asks) // 2]
    lone = [replace(middle, max_tokens=tokens) for tokens in sizes.lone]
    checkouts = [Checkout.this()]
    if values.old is not None:
        root = Path(values.old).resolve()
        if not (root / "launch" / "serve.py").is_file():
            raise InputError(f"--old={values.old}: not the root of a checkout of this project")
        checkouts.insert(0, Checkout("old", root, values.old_python or checkouts[0].python))
    return Subject(values, sizes, asks, lone, batch, tokenizer, checkouts, folder)


def measure(subject: Subject) -> Iterator[str]:
    """Measure each requested section, and yield its name when it is in the results."""
    results, sizes = subject.results, subject.sizes
    new = subject.checkouts[-1]
    if subject.wants("starts"):
        arguments = {one.name: subject.arguments(one) for one in subject.checkouts}
        with generate_loop(new, subject.values.checkpoint, subject.folder / "loop") as loop:
            results["starts"] = measure_starts(subject.checkouts, arguments, loop, subject.lone, sizes.starts)
        yield "starts"
    if subject.wants("compiling"):
        numbers = itertools.count()

        def start(more: Sequence[str]) -> contextlib.AbstractContextManager[Server]:
            empty = f"--compile_cache={subject.folder / f'compiling{next(numbers)}'}"
            return server(new, [*subject.arguments(new), empty, *more])

        results["while_compiling"] = measure_while_compiling(start, subject.lone[0], _REPEATS * sizes.repeats)
        yield "compiling"
    if not any(map(subject.wants, (*_SERVED_SECTIONS, "batch"))):
        return
    with generate_loop(new, subject.values.checkpoint, subject.folder / "loop") as loop:
        if any(map(subject.wants, _SERVED_SECTIONS)):
            with contextlib.ExitStack() as stack:
                servers = {
                    one.name: stack.enter_context(server(one, subject.arguments(one))) for one in subject.checkouts
                }
                for one in servers.values():
                    one.wait_for_programs()
                yield from measure_served(subject, servers, loop)
        if subject.wants("batch"):
            batch = [subject.checkpoint_flag, f"--compile_cache={subject.folder / 'batch'}"]
            results["batch"] = measure_batch(new, batch, loop, subject.batch, subject.count_tokens, sizes)
            yield "batch"


def measure_served(subject: Subject, servers: dict[str, Server], loop: GenerateLoop) -> Iterator[str]:
    """Measure the sections for which a server must have compiled all its programs."""
    results, sizes, seed = subject.results, subject.sizes, subject.values.seed
    if subject.wants("lone"):
        results["lone"] = measure_lone(servers, loop, subject.lone, sizes)
        yield "lone"
    if subject.wants("first_text"):
        results["first_text"] = measure_first_text(servers, subject.lone[0])
        yield "first_text"
    if any(map(subject.wants, ("capacity", "same_arrivals", "loads"))):
        counts = {"old": sizes.old_saturated, "new": sizes.saturated}
        results["capacity"] = measure_capacities(servers, subject.asks, counts, sizes.users, sizes.turns)
        yield "capacity"
    if subject.wants("same_arrivals") and "old" in servers:
        rate = COMPARED_SHARE * results["capacity"]["old"]["requests_per_second"]
        part = subject.asks[: sizes.old_requests]
        results["same_arrivals"] = measure_same_arrivals(servers, part, rate, sizes.turns, seed)
        yield "same_arrivals"
    texts = None
    if subject.wants("one_at_a_time"):
        results["one_at_a_time"], texts = measure_loop(loop, subject.asks)
        yield "one_at_a_time"
    if subject.wants("loads"):
        yield from measure_loads(subject, servers["new"].address, None, texts)


def measure_loads(subject: Subject, address: str, key: str | None, texts: Sequence[str] | None) -> Iterator[str]:
    """Measure this checkout's server, or one that already runs, under each load."""
    results = subject.results
    capacity = results["capacity"]["new"]["requests_per_second"]
    results["loads"] = {}
    for number, share in enumerate(subject.sizes.shares):
        rate, seed = share * capacity, subject.values.seed + number
        results["loads"][str(share)] = measure_load(address, key, subject.asks, rate, seed, texts)
        yield f"loads at {share:g}"


def measure_there(subject: Subject) -> Iterator[str]:
    """Measure the sections of a server that already runs."""
    address, key = subject.values.address.rstrip("/"), read_key(subject.values.api_key_file)
    sizes = subject.sizes
    subject.results["capacity"] = {"new": measure_capacity(address, key, subject.asks, sizes.saturated, sizes.users)}
    yield "capacity"
    yield from measure_loads(subject, address, key, None)


def profile(subject: Subject) -> None:
    """Start another server with ``--profile_dir`` or ``--dump_hlo``, and send it some of the requests.

    That server writes the trace and the compiled programs, so that the timed servers are not slowed down. Without these
    flags, nothing is done.
    """
    more = given_profiling(subject.values)
    if not more:
        return

    async def ask(address: str) -> None:
        async with Client(address, None, TIMEOUT) as client:
            await closed_loop(client, subject.asks[: subject.sizes.users], subject.sizes.users)

    new = subject.checkouts[-1]
    with server(new, [*subject.arguments(new), *more]) as found:
        asyncio.run(ask(found.address))


def read_key(path: str | None) -> str | None:
    """Read the first line of a file with API keys.

    Raises:
      InputError: the file cannot be read.
    """
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="ascii").split()[0]
    except (OSError, ValueError, IndexError) as error:
        raise InputError(f"--api_key_file={path}: contains no key ({error})") from error


def ratios(results: dict[str, Any]) -> dict[str, Any]:
    """Return the ratios between sections, such as speed-ups, if both sides were measured."""
    found: dict[str, Any] = {}
    capacity = {name: one["requests_per_second"] for name, one in results.get("capacity", {}).items()}
    if "old" in capacity:
        found["capacity_times_old"] = round(capacity["new"] / capacity["old"], 2)
    if "one_at_a_time" in results and capacity:
        found["capacity_times_one_at_a_time"] = round(
            capacity["new"] / results["one_at_a_time"]["requests_per_second"], 2
        )
    if "starts" in results:
        served, generated = results["starts"]["lone_from_ready_ms"], results["starts"]["generate_beside_ms"]
        found["lone_from_ready_times_generate"] = {
            tokens: [round(ours / theirs, 3) for ours, theirs in zip(each, generated[tokens], strict=True)]
            for tokens, each in served.items()
        }
    if "lone" in results:
        found["slowest_lone_times_generate"] = max(row["times_generate"] for row in results["lone"])
    return found


def settings(subject: Subject) -> dict[str, Any]:
    """Return the settings of the run for the record."""
    values = subject.values
    names = ("address", "size", "sections", "seed", "server_flag")
    return (
        {name: values[name].value for name in names}
        | {"checkpoint": Path(values.checkpoint).name, "longest_idle": LONGEST_IDLE}
        | {"old_commit": subject.checkouts[0].commit if len(subject.checkouts) > 1 else None}
        | {"max_queue": subject.queue if values.address is None else None}
        | subject.sizes.settings()
    )


def main(values: flags.FlagValues) -> None:
    """Measure, print a line per section, and write the record and the plots."""
    check_one_host()
    check_profiling(values)
    if wrong := [name for name in values.sections if name not in SECTIONS]:
        raise InputError(f"--sections={','.join(wrong)}: expected some of {', '.join(SECTIONS)}")
    if values.address is not None and given_profiling(values):
        raise InputError(
            "--profile_dir and --dump_hlo do not work with --address: they require a server that is started here"
        )
    if values.plot is not None:
        check_output("plot", Path(values.plot), is_file=True)
    notes = load_notes()
    with tempfile.TemporaryDirectory() as temporary:
        subject = read_subject(values, Path(temporary))
        path = None
        for name in measure(subject) if values.address is None else measure_there(subject):
            between = ratios(subject.results)
            results = subject.results | {"ratios": between, "acceptance": acceptance(subject.results, between)}
            record = build_record("serve", kind="measured", settings=settings(subject), results=results, notes=notes)
            path = write_record(record, values.output_dir, values.record)
            print(f"{name}: written to {path}", flush=True)
        if path is None:
            raise InputError("--sections: nothing was measured")
        plot = Path(values.plot) if values.plot else path.with_suffix(".png")
        draw(subject.results, plot)
        print(plot)
        print(acceptance_table(results))
        profile(subject)


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
