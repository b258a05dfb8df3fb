"""The memory that a workload needs on one device, computed by :mod:`runtime.execution.memory` from its phases."""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp

from runtime.execution.memory import Device, Memory, PassShape, memory_of_passes
from runtime.models.attention import choose_attention
from runtime.models.declarations import ModelLayout
from runtime.models.families import model_layout
from runtime.planner.workload import Phase, Workload
from sharding.topology import Chip


def estimate_memory(workload: Workload, layout: ModelLayout, chip: Chip) -> Memory:
    """Estimate the memory that a generation needs on one device. ``layout`` needs no devices."""
    dtype = jnp.dtype(workload.dtype)
    found = memory_of_passes(
        layout,
        dtype,
        Device(chip.platform, chip.fast_memory_bytes),
        workload.rows_per_shard(layout.spec.data),
        workload.canvas(layout, chip.platform),
        [_shape(phase, workload, layout, chip) for phase in workload.phases(layout, chip.platform, widest=True)],
        dtype if workload.has_cache else None,
    )
    if (draft := workload.draft) is None:
        return found
    # A row may be longer than the draft model allows; its cache has as many positions all the same.
    config = replace(draft.config, max_positions=workload.config.max_positions)
    own = replace(workload, config=config, draft=None, quantization=draft.quantization)
    beside = model_layout(draft.config, layout.spec, quantization=draft.quantization)
    return found.beside(estimate_memory(own, beside, chip))


def _shape(phase: Phase, workload: Workload, layout: ModelLayout, chip: Chip) -> PassShape:
    sequence = layout.spec.sequence
    if phase.whole:
        attention = choose_attention("auto", chip.platform, layout, phase.positions, jnp.dtype(workload.dtype))
        positions, keys = math.ceil(phase.positions / sequence), phase.keys
    else:
        # Every sequence shard computes the whole window, and attends to its own part of the cache.
        attention, positions, keys = "xla", phase.positions, math.ceil(phase.keys / sequence)
    head = phase.chunk // phase.head_shards(layout)
    return PassShape(phase.rows, positions, keys, head, attention, phase.canvases)
