"""Plot of decoding modes: speed against quality."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

# The modes in the plot, with the text and position of their labels.
_SHOWN: dict[str, tuple[str, Literal["left", "center", "right"], Literal["bottom", "top"]]] = {
    "exact": ("exact", "center", "bottom"),
    "exact_early_stop": ("exact, early stop", "center", "bottom"),
    "dual_8": ("dual cache, blocks of 8", "center", "bottom"),
    "fast_dllm_8_stop": ("Fast-dLLM baseline", "right", "top"),
    "dual_threshold_8_stop": ("dual, threshold, early stop", "right", "bottom"),
    "dual_threshold_8_stop_once": ("the same, one refresh", "left", "bottom"),
}


def draw_modes(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw speed against quality of the main modes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    shown = [(place, results[name]) for name, place in _SHOWN.items() if name in results]
    for number, ((label, side, edge), row) in enumerate(shown):
        (low, high), rate, speed = row["parse_rate_95"], row["parse_rate"], row["tokens_per_second"]
        axes.errorbar(
            speed,
            rate,
            xerr=row["tokens_per_second_deviation"],
            yerr=[[rate - low], [high - rate]],
            fmt="o",
            color=f"C{number}",
            elinewidth=0.8,
            capsize=2,
        )
        axes.annotate(
            label,
            (speed, high if edge == "bottom" else low),
            (0, 5 if edge == "bottom" else -5),
            textcoords="offset points",
            fontsize=9,
            color=f"C{number}",
            horizontalalignment=side,
            verticalalignment=edge,
        )
    axes.set_xscale("log")
    axes.set_xticks([25, 50, 100, 200, 400, 800], ["25", "50", "100", "200", "400", "800"])
    axes.minorticks_off()
    axes.margins(x=0.15, y=0.2)
    axes.set_xlabel("tokens per second, one prompt at a time")
    axes.set_ylabel("share of completions that parse (95 % interval)")
    axes.set_title("Demo checkpoint, held-out prompts: speed against quality", fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
