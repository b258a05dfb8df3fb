"""Plans as plain objects, for records and for programs that read them. Every number says what it is by its key."""

from __future__ import annotations

from typing import Any

from runtime.planner.compiled import CompiledPhase, collectives_agree
from runtime.planner.estimate import Estimate, PhaseEstimate
from runtime.planner.traffic import bytes_by_axis
from sharding.topology import Topology


def describe_topology(topology: Topology) -> dict[str, Any]:
    """A machine: what it is made of."""
    chip = topology.chip
    return {
        "topology": str(topology),
        "chips": topology.num_devices,
        "chip": chip.name,
        "usable_bytes_per_chip": chip.usable_bytes,
        "memory_bandwidth": chip.memory_bandwidth,
        "flops": chip.flops,
        "link_bandwidth_one_way": chip.link_bandwidth,
        "network_bandwidth_assumed": chip.network_bandwidth,
    }


def describe_estimate(
    found: Estimate, price_per_chip_hour: float | None = None, compiled: list[CompiledPhase] | None = None
) -> dict[str, Any]:
    """One mesh: its estimate, and what the compiler says where it was asked."""
    seconds = found.seconds
    described: dict[str, Any] = {
        "mesh": str(found.spec),
        "fits": found.fits,
        "estimated": {
            "memory_bytes_per_device": found.memory.total,
            "memory": {tensor.name: tensor.bytes for tensor in found.memory.largest},
            "phases": [_phase(one) for one in found.phases],
            "seconds_of_a_generation": seconds,
            "tokens_per_second": found.tokens_per_second,
            "tokens_per_second_per_chip": found.tokens_per_second_per_chip,
        },
    }
    if price_per_chip_hour is not None:
        cost = found.cost_per_million_tokens(price_per_chip_hour)
        described["estimated"]["cost_per_million_tokens"] = cost
    if compiled is not None:
        described["compiled"] = [
            _compiled(found, one, phase) for one in compiled for phase in found.phases if phase.phase.name in one.passes
        ]
    return described


def _phase(one: PhaseEstimate) -> dict[str, Any]:
    return {
        "phase": one.phase.name,
        "forwards": one.phase.forwards,
        "seconds": one.seconds,
        "bound": one.bound,
        "compute_seconds": one.compute_seconds,
        "memory_seconds": one.memory_seconds,
        "network_seconds": one.network_seconds,
        "flops_per_device": one.flops,
        "hbm_bytes_per_device": one.hbm_bytes,
        "head_chunks": one.phase.chunks,
        "collective_bytes": _moved(bytes_by_axis(one.collectives)),
    }


def _compiled(found: Estimate, one: CompiledPhase, phase: PhaseEstimate) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for collective in one.collectives:
        if len(collective.group) != 1:
            counts[collective.kind] = counts.get(collective.kind, 0) + 1
    described: dict[str, Any] = {
        "program": one.name,
        "pass": phase.phase.name,
        "attention": one.attention,
        "compile_seconds": round(one.seconds, 2),
        "memory_bytes_per_device": one.memory_bytes,
        "argument_bytes": one.argument_bytes,
        "temporary_bytes": one.temporary_bytes,
        "estimate_over_compiler": round(found.memory.total / one.memory_bytes, 4),
        "collectives_in_the_program": counts,
        "collective_bytes_of_a_pass": _moved(one.bytes_by_axis(found.layout, phase.phase)),
        # A prefix cache's windows are of several widths, all of them in the program.
        "collective_bytes_equal_the_estimate": None
        if (found.workload.cache, phase.phase.name) == ("prefix", "block step")
        else collectives_agree(phase, one, found.layout),
    }
    return described


def _moved(moved: dict[tuple[str, tuple[str, ...]], float]) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "axes": list(axes), "bytes": amount}
        for (kind, axes), amount in sorted(moved.items(), key=lambda entry: -entry[1])
    ]
