"""The time of a kernel in optimized HLO: from its bundles on a TPU, and from its operations and bytes on a GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from benchmarks.bundles import Kernel
from benchmarks.pass_times import Device, Work
from runtime.planner.hlo import HloCollective, Instruction, Module, array_bytes
from runtime.planner.kernels import LAUNCH_SECONDS
from sharding.links import HOP_SECONDS, Wiring
from sharding.topology import Chip

# Cores per chip, and multiplications per core and cycle. With the published peak, they determine the clock.
_TPU_CORES = {
    "v4": (2, 4 * 128 * 128),
    "v5e": (1, 4 * 128 * 128),
    "v5p": (2, 4 * 128 * 128),
    "v6e": (1, 4 * 256 * 256),
}
# Share of a TPU's published memory bandwidth that copies reach (assumed).
TPU_BANDWIDTH_SHARE = 0.9
# Operations and bytes per second (assumed): what large matrix products and copies reach on one H200.
H200_FLOPS, H200_BANDWIDTH = 790e12, 4.3e12

Links = Callable[[HloCollective], float]

_ARRAY = re.compile(r"\b([a-z]+\d*\[[\d,]*\])(\{[^}]*\})?")
# Kernels whose results have no more bytes than this may be inlined into the program, without a dump of their own.
_SMALL = 4096
_SLICES = ("dynamic-slice", "slice", "gather")
# Operations that update their first operand in place, and the index of the operand that they write into it.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_PASSED_ON = ("bitcast", "reshape", "copy", "convert")


def clock(chip: Chip) -> float:
    """Return the cycles per second of a TPU's cores."""
    cores, numbers = _TPU_CORES[chip.name]
    return chip.flops / (2 * cores * numbers)


def tiles_of(module: Module) -> dict[str, int]:
    """Return the number of tiles that the TPU compiler split each kernel into, if its configuration contains it."""
    found = {}
    for instructions in module.computations.values():
        for one in instructions:
            bounds = re.search(r'"iteration_bounds":\[([^\]]*)\]', one.rest)
            if bounds:
                found[one.name] = math.prod(int(size) for size in re.findall(r"\d+", bounds[1]))
    return found


def tpu_device(chip: Chip, kernels: Mapping[str, Kernel], module: Module, links: Links, missing: set[str]) -> Device:
    """Return the times of instructions on a TPU. A kernel takes the time of its bundles or bytes, the longer of both.

    Args:
      chip: type of the chip.
      kernels: the program's kernels, from the dump.
      module: the program.
      links: returns the seconds of a collective.
      missing: a set to which the names of kernels without bundles are added.
    """
    hertz, bandwidth = clock(chip), chip.memory_bandwidth * TPU_BANDWIDTH_SHARE
    twins: dict[str, Kernel] = {}
    for instructions in module.computations.values():
        local = {one.name: one for one in instructions}
        twins |= {_shape_of_work(module, local, one): kernels[one.name] for one in instructions if one.name in kernels}

    def kernel(module: Module, local: dict[str, Instruction], one: Instruction) -> Work:
        found = kernels.get(one.name) or twins.get(_shape_of_work(module, local, one))
        moved = bytes_moved(module, local, one)
        if found is None and array_bytes(one.shape) > _SMALL:
            missing.add(f"{one.name} {one.operation} {one.shape}")
        return Work(max((found.cycles if found else 0) / hertz, moved / bandwidth), moved)

    return Device(kernel, links, bandwidth)


def _shape_of_work(module: Module, local: dict[str, Instruction], one: Instruction) -> str:
    """Return a text that is equal for kernels with the same operation, shapes and fused operations.

    The compiler dumps the bundles of only one of several equal kernels, so the others are looked up by this text.
    """
    operands = [local[name].shape for name in one.operands if name in local]
    body = [f"{inner.operation} {inner.shape}" for inner in module.computations.get(one.called.get("calls", ""), ())]
    return f"{one.operation} {one.shape} {operands} {body}"


def gpu_device(links: Links) -> Device:
    """Return the times of instructions on an H200, at measured rates.

    A kernel takes as long as its operations or its bytes, the longer of both, plus a launch.
    """

    def kernel(module: Module, local: dict[str, Instruction], one: Instruction) -> Work:
        moved = bytes_moved(module, local, one)
        seconds = max(operations(module, local, one) / H200_FLOPS, moved / H200_BANDWIDTH)
        return Work(seconds, moved)

    return Device(kernel, links, H200_BANDWIDTH, LAUNCH_SECONDS)


