"""Roofline estimate: the memory and the time of a generation on a mesh of a topology, and which mesh is fastest.

Nothing here needs a device, a compiler or weights: sizes come from the declared weights, the work of a layer from the
cost that its family states (:class:`runtime.models.costs.LayerCost`). A forward pass takes as long as the slower of its
arithmetic and its memory traffic at achievable rates; its collectives come on top, none of them overlapped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp

from runtime.decoding.sampling import threshold_passes
from runtime.execution.memory import Memory
from runtime.models.declarations import ModelLayout, shard_shape, tensor_sizes
from runtime.models.families import weights_class
from runtime.models.kv_cache import cache_bytes_per_device
from runtime.planner.memory import estimate_memory
from runtime.planner.traffic import Collective, bytes_by_axis, phase_collectives
from runtime.planner.workload import Phase, Workload
from sharding.links import Wiring
from sharding.mesh import MeshSpec
from sharding.topology import Topology

# Shares of the peaks that large products and copies reach: as measured on one H200 (790 of 990 TF/s, 4.3 of 4.8 TB/s).
ACHIEVABLE_FLOPS, ACHIEVABLE_BANDWIDTH = 0.8, 0.9

# Passes over float32 logits while a token is chosen, beside the search for thresholds; each pass of that reads two
# arrays.
_LOGIT_PASSES, _SEARCHED_ARRAYS = 12, 2


@dataclass(frozen=True)
class PhaseEstimate:
    """The roofline of one phase on one device.

    Attributes:
      phase: the kind of forward pass.
      flops: floating-point operations of one device.
      hbm_bytes: bytes read and written in its memory.
      collectives: collectives that it takes part in.
      compute_seconds, memory_seconds, network_seconds: time of each alone.
    """

    phase: Phase
    flops: float
    hbm_bytes: float
    collectives: tuple[Collective, ...]
    compute_seconds: float
    memory_seconds: float
    network_seconds: float

    @property
    def seconds(self) -> float:
        """Time of one pass."""
        return max(self.compute_seconds, self.memory_seconds) + self.network_seconds

    @property
    def bound(self) -> str:
        """What limits it: ``compute``, ``memory`` or ``network``."""
        times = {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "network": self.network_seconds,
        }
        return max(times, key=lambda name: times[name])

    @property
    def collective_bytes(self) -> float:
        """Bytes of its collectives' arrays, all axes."""
        return sum(one.payload * one.times for one in self.collectives)


