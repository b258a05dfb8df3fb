"""The acceptance list for running DiffuCoder on a new accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.records import NotRunError
from benchmarks.suite.generation import BATCHES, CPU, GENERATIONS
from benchmarks.suite.parity import layer_parity
from benchmarks.suite.subject import Subject
from benchmarks.suite.text import coherence

_SECONDS, _SPEED_UP, _SHARE = 10.0, 10.0, 0.95
ITEMS = (
    "loads without error",
    f"one generation under {_SECONDS:.0f} s once compiled",
    "batching speeds up",
    f"at least {_SPEED_UP:.0f} times the CPU",
    f"layer parity with PyTorch: more than {_SHARE:.0%} within tolerance",
    "text is coherent",
)


def acceptance(subject: Subject) -> list[dict[str, Any]]:
    """Return every item with ``ticked`` (True, False, or None if it was not run) and ``why``."""
    sheet = subject.sheet

    def missing(section: str, name: str) -> NotRunError:
        rows = [row for row in sheet.rows if (row.section, row.name) == (section, name) and row.not_run]
        return NotRunError(rows[0].not_run or "") if rows else NotRunError("no such row")

    def loads() -> tuple[bool, str, dict[str, Any]]:
        return True, f"{subject.engine.layout.parameter_count:,} parameters on {len(subject.devices)} devices", {}

    def fast() -> tuple[bool, str, dict[str, Any]]:
        name = GENERATIONS[0][0]
        row = sheet.find(name)
        if row is None or row.maximum is None:
            raise missing("generation", name)
        return row.maximum < 1e3 * _SECONDS, f"{name}: at most {row.maximum / 1e3:.2f} s", {}

    def batching() -> tuple[bool, str, dict[str, Any]]:
        row = sheet.find("best batch")
        if row is None or "times_batch_1" not in row.facts:
            raise missing(BATCHES, "best batch")
        times = row.facts["times_batch_1"]
        return times > 1.0, f"batch {row.facts['batch']}: {times:.2f} times the tokens per second of batch 1", {}

    def beats_the_cpu() -> tuple[bool, str, dict[str, Any]]:
        name = f"a pass of {GENERATIONS[0][0]}"
        row = sheet.find(name)
        if row is None:
            raise missing(CPU, name)
        times = row.facts["times_as_fast"]
        return times >= _SPEED_UP, f"{times:.1f} times as fast", {}

    def parity() -> tuple[bool, str, dict[str, Any]]:
        found = layer_parity(subject)
        text = f"at least {found['smallest_share']:.2%} of a layer's outputs within {found['tolerance']:g}"
        return found["smallest_share"] > _SHARE, f"{text}, {found['layers']} layers", found

    def coherent() -> tuple[bool, str, dict[str, Any]]:
        found = coherence(subject)
        text = f"{found['parsed']} of {found['prompts']} completions are valid Python"
        return 2 * found["parsed"] >= found["prompts"], text, found

    checks = (loads, fast, batching, beats_the_cpu, parity, coherent)
    found = []
    for what, check in zip(ITEMS, checks, strict=True):
        answer = sheet.tried(check)
        found.append(_item(what, *((None, f"not run: {answer}") if isinstance(answer, str) else answer)))
    return found


def not_loaded(error: Exception) -> list[dict[str, Any]]:
    """Return the items for a model that does not load."""
    why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return [_item(ITEMS[0], False, why), *(_item(what, None, "not run: it does not load") for what in ITEMS[1:])]


def _item(what: str, ticked: bool | None, why: str, details: Mapping[str, Any] | None = None) -> dict[str, Any]:
    print(f"[{'x' if ticked else ' '}] {what}: {why}", flush=True)
    return {"what": what, "ticked": ticked, "why": why, "details": dict(details or {})}
