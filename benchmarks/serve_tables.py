"""Tables of a record of the server benchmark; the benchmark itself wants the ``serve`` extra, its tables do not."""

from __future__ import annotations

from typing import Any

from benchmarks.records import note_lines


def serve_tables(record: dict[str, Any]) -> str:
    """A record of this benchmark as Markdown: ways of batching beside one another, then loads."""
    results, settings, machine = record["results"], record["settings"], record["machine"]
    lines: list[str] = []
    if "comparison" in results:
        lines += [
            "| the same requests | requests/s | tokens/s | latency p50 | p99 | continuous: tokens/s | p99 |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for name, way in results["comparison"].items():
            beside = ["", ""]
            if "throughput_ratio" in way:
                beside = [f"{way['throughput_ratio']:.2f}x", f"1/{way['p99_ratio']:.2f}"]
            cells = [
                name,
                f"{way['requests_per_second']:.1f}",
                f"{way['output_tokens_per_second']:.0f}",
                f"{way['e2e_ms']['p50'] / 1e3:.2f} s",
                f"{way['e2e_ms']['p99'] / 1e3:.2f} s",
                *beside,
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    lines += [
        "| load | requests/s | good | tokens/s | first text p50 | p99 | a token p50 | p99 | whole p50 | p90 | p99 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    loads = [(f"{users} at a time", row) for users, row in results["closed_loop"].items()]
    loads += [
        (f"Poisson, {row['offered_requests_per_second']:.1f}/s", row) for row in results.get("open_loop", {}).values()
    ]
    for name, row in loads:
        milliseconds = [
            *(row["ttft_ms"][rank] for rank in ("p50", "p99")),
            *(row["tpot_ms"][rank] for rank in ("p50", "p99")),
            *(row["e2e_ms"][rank] for rank in ("p50", "p90", "p99")),
        ]
        rates = [
            f"{row['requests_per_second']:.1f}",
            f"{row['goodput_requests_per_second']:.1f}",
            f"{row['output_tokens_per_second']:.0f}",
        ]
        lines.append("| " + " | ".join([name, *rates, *(f"{one:.0f} ms" for one in milliseconds)]) + " |")
    where = f"the server at {settings['address']}"
    if settings["address"] is None:
        flags = " ".join(f"`{one}`" for one in settings["server_flag"])
        where = (
            f"`{settings['checkpoint']}`, {settings['slots']} slots, {flags}, {machine['cores']} cores of "
            f"{machine['processor']} for server and clients"
        )
    lines += [
        "",
        f"Measured: {settings['requests']} requests a load of at most {settings['max_new_tokens']} tokens; {where}. "
        f"Good: the first text within {settings['good_ttft']:g} ms and then a token each {settings['good_tpot']:g} ms.",
    ]
    return "\n".join([*lines, *note_lines(record)])
