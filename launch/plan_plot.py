"""The picture behind ``--plot``: time of a pass and memory of a device over chips, a point for every mesh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.planner.workload import Workload
from sharding.errors import InputError

if TYPE_CHECKING:
    from launch.plan import TopologyPlan


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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    for plan in plans:
        shown = [*plan.fitting, *plan.others]
        chips = [found.spec.size for found in shown]
        chosen = plan.fitting[0].main_phase.phase.name if plan.fitting else ""
        label = f"{plan.topology} ({chosen})" if chosen else str(plan.topology)
        time_axes.scatter(chips, [1e3 * found.main_phase.seconds for found in shown], label=label, s=18)
        points = memory_axes.scatter(chips, [found.memory.total / 1e9 for found in shown], label=label, s=18)
        color = points.get_facecolor()[0]
        memory_axes.axhline(plan.topology.chip.usable_bytes / 1e9, color=color, linewidth=0.8, linestyle=":")
        if len(plans) == 1:
            for found in shown:
                text = str(found.spec).replace("sequence", "seq").replace("tensor", "ten")
                time_axes.annotate(text, (found.spec.size, 1e3 * found.main_phase.seconds), fontsize=7)
                memory_axes.annotate(text, (found.spec.size, found.memory.total / 1e9), fontsize=7)
    for axes, title in ((time_axes, "ms a pass"), (memory_axes, "GB a device; dotted: usable")):
        axes.set_xlabel("chips")
        axes.set_ylabel(title)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    time_axes.legend(fontsize=7)
    figure.suptitle(f"{name}, batch {workload.batch}, {workload.prompt} + {workload.new_tokens} tokens; estimated")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InputError(f"--plot={path}: {error}") from error
