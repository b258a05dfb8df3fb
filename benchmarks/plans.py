"""Plans of the 7.6B model for seven machines, with memory and collectives from their compilers.

  python -m benchmarks.plans                          needs libtpu and JAX's CUDA plugin, and no accelerator
  python -m benchmarks.plans --only=v5e:2x4,8xh100

Every mesh is ranked by the analytical model. The best mesh, and the mesh that shards only weights, are compiled. Times
are estimated. There is one record per machine in benchmarks/results/plans/.
"""

from __future__ import annotations

from typing import Any

from absl import flags

from benchmarks.records import build_record, define_record_flags, load_notes, write_record
from launch.process.startup import compile_only, run_launcher
from runtime.planner.compiled import compile_workload
from runtime.planner.describe import describe_estimate, describe_topology
from runtime.planner.estimate import rank
from runtime.planner.presets import preset
from runtime.planner.workload import Workload
from sharding.aot import aot_devices
from sharding.errors import InputError
from sharding.topology import parse_topology

MODEL = "diffucoder-7b"
# topology -> rows, tokens per prompt, new tokens
MACHINES = {
    "v4:2x2x1": (16, 256, 256),
    "v5e:2x4": (16, 256, 256),
    "v5e:4x4": (16, 256, 256),
    "v5p:2x2x2": (1, 1024, 1024),
    "2xv5e:16x16": (256, 256, 256),
    "8xh100": (16, 256, 256),
    "2x8xh200": (64, 256, 256),
}


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    values["output_dir"].value = "benchmarks/results/plans"
    flags.DEFINE_list("only", [], f"Which of {', '.join(MACHINES)} to plan. Default: all.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Plan, print a line for each compiled mesh, and write the records.

    Raises:
      InputError: ``--only`` names another machine.
      MeshError: a machine's compiler is not installed. A plan without its figures would replace a whole record.
    """
    compile_only()
    unknown = set(values.only) - set(MACHINES)
    if unknown:
        raise InputError(f"--only={','.join(values.only)}: expected some of {', '.join(MACHINES)}")
    busy = load_notes()
    topologies = {text: parse_topology(text) for text in values.only or MACHINES}
    targets = {text: aot_devices(topology) for text, topology in topologies.items()}
    for text, topology in topologies.items():
        rows, prompt, new_tokens = MACHINES[text]
        workload = Workload(preset(MODEL), "bfloat16", rows, prompt, new_tokens, new_tokens)
        fitting, others = rank(workload, topology)
        tensor = next((one for one in fitting if one.spec.tensor == one.spec.size // topology.num_slices), None)
        meshes: list[dict[str, Any]] = []
        for found in [*fitting, *others]:
            wanted = found is fitting[0] or found is tensor
            compiled = compile_workload(workload, found.spec, targets[text]) if wanted else None
            meshes.append(describe_estimate(found, None, compiled))
            for one in compiled or ():
                print(
                    f"{text} {found.spec}: {one.memory_bytes / 1e9:.3f} GB by the compiler, "
                    f"{found.memory.total / 1e9:.3f} estimated; {1e3 * found.main_phase.seconds:.2f} ms per step",
                    flush=True,
                )
        record = build_record(
            "plans",
            kind="estimated",
            settings={
                "model": MODEL,
                "dtype": workload.dtype,
                "batch": rows,
                "prompt": prompt,
                "new_tokens": new_tokens,
                "steps": workload.steps,
                "cache": workload.cache,
            },
            results=describe_topology(topology)
            | {
                "why": fitting[0].explain_against(tensor) if tensor is not None and tensor is not fitting[0] else None,
                "meshes": meshes,
            },
            notes=busy,
        )
        print(f"written: {write_record(record, values.output_dir, text.replace(':', '_'))}", flush=True)


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
