"""The picture behind ``--plot``: time of a pass and memory of a device over chips, a point for every mesh, named."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.topology_plan import TopologyPlan
from runtime import InputError
from runtime.planner import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Names that have room above one another; the best meshes have them.
_MOST_NAMES = 28
# Height of a name and distance from its point, in points of print.
_NAME_HEIGHT, _NAME_DISTANCE = 8.5, 22.0


def check_plot(path: str) -> None:
    """Check before anything is computed that a picture can be written to this file.

    Raises:
      InputError: matplotlib is not installed, the file's ending is no format of its, or the file cannot be written.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise InputError("--plot needs matplotlib: pip install 'diffumesh[bench]'") from error
    formats = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.lower().removeprefix(".") not in formats:
        raise InputError(f"--plot={path}: the name must end with one of .{', .'.join(formats)}")
    file = Path(path).resolve()
    if file.is_dir():
        raise InputError(f"--plot={path}: that is a folder; name a file")
    if not file.parent.is_dir():
        raise InputError(f"--plot={path}: there is no such folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InputError(f"--plot={path}: this user may not write there")


def plot_plans(path: str, name: str, workload: Workload, plans: Sequence[TopologyPlan]) -> None:
    """Draw every mesh of every plan, after :func:`check_plot`.

    Raises:
      InputError: the file cannot be written.
    """
    try:
        draw_plans(name, workload, plans).savefig(path, dpi=150)
    except OSError as error:
        raise InputError(f"--plot={path}: {error}") from error


def draw_plans(name: str, workload: Workload, plans: Sequence[TopologyPlan]) -> Figure:
    """The picture: of one machine every mesh with its name; of several the best mesh of each, the others faint.

    Args:
      name: of the model.
      workload: what is run.
      plans: of each machine.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    several = len(plans) > 1
    points = list(_points(plans))
    counts = sorted({point.chips for point in points})
    figure = Figure(figsize=(max(7.0, 1.5 + 2.4 * len(counts)), 10))
    # Names are placed by the size of the axes, which therefore stands before anything is drawn.
    figure.subplots_adjust(left=0.1, right=0.98, bottom=0.05, top=0.93, hspace=0.12)
    time_axes, memory_axes = figure.subplots(2, 1)
    phases = sorted({point.phase for point in points})
    for axes, title in (
        (time_axes, f"ms a pass ({', '.join(phases)})"),
        (memory_axes, "GB a device; dotted: usable"),
    ):
        heights = [point.gigabytes if axes is memory_axes else point.milliseconds for point in points]
        for point, height in zip(points, heights, strict=True):
            axes.plot(
                counts.index(point.chips),
                height,
                "o",
                markersize=4,
                color=point.color,
                fillstyle="full" if point.fits else "none",
                alpha=1.0 if point.name else 0.35,
                zorder=3 if point.name else 2,
            )
        axes.set_ylabel(title)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(3, 1)))
        axes.set_xlim(-0.1, len(counts))
        axes.set_xticks(range(len(counts)), list(map(str, counts)))
        if axes is memory_axes:
            for usable, color in {(plan.topology.chip.usable_bytes, _color(plan, plans)) for plan in plans}:
                axes.axhline(usable / 1e9, color=color, linewidth=0.8, linestyle=":")
        axes.margins(y=0.08)
        axes.autoscale_view(scalex=False)
        for column, chips in enumerate(counts):
            here = [(height, point) for height, point in zip(heights, points, strict=True) if point.chips == chips]
            _write_names(axes, column, [(height, point) for height, point in here if point.name])
    memory_axes.set_xlabel("chips of the mesh")
    title = f"{name}, {workload.dtype}, batch {workload.batch}, {workload.prompt} + {workload.new_tokens} tokens"
    named = "; named: the best mesh of each machine" if several else ""
    if not several and len(points) > _MOST_NAMES:
        named = f"; named: the {_MOST_NAMES} best"
    figure.suptitle(f"{title}; estimated\nhollow: does not fit{named}", fontsize=11)
    return figure


@dataclass(frozen=True)
class _Point:
    """A mesh in the picture; one without a name is faint."""

    chips: int
    milliseconds: float
    gigabytes: float
    phase: str
    fits: bool
    color: str
    name: str


def _points(plans: Sequence[TopologyPlan]) -> Iterator[_Point]:
    for plan in plans:
        for number, found in enumerate([*plan.fitting, *plan.others]):
            axes = {"data": found.spec.data, "seq": found.spec.sequence, "tensor": found.spec.tensor}
            mesh = ",".join(f"{axis}={size}" for axis, size in axes.items() if size > 1) or "data=1"
            name = mesh if number < _MOST_NAMES else ""
            if len(plans) > 1:
                name = f"{plan.topology} {mesh}" if number == 0 else ""
            main = found.main_phase
            yield _Point(
                chips=found.spec.size,
                milliseconds=1e3 * main.seconds,
                gigabytes=found.memory.total / 1e9,
                phase=main.phase.name,
                fits=number < len(plan.fitting),
                color=_color(plan, plans),
                name=name,
            )


def _color(plan: TopologyPlan, plans: Sequence[TopologyPlan]) -> str:
    """A color for every kind of chip."""
    kinds = sorted({one.topology.chip.name for one in plans})
    return f"C{kinds.index(plan.topology.chip.name) % 10}"


def _write_names(axes: Axes, column: int, named: Iterable[tuple[float, _Point]]) -> None:
    """Write the name of each point of a column right of it, none over another."""
    to_points = 72 / axes.figure.dpi
    points = sorted(named, key=lambda entry: entry[0])
    at = [float(axes.transData.transform((column, height))[1]) * to_points for height, _ in points]
    low, high = (float(edge) * to_points for edge in axes.bbox.intervaly)
    places = spread(at, _NAME_HEIGHT, low + _NAME_HEIGHT, high - _NAME_HEIGHT)
    for (height, point), from_, to in zip(points, at, places, strict=True):
        line = {"arrowstyle": "-", "linewidth": 0.4, "color": point.color, "shrinkA": 0, "shrinkB": 3}
        axes.annotate(
            point.name,
            (column, height),
            (_NAME_DISTANCE, to - from_),
            textcoords="offset points",
            fontsize=7,
            color=point.color,
            verticalalignment="center",
            arrowprops=line | {"relpos": (0, 0.5)},
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            zorder=4,
        )


def spread(heights: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Move ascending heights as little as a pass up and a pass down need for them to be apart and between two edges.

    Args:
      heights: ascending.
      distance: least from one to the next.
      low: the lowest place.
      high: the highest; where there are too many, the lowest go below ``low``.
    """
    places: list[float] = []
    for height in heights:
        places.append(max(height, places[-1] + distance if places else low))
    for number in reversed(range(len(places))):
        places[number] = min(places[number], places[number + 1] - distance if number + 1 < len(places) else high)
    return places
