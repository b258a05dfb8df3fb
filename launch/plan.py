"""Estimate whether a model fits a machine, on which mesh, how fast and at what cost. Needs no accelerator.

  diffumesh plan --model=diffucoder-7b --topology=v5e-8                 every mesh, ranked; the best compiled
  diffumesh plan --model=diffucoder-7b --topology=8xH100 --batch=8 --mesh=data=2,tensor=4
  diffumesh plan --checkpoint=DIR --topology=all --price_per_chip_hour=1.2 --plot=plan.png

Topologies: v5e-8 or v5e:2x4, v4-32 or v4:2x2x4, v5p:4x4x4, v6e:4x4; 2xv5e:16x16 for two slices; l4, rtx4090, a100-40gb,
8xH100; 2x8xh200 for two hosts. Times, rates and costs are estimated by a roofline model fitted to compiled TPU
schedules and to passes measured on one H200. Speeds of networks between hosts and slices are assumptions; a collective
between GPU hosts uses the network cards of all its GPUs. If the compiler is installed (libtpu for TPU, JAX's CUDA
plugin for GPU), memory and collectives of the best meshes come from compiling the programs that generate would run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from absl import flags

from launch.flags.model import read_mesh
from launch.flags.workload import define_workload_flags, read_workload
from launch.plans.plot import check_plot, plot_plans
from launch.plans.search import plan_topology
from launch.plans.table import describe_plans, print_plans
from launch.process.destinations import check_folder
from launch.process.path_flags import define_path
from launch.process.real_flags import define_real
from launch.process.startup import compile_only, run_launcher
from runtime import InputError, MeshError
from runtime.planner import parse_topology

# The machines of --topology=all, as cloud providers rent them.
MACHINES = (
    "v4:2x2x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5p:2x2x1", "v5p:2x2x2", "v6e:2x2", "v6e:2x4", "1xl4", "4xl4",
    "1xrtx4090", "1xa100-40gb", "8xa100-40gb", "1xa100", "8xa100", "1xh100", "8xh100", "1xh200", "8xh200", "2x8xh200",
)  # fmt: skip

# The flags that --help shows; --helpfull shows all.
FIRST_FLAGS = (
    "model", "checkpoint", "topology", "mesh", "batch", "prompt", "new_tokens", "steps", "cache", "dtype", "quantize",
    "compile", "price_per_chip_hour",
)  # fmt: skip


def define_flags(values: flags.FlagValues) -> None:
    """Define the flags of this command."""

    def string(name: str, default: str | None, text: str) -> None:
        flags.DEFINE_string(name, default, text, flag_values=values)

    define_workload_flags(values)
    string("topology", None, "Machine, such as v5e-8, 2xv5e:16x16, l4, 8xH100, 2x8xh200, or all.")
    string("mesh", None, "Plan only this mesh, such as data=2,tensor=4; -1 means all remaining devices.")
    flags.DEFINE_integer(
        "compile",
        None,
        "How many of the best meshes to compile. Default: 1, or 0 with --topology=all or a draft model.",
        0,
        64,
        flag_values=values,
    )
    define_real(
        "price_per_chip_hour",
        None,
        "Dollars per chip-hour; adds a column with dollars per million tokens.",
        0.0,
        values=values,
    )
    flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.", flag_values=values)
    define_path("plot", "Plot time, memory and rate or cost of each mesh into this file (PNG, SVG or PDF).", values)
    define_path("dump_hlo", "Write the optimized HLO of compiled programs into this folder.", values)


def main(values: flags.FlagValues) -> None:
    """Run ``diffumesh plan``: estimate and rank meshes, compile the best one, and print or plot the result."""
    # Programs are compiled for AOT topologies; attached devices are not used.
    compile_only()
    name, workload = read_workload(values)
    if values.topology is None:
        raise InputError("give --topology=v5e:2x4 or another machine, or --topology=all")
    spec = read_mesh(values)
    everything = values.topology == "all"
    if values.compile and workload.draft is not None:
        raise InputError("--compile does not work with a draft model; leave one of them out", field="compile")
    default = 0 if everything or workload.draft is not None else 1
    count = default if values.compile is None else values.compile
    if values.dump_hlo is not None and count == 0:
        raise InputError("--dump_hlo requires a compiled mesh: give --compile=1")
    if values.dump_hlo is not None:
        check_folder("dump_hlo", values.dump_hlo)
    if values.plot is not None:
        check_plot(values.plot)
    topologies = [parse_topology(text) for text in (MACHINES if everything else [values.topology])]
    plans = [plan_topology(workload, topology, spec, values, count, everything) for topology in topologies]
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


def run(argv: Sequence[str] | None = None) -> None:
    """Run ``diffumesh plan`` from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv, FIRST_FLAGS)


if __name__ == "__main__":
    run()
