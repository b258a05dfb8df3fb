"""Table of decoding modes, with the settings that it recommends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.loop_times import loop_lines
from benchmarks.mode_comparison import pareto_front
from benchmarks.records import note_lines

Row = dict[str, Any]


def _points(found: dict[str, Any]) -> str:
    """Format a paired difference in percentage points."""
    low, high = found["interval"]
    return f"{100 * found['difference']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}){' =' if found['equal'] else ''}"


def _share(row: Row, name: str) -> str:
    low, high = row[f"{name}_rate_95"]
    return f"{row[f'{name}_rate']:.1%} ({low:.1%} to {high:.1%})"


# Columns: the key of a row that a column shows, its head, and its cell. A run of fewer modes may lack some of them.
_COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("passed", "passes (95 %)", lambda row: _share(row, "passed")),
    ("to_exact", "points more than exact (95 %)", lambda row: _points(row["to_exact"])),
    ("to_published", "points more than Fast-dLLM (95 %)", lambda row: _points(row["to_published"])),
    ("positions_per_token", "positions/token", lambda row: f"{row['positions_per_token']:.1f}"),
    ("forwards_per_token", "forwards/token", lambda row: f"{row['forwards_per_token']:.2f}"),
    (
        "tokens_per_second",
        "tokens/s",
        lambda row: f"{row['tokens_per_second']:.0f} ± {row['tokens_per_second_deviation']:.0f}",
    ),
    (
        "of_exact",
        "speed vs exact",
        lambda row: f"{row['of_exact']:.1f}x ({row['of_exact_minimum']:.1f} to {row['of_exact_maximum']:.1f})",
    ),
    ("parse_rate", "parses (95 %)", lambda row: _share(row, "parse")),
    (
        "exact_agreement",
        "similarity to exact",
        lambda row: "" if row["exact_agreement"] is None else f"{row['exact_agreement']:.2f}",
    ),
    ("nats_per_token", "nats/token", lambda row: f"{row['nats_per_token']:.2f}"),
    ("weight_bytes", "weights MB", lambda row: f"{row['weight_bytes'] / 1e6:.1f}"),
    ("cache_bytes", "cache MB", lambda row: f"{row['cache_bytes'] / 1e6:.1f}"),
)


def modes_table(record: dict[str, Any]) -> str:
    """Convert a record to a Markdown table with a row per mode, and the settings that follow from it."""
    results, settings, machine = record["results"], record["settings"], record["machine"]
    front = pareto_front(results)
    columns = [column for column in _COLUMNS if any(column[0] in row for row in results.values())]
    lines = [f"| mode | {' | '.join(head for _, head, _ in columns)} |", f"|---|{'---:|' * len(columns)}"]
    for name, row in results.items():
        cells = [f"**`{name}`**" if name in front else f"`{name}`"]
        cells += [cell(row) if key in row else "" for key, _, cell in columns]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "In bold: no other mode passes more tasks with as few computed positions. `=`: equal quality, because the "
        "interval lies above -2 points.",
        "",
        *goal_lines(record),
        *loop_lines(results),
    ]
    where = (
        f"{settings['prompts']} prompts, {settings['new_tokens']} masks each, one at a time, {settings['cores']} CPU "
        f"cores; speed over {settings['trials']} rounds of {settings['timed_prompts']} prompts, modes taking turns "
        "(mean ± deviation; speed vs exact: median, minimum, maximum of the rounds)"
    )
    lines.append(f"Measured: {where}, jax {record['versions']['jax']}, {machine['processor']}.")
    return "\n".join([*lines, *note_lines(record)])


def goal_lines(record: dict[str, Any]) -> list[str]:
    """Return Markdown with the recommended setting of each goal, and whether half the published positions suffice."""
    results = record["results"]
    lines = ["| goal | recommended mode | flags |", "|---|---|---|"]
    lines += [f"| {goal} | `{one['mode']}` | `{one['flags']}` |" for goal, one in record["recommended"].items()]
    if (found := record["half_the_positions"]) is not None:
        goal = f"Goal, half the computed positions of `{found['published']}` at equal quality: "
        if found["mode"] is None:
            said = "not met. No mode is known to have equal quality."
        else:
            points = _points(results[found["mode"]]["to_published"]).removesuffix(" =")
            said = (
                f"{'met' if found['met'] else 'not met'}. `{found['mode']}` has {found['share']:.2f} times its "
                f"positions, and {points} points more tasks pass."
            )
        lines += ["", goal + said]
    return [*lines, ""]
