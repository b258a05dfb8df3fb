"""Tables of a server benchmark record. Unlike the benchmark, this module does not need the ``serve`` extra."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.records import note_lines
from benchmarks.serve.acceptance import TIMES_GENERATE, pair_ratios

_SERVERS = {"old": "older server", "new": "server"}
# The 99th percentile of fewer values lies between the two largest.
_FEW = 100


def serve_tables(record: dict[str, Any]) -> str:
    """Convert a record to Markdown, with a table per section."""
    results = record["results"]
    sections: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("acceptance", acceptance_table),
        ("lone", lone_table),
        ("lone", slowest_pairs),
        ("first_text", first_text_table),
        ("same_arrivals", same_arrivals_table),
        ("loads", loads_table),
        ("batch", batch_table),
        ("starts", starts_table),
        ("while_compiling", compiling_table),
    ]
    parts = [make(results) for section, make in sections if section in results]
    return "\n".join(["\n\n".join(parts), "", about(record), *note_lines(record)])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is text; the others are numbers."""
    rule = "|---|" + "---:|" * (len(head) - 1)
    return "\n".join(["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)])


def seconds(milliseconds: float) -> str:
    """Format a time in seconds, with three digits."""
    return f"{milliseconds / 1e3:.3g} s"


def acceptance_table(results: dict[str, Any]) -> str:
    """Return the table of expectations."""
    said = {None: "", True: "yes", False: "NO"}
    rows = [[row["what"], f"{row['value']:g}", row["goal"] or "", said[row["met"]]] for row in results["acceptance"]]
    return table(["expected", "measured", "goal", "met"], rows)


def lone_table(results: dict[str, Any]) -> str:
    """Return the table of single requests: the server compared with ``engine.generate``."""
    from_ready = results.get("ratios", {}).get("lone_from_ready_times_generate", {})
    rows = []
    for row in results["lone"]:
        tokens, old = str(row["new_tokens"]), row.get("old_ms")
        rows.append(
            [
                f"one request, {tokens} new tokens",
                seconds(row["generate_ms"]["median"]),
                seconds(row["new_ms"]["median"]),
                f"{row['times_generate']:.2f}x",
                f"{row['streamed_times_generate']:.2f}x",
                ", ".join(f"{one:.2f}x" for one in from_ready.get(tokens, ())),
                seconds(old["median"]) if old else "",
                "yes" if row["same_text"] else "NO",
            ]
        )
    head = ["", "`engine.generate`", "server", "ratio", "streamed", "right after ready", "older server", "same text"]
    return table(head, rows)


def slowest_pairs(results: dict[str, Any]) -> str:
    """Return a sentence on how the goal of single requests is judged, and on the pairs that miss it."""
    above = []
    for name, label in (("new", "single"), ("streamed", "streamed")):
        pairs = [
            (one, row["new_tokens"])
            for row in results["lone"]
            for one in pair_ratios(row[f"{name}_ms"], row["generate_ms"])
        ]
        slowest, tokens = max(pairs)
        count = sum(one > TIMES_GENERATE for one, _ in pairs)
        worst = f"at most {slowest:.2f}x, {tokens} new tokens"
        above.append(f"{count} of {len(pairs)} pairs of a {label} request ({worst})")
    repeats = len(results["lone"][0]["generate_ms"]["each"])
    return (
        f"The goal is judged by the median of the {repeats} pairs of each length. Above {TIMES_GENERATE:g}x are "
        f"{' and '.join(above)}."
    )


def first_text_table(results: dict[str, Any]) -> str:
    """Return the table of times to the first text of a stream."""
    rows = [
        [
            f"{_SERVERS[row['server']]}, blocks of {row['block_length']}, {row['new_tokens']} tokens",
            str(row["committed_at_first_text"]),
            seconds(row["first_text_ms"]),
            seconds(row["last_text_ms"]),
            str(row["pieces"]),
        ]
        for row in results["first_text"]
    ]
    return table(["a stream", "tokens at its first text", "first text", "last text", "pieces"], rows)


def same_arrivals_table(results: dict[str, Any]) -> str:
    """Return the table of the older and the newer server with the same arrivals."""
    found, capacity = results["same_arrivals"], results["capacity"]
    rows = [
        [
            label,
            f"{capacity[name]['requests_per_second']:.3f}/s",
            *(seconds(found[name]["e2e_ms"][rank]) for rank in ("p50", "p90", "p99")),
        ]
        for name, label in _SERVERS.items()
    ]
    ratio = results["ratios"]["capacity_times_old"]
    rows.append(["ratio", f"{ratio:.2f}x", f"{found['times_lower_p50']:.2f}x lower", "", ""])
    head = [f"{found['offered_requests_per_second']:.3f} requests/s arrive", "capacity", "p50", "p90", "p99"]
    return table(head, rows)


def loads_table(results: dict[str, Any]) -> str:
    """Return the table of the loads of this checkout's server."""
    capacity = results["capacity"]["new"]["requests_per_second"]
    rows = [
        [
            f"{float(share):.0%} of {capacity:.2f} requests/s",
            *(seconds(load["e2e_ms"][rank]) for rank in ("p50", "p90", "p99")),
            "" if load["useful_share"] is None else f"{load['useful_share']:.0%}",
            str(load["refused"] + load["failed"]),
        ]
        for share, load in results["loads"].items()
    ]
    if loop := results.get("one_at_a_time"):
        times = [seconds(loop["e2e_ms"][rank]) for rank in ("p50", "p90", "p99")]
        rows.append([f"one at a time, `engine.generate`: {loop['requests_per_second']:.2f} requests/s", *times, "", ""])
    return table(["load", "p50", "p90", "p99", "useful positions", "not answered"], rows)


def batch_table(results: dict[str, Any]) -> str:
    """Return the table of ``diffumesh batch``."""
    found = results["batch"]
    best = found["positions_per_second"][found["best"]]
    row = [
        f"`diffumesh batch`, {found['prompts']} prompts",
        f"{found['warm']['wall']:.1f} s",
        f"{found['warm']['generating']:.1f} s",
        f"{found['useful_seconds_at_best']:.1f} s",
        f"{found['wall_times_useful']:.2f}x",
        f"{found['generating_times_useful']:.2f}x",
        f"{found['wall_times_useful_of_canvas']:.2f}x",
    ]
    head = ["", "wall time", "without loading", f"useful work at {best:,} positions/s ({found['best']})"]
    head += ["wall time / useful", "without loading / useful"]
    head += ["wall time / useful, each row at the best rate of its canvas"]
    least, at_best = found["useful_seconds_at_best_of_canvas"], found["useful_seconds_at_best"]
    return (
        f"{table(head, [row])}\n\nWithout padding, loading and scheduling, and with each row at the best rate of its "
        f"canvas, the batch would take {least:.1f} s, which is {least / at_best:.2f}x."
    )


def starts_table(results: dict[str, Any]) -> str:
    """Return the table of starts."""
    rows = []
    for name, found in results["starts"]["starts"].items():
        for cache, one in [("cold", found["cold"]), *(("warm", one) for one in found["warm"])]:
            rows.append(
                [
                    f"{_SERVERS[name]}, {cache} cache",
                    f"{one['seconds_to_ready']:.1f} s",
                    str(one["programs_at_ready"]),
                    f"{one['seconds_to_all_programs']:.1f} s",
                    str(one["programs"]),
                    "not reported" if (cached := one.get("programs_cached")) is None else str(cached),
                ]
            )
    heads = [
        "start",
        "ready after",
        "programs when ready",
        "all programs after",
        "programs",
        "of these, from the cache",
    ]
    return table(heads, rows)


def compiling_table(results: dict[str, Any]) -> str:
    """Return the table of a request while programs are compiled."""
    found = results["while_compiling"]
    repeats = found["repeats"]
    labels = {
        "compiling": ("while programs are compiled, at first in the widest bucket", found["requests"]),
        "widest": ("in the widest bucket, while nothing is compiled", repeats),
        "compiled": ("in its own bucket, when all programs are compiled", repeats),
    }
    ranks = ("p50", "p90", "p99")
    rows = [
        [label, str(count), *(seconds(found[f"{name}_ms"][rank]) for rank in ranks)]
        for name, (label, count) in labels.items()
    ]
    made = table([f"one request after another, {found['new_tokens']} new tokens", "requests", *ranks], rows)
    if repeats >= _FEW:
        return made
    return f"{made}\n\nOf {repeats} requests, p99 is nearly the slowest one: compare p50 and p90."


def about(record: dict[str, Any]) -> str:
    """Return a sentence that describes model, machine and requests."""
    settings, machine = record["settings"], record["machine"]
    prompts, answers = settings["prompts"], settings["answers"]
    where = f"the server at {settings['address']}"
    if settings["address"] is None:
        own = " ".join(f"`{one}`" for one in (f"--max_queue={settings['max_queue']}", *settings["server_flag"]))
        where = (
            f"`{settings['checkpoint']}`, default flags except {own}, {machine['cores']} cores of "
            f"{machine['processor']} for all processes"
        )
    before = f" The older server is commit `{settings['old_commit'][:7]}`." if settings.get("old_commit") else ""
    return (
        f"Measured: {where}. Each load has {settings['requests']} requests with log-normal prompts "
        f"({prompts['least']} to {prompts['most']} tokens) and answers ({answers['least']} to {answers['most']}), "
        f"early stop off.{before}"
    )
