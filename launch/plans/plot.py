"""Draw the picture of ``diffumesh plan --plot``: a row per mesh, with bars of time, memory, and rate or cost."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.plans.topology_plan import TopologyPlan, workload_words
from launch.process.destinations import check_writable
from runtime import InputError, replace_file
from runtime.planner import Estimate, Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Largest number of meshes to draw for one machine.
_MOST_BARS = 24
_UNFIT = "#b0b0b0"
_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Check before anything is computed that a picture can be written to this file.

    Raises:
      InputError: matplotlib is not installed, the file's name has another ending, or the file cannot be written.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError("--plot needs matplotlib: pip install -e '.[bench]' in the checkout") from error
    if Path(path).suffix.lower() not in _FORMATS:
        raise InputError(f"--plot={path}: the name must end with one of {', '.join(_FORMATS)}")
    check_writable("plot", path)


def plot_plans(
    path: str, name: str, workload: Workload, plans: Sequence[TopologyPlan], price: float | None = None
) -> None:
    """Draw every mesh of every plan into a file, which is replaced in one step, after :func:`check_plot`.

    Raises:
      InputError: the file cannot be written.
    """
    target, picture = Path(path), io.BytesIO()
    draw_plans(name, workload, plans, price).savefig(picture, format=target.suffix[1:].lower(), dpi=150)
    try:
        replace_file(target, [picture.getbuffer()])
    except OSError as error:
        raise InputError(f"--plot={path}: cannot be written ({error.strerror or error})") from error


def draw_plans(name: str, workload: Workload, plans: Sequence[TopologyPlan], price: float | None = None) -> Figure:
    """Draw the figure: the best meshes of one machine, or the best mesh of each machine, one row each.

    Args:
      name: name of the model.
      workload: the workload.
      plans: the plan of each machine.
      price: dollars per chip-hour; None to show rates instead of costs.
    """
    from matplotlib.figure import Figure

    every = list(_bars(plans))
    bars = every[:_MOST_BARS] if len(plans) == 1 else every
    figure = Figure(figsize=(12, 1.7 + 0.32 * len(bars)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    memory = [bar.found.memory.total / 1e9 for bar in bars]
    usable = [bar.usable / 1e9 for bar in bars]
    phases = sorted({bar.found.main_phase.phase.name for bar in bars})
    times = [1e3 * bar.found.main_phase.seconds for bar in bars]
    _draw_panel(panels[0], f"ms per pass ({', '.join(phases)})", bars, times, [_short(one) for one in times])
    # The memory of a chip is drawn behind the memory that the mesh needs.
    panels[1].barh(range(len(bars)), usable, color="none", edgecolor="#404040", linewidth=0.8)
    labels = [f"{one:.1f} of {limit:.1f}" for one, limit in zip(memory, usable, strict=True)]
    ends = [max(pair) for pair in zip(memory, usable, strict=True)]
    _draw_panel(panels[1], "GB per chip (outlined: usable)", bars, memory, labels, ends)
    rates = [bar.found.tokens_per_second_per_chip for bar in bars]
    if price is None:
        _draw_panel(panels[2], "tokens/s per chip", bars, rates, [_short(one) for one in rates])
    else:
        costs = [bar.found.cost_per_million_tokens(price) for bar in bars]
        title = f"$ per million tokens, at ${price:g} per chip-hour"
        _draw_panel(panels[2], title, bars, costs, [f"${one:.2f}" for one in costs])
    panels[0].set_yticks(range(len(bars)), [bar.name for bar in bars])
    panels[0].invert_yaxis()
    shown = "" if len(bars) == len(every) else f"; the best {len(bars)} of {len(every)} meshes"
    machine = f" on {plans[0].topology}" if len(plans) == 1 else "; the best mesh of each machine"
    unfit = "" if all(bar.fits for bar in bars) else "; gray: does not fit"
    figure.suptitle(
        f"{name}{machine}{shown}\n{workload_words(workload)}; estimated{unfit}",
        fontsize=11,
    )
    return figure


@dataclass(frozen=True)
class _Bar:
    """A mesh in the figure: its label, its estimate, whether it fits, usable bytes per chip, and its colour."""

    name: str
    found: Estimate
    fits: bool
    usable: int
    color: str


def _bars(plans: Sequence[TopologyPlan]) -> Iterator[_Bar]:
    """Yield the meshes of one machine, best first, or the best mesh of each machine."""
    for plan in plans:
        meshes = [*plan.fitting, *plan.others]
        for number, found in enumerate(meshes[:1] if len(plans) > 1 else meshes):
            axes = {"data": found.spec.data, "sequence": found.spec.sequence, "tensor": found.spec.tensor}
            mesh = ",".join(f"{axis}={size}" for axis, size in axes.items() if size > 1) or "data=1"
            fits = number < len(plan.fitting)
            yield _Bar(
                name=f"{plan.topology}  {mesh}" if len(plans) > 1 else mesh,
                found=found,
                fits=fits,
                usable=plan.topology.chip.usable_bytes,
                color=_color(plan, plans) if fits else _UNFIT,
            )


def _color(plan: TopologyPlan, plans: Sequence[TopologyPlan]) -> str:
    """Return the colour for the kind of chip of a machine."""
    kinds = sorted({one.topology.chip.name for one in plans})
    return f"C{kinds.index(plan.topology.chip.name) % 10}"


def _draw_panel(
    axes: Axes,
    title: str,
    bars: Sequence[_Bar],
    lengths: Sequence[float],
    labels: Sequence[str],
    ends: Sequence[float] | None = None,
) -> None:
    """Draw a bar for each mesh, with its label to the right.

    ``ends`` are where the labels start, if something longer than the bars is drawn in the panel.
    """
    axes.barh(range(len(bars)), lengths, color=[bar.color for bar in bars], height=0.6)
    longest = max(ends or lengths)
    for row, (end, label) in enumerate(zip(ends or lengths, labels, strict=True)):
        axes.text(end + 0.015 * longest, row, label, fontsize=8, verticalalignment="center")
    axes.set_xlim(0, 1.28 * longest)
    axes.set_title(title, parse_math=False, fontsize=9, loc="left")
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _short(number: float) -> str:
    """Format a number with three digits, without an exponent."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
