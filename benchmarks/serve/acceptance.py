"""Expectations of the server benchmark: a row for each, with the measured value and the goal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

# Goals
TIMES_GENERATE = 1.3
_ITERATIONS_TO_FIRST_TEXT = 2
_TIMES_LOWER_P50 = 3.0
_TIMES_CAPACITY = 1.5
_USEFUL_SHARE, _USEFUL_LOAD = 0.8, "0.6"
_TIMES_USEFUL_WORK = 1.15


@dataclass(frozen=True)
class Expectation:
    """One expectation.

    Attributes:
      what: description of the quantity.
      value: the measured value.
      goal: ``at most X`` or ``at least X``; None if the value is only reported.
      met: whether the value reaches the goal; None without a goal.
    """

    what: str
    value: float
    goal: str | None = None
    met: bool | None = None

    @classmethod
    def at_most(cls, what: str, value: float, bound: float) -> Expectation:
        """Return an expectation with an upper bound."""
        return cls(what, value, f"at most {bound:g}", value <= bound)

    @classmethod
    def at_least(cls, what: str, value: float, bound: float) -> Expectation:
        """Return an expectation with a lower bound."""
        return cls(what, value, f"at least {bound:g}", value >= bound)


def acceptance(results: dict[str, Any], ratios: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the expectations whose sections were measured, as JSON values.

    Args:
      results: sections of a record.
      ratios: ratios between sections.
    """
    return [asdict(row) for row in _rows(results, ratios)]


def _rows(results: dict[str, Any], ratios: dict[str, Any]) -> Iterator[Expectation]:
    if "lone" in results:
        rows = results["lone"]
        what = (
            "single requests after all programs are compiled, largest median of a length: time to the last token / "
            "engine.generate"
        )
        yield Expectation.at_most(what, ratios["slowest_lone_times_generate"], TIMES_GENERATE)
        yield Expectation("the same for streamed requests", max(row["streamed_times_generate"] for row in rows))
        for name, label in (("new", "single"), ("streamed", "streamed")):
            pairs = [one for row in rows for one in pair_ratios(row[f"{name}_ms"], row["generate_ms"])]
            what = f"the slowest of all {len(pairs)} pairs of a {label} request and engine.generate"
            yield Expectation(what, round(max(pairs), 3))
    if "lone_from_ready_times_generate" in ratios:
        what = "slowest single request right after ready, with a warm cache: time to the last token / engine.generate"
        yield Expectation.at_most(
            what, max(map(max, ratios["lone_from_ready_times_generate"].values())), TIMES_GENERATE
        )
    for row in results.get("first_text", ()):
        if row["server"] == "new":
            what = f"iterations until the first streamed text, blocks of {row['block_length']}"
            yield Expectation.at_most(what, row["committed_at_first_text"], _ITERATIONS_TO_FIRST_TEXT)
    if "same_arrivals" in results:
        what = "same arrivals at 30% of the old capacity: p50 of the old server / p50 of the new one"
        yield Expectation.at_least(what, results["same_arrivals"]["times_lower_p50"], _TIMES_LOWER_P50)
    if "capacity_times_old" in ratios:
        yield Expectation.at_least(
            "capacity / capacity of the old server", ratios["capacity_times_old"], _TIMES_CAPACITY
        )
    for share, load in results.get("loads", {}).items():
        what = f"unanswered requests at {float(share):.0%} of the capacity"
        yield Expectation.at_most(what, load["refused"] + load["failed"], 0)
        if share == _USEFUL_LOAD and load["useful_share"] is not None:
            what = f"share of useful positions among the computed ones at {float(share):.0%} of the capacity"
            yield Expectation.at_least(what, load["useful_share"], _USEFUL_SHARE)
    if "capacity_times_one_at_a_time" in ratios:
        what = "capacity / requests per second of engine.generate, one at a time"
        yield Expectation(what, ratios["capacity_times_one_at_a_time"])
    if "batch" in results:
        what = "diffumesh batch: wall time / time of its useful work at the best measured rate"
        yield Expectation.at_most(what, results["batch"]["wall_times_useful"], _TIMES_USEFUL_WORK)
        ratio = results["batch"]["wall_times_useful_of_canvas"]
        yield Expectation("the same, each row at the best measured rate of its canvas", ratio)
        computed = results["batch"]["warm"]["computed_positions"] / results["batch"]["useful_positions"]
        yield Expectation("diffumesh batch: computed positions / useful positions", computed)
    if (differing := _differing(results)) is not None:
        yield Expectation.at_most("texts that differ between the servers, the loop and the loads", differing, 0)
    for name, one in results.get("starts", {}).get("starts", {}).items():
        for cache, start in [("cold", one["cold"]), *(("warm", warm) for warm in one["warm"])]:
            yield Expectation(f"{name} server, {cache} cache: seconds to ready", start["seconds_to_ready"])
            yield Expectation(f"{name} server, {cache} cache: programs", start["programs"])


def pair_ratios(ours: Any, theirs: Any) -> list[float]:
    """Return the ratio of each pair of calls that took turns, from two :class:`Timing` or from those of a record."""
    each = (timing["each"] if isinstance(timing, dict) else timing.each for timing in (ours, theirs))
    return [one / other for one, other in zip(*each, strict=True)]


def _differing(results: dict[str, Any]) -> int | None:
    """Return the number of texts that are not the same on all sides; None if nothing was compared."""
    counts = [int(not row["same_text"]) for row in results.get("lone", ())]
    compared = [results.get("same_arrivals", {}), *results.get("loads", {}).values()]
    counts += [found["texts_that_differ"] for found in compared if found.get("texts_that_differ") is not None]
    return sum(counts) if counts else None
