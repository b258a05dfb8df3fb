"""Analytical estimates of memory and time for a workload on a mesh, and the ranking of meshes by them.

Estimates need no device, compiler or weights. Sizes come from the weight declarations, and the work of a layer from the
cost that its family states (:class:`runtime.models.costs.LayerCost`). A forward pass is a sequence of stages: matrix
products of the layers, attention, the head, and the choice of tokens. A stage takes as long as the slower of its
arithmetic and its memory traffic, at achievable rates. The time of collectives is added, except for the part that
overlaps with products.

TPU rates are fitted to the schedules of compiled programs, GPU rates to passes measured on one H200
(:mod:`runtime.planner.kernels`); the time to launch a kernel is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp

from runtime.decoding.threshold_search import bits_per_pass, threshold_candidates, threshold_passes
from runtime.execution.memory import Memory
from runtime.models.attention import choose_attention
from runtime.models.declarations import ModelLayout, shard_shape
from runtime.models.kv_cache import cache_bytes_per_device
from runtime.models.splash_blocks import splash_blocks
from runtime.planner.candidates import candidate_meshes
from runtime.planner.kernels import (
    GPU_CHOICE,
    GPU_PRODUCTS,
    GPU_WEIGHTS,
    choice_seconds,
    launch_seconds,
    padded,
    product_seconds,
    splash_seconds,
    unpack_seconds,
)
from runtime.planner.memory import estimate_memory
from runtime.planner.traffic import Collective, bytes_by_axis, phase_collectives, products_in_pieces
from runtime.planner.workload import Phase, Workload
from sharding.links import Wiring
from sharding.mesh import MeshSpec
from sharding.topology import Topology

# Fractions of peak that large matrix products and copies reach, as on one H200 (790 of 990 TFLOP/s, 4.3 of 4.8 TB/s).
ACHIEVABLE_FLOPS, ACHIEVABLE_BANDWIDTH = 0.8, 0.9
# Fraction of peak that the head's product reaches on a TPU, and that attention reaches without splash attention.
_TPU_HEAD = 0.92
_ATTENTION_FLOPS = {"cudnn": 0.6, "xla": 0.3}

# Choosing tokens reads or writes the float32 logits about 12 times. In addition, each pass of the threshold search
# reads two arrays of that size.
_LOGIT_PASSES, _THRESHOLD_ARRAYS = 12, 2


@dataclass(frozen=True)
class Stage:
    """One stage of a forward pass. Stages run one after another.

    Attributes:
      name: ``layers``, ``attention``, ``head``, ``choice of tokens``, or ``launches`` on a GPU.
      flops: floating-point operations of one device.
      hbm_bytes: bytes that one device reads from and writes to its memory.
      compute_seconds: time of the arithmetic alone, or of launches; with copies that nothing overlaps.
      memory_seconds: time of the memory traffic alone.
    """

    name: str
    flops: float
    hbm_bytes: float
    compute_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """Time of the stage: the longer of compute and memory time."""
        return max(self.compute_seconds, self.memory_seconds)


@dataclass(frozen=True)
class PhaseEstimate:
    """Estimated time of one forward pass on one device.

    Attributes:
      phase: the kind of forward pass, and its shape.
      stages: the parts of the pass, in order.
      collectives: collectives that the pass runs.
      network_seconds: time of the collectives that does not overlap with matrix products.
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
        """Bytes that one device reads from and writes to its memory."""
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
        """The resource that limits most of the time: ``compute``, ``memory`` or ``network``."""
        times = {"compute": 0.0, "memory": 0.0, "network": self.network_seconds}
        for stage in self.stages:
            times["compute" if stage.compute_seconds >= stage.memory_seconds else "memory"] += stage.seconds
        return max(times, key=lambda name: times[name])

    @property
    def collective_bytes(self) -> float:
        """Bytes that the collectives move, over all axes."""
        return sum(one.payload * one.times for one in self.collectives)


