"""The runner: weights on a mesh, their compiled programs, and the sizes of batches, canvases and head chunks.

Dimension letters: B batch, S canvas, P positions of one chunk of the output head.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import functools
import math
import os
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from runtime.execution.buckets import Bucket
from runtime.execution.memory import Device, Memory, PassShape, memory_of_passes
from runtime.execution.programs import ProgramCache, compiler_options
from runtime.execution.rows import bucket_length
from runtime.models.attention import choose_attention
from runtime.models.declarations import ModelLayout
from runtime.models.families import Weights
from runtime.models.forward import Forward, residual_unit
from runtime.models.kv_cache import cache_dtype
from sharding.errors import InputError, MeshError
from sharding.topology import chip_of

# Fraction of the memory left beside the weights that a batch may plan to use.
_ACTIVATION_SHARE = 0.7
# Files with the memory limit of a Linux container, of both versions of control groups.
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# Maximum number of rows per ``data`` shard, even if memory allows more.
MAX_ROWS_PER_SHARD = 1024

# Overhead of a pass on devices of unknown type, as a number of positions that take the same time.
_OVERHEAD_POSITIONS = 64.0
_OVERHEADS_PER_FLOOR = 4
# Typical compile time of a program, and the speed of a CPU. They decide which buckets are worth compiling.
_COMPILE_SECONDS, _CPU_COMPILE_SECONDS, _CPU_FLOPS = 30.0, 3.0, 1e11
# Widths of buckets are multiples of this: small steps on CPU, whole blocks of attention on TPU.
_WIDTH_STEPS = {"cpu": 32, "tpu": 128}
_WIDTH_STEP_DEFAULT = 64
# The same for rows that are known in advance. On CPU, a pass over less padding takes less time, however little less.
_KNOWN_WIDTH_STEPS = _WIDTH_STEPS | {"cpu": 16}

# Number of positions in a prompt chunk: enough to use the matrix units fully.
PROMPT_CHUNKS = {"cpu": 128}
_PROMPT_CHUNK_DEFAULT = 512

# Number of positions per device in a head chunk: enough to use the matrix units fully.
_HEAD_POSITIONS = {"cpu": 64}
_HEAD_POSITIONS_DEFAULT = 512
# Maximum number of positions per row in a head chunk, so that logits stay small, and few positions without a mask are
# computed.
_MAX_HEAD_POSITIONS_PER_ROW = 128


@dataclass
class _Model:
    """What a runner and its :meth:`Runner.over_data` share: replaced weights are replaced for both."""

    weights: Weights


class Runner:
    """Weights on a mesh and the programs compiled for them.

    Attributes:
      layout: the model on its mesh.
      dtype: dtype of the weights.
      cache_dtype: dtype of the KV cache.
      platform: ``cpu``, ``gpu`` or ``tpu``.
      programs: the compiled programs.
      buckets: the buckets that have been used, by a key of everything else that their programs depend on.
      row_unit: the number of rows on the devices is a multiple of this.
      draft: the draft model on the same devices, see :mod:`runtime.decoding.draft_model`; None without one. Its own
        programs are not used: those of this runner run both models.
    """

    def __init__(
        self,
        layout: ModelLayout,
        weights: Weights,
        attention: str,
        max_batch: int | None,
        kv_cache: str = "model",
        draft: Runner | None = None,
    ) -> None:
        """Create a runner from weights that are already on the layout's mesh.

        Args:
          layout: the model's layout, with a mesh.
          weights: the weights, as :meth:`ModelLayout.abstract_weights` describes them.
          attention: see :func:`runtime.models.attention.choose_attention`.
          max_batch: maximum number of rows on the devices at a time; None for what memory allows.
          kv_cache: dtype of the cache, one of :data:`runtime.models.kv_cache.CACHE_DTYPES`.
          draft: the draft model, on a layout from :func:`runtime.execution.draft_models.layout_beside`.

        Raises:
          InputError: the attention implementation cannot run on these devices, or ``max_batch`` is not positive.
        """
        assert layout.mesh is not None, "a runner needs a mesh"
        if max_batch is not None and max_batch < 1:
            raise InputError(f"max_batch is {max_batch}; expected at least 1, or None")
        self.layout = layout
        self._model = _Model(weights)
        self.dtype = jnp.dtype(weights.final_norm.dtype)
        self._device = layout.mesh.devices.flat[0]
        self.platform: str = self._device.platform
        self.programs = ProgramCache(compiler_options(layout, self.dtype))
        self.cache_dtype = cache_dtype(kv_cache, self.dtype)
        self._attention = attention
        self._max_batch = max_batch
        self._memory = smallest_memory(self._device)
        self._row_limits: dict[tuple[int, bool, int, int], int] = {}
        self.buckets: dict[Hashable, set[Bucket]] = {}
        self.row_unit = layout.spec.data
        self.draft = draft
        check_attention(layout, attention, self.dtype)

    @property
    def weights(self) -> Weights:
        """The model's weights: a pytree of arrays, sharded over the mesh."""
        return self._model.weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self._model.weights = weights

    def over_data(self, canvases: int) -> Runner:
        """Return this runner with all rows on every ``data`` shard, and the canvases of their passes divided over it.

        A number of rows that is no multiple of the ``data`` axis then uses all devices.

        Args:
          canvases: canvases of each row that a pass computes, see :mod:`runtime.decoding.drafts`.
        """
        made, data = copy.copy(self), self.layout.spec.data
        made.layout = replace(self.layout, rules=replace(self.layout.rules, batch=()))
        made.row_unit, made._row_limits = data // math.gcd(data, canvases), {}
        return made

    @property
    def row_shards(self) -> int:
        """Number of shards that the rows are divided into."""
        return self.layout.rules.shards("batch", self.layout.mesh_axis_sizes)

    def bucket(self, length: int) -> int:
        """Round a length up to a bucket; see :func:`canvas_bucket`."""
        return canvas_bucket(length, self.layout, self.platform)

    def part_widths(self, canvas: int) -> tuple[int, ...]:
        """Return the buckets of one to three quarters of a canvas, in descending order, without the canvas itself."""
        found = {self.bucket(canvas * quarters // 4) for quarters in (1, 2, 3)}
        return tuple(sorted((width for width in found if width < canvas), reverse=True))

    def forward(self, canvas: int, block_length: int = 0) -> Forward:
        """Return layout and attention implementation for canvases of this many positions.

        Args:
          canvas: number of positions.
          block_length: block length of block-causal attention, if it differs from the model's.
        """
        attention = choose_attention(self._attention, self.platform, self.layout, canvas, self.dtype)
        return Forward(self.layout, attention).with_blocks(block_length)

    def chunk(self, batch: int, canvas: int) -> int:
        """Return the number of positions per row in a head chunk; see :func:`head_chunk`."""
        return head_chunk(batch, canvas, self.layout, self.platform)

    @property
    def prompt_chunk(self) -> int:
        """Number of positions per prompt chunk. Prompts are read in chunks while other rows are being decoded."""
        return PROMPT_CHUNKS.get(self.platform, _PROMPT_CHUNK_DEFAULT)

    def batch_size(self, rows: int, canvas: int, cached: bool = False, canvases: int = 1, window: int = 0) -> int:
        """Return how many of ``rows`` rows to run at a time: a multiple of :attr:`row_unit`, limited by memory.

        The other arguments are those of :meth:`memory`.
        """
        unit = self.row_unit
        rows_that_fit = self.max_rows(canvas, cached, canvases, window) if self._max_batch is None else self._max_batch
        limit = max(unit, rows_that_fit // unit * unit)
        return min(limit, math.ceil(rows / unit) * unit)

    def batches(self, rows: int, canvas: int, cached: bool = False) -> Iterator[slice]:
        """Yield the rows of each batch, in order."""
        size = self.batch_size(rows, canvas, cached)
        for first in range(0, rows, size):
            yield slice(first, min(first + size, rows))

    def max_rows(self, canvas: int, cached: bool = False, canvases: int = 1, window: int = 0) -> int:
        """Estimate how many rows of ``canvas`` positions fit into the memory of the mesh at a time.

        The estimate is for passes over whole rows, which need the most memory in every mode without drafts. The
        arguments are those of :meth:`memory`.
        """
        key = canvas, cached, canvases, window
        if key not in self._row_limits:
            self._row_limits[key] = self._estimate_max_rows(*key)
        return self._row_limits[key]

    def _estimate_max_rows(self, canvas: int, cached: bool, canvases: int, window: int) -> int:
        shards, room = self.row_shards, self.room()
        if room is None:
            return shards * MAX_ROWS_PER_SHARD

        def fits(rows: int) -> bool:
            return self.memory(rows, canvas, cached, canvases, window).total <= room

        return shards * max(1, bisect.bisect_left(range(1, MAX_ROWS_PER_SHARD + 1), True, key=lambda n: not fits(n)))

    def pass_floor(self) -> tuple[float, float]:
        """Return floor and overhead of a pass, see :class:`runtime.execution.buckets.PassCost`, in positions.

        Both are derived from the type of the devices. For CPUs, the floor is 0 and the overhead is a constant.
        """
        chip, spec = chip_of(self._device), self.layout.spec
        copies = spec.data * spec.sequence
        if chip is None:
            return 0.0, _OVERHEAD_POSITIONS * copies
        # Each weight takes two operations per position, and is read once per pass.
        floor = copies * chip.flops / chip.memory_bandwidth * self.dtype.itemsize / 2
        return floor, floor / _OVERHEADS_PER_FLOOR

    def position_seconds(self) -> float:
        """Estimate the seconds that a position adds to a pass, from the peak rate of the type of the devices."""
        chip, spec = chip_of(self._device), self.layout.spec
        flops = _CPU_FLOPS if chip is None else chip.flops
        operations = 2 * weight_bytes(self.layout, self.dtype) / self.dtype.itemsize
        return operations / (flops * spec.data * spec.sequence)

    def compile_positions(self) -> float:
        """Estimate how many positions could be computed in the time that compiling a bucket takes."""
        on_cpu = chip_of(self._device) is None
        return (_CPU_COMPILE_SECONDS if on_cpu else _COMPILE_SECONDS) / self.position_seconds()

    def width_step(self, known: bool = False) -> int:
        """Return the number that bucket widths are multiples of; see :func:`width_step`."""
        return width_step(self.layout, self.platform, known)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on each device, those of the draft model included."""
        own = weight_bytes(self.layout, self.dtype)
        return own if self.draft is None else own + self.draft.weight_bytes

    def width_unit(self) -> int:
        """Return the number that bucket widths are rounded up to a multiple of where this costs little; 1 for none."""
        sharded = self.platform == "tpu" and self.layout.spec.tensor > 1
        return math.lcm(self.width_step(), residual_unit(self.layout)) if sharded else 1

    def room(self) -> float | None:
        """Return the bytes per device that may be planned for, weights included; None if the device reports no size."""
        memory, weights = self._memory, self.weight_bytes
        return None if memory is None else weights + _ACTIVATION_SHARE * (memory - weights)

    def memory(self, rows: int, canvas: int, cached: bool, canvases: int = 1, window: int = 0) -> Memory:
        """Estimate the memory that passes need on each device, weights included.

        They are passes over whole rows and, with a cache and drafts, over the windows of all canvases.

        They need the most memory in every mode, unless windows have logits at many positions.

        Args:
          rows: rows per shard, see :attr:`row_shards`.
          canvas: positions per row.
          cached: whether rows have a KV cache.
          canvases: canvases that a pass computes of each row, see :mod:`runtime.decoding.drafts`.
          window: with a cache and drafts, positions of the widest window.
        """
        chip, spec = chip_of(self._device), self.layout.spec
        device = Device(self.platform, 0 if chip is None else chip.fast_memory_bytes)
        head = self.chunk(rows * self.row_shards, canvas) // spec.sequence
        computed = math.ceil(rows * canvases * self.row_shards / spec.data) if canvases > 1 else 0
        kept, attention = self.cache_dtype if cached else None, self.forward(canvas).attention
        passes = [PassShape(rows, canvas // spec.sequence, canvas, head, attention, 0 if cached else computed)]
        if cached and window:
            # An autoregressive row has logits at all positions of its window, and a canvas at those of a chunk.
            head = window if canvases == 1 else min(window, head * spec.sequence)
            drafted = rows * canvases if canvases > 1 else 0
            passes.append(PassShape(rows, window, canvas // spec.sequence, head, "xla", drafted))
        found = memory_of_passes(self.layout, self.dtype, device, rows, canvas, passes, kept)
        return found if self.draft is None else found.beside(self.draft.memory(rows, canvas, cached, window=2))


def canvas_bucket(length: int, layout: ModelLayout, platform: str) -> int:
    """Round a length up to a bucket that the sequence axis divides; on TPU, into shards of whole attention blocks.

    On TPU, the residual of most buckets can be divided over the tensor axis too. To make it divide in the others
    (:func:`runtime.models.forward.residual_unit`) would take at least an eighth more positions.
    """
    block = 128 if platform == "tpu" else 1
    return bucket_length(length, block * layout.spec.sequence)


def width_step(layout: ModelLayout, platform: str, known: bool = False) -> int:
    """Return the number that bucket widths are multiples of; the sequence axis divides it.

    Args:
      layout: the model's layout.
      platform: platform of the devices.
      known: whether all rows are known in advance.
    """
    steps = _KNOWN_WIDTH_STEPS if known else _WIDTH_STEPS
    step, sequence = steps.get(platform, _WIDTH_STEP_DEFAULT), layout.spec.sequence
    # On TPU, every shard has whole blocks of attention.
    return step * sequence if platform == "tpu" else math.lcm(step, sequence)


def check_attention(layout: ModelLayout, attention: str, dtype: Any) -> None:
    """Check that an attention implementation can run on a layout's devices, before any weight is read.

    Raises:
      InputError: see :func:`runtime.models.attention.choose_attention`.
    """
    assert layout.mesh is not None, "attention runs on a mesh"
    platform = layout.mesh.devices.flat[0].platform
    choose_attention(attention, platform, layout, canvas_bucket(1, layout, platform), dtype)


def head_chunk(rows: int, canvas: int, layout: ModelLayout, platform: str) -> int:
    """Return how many positions per row the output head runs on at a time.

    The chunk is large enough for efficient matrix products, and small enough that logits take little memory.

    Args:
      rows: number of rows on all devices together.
      canvas: S, a multiple of the sequence axis.
      layout: the layout; the chunk is a multiple of its sequence axis.
      platform: platform of the devices.
    """
    target = _HEAD_POSITIONS.get(platform, _HEAD_POSITIONS_DEFAULT)
    sequence = layout.spec.sequence
    per_shard = max(1, target * layout.rules.shards("batch", layout.mesh_axis_sizes) // rows)
    power_of_two = 1 << per_shard.bit_length() - 1
    most = _MAX_HEAD_POSITIONS_PER_ROW // sequence * sequence
    return min(canvas, max(math.lcm(16, sequence), min(most, power_of_two * sequence)))


def device_memory(device: Any) -> int | None:
    """Return the bytes of a device's memory, None if unknown. Simulated CPU devices share the host's memory."""
    if device.platform == "cpu":
        return _host_memory() // max(1, jax.local_device_count())
    # Only a device's own host can query its memory, so a device of this host stands in for a remote one.
    stats = (device if device.process_index == jax.process_index() else jax.local_devices()[0]).memory_stats()
    return stats.get("bytes_limit") if stats else None


def _host_memory() -> int:
    """Return the bytes of this host's memory, or of its part that the process's container may use."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # another operating system, or no limit: "max"
            memory = min(memory, int(Path(path).read_text()))
    return memory


def smallest_memory(device: Any) -> int | None:
    """Return the smallest memory of any host's devices in bytes, None if unknown. Every host has to call this.

    How many rows run at a time follows from it, on which the hosts have to agree.
    """
    own = device_memory(device)
    if jax.process_count() == 1:
        return own
    mebibytes = multihost_utils.process_allgather(np.int32(-1 if own is None else own >> 20))
    return None if mebibytes.min() < 0 else int(mebibytes.min()) << 20


@functools.lru_cache(256)
def weight_bytes(layout: ModelLayout, dtype: Any) -> int:
    """Return the bytes of weights on each device, padding and replication included."""
    return layout.bytes_per_device(dtype)


def check_memory(layout: ModelLayout, dtype: Any, device: Any, others: int = 0) -> None:
    """Check that the weights fit into device memory, before any is read.

    Args:
      layout: the layout.
      dtype: dtype of the weights.
      device: one of the devices.
      others: bytes of weights of another model on each device.

    Raises:
      MeshError: they do not fit. The message says what each device would hold, and what would help.
    """
    memory, needed = device_memory(device), weight_bytes(layout, dtype) + others
    if memory is None or needed <= memory:
        return
    advice = "a larger tensor axis" if device.platform != "cpu" else "a machine with more memory"
    if jnp.dtype(dtype).itemsize > 2:
        advice = f"--dtype=bfloat16 ({needed / 2e9:.1f} GB), or {advice}"
    raise MeshError(
        f"mesh {layout.spec}: each device would hold {needed / 1e9:.1f} GB of {jnp.dtype(dtype).name} weights, but "
        f"has {memory / 1e9:.1f} GB; try {advice}"
    )
