"""Compile the programs of one workload and write their optimized HLO. Runs as a child process, once per checkout.

  python -P benchmarks/compile_phases.py FOLDER '{"model": "diffucoder-7b", "topology": "v5e:2x4", ...}'

Run it with a checkout of the project on ``PYTHONPATH``. It imports only names that old checkouts have too.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def compile_phases(folder: Path, target: dict[str, Any]) -> None:
    """Write ``NAME.hlo`` for each program, and ``phases.json``.

    Args:
      folder: folder that receives the files.
      target: ``topology`` and ``mesh`` as in flags, ``model``, and other fields of a ``Workload``.
    """
    import sharding

    if (Path(next(iter(sharding.__path__))) / "aot.py").is_file():
        aot = importlib.import_module("sharding.aot")
        environment, devices_of = aot.AOT_ENVIRONMENT, aot.aot_devices
    else:  # the names of an AOT topology in checkouts from before 2026-11-22
        aot = importlib.import_module("sharding.described")
        environment, devices_of = aot.ENVIRONMENT, aot.described_devices
    os.environ.update(environment)
    from runtime.planner.compiled import compile_workload
    from runtime.planner.estimate import Estimate
    from runtime.planner.presets import preset
    from runtime.planner.workload import Workload
    from sharding.mesh import MeshSpec
    from sharding.topology import parse_topology

    fields = dict(target)
    topology, mesh = parse_topology(fields.pop("topology")), MeshSpec.parse(fields.pop("mesh"))
    spec = mesh.resolve(topology.num_devices)
    workload = Workload(preset(fields.pop("model")), **fields)
    found = Estimate(workload, topology, workload.layout(spec))
    compiled = compile_workload(workload, spec, devices_of(topology))
    for one in compiled:
        (folder / f"{one.name.replace(' ', '_')}.hlo").write_text(one.text, encoding="utf-8")
    phases = {
        "programs": [
            {"name": one.name, "attention": one.attention, "seconds": round(one.seconds, 1)} for one in compiled
        ],
        "passes": {
            one.phase.name: {"chunk": one.phase.chunk, "planned_ms": round(1e3 * one.seconds, 3)}
            for one in found.phases
        },
    }
    (folder / "phases.json").write_text(json.dumps(phases), encoding="utf-8")


if __name__ == "__main__":
    compile_phases(Path(sys.argv[1]), json.loads(sys.argv[2]))
