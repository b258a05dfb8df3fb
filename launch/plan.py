"""Know before you rent: does a model fit a machine, on which mesh, how fast, at what cost. Needs no accelerator.

  python -m launch.plan --model=diffucoder-7b --topology=v5e:2x4               every mesh, ranked; the best compiled
  python -m launch.plan --model=diffucoder-7b --topology=8xh100 --batch=8 --mesh=data=2,tensor=4
  python -m launch.plan --checkpoint=DIR --topology=all --price_per_chip_hour=1.2 --plot=plan.png

Topologies: v5e:2x4, v4:2x2x4, v5p:4x4x4, v6e:4x4; 2xv5e:16x16 for two slices; 8xh100; 2x8xh200 for two hosts. Times,
rates and costs are estimated by a roofline at rates that large products and copies reach; speeds of networks between
hosts and slices are assumptions. Memory and collectives of the best meshes are the compiler's own, of the very program
that generates, where the compiler is installed (libtpu for TPU, JAX's CUDA plugin for GPU).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from rich import box
from rich.console import Console
from rich.table import Table

from launch.startup import describe_only, run_launcher, say
from runtime.models.config import STORED_DTYPES, ModelConfig
from runtime.models.quantization import QUANTIZATIONS
from runtime.planner.compiled import CompiledPhase, compile_workload
from runtime.planner.describe import describe_estimate, describe_topology
from runtime.planner.estimate import Estimate, estimate, out_of_memory, rank
from runtime.planner.presets import PRESETS, preset
from runtime.planner.workload import CACHES, Workload
from sharding.described import described_devices, missing_compiler
from sharding.errors import InputError, MeshError
from sharding.mesh import MeshSpec
from sharding.topology import Topology, parse_topology

# What --topology=all compares: machines that are rented as they are.
MACHINES = (
    "v4:2x2x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5p:2x2x1", "v5p:2x2x2", "v6e:2x2", "v6e:2x4", "1xa100", "8xa100",
    "1xh100", "8xh100", "1xh200", "8xh200", "2x8xh200",
)  # fmt: skip


def define_flags(values: flags.FlagValues) -> None:
    """Define this launcher's flags."""

    def integer(name: str, default: int | None, text: str) -> None:
        flags.DEFINE_integer(name, default, text, 1, flag_values=values)

    def string(name: str, default: str | None, text: str) -> None:
        flags.DEFINE_string(name, default, text, flag_values=values)

    flags.DEFINE_enum("model", None, tuple(PRESETS), "Architecture by name; no download.", flag_values=values)
    string("checkpoint", None, "Model folder, URL or Hub name; only its config.json is read.")
    string("topology", None, "Machine, such as v5e:2x4, 2xv5e:16x16, 8xh100, 2x8xh200, or all.")
    string("mesh", None, "Plan this mesh alone, such as data=2,tensor=4; one axis may be -1.")
    flags.DEFINE_enum("dtype", None, STORED_DTYPES, "Default: as stored.", flag_values=values)
    integer("batch", 1, "Rows that are generated together.")
    integer("prompt", 256, "Tokens of each prompt.")
    integer("new_tokens", 256, "Tokens to generate for each row.")
    integer("steps", None, "Denoise steps of exact masked diffusion. Default: as many as new tokens.")
    flags.DEFINE_enum("cache", "none", CACHES, "Cache of masked diffusion; none is exact.", flag_values=values)
    integer("block_length", 32, "Positions of a block, with a cache.")
    flags.DEFINE_enum("quantize", "none", QUANTIZATIONS, "Weights in int8.", flag_values=values)
    flags.DEFINE_integer(
        "compile", None, "Best meshes to compile. Default: 1, and none with --topology=all.", 0, 64, flag_values=values
    )
    flags.DEFINE_float("price_per_chip_hour", None, "For the cost of a million tokens.", 0.0, flag_values=values)
    flags.DEFINE_bool("json", False, "One JSON object instead of a table.", flag_values=values)
    string("plot", None, "Write step time and memory over chips, by mesh, to this file (PNG, SVG or PDF).")
    string("dump_hlo", None, "Write the optimized HLO of what is compiled into this folder.")


def read_workload(values: flags.FlagValues) -> tuple[str, Workload]:
    """The model's name and the workload that flags describe.

    Raises:
      InputError: no model, or numbers that do not go together.
    """
    if (values.model is None) == (values.checkpoint is None):
        raise InputError(f"give one of --model={'|'.join(PRESETS)} and --checkpoint=DIR")
    if values.model is not None:
        name, config = values.model, preset(values.model)
    else:
        from checkpoints import open_folder

        folder = open_folder(values.checkpoint)
        name, config = folder.name, ModelConfig.from_huggingface(folder.config)
    return name, Workload(
        config,
        values.dtype or config.dtype,
        values.batch,
        values.prompt,
        values.new_tokens,
        values.steps or values.new_tokens,
        values.cache,
        values.block_length,
        values.quantize,
    )


