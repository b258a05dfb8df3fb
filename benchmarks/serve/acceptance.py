"""What a run of the server benchmark is expected to show: a row for each expectation, with what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

# Bounds of the expectations.
_TIMES_GENERATE = 1.3
_ITERATIONS_TO_FIRST_TEXT = 2
_TIMES_LOWER_P50 = 3.0
_TIMES_CAPACITY = 1.5
_USEFUL_SHARE, _USEFUL_LOAD = 0.8, "0.6"
_TIMES_USEFUL_WORK = 1.15


@dataclass(frozen=True)
class Row:
    """One expectation.

    Attributes:
      what: the sentence.
      value: what was measured.
      goal: ``at most`` or ``at least`` so much; None where a number is wanted and none is asked for.
      met: whether the value reaches the goal; None without one.
    """

    what: str
    value: float
    goal: str | None = None
    met: bool | None = None

    @classmethod
    def at_most(cls, what: str, value: float, bound: float) -> Row:
        """An expectation with an upper bound."""
        return cls(what, value, f"at most {bound:g}", value <= bound)

    @classmethod
    def at_least(cls, what: str, value: float, bound: float) -> Row:
        """An expectation with a lower bound."""
        return cls(what, value, f"at least {bound:g}", value >= bound)


def acceptance(results: dict[str, Any], ratios: dict[str, Any]) -> list[dict[str, Any]]:
    """The expectations whose sections were measured, as JSON values.

    Args:
      results: sections of a record.
      ratios: between them.
    """
    return [asdict(row) for row in _rows(results, ratios)]


def _rows(results: dict[str, Any], ratios: dict[str, Any]) -> Iterator[Row]:
    if "lone" in results:
        what = "a lone request with all programs there: time to the last token, times engine.generate, the slowest"
        yield Row.at_most(what, ratios["slowest_lone_times_generate"], _TIMES_GENERATE)
        yield Row("the same, streamed", max(row["streamed_times_generate"] for row in results["lone"]))
    if "lone_from_ready_times_generate" in ratios:
        what = "a lone request from ready on, with a warm cache: times engine.generate, the slowest"
        yield Row.at_most(what, max(map(max, ratios["lone_from_ready_times_generate"].values())), _TIMES_GENERATE)
    for row in results.get("first_text", ()):
        if row["server"] == "new" and row["block_length"] == 1:
            what = "iterations until the first streamed text"
            yield Row.at_most(what, row["committed_at_first_text"], _ITERATIONS_TO_FIRST_TEXT)
    if "same_arrivals" in results:
        what = "the same arrivals at 30% of the old capacity: times lower p50 than the old server"
        yield Row.at_least(what, results["same_arrivals"]["times_lower_p50"], _TIMES_LOWER_P50)
    if "capacity_times_old" in ratios:
        yield Row.at_least("capacity, times the old server's", ratios["capacity_times_old"], _TIMES_CAPACITY)
    for share, load in results.get("loads", {}).items():
        what = f"requests that were not answered at {float(share):.0%} of the capacity"
        yield Row.at_most(what, load["refused"] + load["failed"], 0)
        if share == _USEFUL_LOAD and load["useful_share"] is not None:
            what = f"share of computed positions that are useful, at {float(share):.0%} of the capacity"
            yield Row.at_least(what, load["useful_share"], _USEFUL_SHARE)
    if "capacity_times_one_at_a_time" in ratios:
        what = "capacity, times that of engine.generate for one request after another"
        yield Row(what, ratios["capacity_times_one_at_a_time"])
    if "batch" in results:
        what = "diffumesh batch: wall time, times its useful work at the best measured rate"
        yield Row.at_most(what, results["batch"]["wall_times_useful"], _TIMES_USEFUL_WORK)
        # Records of earlier versions have one reading alone.
        if (ratio := results["batch"].get("wall_times_useful_of_canvas")) is not None:
            yield Row("the same, each row at the best measured rate of its canvas", ratio)
        if (computed := results["batch"]["warm"].get("computed_positions")) is not None:
            yield Row("the same, computed positions times useful ones", computed / results["batch"]["useful_positions"])
    if (differing := _differing(results)) is not None:
        yield Row.at_most("texts that differ between servers, loop and loads", differing, 0)
    for name, one in results.get("starts", {}).get("starts", {}).items():
        for cache, start in [("cold", one["cold"]), *(("warm", warm) for warm in one["warm"])]:
            yield Row(f"{name} server, {cache} cache: seconds to ready", start["seconds_to_ready"])
            yield Row(f"{name} server, {cache} cache: programs", start["programs"])


def _differing(results: dict[str, Any]) -> int | None:
    """Texts that are not the same everywhere; None where nothing was compared."""
    counts = [int(not row["same_text"]) for row in results.get("lone", ())]
    compared = [results.get("same_arrivals", {}), *results.get("loads", {}).values()]
    counts += [found["texts_that_differ"] for found in compared if found.get("texts_that_differ") is not None]
    return sum(counts) if counts else None
