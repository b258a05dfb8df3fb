"""A model on a mesh, ready to run: how rows are cut into batches, canvases rounded up, programs kept.

Dimension letters: B batch, S canvas, P positions of one head chunk.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from runtime.execution.buckets import Bucket
from runtime.execution.memory import Device, Memory, PassShape, memory_of_passes
from runtime.execution.programs import ProgramCache
from runtime.execution.rows import bucket_length
from runtime.models.attention import choose_attention
from runtime.models.declarations import ModelLayout
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.kv_cache import cache_dtype
from sharding.errors import MeshError
from sharding.topology import CHIPS

# Share of the memory that weights leave which one batch may plan to use.
_ACTIVATION_SHARE = 0.7
# Rows of one shard of data at a time, whatever memory allows.
MAX_ROWS_PER_SHARD = 1024

# Positions whose time a pass costs beside those that it computes, where devices do not say more.
_OVERHEAD_POSITIONS = 64.0
_OVERHEADS_PER_FLOOR = 4
# What compiling a program takes and a device computes meanwhile, as far as it decides what is worth compiling.
_COMPILE_SECONDS, _CPU_COMPILE_SECONDS, _CPU_FLOPS = 30.0, 3.0, 1e11
# Widths of buckets are multiples of this: fine where a pass costs what it computes, whole blocks on a TPU.
_WIDTH_STEPS = {"cpu": 32, "tpu": 128}
_WIDTH_STEP_DEFAULT = 64

# Positions of a prompt that are read at a time while other rows decode: enough to fill the matrix units.
PROMPT_CHUNKS = {"cpu": 128}
_PROMPT_CHUNK_DEFAULT = 512

# Logits positions per device that the head is run on at a time: enough to fill the matrix units.
_HEAD_POSITIONS = {"cpu": 64}
_HEAD_POSITIONS_DEFAULT = 512
# Positions of one row at a time at most: of a few rows only what is still masked is run, and logits stay small.
_HEAD_POSITIONS_OF_A_ROW = 128


class Runner:
    """Weights on a mesh and the programs compiled for them.

    Attributes:
      layout: the model on its mesh.
      weights: its weights.
      dtype: their dtype.
      cache_dtype: dtype of keys and values that are kept.
      platform: ``cpu``, ``gpu`` or ``tpu``.
      programs: what has been compiled.
      buckets: those that rows were in, by what their programs depend on beside the shape.
    """

    def __init__(
        self, layout: ModelLayout, weights: Weights, attention: str, max_batch: int | None, kv_cache: str = "model"
    ) -> None:
        """Take weights that are already on the layout's mesh.

        Args:
          layout: with a mesh.
          weights: as :meth:`ModelLayout.abstract_weights` describes them.
          attention: see :func:`runtime.models.attention.choose_attention`.
          max_batch: rows on the devices at a time; None for what memory allows.
          kv_cache: dtype of the cache, see :data:`runtime.models.kv_cache.CACHE_DTYPES`.

        Raises:
          InputError: an attention implementation that cannot run here.
        """
        assert layout.mesh is not None, "a runner needs a mesh"
        self.layout = layout
        self.weights = weights
        self.dtype = jnp.dtype(weights.final_norm.dtype)
        self._device = layout.mesh.devices.flat[0]
        self.platform: str = self._device.platform
        self.programs = ProgramCache(self.platform)
        self.cache_dtype = cache_dtype(kv_cache, self.dtype)
        self._attention = attention
        self._max_batch = max_batch
        self._row_limits: dict[tuple[int, bool], int] = {}
        self.buckets: dict[Hashable, set[Bucket]] = {}
        check_attention(layout, attention, self.dtype)

    def bucket(self, length: int) -> int:
        """Canvas that ``length`` positions are run at; see :func:`canvas_bucket`."""
        return canvas_bucket(length, self.layout, self.platform)

    def forward(self, canvas: int) -> Forward:
        """How a canvas of this many positions is run."""
        return Forward(self.layout, choose_attention(self._attention, self.platform, self.layout, canvas, self.dtype))

    def chunk(self, batch: int, canvas: int) -> int:
        """Positions of each row that the head is run on at a time; see :func:`head_chunk`."""
        return head_chunk(batch, canvas, self.layout, self.platform)

    @property
    def prompt_chunk(self) -> int:
        """Positions of a prompt that are read at a time in slots that other rows may be in."""
        return PROMPT_CHUNKS.get(self.platform, _PROMPT_CHUNK_DEFAULT)

    def batch_size(self, rows: int, canvas: int, cached: bool = False) -> int:
        """Rows on the devices at a time for ``rows`` in all: a multiple of the data axis that memory allows."""
        data = self.layout.spec.data
        limit = max(data, (self._max_batch or self.max_rows(canvas, cached)) // data * data)
        return min(limit, math.ceil(rows / data) * data)

    def batches(self, rows: int, canvas: int, cached: bool = False) -> Iterator[slice]:
        """The rows of each batch, in order."""
        size = self.batch_size(rows, canvas, cached)
        for first in range(0, rows, size):
            yield slice(first, min(first + size, rows))

    def max_rows(self, canvas: int, cached: bool = False) -> int:
        """Rows of ``canvas`` positions that fit on the mesh at a time, with a cache or without, estimated.

        Whole rows are counted: they are the largest pass of every way of decoding.
        """
        if (canvas, cached) not in self._row_limits:
            self._row_limits[canvas, cached] = self._estimate_max_rows(canvas, cached)
        return self._row_limits[canvas, cached]

    def _estimate_max_rows(self, canvas: int, cached: bool) -> int:
        data, room = self.layout.spec.data, self.room()
        if room is None:
            return data * MAX_ROWS_PER_SHARD

        def fits(rows: int) -> bool:
            return self.memory(rows, canvas, cached).total <= room

        return data * max(1, bisect.bisect_left(range(1, MAX_ROWS_PER_SHARD + 1), True, key=lambda n: not fits(n)))

    def pass_floor(self) -> tuple[float, float]:
        """Positions at which a pass stops being bound by reading the weights, and what each pass costs beside them.

        Both follow from what the devices are. Where nothing is known of them, as of CPUs, a pass of a small model costs
        what it computes and as much again as some positions.
        """
        chips = [chip for chip in CHIPS.values() if chip.device_kind == self._device.device_kind]
        spec = self.layout.spec
        copies = spec.data * spec.sequence
        if not chips:
            return 0.0, _OVERHEAD_POSITIONS * copies
        # A weight is two operations for each position, and as many bytes as its dtype has.
        floor = copies * chips[0].flops / chips[0].memory_bandwidth * self.dtype.itemsize / 2
        return floor, floor / _OVERHEADS_PER_FLOOR

    def compile_positions(self) -> float:
        """Positions that could be computed in the time that compiling a bucket takes, about."""
        chips = [chip for chip in CHIPS.values() if chip.device_kind == self._device.device_kind]
        flops, seconds = (chips[0].flops, _COMPILE_SECONDS) if chips else (_CPU_FLOPS, _CPU_COMPILE_SECONDS)
        operations = 2 * weight_bytes(self.layout, self.dtype) / self.dtype.itemsize
        spec = self.layout.spec
        return seconds * flops * spec.data * spec.sequence / operations

    def width_step(self) -> int:
        """What widths of buckets are multiples of."""
        step = _WIDTH_STEPS.get(self.platform, _WIDTH_STEP_DEFAULT)
        return math.lcm(step, self.layout.spec.sequence)

    def room(self) -> float | None:
        """Bytes of each device that weights and what runs may plan to use, None where the device does not say."""
        memory, weights = device_memory(self._device), weight_bytes(self.layout, self.dtype)
        return None if memory is None else weights + _ACTIVATION_SHARE * (memory - weights)

    def memory(self, rows: int, canvas: int, cached: bool) -> Memory:
        """What passes over whole rows need on each device, weights included, estimated.

        Args:
          rows: of one shard of data.
          canvas: positions of each.
          cached: with a cache.
        """
        spec = self.layout.spec
        chips = [chip for chip in CHIPS.values() if chip.device_kind == self._device.device_kind]
        device = Device(self.platform, chips[0].fast_memory_bytes if chips else 0)
        head = self.chunk(rows * spec.data, canvas) // spec.sequence
        shape = PassShape(rows, canvas // spec.sequence, canvas, head, self.forward(canvas).attention)
        kept = self.cache_dtype if cached else None
        return memory_of_passes(self.layout, self.dtype, device, rows, canvas, [shape], kept)


def canvas_bucket(length: int, layout: ModelLayout, platform: str) -> int:
    """Canvas that ``length`` positions are run at: a multiple of the sequence axis, and of a TPU's blocks."""
    block = 128 if platform == "tpu" else 1
    return bucket_length(length, block * layout.spec.sequence)