@dataclass(frozen=True)
class Estimate:
    """The estimate of a workload on one mesh.

    Attributes:
      workload: the workload.
      topology: the chips and their connections.
      layout: the model's layout on the mesh; the layout itself has no devices.
    """

    workload: Workload
    topology: Topology
    layout: ModelLayout

    @property
    def spec(self) -> MeshSpec:
        """The specification of the mesh."""
        return self.layout.spec

    @cached_property
    def memory(self) -> Memory:
        """Memory needed on one device."""
        return estimate_memory(self.workload, self.layout, self.topology.chip)

    @property
    def fits(self) -> bool:
        """Whether a device has enough memory."""
        return self.memory.total <= self.topology.chip.usable_bytes

    @cached_property
    def phases(self) -> tuple[PhaseEstimate, ...]:
        """The estimates of all phases."""
        return tuple(
            self.estimate_phase(phase) for phase in self.workload.phases(self.layout, self.topology.chip.platform)
        )

    @property
    def seconds(self) -> float:
        """Time to generate the whole batch, in seconds."""
        return sum(one.seconds * one.phase.forwards for one in self.phases)

    @property
    def main_phase(self) -> PhaseEstimate:
        """The phase that takes most of the time."""
        return max(self.phases, key=lambda one: one.seconds * one.phase.forwards)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of all rows together."""
        return self.workload.batch * self.workload.new_tokens / self.seconds

    @property
    def tokens_per_second_per_chip(self) -> float:
        """New tokens per second, divided by all chips of the topology, including those that the mesh leaves idle."""
        return self.tokens_per_second / self.topology.num_devices

    def cost_per_million_tokens(self, price_per_chip_hour: float) -> float:
        """Return the cost of a million new tokens, in the currency of the price per chip and hour."""
        return price_per_chip_hour / 3600 / self.tokens_per_second_per_chip * 1e6

    def estimate_phase(self, phase: Phase) -> PhaseEstimate:
        """Estimate one phase."""
        positions = phase.computed * math.ceil(phase.positions / (self.spec.sequence if phase.whole else 1))
        chunk = phase.rows * phase.chunk // phase.head_shards(self.layout)
        collectives = phase_collectives(self.workload, self.layout, self._wiring, phase)
        return PhaseEstimate(
            phase=phase,
            stages=(*self._layers(phase, positions), *self._choice(phase, chunk), *self._launches(phase)),
            collectives=tuple(collectives),
            network_seconds=sum(self._seconds(one) for one in collectives),
        )

    @property
    def _peak(self) -> float:
        return self.topology.chip.flops if self.workload.item == 2 else self.topology.chip.flops / 8

    @property
    def _bandwidth(self) -> float:
        return self.topology.chip.memory_bandwidth * ACHIEVABLE_BANDWIDTH

    def _stage(
        self,
        name: str,
        flops: float,
        hbm_bytes: float,
        share: float = ACHIEVABLE_FLOPS,
        compute_seconds: float | None = None,
        bandwidth: float = ACHIEVABLE_BANDWIDTH,
    ) -> Stage:
        """Return a stage whose arithmetic takes ``compute_seconds``; None for ``flops`` at a share of the peak."""
        seconds = flops / (self._peak * share) if compute_seconds is None else compute_seconds
        return Stage(name, flops, hbm_bytes, seconds, hbm_bytes / (self.topology.chip.memory_bandwidth * bandwidth))

    def _layers(self, phase: Phase, positions: int) -> tuple[Stage, ...]:
        """Estimate the matrix products of the layers, and attention.

        Args:
          phase: the phase.
          positions: number of positions that the device computes, over all its rows.
        """
        workload, layout, config, chip = self.workload, self.layout, self.workload.config, self.topology.chip
        dtype, cost = jnp.dtype(workload.dtype), layout.layer_cost
        canvas, cache = workload.canvas(layout, chip.platform), 0.0
        if workload.has_cache:
            cache = cache_bytes_per_device(layout, phase.rows * self.spec.data, canvas, dtype, chip.platform)
        weights = layout.bytes_read_per_pass(dtype) - head_bytes(layout, dtype)
        activations = positions * cost.activations_per_position * workload.item * config.num_layers
        flops = config.num_layers * cost.flops_per_position * positions
        products, share, bandwidth = None, GPU_PRODUCTS, GPU_WEIGHTS[layout.quantization]
        if chip.platform == "tpu":
            share, bandwidth = ACHIEVABLE_FLOPS, ACHIEVABLE_BANDWIDTH
            rows = positions if phase.whole else phase.computed * padded(phase.positions)
            pieces = products_in_pieces(layout, self._wiring, phase)
            # Products in pieces start with a copy of the layer's weights, which nothing overlaps.
            copies = weights / self._bandwidth if pieces else 0.0
            columns, padding = layout.size_per_device("mlp"), rows / positions
            products = copies + product_seconds(chip, flops * padding, self._peak, rows, columns, pieces)
            unpacked = sum(math.prod(shard_shape(leaf, layout)) for leaf in layout.leaves if leaf.group is not None)
            products += unpack_seconds(chip, unpacked)
        return (
            self._stage("layers", flops, weights + activations, share, products, bandwidth),
            self._attention(phase, positions, cache),
        )

    def _attention(self, phase: Phase, positions: int, cache: float) -> Stage:
        """Estimate attention.

        Args:
          phase: the phase.
          positions: as in :meth:`_layers`.
          cache: bytes of the device's KV cache.
        """
        layout, config, chip = self.layout, self.workload.config, self.topology.chip
        dtype, mask, whole = jnp.dtype(self.workload.dtype), config.attention_mask, phase.whole
        keys = phase.keys if whole else math.ceil(phase.keys / self.spec.sequence)
        visible = mask.visible_share(phase.keys) if whole else 1.0
        pairs = layout.layer_cost.attention_flops_per_pair * positions * keys * config.num_layers
        kernel = choose_attention("auto", chip.platform, layout, phase.keys, dtype) if whole else "xla"
        if kernel != "splash":
            return self._stage("attention", pairs * visible, cache, _ATTENTION_FLOPS[kernel])
        # The kernel skips only blocks that are hidden as a whole.
        head_dim = layout.size_per_device("head_dim")
        _, block, _ = splash_blocks(mask, phase.keys // self.spec.sequence, phase.keys, head_dim * dtype.itemsize)
        computed = 1.0 if visible == 1.0 else min(1.0, visible + block / (2 * phase.keys))
        heads = layout.query_heads_per_device
        queries = positions * heads * config.num_layers
        seconds = splash_seconds(chip, pairs * computed, queries)
        # Before and after the kernel, its inputs and its output are read and written in other layouts.
        arrays = 2 * positions * (heads + layout.size_per_device("kv_heads")) * config.num_layers
        seconds += 2 * arrays * head_dim * dtype.itemsize / self._bandwidth
        return self._stage("attention", pairs * visible, cache, compute_seconds=seconds)

    def _choice(self, phase: Phase, chunk: int) -> tuple[Stage, ...]:
        """Estimate the head, and the choice of tokens from its logits.

        Args:
          phase: the phase.
          chunk: number of positions that the device runs the head on at a time, over all its rows.
        """
        layout, chip, workload = self.layout, self.topology.chip, self.workload
        logits = chunk * layout.size_per_device("vocab") * 4
        diffusion = workload.config.objective == "masked_diffusion"
        # Arrays of the threshold search that fit into on-chip memory cause no traffic.
        outside = max(0, _THRESHOLD_ARRAYS - chip.fast_memory_bytes // logits) if diffusion else 0
        passes = (
            _LOGIT_PASSES + threshold_passes(workload.sampling_rule().confidence_dtype, self._search_bits) * outside
        )
        flops = 2.0 * chunk * phase.chunks * math.prod(shard_shape(layout.head, layout))
        share, vector, bandwidth = ACHIEVABLE_FLOPS, 0.0, GPU_CHOICE
        if chip.platform == "tpu":
            bandwidth = ACHIEVABLE_BANDWIDTH
            positions, vocab = phase.chunk // phase.head_shards(layout), layout.size_per_device("vocab")
            rule = workload.sampling_rule()
            candidates = threshold_candidates(rule.confidence_dtype, self._search_bits) * rule.searches
            seconds = choice_seconds(chip, phase.rows, positions, vocab, candidates)
            share, vector = _TPU_HEAD, seconds * phase.chunks
        return (
            self._stage("head", flops, head_bytes(layout, jnp.dtype(workload.dtype)) * phase.head_runs, share),
            self._stage(
                "choice of tokens",
                0.0,
                logits * phase.chunks * passes,
                compute_seconds=vector,
                bandwidth=bandwidth,
            ),
        )

    @property
    def _search_bits(self) -> int:
        """Bits of a threshold that one pass of the threshold search finds."""
        return bits_per_pass(self.topology.chip.device_kind, self.layout.spec.size)

    def _launches(self, phase: Phase) -> tuple[Stage, ...]:
        if self.topology.chip.platform != "gpu":
            return ()
        rule = self.workload.sampling_rule()
        passes = threshold_passes(rule.confidence_dtype, self._search_bits) * rule.searches
        seconds = launch_seconds(self.workload.config.num_layers, passes * phase.chunks)
        return (self._stage("launches", 0.0, 0.0, compute_seconds=seconds),)

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
        """Return a sentence that explains why this mesh is faster than another one for the same workload.

        It compares the main phase of this mesh with the same phase of the other one.
        """
        mine = self.main_phase
        theirs = next(one for one in other.phases if one.phase.name == mine.phase.name)
        ours, others = (_describe_bytes(bytes_by_axis(one.collectives)) for one in (mine, theirs))
        return (
            f"{self.spec} takes {1e3 * mine.seconds:.2f} ms per {mine.phase.name} (estimated), {other.spec} takes "
            f"{1e3 * theirs.seconds:.2f} ms. It moves {ours}, compared with {others}; collectives take "
            f"{1e3 * mine.network_seconds:.2f} ms, compared with {1e3 * theirs.network_seconds:.2f} ms; a device needs "
            f"{self.memory.total / 1e9:.2f} GB, compared with {other.memory.total / 1e9:.2f} GB"
        )


def head_bytes(layout: ModelLayout, dtype: jnp.dtype) -> int:
    """Return the bytes of the output head on one device."""
    item = 1 if layout.head.quantized else dtype.itemsize
    return item * math.prod(shard_shape(layout.head, layout))


def _describe_bytes(moved: dict[tuple[str, tuple[str, ...]], float]) -> str:
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
      MeshError: the model cannot be divided over the mesh, the mesh cannot be mapped onto the chips or leaves out a
        host, or an axis other than ``data`` would cross slices.
    """
    spec = spec.resolve(topology.num_devices, planned=True)
    found = Estimate(workload, topology, workload.layout(spec))
    found._wiring.check_hosts()
    return found


