"""Plots of scaling records, with a figure per kind and mode, a panel per pass, and a line per axis or chip."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The records of a line have these in common: kind, pass, mode, and axis or chip.
Group = tuple[str, str, str, str]
_Measure = Callable[[Mapping[str, Any]], float]


def _moved(point: Mapping[str, Any]) -> float:
    return float(point["collective_bytes_of_a_pass"]) / 1e6


def _held(point: Mapping[str, Any]) -> float:
    return float(point["memory_bytes_per_device"]) / 1e6


def plot_scaling(groups: Mapping[Group, Sequence[Mapping[str, Any]]], folder: Path) -> list[Path]:
    """Draw the groups: speed-ups beside the ideal line, or traffic and memory for simulated devices.

    Raises:
      InputError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("--plots needs matplotlib: pip install -e '.[bench]' in the checkout") from error
    pictures: dict[tuple[str, str], dict[str, dict[str, Sequence[Mapping[str, Any]]]]] = {}
    for (kind, what, mode, axis), points in groups.items():
        pictures.setdefault((kind, mode), defaultdict(dict))[what][axis] = points
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for (kind, mode), passes in pictures.items():
        simulated = kind == "simulated devices"
        height = 5.4 if simulated else 3.2
        figure = Figure(figsize=(1.2 + 2.9 * len(passes), height), layout="constrained")
        rows = figure.subplots(
            2 if simulated else 1, len(passes), squeeze=False, sharex=True, sharey="none" if simulated else "row"
        )
        for column, (what, lines) in enumerate(passes.items()):
            rows[0][column].set_title(what, fontsize=10)
            if simulated:
                _draw_lines(rows[0][column], lines, _moved)
                _draw_lines(rows[1][column], lines, _held)
            else:
                _draw_speed_ups(rows[0][column], lines)
            rows[-1][column].set_xlabel("devices", fontsize=9)
        labels = ("MB moved per pass", "MB per device") if simulated else ("speed-up over a line's first point",)
        for row, label in zip(rows, labels, strict=True):
            row[0].set_ylabel(label, fontsize=9)
        figure.suptitle(f"{mode} scaling ({kind}{'' if simulated else '; dashed: ideal'})", fontsize=11)
        path = folder / f"{kind}_{mode}.svg".replace(" ", "_")
        # Equal records make equal files.
        with rc_context({"svg.hashsalt": path.stem}):
            figure.savefig(path, metadata={"Date": None})
        made.append(path)
    return made


def _name_line(axes: Axes, name: str, x: float, y: float, color: str) -> None:
    axes.annotate(name, (x, y), (4, 0), textcoords="offset points", fontsize=8, color=color, verticalalignment="center")


def _prepare(axes: Axes, lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Prepare the axes: ticks at powers of two, with room for the lines' names on the right."""
    devices = sorted({point["devices"] for points in lines.values() for point in points})
    room = 0.05 * max(map(len, lines))
    axes.set_xscale("log", base=2)
    axes.set_xticks(devices, [str(one) for one in devices])
    axes.set_xlim(devices[0] / 1.2, devices[-1] * (devices[-1] / devices[0]) ** room * 1.1)
    axes.tick_params(labelsize=7)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def _draw_lines(axes: Axes, lines: Mapping[str, Sequence[Mapping[str, Any]]], measure: _Measure) -> None:
    top = max(measure(point) for points in lines.values() for point in points) or 1.0
    colors = {name: f"C{number}" for number, name in enumerate(lines)}
    last = -math.inf
    for name, points in sorted(lines.items(), key=lambda line: measure(line[1][-1])):
        values = [measure(point) for point in points]
        axes.plot([point["devices"] for point in points], values, "o-", color=colors[name], markersize=3)
        # Labels of lines with equal ends are stacked.
        last = max(values[-1], last + 0.09 * top)
        _name_line(axes, name, points[-1]["devices"], last, colors[name])
    _prepare(axes, lines)
    # From below zero, so that the axis does not cross out the name of a line at zero, to above the last name.
    axes.set_ylim(-0.07 * top, max(top, last) + 0.07 * top)


def _draw_speed_ups(axes: Axes, lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    colors = {name: f"C{number}" for number, name in enumerate(lines)}
    last = 0.0
    for name, points in sorted(lines.items(), key=lambda line: float(line[1][-1]["speedup"])):
        color, speed = colors[name], [point["speedup"] for point in points]
        # A smaller time is a larger speed-up, so minimum and maximum are exchanged.
        times = [point["ms"] for point in points]
        low = [one * (1 - ms["median"] / ms["maximum"]) for one, ms in zip(speed, times, strict=True)]
        high = [one * (ms["median"] / ms["minimum"] - 1) for one, ms in zip(speed, times, strict=True)]
        own = [point["devices"] for point in points]
        axes.plot(own, [count / own[0] for count in own], "--", color=color, linewidth=0.6, alpha=0.6)
        axes.errorbar(own, speed, yerr=[low, high], marker="o", markersize=3, capsize=2, color=color)
        last = max(speed[-1], last * 1.45)
        _name_line(axes, name, own[-1], last, color)
    _prepare(axes, lines)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    # A name above the axes is not drawn.
    axes.set_ylim(top=max(axes.get_ylim()[1], 1.3 * last))
