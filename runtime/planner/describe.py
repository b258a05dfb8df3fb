"""Plans as JSON-ready dictionaries, for benchmark records and for programs that read them."""

from __future__ import annotations

from typing import Any

from runtime.planner.compiled import CompiledPhase, collectives_agree
from runtime.planner.estimate import Estimate, PhaseEstimate, shortage
from runtime.planner.traffic import bytes_by_axis
from sharding.topology import Topology


def describe_topology(topology: Topology) -> dict[str, Any]:
    """Describe a topology: its chips, memory and rates (bytes, bytes per second, FLOP per second)."""
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
    found: Estimate,
    price_per_chip_hour: float | None = None,
    compiled: list[CompiledPhase] | None = None,
    refused: str | None = None,
) -> dict[str, Any]:
    """Describe one mesh: its estimate, and the compiler's report if its programs were compiled.

    Args:
      found: the estimate.
      price_per_chip_hour: price used for the cost of a million tokens; None leaves the cost out.
      compiled: the compiled programs; None if they were not compiled.
      refused: the compiler's error, if the mesh does not fit although the estimate says so.
    """
    seconds = found.seconds
    described: dict[str, Any] = {
        "mesh": str(found.spec),
        "fits": found.fits and refused is None,
        "idle_chips": found.topology.num_devices - found.spec.size,
        "estimated": {
            "memory_bytes_per_device": found.memory.total,
            "memory": {tensor.name: tensor.bytes for tensor in found.memory.largest},
            "phases": [_phase(one) for one in found.phases],
            "seconds_of_a_generation": seconds,
            "tokens_per_second": found.tokens_per_second,
            "tokens_per_second_per_chip": found.tokens_per_second_per_chip,
        },
    }
    if not found.fits:
        described["does_not_fit"] = shortage(found)
    elif refused is not None:
        described["does_not_fit"] = refused
    if price_per_chip_hour is not None:
        cost = found.cost_per_million_tokens(price_per_chip_hour)
        described["estimated"]["cost_per_million_tokens"] = cost
    if compiled is not None:
        described["compiled"] = describe_compiled(found, compiled)
    return described


def describe_compiled(found: Estimate, compiled: list[CompiledPhase]) -> list[dict[str, Any]]:
    """Describe the compiler's report on each phase of a mesh."""
    return [
        _compiled(found, one, phase) for one in compiled for phase in found.phases if phase.phase.name in one.passes
    ]


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
    counts, widths, drafted = one.count_by_kind(phase.phase), 1, phase.phase.canvases > 0
    if phase.phase.name == "block step":
        widths = len(found.workload.windows(found.layout, found.topology.chip.platform))
    return {
        "program": one.name,
        "pass": phase.phase.name,
        "attention": one.attention,
        "compile_seconds": round(one.seconds, 2),
        "memory_bytes_per_device": one.memory_bytes,
        "argument_bytes": one.argument_bytes,
        "temporary_bytes": one.temporary_bytes,
        "estimate_over_compiler": round(found.memory.total / one.memory_bytes, 4),
        "collectives_of_a_pass": {kind: round(number, 2) for kind, number in counts.items()},
        "collective_bytes_of_a_pass": _moved(one.bytes_by_axis(found.layout, phase.phase)),
        # For a prefix cache, the program contains windows of several widths, and each pass runs one of them. The bytes
        # of all widths are then counted together, and cannot be compared with the estimate. Nor can they with drafts,
        # because the number of steps that a pass makes depends on the text.
        "window_widths_in_the_program": widths,
        "collective_bytes_equal_the_estimate": None
        if widths > 1 or drafted
        else collectives_agree(phase, one, found.layout),
    }


def _moved(moved: dict[tuple[str, tuple[str, ...]], float]) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "axes": list(axes), "bytes": amount}
        for (kind, axes), amount in sorted(moved.items(), key=lambda entry: -entry[1])
    ]
