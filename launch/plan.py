"""Know before you rent: does a model fit a machine, on which mesh, how fast, at what cost. Needs no accelerator.

  diffumesh plan --model=diffucoder-7b --topology=v5e-8                 every mesh, ranked; the best compiled
  diffumesh plan --model=diffucoder-7b --topology=8xH100 --batch=8 --mesh=data=2,tensor=4
  diffumesh plan --checkpoint=DIR --topology=all --price_per_chip_hour=1.2 --plot=plan.png

Topologies: v5e-8 or v5e:2x4, v4-32 or v4:2x2x4, v5p:4x4x4, v6e:4x4; 2xv5e:16x16 for two slices; l4, rtx4090, a100-40gb,
8xH100; 2x8xh200 for two hosts. Times, rates and costs are estimated by a roofline at rates that large products and
copies reach; speeds of networks between hosts and slices are assumptions, and a collective between GPU hosts uses the
network cards of all its GPUs. Memory and collectives of the best meshes are the compiler's own, of the very program
that generates, where the compiler is installed (libtpu for TPU, JAX's CUDA plugin for GPU).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from rich import box
from rich.console import Console
from rich.table import Table

from launch.plan_plot import check_plot, plot_plans
from launch.profiling import check_folder, write_programs
from launch.startup import compile_only, run_launcher, say
from launch.topology_plan import TopologyPlan
from runtime import CACHES, QUANTIZATIONS, STORED_DTYPES, InputError, MeshError, MeshSpec, parse_config
from runtime.planner import (
    PRESETS,
    Estimate,
    Topology,
    Workload,
    aot_devices,
    compile_workload,
    describe_compiled,
    describe_estimate,
    describe_topology,
    estimate_workload,
    missing_compiler,
    parse_topology,
    preset,
    rank,
    shortage,
    what_would_help,
)

# What --topology=all compares: machines that are rented as they are.
MACHINES = (
    "v4:2x2x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5p:2x2x1", "v5p:2x2x2", "v6e:2x2", "v6e:2x4", "1xl4", "4xl4",
    "1xrtx4090", "1xa100-40gb", "8xa100-40gb", "1xa100", "8xa100", "1xh100", "8xh100", "1xh200", "8xh200", "2x8xh200",
)  # fmt: skip


def define_flags(values: flags.FlagValues) -> None:
    """Define this launcher's flags."""

    def integer(name: str, default: int | None, text: str) -> None:
        flags.DEFINE_integer(name, default, text, 1, flag_values=values)

    def string(name: str, default: str | None, text: str) -> None:
        flags.DEFINE_string(name, default, text, flag_values=values)

    flags.DEFINE_enum("model", None, tuple(PRESETS), "Architecture by name; no download.", flag_values=values)
    string("checkpoint", None, "Model folder, URL or Hub name; only its config.json is read.")
    string("topology", None, "Machine, such as v5e-8, 2xv5e:16x16, l4, 8xH100, 2x8xh200, or all.")
    string("mesh", None, "Plan this mesh alone, such as data=2,tensor=4; one axis may be -1.")
    flags.DEFINE_enum("dtype", None, STORED_DTYPES, "Default: as stored.", flag_values=values)
    integer("batch", 1, "Rows that are generated together.")
    integer("prompt", 256, "Tokens of each prompt.")
    integer("new_tokens", 256, "Tokens to generate for each row.")
    integer("steps", None, "Denoise steps of masked diffusion, in all blocks together. Default: as many as new tokens.")
    flags.DEFINE_enum("cache", "none", CACHES, "Cache of masked diffusion; none is exact.", flag_values=values)
    integer("block_length", None, "Positions of a block, with a cache. Default: 32, or as the model's attention.")
    flags.DEFINE_enum(
        "quantize", "none", QUANTIZATIONS, "Weights in int8; what is stored so is planned so.", flag_values=values
    )
    flags.DEFINE_integer(
        "compile", None, "Best meshes to compile. Default: 1, and none with --topology=all.", 0, 64, flag_values=values
    )
    flags.DEFINE_float(
        "price_per_chip_hour",
        None,
        "Dollars for a chip and an hour: adds dollars per million tokens.",
        0.0,
        flag_values=values,
    )
    flags.DEFINE_bool("json", False, "One JSON object instead of a table.", flag_values=values)
    string("plot", None, "Write time, memory and rate or cost of each mesh to this file (PNG, SVG or PDF).")
    string("dump_hlo", None, "Write the optimized HLO of what is compiled into this folder.")