@dataclass(frozen=True)
class Estimate:
    """The estimate of a workload on one mesh of a topology."""

    workload: Workload
    topology: Topology
    layout: ModelLayout

    @property
    def spec(self) -> MeshSpec:
        """The mesh."""
        return self.layout.spec

    @cached_property
    def memory(self) -> Memory:
        """Memory of one device."""
        return estimate_memory(self.workload, self.layout, self.topology.chip)

    @property
    def fits(self) -> bool:
        """Whether a device has that much memory."""
        return self.memory.total <= self.topology.chip.usable_bytes

    @cached_property
    def phases(self) -> tuple[PhaseEstimate, ...]:
        """The roofline of every phase."""
        return tuple(self._phase(phase) for phase in self.workload.phases(self.layout, self.topology.chip.platform))

    @property
    def seconds(self) -> float:
        """Time of one generation of the whole batch."""
        return sum(one.seconds * one.phase.forwards for one in self.phases)

    @property
    def main_phase(self) -> PhaseEstimate:
        """The phase that takes most of the time."""
        return max(self.phases, key=lambda one: one.seconds * one.phase.forwards)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows."""
        return self.workload.batch * self.workload.new_tokens / self.seconds

    @property
    def tokens_per_second_per_chip(self) -> float:
        """The same per chip of the whole machine: chips that the mesh leaves idle are rented too."""
        return self.tokens_per_second / self.topology.num_devices

    def cost_per_million_tokens(self, price_per_chip_hour: float) -> float:
        """Cost of a million new tokens, in the currency of the price."""
        return price_per_chip_hour / 3600 / self.tokens_per_second_per_chip * 1e6

    def _phase(self, phase: Phase) -> PhaseEstimate:
        """The roofline of one phase."""
        workload, layout, chip = self.workload, self.layout, self.topology.chip
        positions = phase.rows * math.ceil(phase.positions / (self.spec.sequence if phase.whole else 1))
        chunk = phase.rows * phase.chunk // phase.head_shards(layout)
        flops, traffic = self._flops(phase, positions, chunk), self._traffic(phase, positions, chunk)
        collectives = phase_collectives(workload, layout, chip.platform, phase, self._wiring.slices)
        peak = chip.flops if workload.item == 2 else chip.flops / 8
        return PhaseEstimate(
            phase=phase,
            flops=flops,
            hbm_bytes=traffic,
            collectives=tuple(collectives),
            compute_seconds=flops / (peak * ACHIEVABLE_FLOPS),
            memory_seconds=traffic / (chip.memory_bandwidth * ACHIEVABLE_BANDWIDTH),
            network_seconds=sum(self._seconds(one) for one in collectives),
        )

    def _flops(self, phase: Phase, positions: int, chunk: int) -> float:
        """Operations of one device: the weights of each layer, attention to what its mask leaves, the head.

        Args:
          phase: which.
          positions: that the device computes, of all its rows.
          chunk: those of them that the head is run on at a time.
        """
        layout, config = self.layout, self.workload.config
        keys = phase.keys if phase.whole else math.ceil(phase.keys / self.spec.sequence)
        visible = config.attention_mask.visible_share(phase.keys) if phase.whole else 1.0
        cost = layout.layer_cost
        attention = cost.attention_flops_per_pair * positions * keys * visible
        layers = config.num_layers * (cost.flops_per_position * positions + attention)
        return layers + 2.0 * chunk * phase.chunks * math.prod(shard_shape(layout.head, layout))

    def _traffic(self, phase: Phase, positions: int, chunk: int) -> float:
        """Bytes that one device reads and writes: weights once, activations of each layer, the cache, logits.

        Args:
          phase: which.
          positions: that the device computes, of all its rows.
          chunk: those of them that the head is run on at a time.
        """
        workload, layout, config, chip = self.workload, self.layout, self.workload.config, self.topology.chip
        dtype = jnp.dtype(workload.dtype)
        activations = positions * layout.layer_cost.activations_per_position * workload.item * config.num_layers
        cache = 0.0
        if workload.has_cache:
            canvas = workload.canvas(layout, chip.platform)
            cache = cache_bytes_per_device(layout, phase.rows * self.spec.data, canvas, dtype)
        logits = chunk * layout.size_per_device("vocab") * 4
        diffusion = config.objective == "masked_diffusion"
        passes = _LOGIT_PASSES
        if diffusion and _SEARCHED_ARRAYS * logits > chip.fast_memory_bytes:
            passes += _SEARCHED_ARRAYS * threshold_passes(workload.sampling_rule().confidence_dtype)
        return layout.bytes_read_per_pass(dtype) + activations + cache + logits * phase.chunks * passes

    def _seconds(self, one: Collective) -> float:
        members = self._wiring.members(one.axes, one.inside_slices)
        if members == 1 or not one.times:
            return 0.0
        link = self._wiring.link(one.axes, one.inside_slices)
        return one.times * link.seconds(one.kind, one.payload, members)

    @cached_property
    def _wiring(self) -> Wiring:
        return Wiring(self.topology, self.spec, self.layout.heads)

    def explain_against(self, other: Estimate) -> str:
        """One sentence on why this mesh is faster than another."""
        mine, theirs = self.main_phase, other.main_phase
        ours, others = (_in_words(bytes_by_axis(one.collectives)) for one in (mine, theirs))
        return (
            f"{self.spec} takes {1e3 * mine.seconds:.2f} ms a {mine.phase.name} (estimated), {other.spec} "
            f"{1e3 * theirs.seconds:.2f}: it moves {ours} against {others}, "
            f"{1e3 * mine.network_seconds:.2f} ms of collectives against {1e3 * theirs.network_seconds:.2f}; "
            f"{self.memory.total / 1e9:.2f} GB a device against {other.memory.total / 1e9:.2f}"
        )


def _in_words(moved: dict[tuple[str, tuple[str, ...]], float]) -> str:
    names = {"kv": "tensor", "group": "tensor"}
    parts = [
        f"{amount / 1e6:.1f} MB {kind} over {'*'.join(dict.fromkeys(names.get(axis, axis) for axis in axes))}"
        for (kind, axes), amount in sorted(moved.items(), key=lambda entry: -entry[1])
        if amount >= 1e5
    ]
    return " and ".join(parts) or "nothing"


def estimate_workload(workload: Workload, topology: Topology, spec: MeshSpec) -> Estimate:
    """Estimate a workload on one mesh.

    Raises:
      MeshError: the mesh has more devices than the topology, does not divide the model, cannot be laid over the chips,
        or would cross slices with another axis than ``data``.
    """
    spec = spec.resolve(topology.num_devices)
    found = Estimate(workload, topology, workload.layout(spec))
    found._wiring.link(("data",))  # a mesh that cannot be laid over the chips is refused here
    return found


def candidate_meshes(workload: Workload, topology: Topology) -> list[MeshSpec]:
    """Every mesh of all the topology's devices on which the model divides and no row or position is idle."""
    devices, slices = topology.num_devices, topology.num_slices
    platform, found = topology.chip.platform, []
    sizes = tensor_sizes(workload.config, weights_class(workload.config), devices // slices)
    for tensor in sizes:
        if devices % tensor:
            continue
        rest = devices // tensor
        for data in (count for count in range(1, rest + 1) if rest % count == 0):
            if data % slices or data > max(workload.batch, slices):
                continue
            spec = MeshSpec(data=data, sequence=rest // data, tensor=tensor)
            layout = workload.layout(spec)
            tokens = workload.prompt + workload.new_tokens
            if spec.sequence > 1 and workload.canvas(layout, platform) > max(512, 2 * tokens):
                continue
            found.append(spec)
    return found


def rank(workload: Workload, topology: Topology) -> tuple[list[Estimate], list[Estimate]]:
    """Meshes of all the topology's devices that fit, the fastest first, and those that do not fit."""
    found = [estimate_workload(workload, topology, spec) for spec in candidate_meshes(workload, topology)]
    fitting = sorted(
        (one for one in found if one.fits), key=lambda one: (one.seconds, one.spec.tensor, one.spec.sequence)
    )
    return fitting, sorted((one for one in found if not one.fits), key=lambda one: one.memory.total)


def what_would_help(found: Estimate) -> str:
    """The largest tensors of a mesh, and what would make them smaller."""
    largest = [f"{one.name} {one.bytes / 1e9:.2f} GB" for one in found.memory.largest[:3] if one.bytes]
    help_ = dict.fromkeys(one.smaller_by for one in found.memory.largest[:2] if one.bytes)
    return f"largest: {', '.join(largest)}. What would help: {'; '.join(help_)}; or more or larger chips"


def shortage(found: Estimate) -> str:
    """What a mesh that does not fit needs, and what would help."""
    return (
        f"{found.spec} needs {found.memory.total / 1e9:.2f} GB on each device (estimated) of "
        f"{found.topology.chip.usable_bytes / 1e9:.2f} usable; {what_would_help(found)}"
    )


def out_of_memory(estimates: Sequence[Estimate], topology: Topology) -> str:
    """Why nothing fits: the mesh that comes closest."""
    if not estimates:
        return f"no mesh of all {topology.num_devices} devices of {topology} divides the model and the batch"
    closest = min(estimates, key=lambda one: one.memory.total)
    return f"nothing fits {topology}. The mesh that comes closest: {shortage(closest)}"
