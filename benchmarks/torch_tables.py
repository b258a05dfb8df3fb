"""Goals of the comparison with PyTorch, and its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.records import note_lines

# Goals are ratios: how many times as fast as PyTorch. They hold on one CPU core in float32.
_FORWARD, _FORWARD_BEYOND_PRODUCTS, _DECODE = 0.95, 1.0, 1.0
# A pass in which more than this share of the time is attention or the head does not depend on matrix products alone.
_SHARE = 0.2
_SHORT_CANVAS, _SHORT_GENERATION, _LONG_GENERATION = 512, 1.4, 1.2
PASSES = ("transformer", "logits")
_SHAPES = ("batch", "canvas", "prompt", "new_tokens", "steps")
# What a missed goal of a pass that consists of matrix products is called: the row shows the rates of both libraries.
_RATES = "rates shown"


def _goal(part: str, sizes: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    if part == "forward":
        beyond = max(found["attention_share"], found["head_share"]) > _SHARE
        return _FORWARD_BEYOND_PRODUCTS if beyond else _FORWARD
    if part == "generate":
        return _SHORT_GENERATION if sizes["canvas"] <= _SHORT_CANVAS else _LONG_GENERATION
    return _DECODE


def add_goals(part: str, row: dict[str, Any]) -> None:
    """Add ``goal`` and ``verdict`` to a row that was measured on one CPU core in float32, in place.

    A forward pass has a goal for each of its two passes. The verdict is ``met`` or ``missed``. The goal of a pass that
    consists of matrix products allows less if the row shows the rates of both libraries; its verdict is then
    ``rates shown``.

    Args:
      part: the part that the row belongs to.
      row: sizes and results.
    """
    for found in [row[name] for name in PASSES] if part == "forward" else [row]:
        goal, ratio = _goal(part, row, found), found["times_as_fast"]["median"]
        missed = _RATES if part == "forward" and goal == _FORWARD else "missed"
        found["goal"], found["verdict"] = goal, "met" if ratio >= goal else missed


def rows_of(results: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], str]]:
    """Yield part, row, the row's times, and the name of the pass, which is empty except for forward passes.

    Rows whose case did not fit into the device's memory are left out.
    """
    for part, rows in results.items():
        for row in rows:
            if "out_of_memory" not in row:
                for name in PASSES if part == "forward" else ("",):
                    yield part, row, row[name] if name else row, name


def _shape(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {row[name]}" for name in _SHAPES if name in row)


def agreement(row: Mapping[str, Any]) -> str:
    """Return in words how well the results of both libraries agree."""
    if "relative_difference_of_logits" in row:
        far = "" if row["agrees"] else " (TOO FAR)"
        exact = "".join(
            f", {row[name]['jax']:.1e} and {row[name]['torch']:.1e} from {dtype}"
            for dtype in ("float32", "float64")
            if (name := f"distance_from_{dtype}") in row
        )
        return f"logits {row['relative_difference_of_logits']:.1e} apart{exact}{far}"
    steps = f" in {row['compared_steps']} greedy steps" if row.get("compared_steps") else ""
    text = f"{row['share_of_equal_new_tokens']:.1%} of tokens equal{steps}"
    if (samples := row.get("samples")) is not None:
        ours, theirs = samples["jax"], samples["torch"]
        text += (
            f"; samples: {ours['share_in_pytorch_support']:.2%} in PyTorch's support, "
            f"{ours['mean_log_likelihood']} and {theirs['mean_log_likelihood']} nats"
            f"{'' if samples['agree'] else ' (DIFFERENT)'}"
        )
    return text


def _details(row: Mapping[str, Any], found: Mapping[str, Any], platform: str) -> str:
    words = [agreement(row)]
    # On a GPU, a product or an attention that is timed alone takes as long as its launch.
    if platform == "cpu" and (rates := found.get("products_gflops_per_second")) is not None:
        words.append(f"products {rates['jax']:.0f} and {rates['torch']:.0f} GFLOP/s")
        words.append(f"attention {found['attention_share']:.0%}, head {found['head_share']:.0%}")
    return "; ".join(words)


def _cells(part: str, row: Mapping[str, Any], found: Mapping[str, Any], name: str, record: Mapping[str, Any]) -> str:
    fast, goal = found["times_as_fast"], found.get("goal")
    cells = [
        f"{part} {name}".strip(),
        row["model"],
        str(row["cores"]),
        _shape(row),
        f"{found['jax_ms']['median']:.1f}",
        f"{found['torch_ms']['median']:.1f} ({row['torch_backend']})",
        f"{fast['median']:.2f} ({fast['minimum']:.2f} to {fast['maximum']:.2f})",
        "" if goal is None else f">= {goal:g}: {found['verdict'].replace('missed', 'MISSED')}",
        _details(row, found, record["machine"]["platform"]),
    ]
    return f"| {' | '.join(cells)} |"


def _heading(record: Mapping[str, Any]) -> str:
    settings, versions = record["settings"], record["versions"]
    return (
        f"{settings['dtype']}, {record['machine']['device_kind']}, {record['machine']['processor']}; jax "
        f"{versions['jax']}, torch {versions['torch']}, transformers {versions['transformers']}. "
        f"{record['kind'].capitalize()}: `{record['command']}`."
    )


def comparison_table(record: Mapping[str, Any]) -> str:
    """Convert a record to Markdown: a table with a row per case, and the goals."""
    results = record["results"]
    lines = [
        _heading(record),
        "",
        "| | model | cores | shape | JAX ms | PyTorch ms | times as fast, median (minimum to maximum) | goal | |",
        "|---|---|---:|---|---:|---:|---|---|---|",
    ]
    judged: dict[str, int] = {}
    for part, row, found, name in rows_of(results):
        lines.append(_cells(part, row, found, name, record))
        if "verdict" in found:
            judged[found["verdict"]] = judged.get(found["verdict"], 0) + 1
    for part, rows in results.items():
        lines += [
            f"| {part} | {row['model']} | {row['cores']} | {_shape(row)} | out of memory | | | | |"
            for row in rows
            if "out_of_memory" in row
        ]
    if judged:
        counts = ", ".join(f"{judged.get(verdict, 0)} {verdict}" for verdict in ("met", _RATES, "missed"))
        lines += ["", f"Goals on one core: {counts}."]
    return "\n".join([*lines, *note_lines(record)])


def memory_table(record: Mapping[str, Any]) -> str:
    """Convert a record of memory to Markdown, in MB. PyTorch's figure is that of the library that needs less."""
    lines = [
        _heading(record),
        "",
        "| | model | shape | JAX MB | PyTorch MB | JAX / PyTorch |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in record["results"]["rows"]:
        backend = min(row["torch"], key=lambda name: row["torch"][name]["peak_bytes"])
        used = [(side["peak_bytes"] - side["before_bytes"]) / 1e6 for side in (row["jax"], row["torch"][backend])]
        cells = [row["part"], row["model"], _shape(row), f"{used[0]:.0f}", f"{used[1]:.0f} ({backend})"]
        lines.append(f"| {' | '.join(cells)} | {used[0] / used[1]:.2f} |")
    return "\n".join([*lines, *note_lines(record)])
