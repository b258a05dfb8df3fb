"""The load of servers: what is asked, counted and drawn. Against a server: tests/launch/test_serve_soak.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from absl import flags

from benchmarks.load import Answer, summary
from benchmarks.serve import define_flags, draw, main, make_asks, profile, shares
from sharding.errors import InputError


def test_what_is_counted() -> None:
    answers = [Answer(200, 0.1, 0.1 + 0.01 * number, 11, "x") for number in range(99)]
    answers += [Answer(200, 5.0, 6.0, 1, "x"), Answer(429, 0.01, 0.01, 0, ""), Answer(0, 0.1, 0.2, 3, "x")]
    found = summary(answers, 10.0, ttft=1000.0, tpot=50.0)
    assert (found["requests"], found["completed"], found["refused"], found["failed"]) == (102, 100, 1, 1)
    assert found["requests_per_second"] == 10
    assert found["output_tokens_per_second"] == 109.0
    # 10 tokens after the first in up to 0.5 s: numbers 0 to 50; the last one was late to begin.
    assert found["goodput_requests_per_second"] == 5.1
    assert found["ttft_ms"] == {"p50": 100, "p90": 100, "p99": pytest.approx(149, abs=0.1)}
    assert found["tpot_ms"]["p50"] == pytest.approx(49.5, abs=0.1)
    assert found["e2e_ms"]["p99"] == pytest.approx(1129.2, abs=0.1)
    assert summary([Answer(429, 0.1, 0.1, 0, "")], 1.0, 1.0, 1.0)["e2e_ms"] is None


def test_lengths_are_uneven_and_the_same_again() -> None:
    asks = make_asks(["a"] * 50, 64, 3)
    assert asks == make_asks(["a"] * 50, 64, 3)
    assert {8 <= ask.max_tokens <= 64 for ask in asks} == {True}
    assert len({ask.max_tokens for ask in asks}) > 10
    assert len({ask.seed for ask in asks}) == 50


@pytest.mark.parametrize("texts", [[], ["a"], ["0"], ["-1"], ["nan"], ["1", "inf"]])
def test_loads_are_positive_numbers(texts: list[str]) -> None:
    assert shares(["0.5", "2"]) == [0.5, 2]
    with pytest.raises(InputError, match="--loads="):
        shares(texts)


def test_it_is_drawn_with_and_without_a_comparison(tmp_path: Path) -> None:
    times = {"p50": 1.0, "p90": 2.0, "p99": 3.0}
    point = {"offered_requests_per_second": 2.0, "e2e_ms": times, "ttft_ms": times}
    way = {"output_tokens_per_second": 5.0, "e2e_ms": times}
    results = {"open_loop": {"0.5": point, "9": point | {"e2e_ms": None}}}
    sizes = []
    for more in ({}, {"comparison": {"continuous": way, "one at a time": way}}):
        draw(results | more, tmp_path / "plot.png")
        sizes.append((tmp_path / "plot.png").stat().st_size)
    assert sizes[0] < sizes[1]


def flags_of(*arguments: str) -> flags.FlagValues:
    values = flags.FlagValues()
    define_flags(values)
    values(["serve", *arguments])
    return values


def test_a_server_elsewhere_cannot_be_profiled(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="started here"):
        main(flags_of("--address=http://localhost:1", f"--profile_dir={tmp_path / 'trace'}"))


@pytest.mark.slow
def test_a_profile_is_of_a_server_of_its_own(tmp_path: Path) -> None:
    trace, programs = tmp_path / "trace", tmp_path / "programs"
    values = flags_of("--slots=2", f"--profile_dir={trace}", f"--dump_hlo={programs}")
    profile(values, make_asks(["def f(x):"] * 2, 8, 0))
    assert list(trace.rglob("*.xplane.pb"))
    assert any("/layer/" in path.read_text() for path in programs.glob("*.hlo.txt"))
