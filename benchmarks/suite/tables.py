"""Converts a suite's record to Markdown: measurements, grid of forward passes, acceptance list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.records import NotRunError, note_lines
from benchmarks.suite.passes import BATCHING, GRID, grid_name, judge_batching
from benchmarks.suite.sheet import Measurement

# Facts in the order in which a row shows them. Other facts are only in the record.
_FACTS = {
    "predicted_ms": "{} ms predicted",
    "tokens_per_second": "{} tokens/s",
    "canvas_tokens_per_second": "{} canvas tokens/s",
    "forwards": "{} forwards",
    "tokens_per_forward": "{} tokens per forward",
    "mfu": "MFU {:.1%}",
    "mbu": "MBU {:.1%}",
    "window": "a window of {}",
    "batch": "batch {}",
    "times_batch_1": "{} times batch 1",
    "times_as_fast": "the accelerator {} times as fast",
    "programs_compiled": "{} programs compiled",
    "programs": "{} programs",
    "compile_seconds": "{} s of compilation",
    "parameters": "{:,} parameters",
    "first": "the first {} s",
    "one_trial": "one trial: {}",
    "gigabytes_per_device": "{} GB per device",
    "peak": "peak {} GB",
    "megabytes": "{} MB",
    "gigabytes_per_second": "{} GB/s",
}


def suite_tables(record: Mapping[str, Any]) -> str:
    """Return the tables of one record."""
    settings, machine, results = record["settings"], record["machine"], record["results"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    place = f"{machine['device_count']} x {machine['device_kind']}"
    if machine["platform"] == "cpu":
        place = f"{machine['processor']}, {machine['cores']} cores"
    if machine.get("driver"):
        place += f", driver {machine['driver']}"
    model = "not loaded"
    if settings["parameters"] is not None:
        model = f"{settings['parameters']:,} parameters, {settings['dtype']}, mesh {settings['mesh']}"
    lines = [
        f"`{settings['model']}`, {model}, on {place}; {versions}. {record['kind'].capitalize()}: "
        f"`{record['command']}`.",
        "",
        "| | measurement | mean ± deviation | minimum | maximum | |",
        "|---|---|---:|---:|---:|---|",
    ]
    section = ""
    sections = list(dict.fromkeys(row["section"] for row in results["rows"]))
    for row in sorted(results["rows"], key=lambda row: sections.index(row["section"])):
        if row["section"] == GRID:
            continue
        first = row["section"] if row["section"] != section else ""
        section = row["section"]
        lines.append(f"| {first} | {row['name']} | " + " | ".join(_cells(row)) + " |")
    grid = [row for row in results["rows"] if row["section"] == GRID]
    if grid:
        lines += ["", *_grid(grid)]
    lines += ["", "Acceptance list for a model on a new accelerator:", ""]
    for item in (_judge_again(item, results["rows"]) for item in results["acceptance"]):
        lines.append(f"- [{'x' if item['ticked'] else ' '}] {item['what']}: {item['why']}")
    return "\n".join([*lines, *note_lines(record)])


def _judge_again(item: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Judge batching by the rows: earlier records tick it for the shortest length. Return other entries as they are."""
    if not item["what"].startswith("batching speeds up forward passes"):
        return item
    try:
        ticked, why = judge_batching([Measurement(**row) for row in rows])
    except NotRunError:
        return {**item, "what": BATCHING}
    return {"what": BATCHING, "ticked": ticked, "why": why}


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    if row["not_run"] is not None:
        return "not run", "", "", " ".join(row["not_run"].replace("|", "/").split())
    facts = ", ".join(text.format(row["facts"][name]) for name, text in _FACTS.items() if name in row["facts"])
    if row["trials"] == 1:
        return f"{_number(row['mean'])} {row['unit']}", "", "", facts
    spread = f"{_number(row['mean'])} ± {_number(row['deviation'])} {row['unit']}"
    return spread, _number(row["minimum"]), _number(row["maximum"]), facts


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _grid(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the grid with a row per length and a column per batch, and below it why cells were not run."""
    found = {row["name"]: row for row in rows}
    pairs = [(int(name.split()[0]), int(name.split()[-1])) for name in found]
    lengths, batches = (sorted(set(sizes)) for sizes in zip(*pairs, strict=True))
    lines = [
        "A forward pass without its head: ms ± deviation, tokens per second relative to batch 1, MFU.",
        "",
        "| tokens | " + " | ".join(f"batch {batch}" for batch in batches) + " |",
        "|---:|" + "---:|" * len(batches),
    ]
    for length in lengths:
        cells = []
        for batch in batches:
            # An interrupted run may lack batches of its last length.
            row = found.get(grid_name(length, batch))
            if row is None or row["not_run"] is not None:
                cells.append("not run")
                continue
            efficiency = f", {row['facts']['efficiency']:.2f}" if "efficiency" in row["facts"] else ""
            cells.append(f"{_number(row['mean'])} ± {_number(row['deviation'])}{efficiency}, {row['facts']['mfu']:.0%}")
        lines.append(f"| {length} | " + " | ".join(cells) + " |")
    why: dict[str, list[str]] = {}
    for row in rows:
        if row["not_run"] is not None:
            why.setdefault(row["not_run"], []).append(row["name"])
    lines += [""] * bool(why) + [f"Not run: {'; '.join(names)} ({reason})." for reason, names in why.items()]
    return lines
