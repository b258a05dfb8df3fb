"""Convert the lines of a batch to rows, and generated rows to records."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from launch.batches.lines import Line
from launch.batches.records import Key, failure_record, openai_record, sample_record
from launch.openai.bodies import Defaults
from runtime import RowRequest, RowResult


class LineRows:
    """The rows of all lines, ordered by line and sample.

    Attributes:
      requests: the rows to generate.
      stops: the stop strings of each row.
      failed: keys of the records of which a row, so far, ended without a result.
    """

    def __init__(self, lines: Sequence[Line], defaults: Defaults) -> None:
        """Make the rows of all lines of the input; ``defaults`` are those that the lines were read with."""
        self._defaults = defaults
        self.requests: list[RowRequest] = [request for line in lines for request in line.requests()]
        self.stops = [line.stop for line in lines for _ in range(line.samples)]
        self._owners = [(line, sample) for line in lines for sample in range(line.samples)]
        self.failed: set[Key] = set()
        self._samples: dict[str, dict[int, dict[str, Any]]] = {}  # samples of incomplete OpenAI lines, by line id

    def of_records(self, records: Collection[Key]) -> set[int]:
        """Return the indices of the rows that belong to the records with these keys."""
        if not records:
            return set()
        return {
            index
            for index, (line, sample) in enumerate(self._owners)
            if (line.id, sample if line.form == "plain" else None) in records
        }

    def failure(self, result: RowResult) -> dict[str, Any] | None:
        """Return the error record for a row without a result; None if a row of the same record was reported before."""
        line, sample = self._owners[result.number]
        key = (line.id, sample if line.form == "plain" else None)
        if key in self.failed:
            return None
        self.failed.add(key)
        return failure_record(line, key)

    def record(self, result: RowResult) -> dict[str, Any] | None:
        """Return the record that a finished row completes; None if other samples of its line are still missing."""
        (line, sample), defaults = self._owners[result.number], self._defaults
        request, tokenizer = self.requests[result.number], defaults.tokenizer
        own = sample_record(line, request, result, sample, defaults.completions)
        if line.form == "plain":
            return own
        samples = self._samples.setdefault(line.id, {})
        samples[sample] = own
        if len(samples) < line.samples:
            return None
        del self._samples[line.id]
        ordered = [samples[number] for number in range(line.samples)]
        return openai_record(line, ordered, tokenizer, defaults.model_name)
