"""The list that people tick when they bring DiffuCoder to a new accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.suite.generation import BATCHES, CPU, GENERATIONS
from benchmarks.suite.parity import layer_parity
from benchmarks.suite.sheet import NotRunError
from benchmarks.suite.subject import Subject
from benchmarks.suite.text import coherence

_SECONDS, _SPEED_UP, _SHARE = 10.0, 10.0, 0.95


def acceptance(subject: Subject) -> list[dict[str, Any]]:
    """Every item: ``ticked`` True or False, or None where it was not run, and ``why``."""
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
        return times > 1.0, f"batch {row.facts['batch']}: {times:.2f} times the tokens a second of batch 1", {}

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

    items: dict[str, Callable[[], tuple[bool, str, dict[str, Any]]]] = {
        "loads without error": loads,
        f"one generation under {_SECONDS:.0f} s once compiled": fast,
        "batching speeds up": batching,
        f"at least {_SPEED_UP:.0f} times the CPU": beats_the_cpu,
        f"layer parity with PyTorch: more than {_SHARE:.0%} within tolerance": parity,
        "text is coherent": coherent,
    }
    found = []
    for what, check in items.items():
        answer = sheet.tried(check)
        ticked, why, details = (None, f"not run: {answer}", {}) if isinstance(answer, str) else answer
        print(f"[{'x' if ticked else ' '}] {what}: {why}", flush=True)
        found.append({"what": what, "ticked": ticked, "why": why, "details": details})
    return found
