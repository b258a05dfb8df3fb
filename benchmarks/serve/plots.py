"""Plots of a server benchmark record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the measured sections into one file, with separate axes for each."""
    from matplotlib.figure import Figure

    panels = [
        draw_one
        for section, draw_one in (
            ("lone", draw_lone),
            ("same_arrivals", draw_same_arrivals),
            ("loads", draw_loads),
            ("loads", draw_useful_share),
        )
        if section in results
    ]
    if not panels:
        return
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for axes, draw_one in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw_one(results, axes)
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def draw_lone(results: dict[str, Any], axes: Any) -> None:
    """Draw the time to the last token of a single request over its number of new tokens."""
    names = {"generate": "engine.generate", "new": "server", "streamed": "server, streamed", "old": "older server"}
    for name, label in names.items():
        rows = [row for row in results["lone"] if f"{name}_ms" in row]
        seconds = [median_of(row[f"{name}_ms"]) / 1e3 for row in rows]
        if rows:
            axes.plot([row["new_tokens"] for row in rows], seconds, "-o", label=label)
    axes.set(xlabel="new tokens", ylabel="seconds to the last token", title="One request", yscale="log")
    axes.legend()


def median_of(timing: Any) -> float:
    """Return the median of a timing, from a :class:`Timing` or a record."""
    return float(timing["median"] if isinstance(timing, dict) else timing.median)


def draw_same_arrivals(results: dict[str, Any], axes: Any) -> None:
    """Draw percentiles of the latency of the older and the newer server with the same arrivals."""
    found, ranks = results["same_arrivals"], ("p50", "p90", "p99")
    for number, (name, label) in enumerate((("old", "older server"), ("new", "server"))):
        seconds = [found[name]["e2e_ms"][rank] / 1e3 for rank in ranks]
        axes.bar(np.arange(len(ranks)) + 0.4 * number, seconds, 0.4, label=label)
    axes.set_xticks(np.arange(len(ranks)) + 0.2, ranks)
    rate = found["offered_requests_per_second"]
    axes.set(ylabel="seconds to the last token", title=f"{rate:.2f} requests per second", yscale="log")
    axes.legend()


def draw_loads(results: dict[str, Any], axes: Any) -> None:
    """Draw latency over arrivals per second."""
    loads = [load for load in results["loads"].values() if load["e2e_ms"]]
    for rank in ("p50", "p99"):
        seconds = [load["e2e_ms"][rank] / 1e3 for load in loads]
        axes.plot([load["offered_requests_per_second"] for load in loads], seconds, "-o", label=rank)
    axes.set(xlabel="arriving requests per second", ylabel="seconds to the last token", title="Latency")
    axes.set_ylim(0, None)
    axes.legend()


def draw_useful_share(results: dict[str, Any], axes: Any) -> None:
    """Draw the share of useful positions over arrivals per second."""
    loads = [load for load in results["loads"].values() if load["useful_share"] is not None]
    shares = [100 * load["useful_share"] for load in loads]
    axes.plot([load["offered_requests_per_second"] for load in loads], shares, "-o")
    axes.set(xlabel="arriving requests per second", ylabel="per cent", title="Useful of all computed positions")
    axes.set_ylim(0, 100)