def read_workload(values: flags.FlagValues) -> tuple[str, Workload]:
    """The model's name and the workload that flags describe.

    Raises:
      InputError: no model, or numbers that do not go together.
    """
    if (values.model is None) == (values.checkpoint is None):
        raise InputError(f"give one of --model={'|'.join(PRESETS)} and --checkpoint=DIR")
    if values.model is not None:
        name, config, stored = values.model, preset(values.model), "none"
    else:
        from checkpoints import open_folder

        folder = open_folder(values.checkpoint, weights=False)
        name, config, stored = folder.name, parse_config(folder.config), folder.quantization
    given = [f"--{flag}" for flag in ("steps", "cache", "block_length") if values[flag].present]
    if config.objective == "autoregressive" and given:
        raise InputError(
            f"{', '.join(given)}: of masked diffusion; {name} is autoregressive, with a cache and a pass for each token"
        )
    return name, Workload(
        config,
        values.dtype or config.dtype,
        values.batch,
        values.prompt,
        values.new_tokens,
        values.steps or values.new_tokens,
        values.cache,
        values.block_length or config.attention_block_length or Workload.block_length,
        values.quantize if stored == "none" else stored,
    )


def main(values: flags.FlagValues) -> None:
    """Run the launcher."""
    # Programs are compiled for AOT topologies; an attached device is not touched.
    compile_only()
    name, workload = read_workload(values)
    if values.topology is None:
        raise InputError("give --topology=v5e:2x4 or another machine, or --topology=all")
    if values.mesh is not None:
        MeshSpec.parse(values.mesh)
    everything = values.topology == "all"
    count = values.compile if values.compile is not None else 0 if everything else 1
    if values.dump_hlo is not None and count == 0:
        raise InputError("--dump_hlo is of what is compiled, and nothing is; give --compile=1")
    if values.dump_hlo is not None:
        check_folder("dump_hlo", values.dump_hlo)
    if values.plot is not None:
        check_plot(values.plot)
    topologies = [parse_topology(text) for text in (MACHINES if everything else [values.topology])]
    plans = [plan_topology(workload, topology, values, count, everything) for topology in topologies]
    if not any(plan.fitting for plan in plans):
        raise MeshError("; ".join(plan.verdict for plan in plans))
    if everything:
        plans.sort(key=lambda plan: -plan.fitting[0].tokens_per_second_per_chip if plan.fitting else 1.0)
    if values.json:
        price = values.price_per_chip_hour
        print(json.dumps({"kind": "estimated", "model": name} | describe_plans(workload, plans, price), indent=2))
    else:
        print_plans(name, workload, plans, values.price_per_chip_hour)
    if values.plot is not None:
        plot_plans(values.plot, name, workload, plans, values.price_per_chip_hour)


def plan_topology(
    workload: Workload, topology: Topology, values: flags.FlagValues, compile_best: int, everything: bool
) -> TopologyPlan:
    """Rank the meshes of one machine and compile the best of them.

    Raises:
      MeshError: a mesh that was named and cannot be, or that the compiler refuses.
    """
    if values.mesh is not None:
        try:
            found = estimate_workload(workload, topology, MeshSpec.parse(values.mesh))
        except MeshError as error:
            if not everything:
                raise
            return TopologyPlan(topology, [], [], f"{topology}: {error}")
        if found.fits:
            plan = TopologyPlan(topology, [found], [])
        else:
            plan = TopologyPlan(topology, [], [found], f"{topology}: mesh {shortage(found)}")
    else:
        plan = TopologyPlan(topology, *rank(workload, topology))
    install = missing_compiler(topology.chip.platform) if compile_best else None
    if install is not None:
        plan.notes.append(f"analytical only: compiling for {topology} needs {install}")
        say(plan.notes[-1])
    elif compile_best and plan.fitting:
        compile_plan(workload, plan, values, compile_best, only=values.mesh is not None and not everything)
    return plan


