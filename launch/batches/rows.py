"""Convert the lines of a batch to rows, and generated rows to records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from launch.batches.lines import Line
from launch.batches.records import Key, failure_record, openai_record, sample_record
from launch.openai.bodies import Defaults
from runtime import NON_FINITE, RowResult, UndecodableError


class LineRows:
    """The rows of all lines, ordered by line and sample.

    Attributes:
      requests: the rows to generate.
      stops: the stop strings of each row.
      failed: keys of the records of which a row, so far, ended without a result, each with the reason.
    """

    def __init__(self, lines: Sequence[Line], defaults: Defaults) -> None:
        """Make the rows of all lines of the input; ``defaults`` are those that the lines were read with."""
        self._defaults = defaults
        self._owners = [(line, sample) for line in lines for sample in range(line.samples)]
        self.requests = [line.sample(number) for line, number in self._owners]
        self.stops = [line.stop for line, _ in self._owners]
        self.failed: dict[Key, str] = {}
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

    def finish(self, results: Iterable[RowResult]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the records that finished rows complete, and the error records of rows without a result."""
        records: list[dict[str, Any]] = []
        errors: list[dict[str, Any]] = []
        for result in results:
            if result.non_finite:
                errors += self._failure(result, "non_finite_logits", NON_FINITE)
                continue
            try:
                records += self._record(result)
            except UndecodableError as error:
                errors += self._failure(result, "undecodable_tokens", error.message)
        return records, errors

    def _failure(self, result: RowResult, code: str, message: str) -> list[dict[str, Any]]:
        """Return the error record for a row without a result; nothing if a row of the same record had one."""
        line, sample = self._owners[result.number]
        key = (line.id, sample if line.form == "plain" else None)
        if key in self.failed:
            return []
        self.failed[key] = message
        return [failure_record(line, key, code, message)]

    def _record(self, result: RowResult) -> list[dict[str, Any]]:
        """Return the record that a finished row completes; nothing if other samples of its line are still missing."""
        (line, sample), defaults = self._owners[result.number], self._defaults
        request, tokenizer = self.requests[result.number], defaults.tokenizer
        own = sample_record(line, request, result, sample, defaults.completions)
        if line.form == "plain":
            return [own]
        samples = self._samples.setdefault(line.id, {})
        samples[sample] = own
        if len(samples) < line.samples:
            return []
        del self._samples[line.id]
        ordered = [samples[number] for number in range(line.samples)]
        return [openai_record(line, ordered, tokenizer, defaults.model_name)]
