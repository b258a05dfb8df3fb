"""The acceptance list for running DiffuCoder on a new accelerator."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from benchmarks.records import NotRunError, build_record, kind_of_devices, write_record
from benchmarks.suite.generation import CPU, GENERATIONS
from benchmarks.suite.parity import layer_parity
from benchmarks.suite.passes import BATCHING, judge_batching
from benchmarks.suite.subject import Subject, model_name, open_engine
from benchmarks.suite.text import coherence
from sharding.errors import InputError

_SECONDS, _SPEED_UP, _SHARE, _PASSED = 10.0, 10.0, 0.95, 0.5
ITEMS = (
    "loads without error",
    f"one generation under {_SECONDS:.0f} s once compiled",
    BATCHING,
    f"at least {_SPEED_UP:.0f} times the CPU",
    f"layer parity with PyTorch: more than {_SHARE:.0%} within tolerance",
    f"text is coherent: at least {_PASSED:.0%} of plain functions pass their tests",
)


def acceptance(subject: Subject, tolerance: float | None = None) -> list[dict[str, Any]]:
    """Check every entry of the list; return each with ``ticked`` (True, False, or None if it was not run) and ``why``.

    Args:
      subject: the model and its measurements.
      tolerance: see :func:`layer_parity`.
    """
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
        return *judge_batching(sheet.rows), {}

    def beats_the_cpu() -> tuple[bool, str, dict[str, Any]]:
        name = f"a pass of {GENERATIONS[0][0]}"
        row = sheet.find(name)
        if row is None:
            raise missing(CPU, name)
        times = row.facts["times_as_fast"]
        return times >= _SPEED_UP, f"{times:.1f} times as fast", {}

    def parity() -> tuple[bool, str, dict[str, Any]]:
        found = layer_parity(subject.engine, subject.values.attention, tolerance)
        text = f"at least {found['smallest_share']:.2%} of a layer's outputs within {found['tolerance']:g}"
        return found["smallest_share"] > _SHARE, f"{text}, {found['layers']} layers", found

    def coherent() -> tuple[bool, str, dict[str, Any]]:
        found = coherence(subject)
        text = f"{found['passed']} of {found['tasks']} pass"
        return found["passed"] >= _PASSED * found["tasks"], text, found

    checks = (loads, fast, batching, beats_the_cpu, parity, coherent)
    found = []
    for what, check in zip(ITEMS, checks, strict=True):
        answer = sheet.tried(check)
        found.append(_item(what, *((None, f"not run: {answer}") if isinstance(answer, str) else answer)))
    return found


def check_parity(values: flags.FlagValues, devices: Sequence[Any]) -> None:
    """Compare each layer of the folder ``--parity`` with PyTorch's, write a record, and exit with 1 if one differs.

    Raises:
      InputError: the model cannot be compared.
    """
    engine = open_engine(values, devices)
    try:
        found = layer_parity(engine, values.attention, values.tolerance)
    except NotRunError as error:
        raise InputError(f"--parity={values.parity}: {error}") from error
    for number, share in enumerate(found["shares"]):
        said = "" if share > _SHARE else f"; more than {_SHARE:.0%} are expected"
        print(f"layer {number}: {share:.4%} of the outputs within {found['tolerance']:g} of PyTorch's{said}")
    record = build_record(
        "suite",
        kind=kind_of_devices(devices),
        settings={"model": model_name(values), "dtype": str(engine.dtype), "mesh": str(engine.layout.spec)},
        results={"parity": found},
        devices=devices,
    )
    print(f"written: {write_record(record, values.output_dir, values.record or f'parity_{model_name(values)}')}")
    if found["smallest_share"] <= _SHARE:
        sys.exit(1)


def not_loaded(error: Exception) -> list[dict[str, Any]]:
    """Return the entries of the list for a model that does not load."""
    why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return [_item(ITEMS[0], False, why), *(_item(what, None, "not run: it does not load") for what in ITEMS[1:])]


def _item(what: str, ticked: bool | None, why: str, details: Mapping[str, Any] | None = None) -> dict[str, Any]:
    print(f"[{'x' if ticked else ' '}] {what}: {why}", flush=True)
    return {"what": what, "ticked": ticked, "why": why, "details": dict(details or {})}
