"""Plot of decoding modes: computed positions against functions that pass their tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.mode_quality import pareto_front, recommended

# Modes that are labelled wherever they lie, with their labels.
_KNOWN = {"exact_full_canvas": "exact, full canvas", "exact": "exact", "fast_dllm_preset": "Fast-dLLM as published"}


def draw_modes(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the share of passed tasks against computed positions per token, with the modes that no other mode beats."""
    from matplotlib.figure import Figure

    front = pareto_front(results)
    named = {name: _KNOWN.get(name, name.replace("_", " ")) for name in results if name in {*front, *_KNOWN}}
    for goal, name in recommended(results).items():
        if goal != name:
            named[name] = f"{named.get(name, name.replace('_', ' '))} ({goal})"
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, row in results.items():
        (low, high), rate = row["passed_rate_95"], row["passed_rate"]
        color = "C0" if name in front else "C1" if name in named else "0.7"
        spread = [[rate - low], [high - rate]]
        axes.errorbar(row["positions_per_token"], rate, spread, fmt="o", color=color, elinewidth=0.8, capsize=2)
    axes.plot(
        [results[name]["positions_per_token"] for name in front],
        [results[name]["passed_rate"] for name in front],
        color="C0",
        linewidth=1,
        drawstyle="steps-post",
    )
    # Labels stand beside their points in a column each, so that those of neighbours do not overlap.
    order = sorted(named, key=lambda name: results[name]["positions_per_token"])
    for place, name in enumerate(order):
        above = place % 2 == 0
        row = results[name]
        axes.annotate(
            named[name],
            (row["positions_per_token"], row["passed_rate_95"][above]),
            (0, (8 + 14 * (place // 2 % 3)) * (1 if above else -1)),
            textcoords="offset points",
            fontsize=8.5,
            color="C0" if name in front else "C1",
            horizontalalignment="center",
            verticalalignment="bottom" if above else "top",
            arrowprops={"arrowstyle": "-", "color": "0.8", "linewidth": 0.6},
        )
    axes.set_xscale("log")
    ticks = [tick for tick in (5, 10, 20, 50, 100, 200, 500) if _within(tick, results)]
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.margins(x=0.2, y=0.35)
    axes.set_xlabel("computed positions per token, one prompt at a time")
    axes.set_ylabel("tasks passed (95 % interval)")
    axes.set_title("Demo checkpoint, held-out tasks: cost against quality", fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _within(tick: float, results: dict[str, dict[str, Any]]) -> bool:
    costs = [row["positions_per_token"] for row in results.values()]
    return min(costs) / 1.5 <= tick <= 1.5 * max(costs)
