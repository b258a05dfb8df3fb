"""Rank the meshes of one machine by estimate, and compile the best ones."""

from __future__ import annotations

from absl import flags

from launch.plans.topology_plan import TopologyPlan
from launch.process.profiling import write_programs
from launch.process.startup import say
from runtime import MeshError, MeshSpec, OutOfMemoryError
from runtime.planner import (
    Topology,
    Workload,
    aot_devices,
    compile_workload,
    estimate_workload,
    missing_compiler,
    rank,
    shortage,
    what_would_help,
)


def plan_topology(
    workload: Workload,
    topology: Topology,
    spec: MeshSpec | None,
    values: flags.FlagValues,
    compile_best: int,
    everything: bool,
) -> TopologyPlan:
    """Rank the meshes of one machine and compile the best of them.

    Args:
      workload: the workload.
      topology: the machine.
      spec: the only mesh to plan; None for all meshes.
      values: parsed flags.
      compile_best: number of meshes to compile.
      everything: whether several machines are planned. If so, a mesh that is impossible on this one is no error.

    Raises:
      MeshError: ``spec`` is impossible on the only machine, or the compiler refuses it.
    """
    if spec is not None:
        try:
            found = estimate_workload(workload, topology, spec)
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
        compile_plan(workload, plan, values, compile_best, only=spec is not None and not everything)
    return plan


def compile_plan(workload: Workload, plan: TopologyPlan, values: flags.FlagValues, count: int, only: bool) -> None:
    """Compile the best meshes of a plan. If the compiler finds a mesh too large, the next one is compiled instead.

    Args:
      workload: the workload.
      plan: the plan of one machine.
      values: parsed flags.
      count: number of meshes to compile.
      only: whether no other mesh is planned, so that it is an error if the compiler refuses this one.

    Raises:
      MeshError: the compiler refuses the only mesh.
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
                raise OutOfMemoryError(f"needs {most / 1e9:.2f} GB per device; {usable / 1e9:.2f} GB are usable")
        except MeshError as error:
            reason = str(error).splitlines()[0]
            if isinstance(error, OutOfMemoryError):
                reason += f"; {what_would_help(found)}"
            if only:
                raise MeshError(f"{found.spec} on {topology}, by the compiler: {reason}") from error
            plan.refuse(number, f"by the compiler, {reason}")
            say(plan.notes[-1])
            continue
        plan.compiled[number] = programs
        write_programs(values, {f"{topology}_{found.spec}_{one.name}": one.text for one in programs})