def rank(workload: Workload, topology: Topology) -> tuple[list[Estimate], list[Estimate]]:
    """Estimate all candidate meshes of a topology.

    Returns:
      The meshes that fit, fastest first, and those that do not fit, smallest memory first.
    """
    found = [estimate_workload(workload, topology, spec) for spec in candidate_meshes(workload, topology)]
    fitting = sorted(
        (one for one in found if one.fits), key=lambda one: (one.seconds, one.spec.tensor, one.spec.sequence)
    )
    return fitting, sorted((one for one in found if not one.fits), key=lambda one: one.memory.total)


def what_would_help(found: Estimate) -> str:
    """Return a phrase that names the largest tensors on a device, and what would make them smaller."""
    largest = [f"{one.name} {one.bytes / 1e9:.2f} GB" for one in found.memory.largest[:3] if one.bytes]
    ways = ", ".join(one.smaller_by for one in found.memory.largest[:2] if one.bytes).replace(", or ", ", ").split(", ")
    help_ = dict.fromkeys(way for way in ways if found.topology.num_devices > 1 or "axis" not in way)
    return f"largest: {', '.join(largest)}. What would help: {', '.join([*help_, 'more or larger chips'])}"


def shortage(found: Estimate) -> str:
    """Return a message that says how much memory a mesh lacks, and what would help."""
    return (
        f"{found.spec} needs an estimated {found.memory.total / 1e9:.2f} GB per device, but only "
        f"{found.topology.chip.usable_bytes / 1e9:.2f} GB are usable; {what_would_help(found)}"
    )


def out_of_memory(estimates: Sequence[Estimate], topology: Topology) -> str:
    """Return a message that no mesh fits, with the shortage of the mesh that needs the least memory."""
    if not estimates:
        return (
            f"model and batch cannot be divided over any mesh of all {topology.num_devices} devices that can be laid "
            f"out on {topology}; a mesh that pads the batch: data={topology.num_devices}"
        )
    closest = min(estimates, key=lambda one: one.memory.total)
    return f"no mesh of {topology} fits. The mesh that comes closest: {shortage(closest)}"
