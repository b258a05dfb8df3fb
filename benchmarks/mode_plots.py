"""Plot of decoding modes: computed positions against functions that pass their tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.mode_comparison import Results, pareto_front

# Costs at which the axis may be labelled, and the gap between labels in shares of the plot's height
_TICKS = (2, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500)
_GAP = 0.05


def draw_modes(results: Results, goals: Mapping[str, str], published: str, path: Path) -> None:
    """Draw the share of passed tasks against computed positions per token, with the modes that no other mode beats.

    Each point is numbered; the names stand beside the plot.

    Args:
      results: figures by mode.
      goals: the recommended mode of each goal.
      published: the mode with the published setting of Fast-dLLM.
      path: where to save the picture.
    """
    from matplotlib.figure import Figure

    front = pareto_front(results)
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes, names = figure.subplots(1, 2, width_ratios=(2.2, 1))
    names.axis("off")
    for place, name in enumerate(sorted(results, key=lambda name: results[name]["positions_per_token"])):
        row = results[name]
        (low, high), rate, cost = row["passed_rate_95"], row["passed_rate"], row["positions_per_token"]
        color = "C0" if name in front else "C1" if name == published else "0.55"
        spread = [[rate - low], [high - rate]]
        axes.errorbar(cost, rate, spread, fmt="o", color=color, elinewidth=0.6, capsize=2, markersize=4)
        # Numbers of neighbours stand at different heights, so that they cannot overlap.
        above, away = place % 2 == 0, 4 + 11 * (place // 2 % 3)
        axes.annotate(
            str(place + 1),
            (cost, high if above else low),
            (0, away if above else -away),
            textcoords="offset points",
            fontsize=9,
            color=color,
            horizontalalignment="center",
            verticalalignment="bottom" if above else "top",
        )
        roles = [goal for goal, chosen in goals.items() if name == chosen and name != goal]
        roles += ["Fast-dLLM as published"] if name == published else []
        text = f"{place + 1}  {name}" + (f" ({', '.join(roles)})" if roles else "")
        names.text(0, 0.95 - _GAP * place, text, color=color, fontsize=8.5, verticalalignment="top")
    axes.plot(
        [results[name]["positions_per_token"] for name in front],
        [results[name]["passed_rate"] for name in front],
        color="C0",
        linewidth=1,
        drawstyle="steps-post",
        label="no other mode passes more tasks with as few positions",
    )
    _label(axes, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _label(axes: Any, results: Results) -> None:
    costs = [row["positions_per_token"] for row in results.values()]
    ticks = [tick for tick in _TICKS if min(costs) / 1.2 <= tick <= 1.2 * max(costs)]
    axes.set_xscale("log")
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.margins(x=0.08, y=0.2)
    axes.set_xlabel("computed positions per token, one prompt at a time")
    axes.set_ylabel("tasks passed (95 % interval)")
    axes.set_title("Demo checkpoint, held-out tasks: cost against quality", fontsize=11, loc="left")
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
