"""Roofline estimate: the memory and the time of a generation on a mesh of a topology, and which mesh is fastest.

Nothing here needs a device, a compiler or weights: sizes come from the declared weights, the work of a layer from the
cost that its family states (:class:`runtime.models.costs.LayerCost`). A pass is a sequence of stages: the products of
the layers, attention, the head, the choice of tokens. Each takes as long as the slower of its arithmetic and its memory
traffic at achievable rates; one begins when the other has ended. Collectives come on top, less what products hide.

The rates of TPUs were fitted to schedules of compiled programs (``benchmarks.schedule``), those of GPUs were measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp

from runtime.decoding.sampling import threshold_passes
from runtime.execution.memory import Memory
from runtime.models.attention import choose_attention
from runtime.models.declarations import ModelLayout, shard_shape, tensor_sizes
from runtime.models.families import weights_class
from runtime.models.kv_cache import cache_bytes_per_device
from runtime.planner.memory import estimate_memory
from runtime.planner.traffic import Collective, bytes_by_axis, phase_collectives
from runtime.planner.workload import Phase, Workload
from sharding.links import Wiring
from sharding.mesh import MeshSpec
from sharding.topology import Topology

# Shares of the peaks that large products and copies reach, as measured on one H200 (790 of 990 TF/s, 4.3 of 4.8 TB/s).
ACHIEVABLE_FLOPS, ACHIEVABLE_BANDWIDTH = 0.8, 0.9
# The share of a TPU's peak that the products of layers reach, with what is fused into them.
_TPU_FLOPS = {"v4": 0.82}
_TPU_FLOPS_OF_OTHERS = 0.92
# The share of the peak that attention reaches, by implementation, and where that differs by chip.
_ATTENTION_FLOPS = {"splash": 0.18, "cudnn": 0.6, "xla": 0.3}
_SPLASH_FLOPS = {"v4": 0.085, "v5p": 0.1}

# Passes over float32 logits while a token is chosen, beside the search for thresholds; each pass of that reads two
# arrays.
_LOGIT_PASSES, _THRESHOLD_ARRAYS = 12, 2


@dataclass(frozen=True)
class Stage:
    """A part of a phase that begins when the part before it has ended.

    Attributes:
      name: ``layers``, ``attention``, ``head`` or ``choice of tokens``.
      flops: floating-point operations of one device.
      hbm_bytes: bytes read and written in its memory.
      compute_seconds, memory_seconds: time of each alone.
    """

    name: str
    flops: float
    hbm_bytes: float
    compute_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """Its time: of the slower."""
        return max(self.compute_seconds, self.memory_seconds)


@dataclass(frozen=True)
class PhaseEstimate:
    """The estimate of one phase on one device.

    Attributes:
      phase: the kind of forward pass.
      stages: one after another.
      collectives: collectives that it takes part in.
      network_seconds: time of those, less what products hide.
    """

    phase: Phase
    stages: tuple[Stage, ...]
    collectives: tuple[Collective, ...]
    network_seconds: float

    @property
    def flops(self) -> float:
        """Floating-point operations of one device."""
        return sum(stage.flops for stage in self.stages)

    @property
    def hbm_bytes(self) -> float:
        """Bytes read and written in its memory."""
        return sum(stage.hbm_bytes for stage in self.stages)

    @property
    def compute_seconds(self) -> float:
        """Time of the arithmetic alone."""
        return sum(stage.compute_seconds for stage in self.stages)

    @property
    def memory_seconds(self) -> float:
        """Time of the memory traffic alone."""
        return sum(stage.memory_seconds for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Time of one pass."""
        return sum(stage.seconds for stage in self.stages) + self.network_seconds

    @property
    def bound(self) -> str:
        """What limits most of it: ``compute``, ``memory`` or ``network``."""
        times = {"compute": 0.0, "memory": 0.0, "network": self.network_seconds}
        for stage in self.stages:
            times["compute" if stage.compute_seconds >= stage.memory_seconds else "memory"] += stage.seconds
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
        return tuple(self.of_phase(phase) for phase in self.workload.phases(self.layout, self.topology.chip.platform))

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

    def of_phase(self, phase: Phase) -> PhaseEstimate:
        """The estimate of one phase."""
        chip = self.topology.chip
        positions = phase.rows * math.ceil(phase.positions / (self.spec.sequence if phase.whole else 1))
        chunk = phase.rows * phase.chunk // phase.head_shards(self.layout)
        collectives = phase_collectives(self.workload, self.layout, chip.platform, phase, self._wiring.slices)
        return PhaseEstimate(
            phase=phase,
            stages=(*self._layers(phase, positions), *self._choice(phase, chunk)),
            collectives=tuple(collectives),
            network_seconds=sum(self._seconds(one) for one in collectives),
        )

    def _stage(self, name: str, flops: float, hbm_bytes: float, share: float = ACHIEVABLE_FLOPS) -> Stage:
        chip = self.topology.chip
        peak = chip.flops if self.workload.item == 2 else chip.flops / 8
        bandwidth = chip.memory_bandwidth * ACHIEVABLE_BANDWIDTH
        return Stage(name, flops, hbm_bytes, flops / (peak * share), hbm_bytes / bandwidth)

    def _layers(self, phase: Phase, positions: int) -> tuple[Stage, ...]:
        """Products of the layers, which read weights once and activations, and attention, which reads the cache.

        Args:
          phase: which.
          positions: that the device computes, of all its rows.
        """
        workload, layout, config, chip = self.workload, self.layout, self.workload.config, self.topology.chip
        dtype, cost = jnp.dtype(workload.dtype), layout.layer_cost
        keys = phase.keys if phase.whole else math.ceil(phase.keys / self.spec.sequence)
        visible = config.attention_mask.visible_share(phase.keys) if phase.whole else 1.0
        pairs = positions * keys * visible * config.num_layers
        canvas, cache = workload.canvas(layout, chip.platform), 0.0
        if workload.has_cache:
            cache = cache_bytes_per_device(layout, phase.rows * self.spec.data, canvas, dtype)
        head = head_bytes(layout, dtype)
        weights = layout.bytes_read_per_pass(dtype) - head
        activations = positions * cost.activations_per_position * workload.item * config.num_layers
        flops = config.num_layers * cost.flops_per_position * positions
        share = _TPU_FLOPS.get(chip.name, _TPU_FLOPS_OF_OTHERS) if chip.platform == "tpu" else ACHIEVABLE_FLOPS
        kernel = "xla"
        if phase.whole:
            kernel = choose_attention("auto", chip.platform, layout, phase.keys, dtype)
        attention = cost.attention_flops_per_pair * pairs
        reached = (
            _ATTENTION_FLOPS[kernel] if kernel != "splash" else _SPLASH_FLOPS.get(chip.name, _ATTENTION_FLOPS["splash"])
        )
        return (
            self._stage("layers", flops, weights + activations, share),
            self._stage("attention", attention, cache, reached),
        )

    def _choice(self, phase: Phase, chunk: int) -> tuple[Stage, ...]:
        """The head, and the choice of tokens from its logits.

        Args:
          phase: which.
          chunk: positions of the device that the head is run on at a time.
        """
        layout, chip, workload = self.layout, self.topology.chip, self.workload
        logits = chunk * layout.size_per_device("vocab") * 4
        diffusion = workload.config.objective == "masked_diffusion"
        # Of the two arrays those that fit stay on the chip.
        outside = max(0, _THRESHOLD_ARRAYS - chip.fast_memory_bytes // logits) if diffusion else 0
        passes = _LOGIT_PASSES + threshold_passes(workload.sampling_rule().confidence_dtype) * outside
        flops = 2.0 * chunk * phase.chunks * math.prod(shard_shape(layout.head, layout))
        share = _TPU_FLOPS_OF_OTHERS if chip.platform == "tpu" else ACHIEVABLE_FLOPS
        return (
            self._stage("head", flops, head_bytes(layout, jnp.dtype(workload.dtype)), share),
            self._stage("choice of tokens", 0.0, logits * phase.chunks * passes),
        )

    def _seconds(self, one: Collective) -> float:
        members = self._wiring.members(one.axes, one.inside_slices)
        if members == 1 or not one.times:
            return 0.0
        link = self._wiring.link(one.axes, one.inside_slices)
        alone = link.seconds(one.kind, one.payload / one.rounds, members)
        return one.times * one.rounds * alone * (1 - one.hidden)

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


def head_bytes(layout: ModelLayout, dtype: jnp.dtype) -> int:
    """Bytes of a device's part of the head."""
    item = 1 if layout.head.quantized else dtype.itemsize
    return item * math.prod(shard_shape(layout.head, layout))


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