def main(values: flags.FlagValues) -> None:
    """Run the launcher."""
    # Compilers are asked about machines that are described; none that may be attached is touched.
    describe_only()
    name, workload = read_workload(values)
    if values.topology is None:
        raise InputError("give --topology=v5e:2x4 or another machine, or --topology=all")
    if values.mesh is not None:
        MeshSpec.parse(values.mesh)
    for flag in ("plot", "dump_hlo"):
        path = values[flag].value
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise InputError(f"--{flag}={path}: there is no such folder")
    everything = values.topology == "all"
    topologies = [parse_topology(text) for text in (MACHINES if everything else [values.topology])]
    count = values.compile if values.compile is not None else 0 if everything else 1
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
        from launch.plan_plot import plot_plans

        plot_plans(values.plot, name, workload, plans)


class TopologyPlan:
    """Meshes of one machine: those that fit, ranked, what the compiler says of the best, and a verdict in words."""

    def __init__(self, topology: Topology, fitting: list[Estimate], others: list[Estimate]) -> None:
        """Take a ranking."""
        self.topology, self.fitting, self.others = topology, fitting, others
        self.compiled: dict[int, list[CompiledPhase]] = {}
        self.notes: list[str] = []

    @property
    def verdict(self) -> str:
        """Why the first is first, or why there is none."""
        if not self.fitting:
            return out_of_memory(self.others, self.topology)
        best = self.fitting[0]
        tensor = next((one for one in self.fitting if one.spec.tensor == one.spec.size), None)
        other = tensor if tensor is not None and tensor is not best else None
        return best.explain_against(other) if other is not None else f"{best.spec} is the fastest that fits (estimated)"


def plan_topology(
    workload: Workload, topology: Topology, values: flags.FlagValues, compile_best: int, everything: bool
) -> TopologyPlan:
    """Rank the meshes of one machine and compile the best of them.

    Raises:
      MeshError: a mesh that was named and cannot be, or does not fit.
    """
    if values.mesh is not None:
        try:
            found = estimate(workload, topology, MeshSpec.parse(values.mesh))
        except MeshError:
            if not everything:
                raise
            return TopologyPlan(topology, [], [])
        plan = TopologyPlan(topology, [found] if found.fits else [], [] if found.fits else [found])
    else:
        plan = TopologyPlan(topology, *rank(workload, topology))
    install = missing_compiler(topology.chip.platform) if compile_best else None
    if install is not None:
        plan.notes.append(f"analytical only: compiling for {topology} needs {install}")
        say(plan.notes[-1])
    elif compile_best and plan.fitting:
        devices = described_devices(topology)
        for number, found in enumerate(plan.fitting[:compile_best]):
            say(f"compiling for {topology}, mesh {found.spec}")
            plan.compiled[number] = compile_workload(workload, found.spec, devices)
            if values.dump_hlo is not None:
                folder = Path(values.dump_hlo)
                folder.mkdir(exist_ok=True)
                for one in plan.compiled[number]:
                    file = f"{topology}_{found.spec}_{one.name}.hlo.txt".replace(":", "_").replace(" ", "_")
                    (folder / file).write_text(one.text, encoding="utf-8")
    return plan


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
                    describe_estimate(found, price, plan.compiled.get(number))
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
        + ("" if workload.config.is_autoregressive else f", cache {workload.cache}")
        + "; times, rates and costs are estimated"
    )
    table = Table(box=box.SIMPLE_HEAD, title=title)
    table.add_column("topology" if several else "mesh", no_wrap=True)
    if several:
        table.add_column("best mesh", no_wrap=True)
    for column in ("GB/chip", "compiler", "pass", "ms/pass", "bound", "moved MB", "tokens/s", "tok/s/chip"):
        table.add_column(column, justify="left" if column in ("pass", "bound") else "right")
    if price is not None:
        table.add_column("per million", justify="right")
    for plan in plans:
        shown = list(enumerate(plan.fitting[:1] if several else plan.fitting))
        for number, found in shown:
            compiled = plan.compiled.get(number)
            most = max((one.memory_bytes for one in compiled), default=0) if compiled else 0
            phase = found.main_phase
            cells = [str(plan.topology), str(found.spec)] if several else [str(found.spec)]
            cells += [
                f"{found.memory.total / 1e9:.2f}",
                f"{most / 1e9:.2f}" if most else "-",
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
            table.add_row(str(plan.topology), "does not fit", *[""] * (len(table.columns) - 2))
        if not several:
            for found in plan.others:
                cells = [str(found.spec), f"{found.memory.total / 1e9:.2f}", "", "does not fit"]
                table.add_row(*cells, *[""] * (len(table.columns) - len(cells)))
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for plan in plans if not several else ():
        console.print(f"why: {plan.verdict}", highlight=False)
        for number, phases in plan.compiled.items():
            for one in phases:
                counts = describe_estimate(plan.fitting[number], None, [one])["compiled"][0]
                text = ", ".join(f"{count} {kind}" for kind, count in counts["collectives_in_the_program"].items())
                ratio = counts["estimate_over_compiler"]
                console.print(
                    f"compiled: {plan.fitting[number].spec}, {one.name}, {one.attention} attention, "
                    f"{one.memory_bytes / 1e9:.3f} GB a device (estimate {ratio:.3f} times), "
                    f"{text or 'no collectives'} in the program, {one.seconds:.1f} s to compile",
                    highlight=False,
                )


def run(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
