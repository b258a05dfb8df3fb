"""The table of an overload record. Unlike the benchmark, this module does not need the ``bench`` extra."""

from __future__ import annotations

from typing import Any

from benchmarks.records import note_lines


def overload_table(record: dict[str, Any]) -> str:
    """Convert a record to a Markdown table with a row per goal."""
    results, machine = record["results"], record["machine"]
    lines = ["| overload | measured | goal | met |", "|---|---:|---:|---|"]
    for one in results["goals"]:
        value = "none" if one["value"] is None else f"{one['value']:g}"
        lines.append(f"| {one['what']} | {value} | {one['goal']} | {'yes' if one['met'] else 'NO'} |")
    made = (
        f"{record['kind'].capitalize()}: `{record['command']}`, {results['capacity_per_second']:g} requests per second "
        f"answered at capacity, {results['offered_per_second']:g} planned for {record['settings']['seconds']:g} s; the "
        f"load comes from the same {machine['cores']} cores ({machine['processor']})."
    )
    return "\n".join([*lines, "", made, *note_lines(record)])
