"""Planning: memory, time and cost of a workload on any mesh, first estimated, then checked with the compiler.

Public names are imported on first use. They include the names of other packages that planning commands need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.execution.runner import device_memory
    from runtime.models.families import weights_class
    from runtime.planner.compiled import CompiledPhase, compile_workload, is_out_of_memory
    from runtime.planner.default import held_dtype
    from runtime.planner.describe import describe_compiled, describe_estimate, describe_topology
    from runtime.planner.estimate import Estimate, estimate_workload, out_of_memory, rank, shortage, what_would_help
    from runtime.planner.presets import PRESETS, preset
    from runtime.planner.workload import Workload
    from sharding.aot import aot_devices, missing_compiler
    from sharding.heads import HeadLayout
    from sharding.mesh import build_mesh
    from sharding.topology import Topology, parse_topology

__all__ = [
    "PRESETS",
    "CompiledPhase",
    "Estimate",
    "HeadLayout",
    "Topology",
    "Workload",
    "aot_devices",
    "build_mesh",
    "compile_workload",
    "describe_compiled",
    "describe_estimate",
    "describe_topology",
    "device_memory",
    "estimate_workload",
    "held_dtype",
    "is_out_of_memory",
    "missing_compiler",
    "out_of_memory",
    "parse_topology",
    "preset",
    "rank",
    "shortage",
    "weights_class",
    "what_would_help",
]

_HOMES = {
    "CompiledPhase": "runtime.planner.compiled",
    "Estimate": "runtime.planner.estimate",
    "HeadLayout": "sharding.heads",
    "PRESETS": "runtime.planner.presets",
    "Topology": "sharding.topology",
    "Workload": "runtime.planner.workload",
    "aot_devices": "sharding.aot",
    "build_mesh": "sharding.mesh",
    "compile_workload": "runtime.planner.compiled",
    "describe_compiled": "runtime.planner.describe",
    "describe_estimate": "runtime.planner.describe",
    "describe_topology": "runtime.planner.describe",
    "device_memory": "runtime.execution.runner",
    "estimate_workload": "runtime.planner.estimate",
    "held_dtype": "runtime.planner.default",
    "is_out_of_memory": "runtime.planner.compiled",
    "missing_compiler": "sharding.aot",
    "out_of_memory": "runtime.planner.estimate",
    "parse_topology": "sharding.topology",
    "preset": "runtime.planner.presets",
    "rank": "runtime.planner.estimate",
    "shortage": "runtime.planner.estimate",
    "weights_class": "runtime.models.families",
    "what_would_help": "runtime.planner.estimate",
}

if not TYPE_CHECKING:  # so that a type checker knows every name, and no other

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)
