"""Tables of the records of :mod:`benchmarks.faults`: faults of hosts, and attacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.records import note_lines


def fault_table(record: Mapping[str, Any]) -> str:
    """Convert a record to a Markdown table with a row per attack, or a row per fault."""
    made = _attacks(record["results"]) if "attacks" in record["settings"] else _faults(record["results"])
    machine = record["machine"]
    where = f"{record['kind'].capitalize()}: `{record['command']}`, {machine['cores']} cores, {machine['processor']}."
    return "\n".join([*made, "", where, *note_lines(record)])


def _faults(results: list[dict[str, Any]]) -> list[str]:
    # A frozen host never ends, so the time is that of the others.
    seconds = "seconds until all hosts that are not frozen have ended"
    lines = [f"| fault | host | {seconds} | exit codes | named |", "|---|---:|---:|---|---|"]
    for one in results:
        without = "frozen" if one["case"] == "freeze" else "not started"
        codes = ", ".join(without if code is None else str(code) for code in one["codes"])
        named = "yes" if one["named"] else "NO"
        lines.append(f"| {one['case']} | {one['host']} | {one['seconds']:.2f} | {codes} | {named} |")
    return lines


def _attacks(results: Mapping[str, Any]) -> list[str]:
    lines = ["| attack | attempts | outcome |", "|---|---|---|"]
    for name, found in results.items():
        lines += [f"| {' | '.join(cells)} |" for cells in _ROWS[name](found)]
    return lines


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def _checkpoints(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            f"random changes of a checkpoint ({layout})",
            f"{one['tried']:,}",
            f"{one['found']:,} found, {100 * one['found'] / one['tried']:.2f}%",
        )
        for layout, one in found.items()
    ]


def _server(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    bodies, alone, under, end = found["hostile_bodies"], found["alone"], found["under_attack"], found["end"]
    return [
        (
            f"lists of 100,000 errors, from {found['clients']} clients",
            f"{found['lists_sent']:,}",
            f"p99 of valid requests {under['p99']:.3f} s, alone {alone['p99']:.3f} s: {found['p99_ratio']:.2f}x; "
            f"{_mb(found['bytes_grown'])} more memory",
        ),
        (
            "random request bodies",
            f"{bodies['tried']:,}",
            f"{bodies['refused']:,} refused, {bodies['server_errors']} server errors",
        ),
        _counted("requests with two lengths of their body", found["two_lengths"], "refused"),
        _counted("chats whose template does not end", found["chats"], "refused"),
        _counted("`/health` while chats hang", end["health"], "ready"),
        (
            "SIGTERM while chats hang",
            f"{end['chats']} chats",
            f"ended with code {end['code']} after {end['seconds']:.1f} s (grace period {end['grace']} s)",
        ),
    ]


def _counted(attack: str, found: Mapping[str, Any], held: str) -> tuple[str, ...]:
    """Return the table row of an attack whose attempts are counted; ``held`` is the key of the number that failed."""
    return attack, f"{found['tried']:,}", f"{found[held]:,} {held}"


def _batch(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            "a batch of many lines, with a byte order mark and CRLF",
            f"{found['lines']:,}",
            f"first result after {found['first_result_seconds']:.1f} s, {found['wrong_results']} wrong",
        ),
        _counted(
            "lines of that batch that cannot be run: too long, endless spaces, not JSON", found["bad_lines"], "reported"
        ),
        _counted("lines of that batch whose logits are NaN", found["non_finite"], "reported"),
        _counted("second writers, after the lock file of that batch was removed", found["second_writers"], "refused"),
        _counted("changed bits in the results of that batch", found["changed_results"], "found"),
    ]


def _hosts(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    topics = found["topics"]
    return [
        (
            "unauthenticated connections with endless lines, to host 0",
            f"{found['connections']:,}",
            f"{found['cut_off']:,} closed after {_mb(found['bytes_sent'])}; {_mb(found['bytes_grown'])} more memory",
        ),
        _counted("hosts with a wrong secret", found["secrets"], "refused"),
        (
            "exchanges that one host begins at a time",
            f"{topics['tried']:,}",
            f"the run ends{' and names the host' if topics['named'] else ', BUT NAMES NO HOST'}",
        ),
    ]


def _numbers(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            "NaN or infinity in one weight",
            f"{found['tried']:,}",
            f"{found['verify']:,} named by `verify`, {found['convert']:,} by `convert`, {found['passed_on']} passed on",
        ),
        _counted("generations with such weights, or with weights that overflow", found["generations"], "refused"),
    ]


_ROWS: dict[str, Callable[[Mapping[str, Any]], list[tuple[str, ...]]]] = {
    "checkpoints": _checkpoints,
    "templates": lambda found: [
        (
            "chat templates that do not end, fill the memory or fail",
            f"{found['tried']}",
            f"{found['refused']} refused, the longest after {found['longest_seconds']:.2f} s "
            f"(limit {found['deadline']:g} s)",
        )
    ],
    "hosts": _hosts,
    "server": _server,
    "batch": _batch,
    "numbers": _numbers,
    "side_files": lambda found: [
        (
            "readers of links out of the folder, and of files of 6 GB",
            f"{found['tried']}",
            f"{found['refused']} refused, {found['passed_on']} passed on",
        )
    ],
    "replacement": lambda found: [
        (
            "conversions killed while they replace a different checkpoint",
            f"{found['tried']} ({found['interrupted']} before their end)",
            f"{found['whole']} wholly the old or the new one afterwards, missing to a reader {found['missing']} times",
        )
    ],
    "outputs": lambda found: [
        (
            "full disks, places that cannot be written, broken templates and tokenizers, ports in use",
            f"{found['tried']}",
            f"{found['one_message']} end with code 2 and one message",
        )
    ],
    "local": lambda found: [
        (
            "`diffumesh local` with a frozen process",
            f"{found['tried']}",
            f"{found['ended']} end with the exit code of the others",
        )
    ],
}