def link_times(wiring: Wiring, sizes: Mapping[str, int]) -> Links:
    """Return a function that computes the seconds of a collective: its bytes divided by the rates of the links.

    Args:
      wiring: the links of the mesh.
      sizes: sizes of its axes.
    """

    def seconds(one: HloCollective) -> float:
        axes = one.axes(sizes)
        members = wiring.members(axes)
        if one.kind == "collective-permute":
            # A transfer to a neighbour uses one link.
            return one.payload / wiring.topology.chip.link_bandwidth + HOP_SECONDS["interconnect"]
        return wiring.link(axes).seconds(one.kind, one.payload, members) if members > 1 else 0.0

    return seconds


def bytes_moved(module: Module, local: Mapping[str, Instruction], one: Instruction) -> float:
    """Return the bytes that a kernel reads and writes in device memory. Of a sliced array, only the slice counts.

    Args:
      module: the program.
      local: the instructions of the kernel's computation, by name.
      one: the kernel.
    """
    if one.operation in _SLICES:
        return 2.0 * _in_memory(one.shape)
    inner = module.computations.get(one.called.get("calls", ""), ()) if one.operation == "fusion" else ()
    total = 0.0
    for number, name in enumerate(one.operands):
        if name in local:
            whole = _in_memory(local[name].shape)
            total += min(whole, _taken(module, inner, number)) if inner else whole
    return total + _written(module, inner, one.shape)


def _in_memory(shape: str) -> int:
    """Return the bytes of those arrays of a shape that are not in on-chip memory."""
    return sum(array_bytes(array) for array, layout in _ARRAY.findall(shape) if "S(" not in layout)


def _taken(module: Module, body: Sequence[Instruction], number: int) -> float:
    """Return the bytes that a fused computation reads from a parameter: all of it, or a slice."""
    name = next((one.name for one in body if one.operation == "parameter" and one.rest.startswith(f"{number})")), "")
    total = 0.0
    for one in body:
        if name not in one.operands:
            continue
        place = one.operands.index(name)
        if one.operation in _SLICES and place == 0:
            total += array_bytes(one.shape)
        elif one.operation in _UPDATES and place == 0:
            continue
        elif one.operation in _PASSED_ON or "output_to_operand_aliasing" in one.rest:
            # An aliased fusion reads the array with another tiling, which moves nothing.
            following = [other for other in body if one.name in other.operands]
            if not following or not all(other.operation in _SLICES for other in following):
                return math.inf
            total += sum(array_bytes(other.shape) for other in following)
        elif one.operation == "fusion":
            total += _taken(module, module.computations[one.called["calls"]], place)
        else:
            return math.inf
    return total


def _written(module: Module, body: Sequence[Instruction], shape: str) -> float:
    """Return the bytes of a kernel's results. Of an array that is updated in place, only the update counts."""
    whole = _in_memory(shape)
    if not body or not whole:
        return whole
    byname = {one.name: one for one in body}
    root = body[-1]
    while root.operation in _PASSED_ON and root.operands and root.operands[0] in byname:
        root = byname[root.operands[0]]
    if root.operation in _UPDATES:
        return array_bytes(byname[root.operands[_UPDATES[root.operation]]].shape)
    return whole


def operations(module: Module, local: Mapping[str, Instruction], one: Instruction) -> float:
    """Return the floating-point operations of the matrix products in a kernel."""
    if one.operation == "fusion":
        body = module.computations.get(one.called.get("calls", ""), ())
        inside = {inner.name: inner for inner in body}
        return sum(operations(module, inside, inner) for inner in body)
    shapes = [_sizes(local[name].shape) for name in one.operands if name in local]
    if one.operation == "dot" or "gemm" in one.rest:
        contracted = re.search(r'lhs_contracting_(?:dims=\{|dimensions":\[)"?([\d,"]*)', one.rest)
        if contracted and shapes:
            axes = [int(axis) for axis in re.findall(r"\d+", contracted[1])]
            result = _ARRAY.search(one.shape)
            return 2.0 * math.prod(_sizes(result[1] if result else "")) * math.prod(shapes[0][axis] for axis in axes)
    if "fmha" in one.rest and len(shapes) > 1:
        # Two products of [B, S, heads, H] and [B, T, KV heads, H].
        B, S, heads, H = shapes[0]
        return 4.0 * B * S * heads * H * shapes[1][1]
    return 0.0


def _sizes(shape: str) -> list[int]:
    found = re.search(r"\[([\d,]*)\]", shape)
    return [int(size) for size in found[1].split(",") if size] if found else []
