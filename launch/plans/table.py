"""Plans as a table for people and as plain objects for ``--json``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table

from launch.display.console import PipedConsole
from launch.plans.topology_plan import TopologyPlan, workload_words
from runtime import model_layout
from runtime.planner import (
    Estimate,
    Workload,
    describe_compiled,
    describe_estimate,
    describe_topology,
    shortage,
)


def describe_plans(workload: Workload, plans: Sequence[TopologyPlan], price: float | None) -> dict[str, Any]:
    """Return the workload and its plans as plain objects. ``price`` is in dollars per chip-hour."""
    names = ["dtype", "batch", "prompt", "new_tokens", "steps", "cache", "block_length", "quantization"]
    names += ["draft_steps", "draft_axis"]
    draft = workload.draft
    model = draft and {"parameters": model_layout(draft.config).parameter_count, "quantization": draft.quantization}
    return {
        "workload": {name: getattr(workload, name) for name in names} | {"draft_model": model},
        "plans": [
            describe_topology(plan.topology)
            | {
                "verdict": plan.verdict,
                "notes": plan.notes,
                "meshes": [
                    describe_estimate(found, price, plan.compiled.get(number), plan.refused.get(found.spec))
                    for number, found in enumerate([*plan.fitting, *plan.others])
                ],
            }
            for plan in plans
        ],
    }


def print_plans(name: str, workload: Workload, plans: Sequence[TopologyPlan], price: float | None) -> None:
    """Print a table: the meshes of one machine, or the best mesh of each of several machines."""
    several = len(plans) > 1
    title = (
        f"{name}, {workload_words(workload)}"
        + ("" if price is None else f", at ${price:g} per chip-hour")
        + "; all but the compiler's column is estimated"
    )
    table = Table(box=box.SIMPLE_HEAD, title=title)
    table.add_column("topology" if several else "mesh", no_wrap=True)
    if several:
        table.add_column("best mesh", no_wrap=True)
    for column in (
        "GB/chip", "compiler", "usable", "headroom", "pass", "ms/pass", "bound", "moved MB", "tokens/s", "tok/s/chip",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column in ("pass", "bound") else "right")
    if price is not None:
        table.add_column("$/M tokens", justify="right")
    for plan in plans:
        shown = list(enumerate(plan.fitting[:1] if several else plan.fitting))
        for number, found in shown:
            compiled = plan.compiled.get(number)
            most = max((one.memory_bytes for one in compiled), default=0) if compiled else 0
            phase = found.main_phase
            idle = plan.topology.num_devices - found.spec.size
            mesh = f"{found.spec}, {idle} chips idle" if idle else str(found.spec)
            cells = [str(plan.topology), mesh] if several else [mesh]
            usable = plan.topology.chip.usable_bytes
            cells += [
                f"{found.memory.total / 1e9:.2f}",
                f"{most / 1e9:.2f}" if most else "-",
                f"{usable / 1e9:.2f}",
                f"{(usable - (most or found.memory.total)) / 1e9:.2f}",
                phase.phase.name,
                f"{1e3 * phase.seconds:.2f}",
                phase.bound,
                f"{phase.collective_bytes / 1e6:.1f}",
                f"{found.tokens_per_second:.0f}",
                f"{found.tokens_per_second_per_chip:.1f}",
            ]
            if price is not None:
                cells.append(f"{found.cost_per_million_tokens(price):.2f}")
            table.add_row(*cells)
        if several and not plan.fitting:
            table.add_row(str(plan.topology), _why_not(plan), *[""] * (len(table.columns) - 2))
        if not several:
            for found in plan.others:
                usable = plan.topology.chip.usable_bytes
                lacks = f"{(usable - found.memory.total) / 1e9:.2f}"
                cells = [str(found.spec), f"{found.memory.total / 1e9:.2f}", "", f"{usable / 1e9:.2f}", lacks]
                cells.append("does not fit")
                table.add_row(*cells, *[""] * (len(table.columns) - len(cells)))
    console = PipedConsole(200)
    console.print(table)
    for plan in plans:
        for line in _lines_below(plan, several):
            console.print(line, highlight=False, soft_wrap=True)


def _why_not(plan: TopologyPlan) -> str:
    return "does not fit" if plan.others else "no such mesh"


def _lines_below(plan: TopologyPlan, several: bool) -> Iterator[str]:
    """Yield the lines below the table: meshes that do not fit, why the best mesh is best, and the compiler's results.

    Args:
      plan: the plan of one machine.
      several: whether the table shows several machines; if so, each line names its machine.
    """
    machine = f"{plan.topology}, " if several else ""
    if several and not plan.fitting:
        yield f"{_why_not(plan)}: {plan.verdict}"
    elif several:
        yield from (f"does not fit: {machine}{why}" for why in plan.refused.values())
    else:
        yield from (f"does not fit: {plan.refused.get(found.spec) or shortage(found)}" for found in plan.others)
        yield f"why: {plan.verdict}"
    for number, programs in plan.compiled.items():
        for one in describe_compiled(plan.fitting[number], programs):
            yield f"compiled: {machine}{_compiled_in_words(plan.fitting[number], one)}"


def _compiled_in_words(found: Estimate, one: dict[str, Any]) -> str:
    """Return one line with the compiler's results for one kind of forward pass on a mesh.

    Args:
      found: the estimate of the mesh.
      one: an item of :func:`runtime.planner.describe_compiled`.
    """
    counts = ", ".join(f"{count:g} {kind}" for kind, count in one["collectives_of_a_pass"].items())
    moved = sum(entry["bytes"] for entry in one["collective_bytes_of_a_pass"])
    widths = one["window_widths_in_the_program"]
    return (
        f"{found.spec}, {one['pass']}, {one['attention']} attention, "
        f"{one['memory_bytes_per_device'] / 1e9:.3f} GB per device (estimate "
        f"{one['estimate_over_compiler']:.3f} times), "
        + (f"{counts} of {moved / 1e6:.3f} MB" if counts else "no collectives")
        + (f" in the windows of {widths} widths together" if widths > 1 else " per pass")
        + f", {one['compile_seconds']:.1f} s to compile"
    )