def compile_plan(workload: Workload, plan: TopologyPlan, values: flags.FlagValues, count: int, only: bool) -> None:
    """Compile the best meshes of a plan; one that the compiler finds too large makes room for the next.

    Args:
      workload: what is run.
      plan: of one machine.
      values: flags.
      count: meshes to compile.
      only: there is no next.

    Raises:
      MeshError: the compiler refuses the only one.
    """
    topology = plan.topology
    devices = aot_devices(topology)
    while len(plan.compiled) < min(count, len(plan.fitting)):
        number = len(plan.compiled)
        found = plan.fitting[number]
        say(f"compiling for {topology}, mesh {found.spec}")
        try:
            programs = compile_workload(workload, found.spec, devices)
            most, usable = max(one.memory_bytes for one in programs), topology.chip.usable_bytes
            if most > usable:
                raise MeshError(f"needs {most / 1e9:.2f} GB of memory on each device of {usable / 1e9:.2f} usable")
        except MeshError as error:
            reason = str(error).splitlines()[0]
            if "memory" in reason:
                reason += f"; {what_would_help(found)}"
            if only:
                raise MeshError(f"{found.spec} on {topology}, by the compiler: {reason}") from error
            plan.refuse(number, f"by the compiler, {reason}")
            say(plan.notes[-1])
            continue
        plan.compiled[number] = programs
        write_programs(values, {f"{topology}_{found.spec}_{one.name}": one.text for one in programs})


def describe_plans(workload: Workload, plans: Sequence[TopologyPlan], price: float | None) -> dict[str, Any]:
    """The workload and what was found, as plain objects."""
    names = ("dtype", "batch", "prompt", "new_tokens", "steps", "cache", "block_length", "quantization")
    return {
        "workload": {name: getattr(workload, name) for name in names},
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
    """A table for people."""
    several = len(plans) > 1
    title = (
        f"{name}, {workload.dtype}, batch {workload.batch}, {workload.prompt} + {workload.new_tokens} tokens"
        + ("" if workload.config.objective == "autoregressive" else f", cache {workload.cache}")
        + ("" if price is None else f", at ${price:g} a chip-hour")
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
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for plan in plans:
        for line in _lines_below(plan, several):
            console.print(line, highlight=False, soft_wrap=True)


def _why_not(plan: TopologyPlan) -> str:
    return "does not fit" if plan.others else "no such mesh"


def _lines_below(plan: TopologyPlan, several: bool) -> Iterator[str]:
    """What does not fit and what would help, why the best is best, and what the compiler says.

    Args:
      plan: of one machine.
      several: it is one of several, of which only the best mesh is shown, and is named on each line.
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
    """What the compiler says of one pass of a mesh, in a line."""
    counts = ", ".join(f"{count:g} {kind}" for kind, count in one["collectives_of_a_pass"].items())
    moved = sum(entry["bytes"] for entry in one["collective_bytes_of_a_pass"])
    widths = one["window_widths_in_the_program"]
    return (
        f"{found.spec}, {one['pass']}, {one['attention']} attention, "
        f"{one['memory_bytes_per_device'] / 1e9:.3f} GB a device (estimate {one['estimate_over_compiler']:.3f} times), "
        + (f"{counts} of {moved / 1e6:.3f} MB" if counts else "no collectives")
        + (f" in the windows of {widths} widths together" if widths > 1 else " a pass")
        + f", {one['compile_seconds']:.1f} s to compile"
    )


def run(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
