"""Measurements within a time budget; each has a value or the reason why it was not run."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from benchmarks.records import NotRunError, Timing, time_alternating
from benchmarks.roofline import fits_or_none
from launch.process.startup import this_host
from sharding.errors import InputError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Measurement:
    """One measurement.

    Attributes:
      section: section of the table.
      name: what is measured.
      unit: unit of mean, deviation, minimum and maximum.
      mean, deviation, minimum, maximum: over the trials; None if it was not run.
      trials: number of trials.
      facts: other facts, such as rates, counts and shapes.
      not_run: why it was not run; None if it was.
    """

    section: str
    name: str
    unit: str = "ms"
    mean: float | None = None
    deviation: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    trials: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    not_run: str | None = None


class Sheet:
    """The measurements of a run, in order.

    Attributes:
      rows: the measurements so far.
      failures: number of calls of :meth:`tried` that ended with an unexpected error.
    """

    def __init__(self, trials: int, row_seconds: float, budget: float | None) -> None:
        """Create an empty sheet.

        Args:
          trials: timed calls per measurement, if there is time for them.
          row_seconds: largest time of a measurement; it is not run if two calls would take longer.
          budget: seconds for all measurements together; None for no limit.
        """
        self.rows: list[Measurement] = []
        self.failures = 0
        self._trials, self._row_seconds, self._budget = trials, row_seconds, budget
        self._start = time.perf_counter()

    def find(self, name: str) -> Measurement | None:
        """Return the measurement of this name, if it was run."""
        return next((row for row in self.rows if row.name == name and row.not_run is None), None)

    def value(self, section: str, name: str, number: float, unit: str, facts: Mapping[str, Any] | None = None) -> None:
        """Add a measurement with one number."""
        self.values(section, name, [number], unit, facts)

    def values(
        self, section: str, name: str, numbers: Sequence[float], unit: str, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Add a measurement: mean, deviation and bounds of ``numbers``, which has one number per trial."""
        deviation = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
        mean, deviation, low, high = (
            round(one, 4) for one in (statistics.mean(numbers), deviation, min(numbers), max(numbers))
        )
        self.add(Measurement(section, name, unit, mean, deviation, low, high, len(numbers), dict(facts or {})))

    def timing(self, section: str, name: str, timing: Timing, facts: Mapping[str, Any]) -> None:
        """Add a measurement of timed calls or passes."""
        self.add(
            Measurement(
                section, name, "ms", timing.mean, timing.deviation, timing.minimum, timing.maximum, timing.repeats,
                {"median": timing.median} | dict(facts),
            )
        )  # fmt: skip

    def leave_out(self, section: str, name: str, why: str) -> None:
        """Add a measurement that is not run."""
        self.add(Measurement(section, name, not_run=why))

    def measure(
        self,
        section: str,
        name: str,
        prepare: Callable[[], Callable[[], Any]],
        facts: Callable[[Timing], Mapping[str, Any]] | None = None,
        *,
        seconds: float = 0.0,
        warmup: int = 1,
    ) -> None:
        """Time calls and add a measurement.

        Args:
          section: see :class:`Measurement`.
          name: see :class:`Measurement`.
          prepare: compiles and loads, and returns the function to time. It may raise :class:`NotRunError`.
          facts: returns further facts after the calls.
          seconds: expected seconds of one call.
          warmup: number of calls before the timed ones, with the same shapes.
        """

        def work() -> None:
            trials = self.trials(seconds, warmup)
            timing = time_alternating({name: prepare()}, trials, warmup)[name]
            self.timing(section, name, timing, {} if facts is None else facts(timing))

        self.attempt(section, name, work)

    def trials(self, seconds: float, warmup: int = 1) -> int:
        """Return the number of timed calls that fit into the budget if one takes ``seconds``.

        Raises:
          NotRunError: fewer than two calls fit.
        """
        trials = self._trials
        if seconds > 0:
            trials = min(trials, int(self._row_seconds / seconds) - warmup)
        if trials < 2:
            raise NotRunError(
                f"estimated at {seconds:.0f} s per call from the measured peak rates; --row_seconds allows more"
            )
        return trials

    def attempt(self, section: str, name: str, work: Callable[[], None]) -> None:
        """Call ``work``, which adds a measurement. If time or :meth:`tried` prevent it, add the reason."""
        spent = time.perf_counter() - self._start
        if self._budget is not None and spent > self._budget:
            self.leave_out(section, name, f"the budget of {self._budget:.0f} s was used up")
            return
        found = self.tried(work)
        if isinstance(found, str):
            self.leave_out(section, name, found)

    def tried(self, work: Callable[[], Result]) -> Result | str:
        """Return the result of ``work``, or the reason of its failure: out of memory, or the error that it raised."""
        try:
            this_host().mark()  # the run is slow, but does not hang
            found = fits_or_none(work)
        except (NotRunError, InputError) as error:
            return str(error)
        except Exception as error:  # the other measurements are still made, and the run ends with an error
            traceback.print_exc()
            self.failures += 1
            return f"failed: {type(error).__name__}: {str(error)[:200]}"
        return f"out of memory: {found}" if isinstance(found, str) else found

    def records(self) -> list[dict[str, Any]]:
        """Return the measurements as dictionaries."""
        return [asdict(row) for row in self.rows]

    def add(self, row: Measurement) -> None:
        """Add a measurement and print it."""
        self.rows.append(row)
        if row.not_run is not None:
            print(f"{row.section}: {row.name}: not run, {row.not_run}", flush=True)
            return
        assert row.mean is not None, "a row that was run has numbers"
        facts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in row.facts.items() if key != "median")
        print(f"{row.section}: {row.name}: {row.mean:.3f} ± {row.deviation:.3f} {row.unit}  {facts}", flush=True)
