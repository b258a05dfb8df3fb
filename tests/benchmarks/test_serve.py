"""The serving benchmark: requests, counts and plots. tests/launch/test_serve_soak.py runs it against a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from absl import flags

from benchmarks.load import Answer, Ask, Client, open_loop, saturate, summary
from benchmarks.records import Timing
from benchmarks.serve import sections
from benchmarks.serve.__main__ import define_flags, main, measure, profile, ratios, read_subject
from benchmarks.serve.acceptance import acceptance
from benchmarks.serve.plots import draw
from benchmarks.serve.processes import Checkout
from benchmarks.serve.tables import serve_tables
from benchmarks.serve.workload import SIZES, Lengths, make_asks, read_functions
from checkpoints import DEMO, open_folder
from runtime import TextTokenizer
from sharding.errors import InputError
from tests.launch.tiny import write_tiny_checkpoint

FULL = SIZES["full"]


class Slots(Client):
    """A simulated server: ``slots`` rows at a time, one token per row every ``step`` seconds."""

    def __init__(self, slots: int, step: float) -> None:
        super().__init__("http://localhost", None, 1.0)
        self._slots, self._step = asyncio.Semaphore(slots), step
        self.most = self.now = 0

    async def send(self, ask: Ask, due: float) -> Answer:
        self.now += 1
        self.most = max(self.most, self.now)
        async with self._slots:
            await asyncio.sleep(self._step * ask.max_tokens)
        self.now -= 1
        end = time.perf_counter() - due
        return Answer(200, end, end, ask.max_tokens, ask.prompt)


def asks_of(lengths: Sequence[int]) -> list[Ask]:
    return [Ask(str(number), length, number) for number, length in enumerate(lengths)]


def test_what_is_counted() -> None:
    answers = [Answer(200, 0.1, 0.1 + 0.01 * number, 11, "x", 2) for number in range(99)]
    answers += [Answer(200, 5.0, 6.0, 1, "x", 2), Answer(429, 0.01, 0.01, 0, ""), Answer(0, 0.1, 0.2, 3, "x")]
    found = summary(answers)
    assert (found["requests"], found["completed"], found["refused"], found["failed"]) == (102, 100, 1, 1)
    assert found["ttft_ms"] == {"p50": 100, "p90": 100, "p99": pytest.approx(149, abs=0.1)}
    assert found["e2e_ms"]["p99"] == pytest.approx(1129.2, abs=0.1)
    assert summary([Answer(200, 1.0, 1.0, 1, "x")])["ttft_ms"] is None
    assert summary([Answer(429, 0.1, 0.1, 0, "")])["e2e_ms"] is None


def test_a_saturated_server_is_measured_while_it_is_full() -> None:
    # The last request is long. It is cancelled, so the time in which it runs alone does not count.
    server, lengths = Slots(4, 0.001), [10, 20, 30, 40] * 15 + [10_000]

    async def full() -> Any:
        return await saturate(server, asks_of(lengths), users=8, warmup=8)

    found = asyncio.run(full())
    assert server.most == 8
    assert len(found.answers) == len(found.asks) == len(lengths) - 7 - 8
    assert [answer.text for answer in found.answers] == [ask.prompt for ask in found.asks]
    # Four rows with a token per millisecond; a busy machine may be slower, but never faster.
    assert 0 < found.tokens_per_second <= 1.2 * 4000


def test_only_waits_in_which_nothing_runs_are_cut_short() -> None:
    async def load(longest_idle: float | None) -> tuple[float, list[Answer]]:
        start = time.perf_counter()
        answers = await open_loop(Slots(1, 0.001), asks_of([50] * 6), 4.0, 0, longest_idle)
        return time.perf_counter() - start, answers

    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / 4.0, 6))
    seconds, answers = asyncio.run(load(None))
    assert seconds >= arrivals[-1] + 0.05
    shorter, again = asyncio.run(load(0.01))
    assert shorter < seconds - 0.2
    assert [answer.text for answer in again] == [answer.text for answer in answers] == list("012345")
    # Requests run one after another, so shorter idle waits do not change how long later requests wait.
    assert all(answer.end >= 0.05 for answer in again)


def test_lengths_are_drawn_within_their_bounds() -> None:
    generator = np.random.default_rng(0)
    drawn = [Lengths(8, 256, 32.0, 0.8).draw(generator) for _ in range(2000)]
    assert (min(drawn), max(drawn)) == (8, pytest.approx(256, abs=80))
    assert float(np.median(drawn)) == pytest.approx(33, abs=3)


def test_requests_are_the_same_again_and_fit_the_canvas() -> None:
    functions, tokenizer = read_functions(str(DEMO / "held_out.jsonl")), TextTokenizer.from_folder(open_folder(DEMO))
    assert tokenizer is not None
    asks = make_asks(functions, tokenizer, FULL, 40, 3, {"early_stop": False})
    assert asks == make_asks(functions, tokenizer, FULL, 40, 3, {"early_stop": False})
    lengths = [len(tokenizer.encode(ask.prompt)) for ask in asks]
    assert 18 <= min(lengths) < max(lengths) <= 208
    assert len(set(lengths)) > 20
    assert all(8 <= ask.max_tokens <= 256 and ask.fields == {"early_stop": False} for ask in asks)
    assert len({ask.seed for ask in asks}) == 40
    # The server's default canvas
    assert FULL.prompts.most + FULL.answers.most <= 512


def results(old: bool) -> dict[str, Any]:
    """Return the results of a run, with numbers that can be distinguished."""

    def times(p50: float) -> dict[str, float]:
        return {"p50": p50, "p90": 2 * p50, "p99": 3 * p50}

    def start(seconds: float) -> dict[str, Any]:
        return {
            "seconds_to_ready": seconds, "programs_at_ready": 3, "programs_remaining_at_ready": 21,
            "seconds_to_all_programs": 10 * seconds, "programs": 24,
        }  # fmt: skip

    cold = start(20.0) | {"programs_cached": 0}
    warm = start(5.0) | {"programs_at_ready": 24, "programs_remaining_at_ready": 0, "programs_cached": 24}
    lone: dict[str, Any] = {
        "new_tokens": 32, "generate_ms": Timing.of([0.5] * 3, [0]), "new_ms": Timing.of([0.6, 0.625, 0.6], [0]),
        "streamed_ms": Timing.of([0.7] * 3, [0]),
        "times_generate": 1.2, "streamed_times_generate": 1.4, "same_text": True,
    }  # fmt: skip
    streamed = {
        "server": "new", "block_length": 1, "new_tokens": 16, "committed_at_first_text": 2, "first_text_ms": 12.0,
        "last_text_ms": 99.0, "pieces": 7,
    }  # fmt: skip
    load = {
        "offered_requests_per_second": 0.6, "e2e_ms": times(700.0), "useful_share": 0.83, "refused": 1, "failed": 2,
    }  # fmt: skip
    found: dict[str, Any] = {
        "starts": {
            "starts": {"new": {"cold": cold, "warm": [warm]}},
            "lone_from_ready_ms": {"32": [650]}, "generate_beside_ms": {"32": [500]},
        },
        "while_compiling": {
            "new_tokens": 32, "requests": 61, "repeats": 20, "compiling_ms": times(550.0), "widest_ms": times(500.0),
            "compiled_ms": times(240.0),
        },
        "lone": [lone],
        "first_text": [streamed],
        "capacity": {"new": {"requests_per_second": 2.0}},
        "one_at_a_time": {"requests_per_second": 1.6, "e2e_ms": times(400.0)},
        "loads": {"0.3": load, "0.6": load | {"useful_share": None}},
        "batch": {
            "prompts": 200, "positions_per_second": {"8 x 64": 54321}, "best": "8 x 64", "useful_seconds_at_best": 80.0,
            "useful_seconds_at_best_of_canvas": 100.0,
            "warm": {"wall": 100.0, "generating": 88.0, "computed_positions": 150}, "useful_positions": 120,
            "wall_times_useful": 1.25, "generating_times_useful": 1.1, "wall_times_useful_of_canvas": 1.0,
        },
    }  # fmt: skip
    if old:
        lone["old_ms"] = Timing.of([30.0], [0])
        found["capacity"]["old"] = {"requests_per_second": 0.25}
        found["starts"]["starts"]["old"] = {"cold": start(9.0), "warm": []}
        found["same_arrivals"] = {
            "offered_requests_per_second": 0.075, "old": {"e2e_ms": times(40_000.0)}, "new": {"e2e_ms": times(800.0)},
            "times_lower_p50": 50.0, "texts_that_differ": 0,
        }  # fmt: skip
    return found


def test_ratios_between_sections() -> None:
    found = ratios(results(old=True))
    assert found["capacity_times_old"] == 8.0
    assert found["capacity_times_one_at_a_time"] == 1.25
    assert found["lone_from_ready_times_generate"] == {"32": [1.3]}
    assert found["slowest_lone_times_generate"] == 1.2
    assert ratios({}) == {}


def test_the_guide_has_the_figures_of_the_record() -> None:
    folder = Path(sections.__file__).parents[1]
    record = json.loads((folder / "results" / "serve.json").read_text())
    batch, share = record["results"]["batch"], record["results"]["ratios"]["capacity_times_one_at_a_time"]
    guide = " ".join((folder / "README.md").read_text("utf-8").split())
    assert f"the server answers {share:.2f} times as many requests per second as a loop" in guide
    assert batch["warm"]["programs"] == 5
    padding = batch["warm"]["computed_positions"] / batch["useful_positions"] - 1
    assert "It pads its rows to only five widths" in guide
    assert f"so it computes {100 * padding:.0f} % more positions than needed" in guide


def test_what_is_expected_of_a_record() -> None:
    measured = results(old=True)
    measured["loads"]["0.6"]["useful_share"] = 0.79
    rows = acceptance(measured, ratios(measured))
    found = {row["what"]: (row["value"], row["met"]) for row in rows if row["goal"] is not None}
    assert list(found.values()) == [
        (1.2, True), (1.3, True), (2, True), (50.0, True), (8.0, True), (3, False), (3, False), (0.79, False),
        (1.25, False), (0, True),
    ]  # fmt: skip
    assert {row["what"]: row["value"] for row in rows}["old server, cold cache: programs"] == 24
    assert acceptance({}, {}) == []


def test_a_start_is_read_before_requests_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    @contextlib.contextmanager
    def server(checkout: Checkout, arguments: Sequence[str]) -> Iterator[Any]:
        yield SimpleNamespace(address="http://localhost:1")

    def started(found: Any) -> dict[str, Any]:
        calls.append("started")
        return {}

    def lone(address: str, ask: Ask) -> Answer:
        calls.append("lone")
        return Answer(200, 0.1, 0.2, ask.max_tokens, "x")

    def generate(prompt: str, max_tokens: int, seed: int) -> dict[str, float]:
        calls.append("generate")
        return {"seconds": 0.1}

    for replacement in (server, started, lone):
        monkeypatch.setattr(sections, replacement.__name__, replacement)
    loop: Any = SimpleNamespace(generate=generate)
    found = sections.measure_starts([Checkout("new", Path(), "python")], {"new": []}, loop, asks_of([3, 4]), 2)
    assert calls == ["generate", "generate", "started", *["started", *["lone", "generate"] * 2] * 2]
    assert found["lone_from_ready_ms"] == {"3": [200.0] * 2, "4": [200.0] * 2}
    assert found["generate_beside_ms"] == {"3": [100.0] * 2, "4": [100.0] * 2}


def test_tables_and_plots_of_a_record(tmp_path: Path) -> None:
    sizes = []
    for old in (False, True):
        measured = results(old)
        draw(measured, tmp_path / "plot.png")
        sizes.append((tmp_path / "plot.png").stat().st_size)
        written = json.dumps(
            {
                "results": measured
                | {"ratios": ratios(measured), "acceptance": acceptance(measured, ratios(measured))},
                "settings": FULL.settings()
                | {
                    "address": None,
                    "max_queue": 400,
                    "checkpoint": "demo",
                    "server_flag": [],
                    "old_commit": "ed2e438abc" if old else None,
                },
                "machine": {"processor": "Some CPU", "cores": 2},
                "notes": ["the machine was busy"],
            },
            default=lambda timing: timing.__dict__,
        )
        lines = serve_tables(json.loads(written)).splitlines()
        before = "30 s" if old else ""
        assert lines[2].endswith("the last token / engine.generate | 1.2 | at most 1.3 | yes |")
        assert "| the slowest of all 3 pairs of a single request and engine.generate | 1.25 |  |  |" in lines
        assert "| the slowest of all 3 pairs of a streamed request and engine.generate | 1.4 |  |  |" in lines
        assert f"| one request, 32 new tokens | 0.5 s | 0.6 s | 1.20x | 1.40x | 1.30x | {before} | yes |" in lines
        assert "| server, blocks of 1, 16 tokens | 2 | 0.012 s | 0.099 s | 7 |" in lines
        assert "| 30% of 2.00 requests/s | 0.7 s | 1.4 s | 2.1 s | 83% | 3 |" in lines
        assert "| 60% of 2.00 requests/s | 0.7 s | 1.4 s | 2.1 s |  | 3 |" in lines
        assert any(
            line == "| `diffumesh batch`, 200 prompts | 100.0 s | 88.0 s | 80.0 s | 1.25x | 1.10x | 1.00x |"
            for line in lines
        )
        assert any(line.endswith("the batch would take 100.0 s, which is 1.25x.") for line in lines)
        assert "| server, cold cache | 20.0 s | 3 | 200.0 s | 24 | 0 |" in lines
        assert "| server, warm cache | 5.0 s | 24 | 50.0 s | 24 | 24 |" in lines
        assert ("| older server, cold cache | 9.0 s | 3 | 90.0 s | 24 | not reported |" in lines) == old
        assert "| while programs are compiled, at first in the widest bucket | 61 | 0.55 s | 1.1 s | 1.65 s |" in lines
        assert "| in its own bucket, when all programs are compiled | 20 | 0.24 s | 0.48 s | 0.72 s |" in lines
        assert "Of 20 requests, p99 is nearly the slowest one: compare p50 and p90." in lines
        assert any(
            line.endswith(
                "Above 1.3x are 0 of 3 pairs of a single request (at most 1.25x, 32 new tokens) and 3 of 3 pairs of a "
                "streamed request (at most 1.40x, 32 new tokens)."
            )
            for line in lines
        )
        assert any("`demo`, default flags except `--max_queue=400`, 2 cores of Some CPU" in line for line in lines)
        assert ("| ratio | 8.00x | 50.00x lower |  |  |" in lines) == old
        assert lines[-1] == "Note: the machine was busy."
        assert ("commit `ed2e438`" in lines[-3]) == old
    assert sizes[0] < sizes[1]


def flags_of(*arguments: str) -> flags.FlagValues:
    values = flags.FlagValues()
    define_flags(values)
    values(["serve", *arguments])
    return values


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--sections=lone,speed", "--sections=speed: expected some of starts, compiling, lone"),
        ("--old=/nowhere", "--old=/nowhere: not the root of a checkout"),
        ("--prompts=/nowhere", "--prompts=/nowhere: cannot be read"),
        ("--api_key_file=/nowhere", "--api_key_file=/nowhere: contains no key"),
    ],
)
def test_wrong_flags(tmp_path: Path, argument: str, said: str) -> None:
    more = ["--address=http://localhost:1"] if "key" in argument else []
    with pytest.raises(InputError, match=said):
        main(flags_of(argument, f"--output_dir={tmp_path}", *more))


def test_a_server_elsewhere_cannot_be_profiled(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="started here"):
        main(flags_of("--address=http://localhost:1", f"--profile_dir={tmp_path / 'trace'}"))


@pytest.mark.slow
def test_the_short_form_beside_another_checkout(tmp_path: Path) -> None:
    """Run all sections, with this checkout also as the older one."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    write_tiny_checkpoint(checkpoint)
    values = flags_of(
        "--size=short", f"--old={Checkout.this().root}", f"--checkpoint={checkpoint}", "--server_flag=--mesh=tensor=1",
        "--server_flag=--max_new_tokens=32", "--server_flag=--max_programs=3", f"--output_dir={tmp_path}",
    )  # fmt: skip
    main(values)
    record = json.loads((tmp_path / "serve.json").read_text())
    found = record["results"]
    assert (tmp_path / "serve.png").stat().st_size > 0
    assert serve_tables(record).count("\n\n| ") >= 4
    starts = found["starts"]["starts"]
    assert set(starts) == {"old", "new"}
    cold, warm = starts["new"]["cold"], starts["new"]["warm"][0]
    assert cold["programs"] == warm["programs"] > 0
    # On a fast machine, some programs of this model are compiled within the 0.2 s from which on they are kept.
    assert cold["programs_cached"] == 0 < warm["programs_cached"] <= warm["programs"]
    assert found["while_compiling"]["requests"] > 0
    assert found["while_compiling"]["compiling_ms"]["p99"] > 0
    assert all(row["same_text"] and row["times_generate"] > 0 for row in found["lone"])
    assert [("old_ms" in row) for row in found["lone"]] == [True, False]
    assert {row["server"] for row in found["first_text"]} == {"old", "new"}
    assert all(1 <= row["committed_at_first_text"] <= 16 for row in found["first_text"])
    assert all(one["requests_per_second"] > 0 for one in found["capacity"].values())
    assert (found["same_arrivals"]["texts_that_differ"], found["same_arrivals"]["new"]["completed"]) == (0, 6)
    assert [load["texts_that_differ"] for load in found["loads"].values()] == [0, 0]
    batch = found["batch"]
    assert batch["wall_times_useful"] > batch["generating_times_useful"] > 0
    assert batch["wall_times_useful"] >= batch["wall_times_useful_of_canvas"] > 0
    assert batch["warm"]["computed_positions"] >= batch["useful_positions"]
    assert batch["warm"]["programs"] > 0


@pytest.mark.slow
def test_a_profile_is_of_a_server_of_its_own(tmp_path: Path) -> None:
    trace, programs = tmp_path / "trace", tmp_path / "programs"
    values = flags_of("--size=short", "--server_flag=--canvas=128", f"--profile_dir={trace}", f"--dump_hlo={programs}")
    profile(read_subject(values, tmp_path))
    assert list(trace.rglob("*.xplane.pb"))
    assert any("/layer/" in path.read_text() for path in programs.glob("*.hlo.txt"))


def test_nothing_is_started_for_sections_that_are_not_wanted(tmp_path: Path) -> None:
    assert list(measure(read_subject(flags_of("--sections="), tmp_path))) == []