def check_attention(layout: ModelLayout, attention: str, dtype: Any) -> None:
    """Check that an attention implementation can run on a layout's devices, before any weight is read.

    Raises:
      InputError: see :func:`runtime.models.attention.choose_attention`.
    """
    assert layout.mesh is not None, "attention runs on a mesh"
    platform = layout.mesh.devices.flat[0].platform
    choose_attention(attention, platform, layout, canvas_bucket(1, layout, platform), dtype)


def head_chunk(rows: int, canvas: int, layout: ModelLayout, platform: str) -> int:
    """Positions of each row that the head is run on at a time: a full matrix product, and logits that stay small.

    Args:
      rows: rows on the devices, all together.
      canvas: S, a multiple of the sequence axis.
      layout: the mesh; the chunk is a multiple of its sequence axis.
      platform: of the devices.
    """
    target = _HEAD_POSITIONS.get(platform, _HEAD_POSITIONS_DEFAULT)
    sequence = layout.spec.sequence
    per_shard = max(1, target * layout.spec.data // rows)
    power_of_two = 1 << per_shard.bit_length() - 1
    most = _HEAD_POSITIONS_OF_A_ROW // sequence * sequence
    return min(canvas, max(math.lcm(16, sequence), min(most, power_of_two * sequence)))


def device_memory(device: Any) -> int | None:
    """Bytes that one device offers, None where it does not say. Simulated CPU devices share the host's memory."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, jax.local_device_count())
    # A device says so to its own host only.
    stats = (device if device.process_index == jax.process_index() else jax.local_devices()[0]).memory_stats()
    return stats.get("bytes_limit") if stats else None


def weight_bytes(layout: ModelLayout, dtype: Any) -> int:
    """Bytes of weights on each device, padding and replication included."""
    return layout.bytes_per_device(dtype)


def check_memory(layout: ModelLayout, dtype: Any, device: Any) -> None:
    """Check that the weights fit before any is read.

    Raises:
      MeshError: they do not; says what each device would hold, and what would help.
    """
    memory, needed = device_memory(device), weight_bytes(layout, dtype)
    if memory is None or needed <= memory:
        return
    advice = "a larger tensor axis" if device.platform != "cpu" else "a machine with more memory"
    if jnp.dtype(dtype).itemsize > 2:
        advice = f"--dtype=bfloat16 ({needed / 2e9:.1f} GB), or {advice}"
    raise MeshError(
        f"mesh {layout.spec}: each device would hold {needed / 1e9:.1f} GB of {jnp.dtype(dtype).name} weights and has "
        f"{memory / 1e9:.1f} GB; what would help: {advice}"
    )
