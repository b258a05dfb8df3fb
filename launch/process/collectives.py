"""Collectives over each axis of a mesh, checked and timed, for ``diffumesh doctor``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from launch.process.startup import this_host
from runtime import MeshSpec
from runtime.planner import HeadLayout, build_mesh

_REPEATS = 5


def probe_mesh(given: MeshSpec | None, devices: Sequence[Any]) -> Mesh:
    """Return the mesh to test: the given one, or ``data`` over hosts and ``tensor`` over the devices of each host.

    Raises:
      MeshError: the mesh does not fit the devices.
    """
    if given is not None:
        spec = given.resolve(len(devices))
    else:
        hosts = len({device.process_index for device in devices})
        spec = MeshSpec(data=hosts, tensor=len(devices) // hosts)
    return build_mesh(spec, HeadLayout(1, 1, 1, spec.tensor), devices)


def collective_lines(mesh: Mesh, megabytes: float) -> Iterator[str]:
    """Run and check an all-reduce over each axis, and yield a line with its time and bandwidth.

    The bandwidth counts the bytes that a device sends if the all-reduce is a ring.

    Raises:
      RuntimeError: a sum is wrong.
    """
    for axis in (name for name, size in mesh.shape.items() if size > 1):
        size = mesh.shape[axis]
        count = max(1, int(megabytes * 1e6 / 4))
        user_axis = "tensor" if axis in ("kv", "group") else axis
        seconds, right = _all_reduce(mesh, axis, count)
        this_host().mark()
        if not right:
            raise RuntimeError(
                f"an all-reduce over {user_axis}={size} gave a wrong sum: the links along this axis cannot be trusted"
            )
        moved = 4 * count * 2 * (size - 1) / size
        yield (
            f"{f'{user_axis}={size}':<12} all-reduce of {4 * count / 1e6:g} MB: {1e3 * seconds:.2f} ms, "
            f"{moved / seconds / 1e9:.2f} GB/s on each device, correct sums"
        )
    if mesh.size == 1:
        yield "one device: there is nothing to reduce"


def _all_reduce(mesh: Mesh, axis: str, count: int) -> tuple[float, bool]:
    """Return the median seconds of an all-reduce of ``count`` floats over an axis, and whether all sums are right."""
    every = PartitionSpec(tuple(mesh.axis_names))

    @partial(jax.jit, out_shardings=jax.NamedSharding(mesh, every))
    def make() -> jax.Array:
        return jnp.arange(mesh.size, dtype=jnp.float32)[:, None] + jnp.zeros((mesh.size, count), jnp.float32)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=every, out_specs=every)
    def reduce(own: jax.Array) -> jax.Array:
        return jax.lax.psum(own, axis) + jnp.zeros_like(own)

    numbers = np.arange(mesh.size, dtype=np.float32).reshape(mesh.devices.shape)
    place = mesh.axis_names.index(axis)
    wanted = np.broadcast_to(numbers.sum(place, keepdims=True), numbers.shape).reshape(-1)
    operand = make()
    seconds = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        result = jax.block_until_ready(reduce(operand))
        seconds.append(time.perf_counter() - start)
    parts = [(part.index[0].start or 0, np.asarray(part.data)) for part in result.addressable_shards]
    right = all(bool((data == wanted[row]).all()) for row, data in parts)
    return float(np.median(seconds[1:])), all(this_host().gather("sums", right))
