"""Chooses a model's layout: on the mesh that the caller gives, or on the mesh that the planner estimates as fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from runtime.decoding.kinds import Integer
from runtime.execution.draft_models import DraftModel
from runtime.execution.offline import DEFAULT_SLOTS
from runtime.execution.runner import check_memory, smallest_memory
from runtime.models.config import ModelConfig
from runtime.models.declarations import ModelLayout
from runtime.models.families import model_layout
from runtime.planner.candidates import candidate_meshes
from runtime.planner.estimate import estimate_workload, out_of_memory
from runtime.planner.workload import Workload
from sharding.errors import MeshError
from sharding.mesh import MeshSpec
from sharding.topology import CHIPS, UNKNOWN_CHIP, Topology

# Prompt tokens and new tokens per row that a default mesh is chosen for, because the prompts are not known yet.
_PROMPT, _NEW_TOKENS = 256, 256
# More than any caller has. A mesh runs fewer at a time.
_MAX_ROWS = (1 << 31) - 1


def topology_of(devices: Sequence[Any]) -> Topology:
    """Return the topology of attached devices, with the memory sizes that the devices report. All hosts call this.

    Devices that are not in :data:`sharding.topology.CHIPS`, such as CPUs, are treated as GPUs.
    """
    first = devices[0]
    known = [chip for chip in CHIPS.values() if chip.device_kind == first.device_kind]
    memory = smallest_memory(first)
    hosts = {device.process_index for device in devices}
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if known and first.platform == "tpu":
        chip = known[0] if memory is None else replace(known[0], usable_bytes=memory)
        per_slice = len(devices) // len(slices)
        inside = [device for device in devices if getattr(device, "slice_index", 0) == min(slices)]
        spans = [len({device.coords[axis] for device in inside}) for axis in range(chip.torus_dimensions)]
        box = 1
        for span in spans:
            box *= span
        if box == per_slice and per_slice * len(slices) == len(devices):
            return Topology(chip, tuple(spans), len(slices))
    base = known[0] if known and first.platform == "gpu" else UNKNOWN_CHIP
    chip = replace(base, usable_bytes=memory or base.usable_bytes or 1 << 60)
    count = len(hosts) if len(devices) % len(hosts) == 0 else 1
    return Topology(chip, (len(devices) // count,), count)


def default_mesh(
    config: ModelConfig,
    devices: Sequence[Any],
    dtype: Any,
    rows: int,
    quantization: str = "none",
    draft: DraftModel | None = None,
) -> MeshSpec:
    """Return the fastest mesh that fits, by the planner's estimate, for ``rows`` rows on all these devices.

    At a time, a mesh runs :data:`runtime.execution.offline.DEFAULT_SLOTS` rows per ``data`` shard at most. Row lengths
    are not known yet, so a typical length is assumed. If no mesh is estimated to fit, the mesh that needs the least
    memory is returned; the later check of the weights reports an error if even that does not fit. If no mesh uses all
    devices, which belong to one host, it has one device.

    Raises:
      MeshError: no mesh uses all devices, and they belong to several hosts, each of which takes part.
      InputError: ``rows`` is not an integer from 1 to 2^31 - 1.
    """
    Integer(1, _MAX_ROWS).read("rows", rows)

    def slots(data: int) -> int:
        return min(rows, DEFAULT_SLOTS * data)

    tokens = min(_PROMPT + _NEW_TOKENS, config.max_positions)
    new, in_blocks = tokens // 2, config.family.block_causal
    cache, block = ("exact", min(config.attention_block_length, new)) if in_blocks else ("none", Workload.block_length)
    most = slots(len(devices))
    workload = Workload(config, str(dtype), most, tokens - new, new, new, cache, block, quantization, draft=draft)
    topology = topology_of(devices)
    found = [
        estimate_workload(replace(workload, batch=slots(spec.data)), topology, spec)
        for spec in candidate_meshes(workload, topology)
    ]
    if fitting := [one for one in found if one.fits]:
        return min(fitting, key=lambda one: (one.seconds / one.workload.batch, one.spec.tensor, one.spec.sequence)).spec
    if not found and len({device.process_index for device in devices}) > 1:
        raise MeshError(out_of_memory([], topology))
    return min(found, key=lambda one: one.memory.total).spec if found else MeshSpec()


def held_dtype(stored: str, platform: str) -> str:
    """Return the dtype in which devices hold weights that are stored as ``stored``, unless the caller names one."""
    return "float32" if platform == "cpu" else stored


def choose_layout(
    config: ModelConfig,
    spec: MeshSpec | None,
    devices: Sequence[Any] | None,
    dtype: str | None,
    *,
    stored: str = "float32",
    rows: int = 1,
    quantize: str = "none",
    draft: DraftModel | None = None,
) -> tuple[ModelLayout, str, list[str]]:
    """Lay a model out on devices, and check that its weights fit.

    Args:
      config: the model's configuration.
      spec: the mesh, with at most one axis of size -1; None chooses the fastest mesh that fits.
      devices: devices to use; None uses all.
      dtype: dtype of the weights. None uses the stored dtype, except on CPU, which uses float32.
      stored: dtype in which the weights are stored.
      rows: expected number of rows per batch, a hint for choosing the mesh.
      quantize: one of :data:`runtime.models.quantization.QUANTIZATIONS`.
      draft: the draft model, which has to fit beside the model if the mesh is chosen here.

    Returns:
      The layout, the dtype, and one sentence about each decision that was made for the caller.

    Raises:
      MeshError: the model cannot be divided over the mesh, or its weights do not fit; there are no devices; or no mesh
        can be chosen.
      InputError: a mesh is to be chosen, and ``rows`` is not an integer from 1 to 2^31 - 1.
    """
    # The layout is made here if it can be, because that checks the mesh before a device is touched.
    known = None if spec is None or spec.tensor == -1 else model_layout(config, spec, quantization=quantize)
    found = list(jax.devices() if devices is None else devices)
    if not found:
        raise MeshError("devices is empty; expected at least one device, or None for all")
    platform, notes = found[0].platform, []
    if dtype is None:
        dtype = held_dtype(stored, platform)
        if dtype != stored:
            notes.append(f"weights are stored as {stored} and run as float32 on CPU; --dtype={stored} keeps {stored}")
    if spec is None:
        spec = default_mesh(config, found, dtype, rows, quantize, draft)
        notes.append(f"mesh {spec}, chosen for {len(found)} {platform} device(s); --mesh overrides it")
    layout = model_layout(config, spec.resolve(len(found)), found, quantize) if known is None else known.on(found)
    _check_hosts(layout, found)
    check_memory(layout, dtype, found[0])
    return layout, dtype, notes


def _check_hosts(layout: ModelLayout, devices: Sequence[Any]) -> None:
    assert layout.mesh is not None, "the layout has been placed on the devices"
    idle = {device.process_index for device in devices} - {one.process_index for one in layout.mesh.devices.flat}
    if idle:
        hosts = ", ".join(map(str, sorted(idle)))
        raise MeshError(
            f"mesh {layout.spec} has no device of host {hosts}, but every host takes part: use all {len(devices)} "
            "devices, for example with data=-1"
        )
