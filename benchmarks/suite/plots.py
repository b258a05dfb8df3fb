"""Plot of a suite's record: throughput against batch size."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.plot_labels import Label, place_labels
from benchmarks.suite.generation import BATCHES
from benchmarks.suite.passes import GRID

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Where a line's name may stand, in points from its last point
_OFFSETS = ((5.0, 0.0), *((5.0, sign * away) for away in (1.0, 6.0, 12.0, 18.0) for sign in (1.0, -1.0)))

# Batches, with the tokens per second of each
_Line = dict[int, float]


def plot_batches(record: Mapping[str, Any], path: Path) -> bool:
    """Draw tokens per second against batch size: generations, and forward passes of each length.

    Returns:
      Whether there is something to draw, and matplotlib is installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    generations: _Line = {}
    lengths: dict[int, _Line] = {}
    for row in record["results"]["rows"]:
        speed = row["facts"].get("tokens_per_second")
        if speed is None or row["not_run"] is not None:
            continue
        if row["section"] == BATCHES and (found := re.match(r"batch (\d+),", row["name"])):
            generations[int(found[1])] = speed
        elif row["section"] == GRID:
            canvas, batch = (int(one) for one in re.findall(r"\d+", row["name"]))
            lengths.setdefault(canvas, {})[batch] = speed
    panels = [
        (title, lines)
        for title, lines in (
            ("generation", {"": generations}),
            ("forward pass without head", {f"{canvas} positions": line for canvas, line in sorted(lengths.items())}),
        )
        if any(lines.values())
    ]
    if not panels:
        return False
    figure = Figure(figsize=(4.6 * len(panels), 3.6), dpi=130, layout="constrained")
    figure.suptitle(f"{record['settings']['model']}: tokens per second by batch size ({record['kind']})", fontsize=11)
    drawn = list(zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True))
    for axes, (title, lines) in drawn:
        _draw(axes, title, lines)
    for axes, (_, lines) in drawn:
        labels = [
            Label(name, (max(line), line[max(line)]), f"C{number}") for number, (name, line) in enumerate(lines.items())
        ]
        place_labels(axes, [label for label in labels if label.text], _OFFSETS, 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True


def _draw(axes: Axes, title: str, lines: Mapping[str, _Line]) -> None:
    batches = sorted({batch for line in lines.values() for batch in line})
    for number, line in enumerate(lines.values()):
        at = sorted(line)
        axes.plot(at, [line[batch] for batch in at], "o-", color=f"C{number}", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    if len(lines) > 1:  # room for the labels
        axes.set_xlim(batches[0] / 1.2, batches[-1] * (batches[-1] / batches[0]) ** 0.35 * 1.1)
    axes.set_ylim(0, None)
    axes.set_xlabel("batch")
    axes.set_ylabel("tokens per second")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
