"""Plot of decoding modes: computed positions against functions that pass their tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.mode_comparison import Results, modes_that_matter, pareto_front
from benchmarks.plot_labels import Label, place_labels

# Costs at which the axis may be labelled
_TICKS = (2, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500)
# Where a name may stand, in points from its point, the nearest places first
_OFFSETS = tuple((right, sign * away) for away in range(6, 90, 4) for right in (0, 6, -6) for sign in (1, -1))
_CAPTION = (
    "Named: exact decoding, Fast-dLLM as published, the mode of each goal, the cheapest\n"
    "mode that equals Fast-dLLM, and the best others that no mode beats (on the line).\n"
    "Bars: 95 % intervals. Gray: the other modes."
)


def draw_modes(results: Results, goals: Mapping[str, str], published: str, path: Path) -> None:
    """Draw the share of passed tasks against computed positions per token.

    The modes that matter (:func:`benchmarks.mode_comparison.modes_that_matter`) have their names beside their points.

    Args:
      results: figures by mode.
      goals: the recommended mode of each goal.
      published: the mode with the published setting of Fast-dLLM.
      path: where to save the picture.
    """
    from matplotlib.figure import Figure

    front, named = pareto_front(results), modes_that_matter(results, goals, published)
    figure = Figure(figsize=(6.8, 5.4), dpi=130, layout="constrained")
    axes = figure.subplots()
    labels = []
    for name, row in results.items():
        (low, high), at = row["passed_rate_95"], (row["positions_per_token"], row["passed_rate"])
        if name not in named:
            axes.plot(*at, "o", color="0.7", markersize=3.5, zorder=1)
            continue
        color = "C1" if name == published else "C0" if name in front else "0.2"
        axes.errorbar(*at, [[at[1] - low], [high - at[1]]], fmt="o", color=color, elinewidth=0.8, capsize=2)
        roles = [goal for goal, chosen in goals.items() if name == chosen and name != goal]
        roles += ["as published"] if name == published else []
        labels.append(Label("\n".join([name, *(f"({role})" for role in roles)]), at, color))
    axes.plot(
        [results[name]["positions_per_token"] for name in front],
        [results[name]["passed_rate"] for name in front],
        color="C0",
        linewidth=0.8,
        alpha=0.6,
        drawstyle="steps-post",
        zorder=0,
    )
    _prepare(axes, results)
    figure.supxlabel(_CAPTION, fontsize=9, x=0.02, horizontalalignment="left")
    _name(axes, labels, results, named)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _name(axes: Any, labels: list[Label], results: Results, named: list[str]) -> None:
    """Write the names where they cover no point, and none of the named modes' intervals."""
    from matplotlib.transforms import Bbox

    axes.get_figure().draw_without_rendering()
    taken, marks = [], []
    for name, row in results.items():
        low, high = row["passed_rate_95"] if name in named else (row["passed_rate"], row["passed_rate"])
        cost = row["positions_per_token"]
        mark = Bbox(axes.transData.transform([(cost, low), (cost, high)]))
        taken.append(mark.padded(4))
        if name in named:
            marks.append(mark)
    place_labels(axes, labels, _OFFSETS, 10, taken, marks)


def _prepare(axes: Any, results: Results) -> None:
    costs = [row["positions_per_token"] for row in results.values()]
    ticks = [tick for tick in _TICKS if min(costs) / 1.2 <= tick <= 1.2 * max(costs)]
    axes.set_xscale("log")
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    # Room for a name on the left, where points are dense
    axes.set_xlim(min(costs) / 2.8, 1.2 * max(costs))
    axes.margins(y=0.12)
    axes.tick_params(labelsize=11)
    axes.set_xlabel("computed positions per token, one prompt at a time", fontsize=11)
    axes.set_ylabel("held-out tasks passed", fontsize=11)
    axes.set_title("Demo checkpoint: cost against quality of decoding modes", fontsize=12, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
