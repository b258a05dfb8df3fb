"""Mesh specifications that users write, and the JAX meshes that are built from them.

Users specify three axes: ``data``, ``sequence`` and ``tensor``. The JAX mesh has four, because the model's
:class:`~sharding.heads.HeadLayout` splits ``tensor`` into ``kv`` and ``group``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from sharding.errors import MeshError
from sharding.heads import HeadLayout

MESH_AXES = ("data", "sequence", "kv", "group")
MAX_AXIS = 1 << 20

# If weights take more than this fraction of a device's memory, little room is left for anything else.
WEIGHT_MEMORY_SHARE = 0.6


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the three mesh axes. One size may be -1, which means all remaining devices.

    Attributes:
      data: number of shards of the batch.
      sequence: number of shards of the canvas, and of the positions of the KV cache.
      tensor: number of shards of the weights: of attention heads, MLP and vocabulary.
    """

    data: int = 1
    sequence: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
          MeshError: a size is not a positive integer or -1, or several sizes are -1.
        """
        for field in fields(self):
            size = getattr(self, field.name)
            if size != -1 and not 1 <= size <= MAX_AXIS:
                raise MeshError(f"mesh {self}: {field.name}={size}; expected a positive integer, or -1 for the rest")
        if [self.data, self.sequence, self.tensor].count(-1) > 1:
            raise MeshError(f"mesh {self}: only one axis can be -1")

    @classmethod
    def read(cls, mesh: str | MeshSpec | None) -> MeshSpec | None:
        """Return the mesh that an argument names: a string is parsed, None stays None.

        Raises:
          MeshError: it is none of these, or :meth:`parse` rejects the string.
        """
        if isinstance(mesh, str):
            return cls.parse(mesh)
        if not isinstance(mesh, MeshSpec | None):
            raise MeshError(f'mesh: expected a string such as "data=2,tensor=4" or a MeshSpec, not {mesh!r:.100}')
        return mesh

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """Parse the axis sizes in a string such as ``"data=2,sequence=1,tensor=4"``. Missing axes have size 1.

        Raises:
          MeshError: no axis is given, an axis is unknown or repeated, a size is not a positive integer or -1, or
            several sizes are -1.
        """
        names = [field.name for field in fields(cls)]
        example = f'write for example "data=2,sequence=1,tensor=4" (axes: {", ".join(names)}; one may be -1)'
        sizes: dict[str, int] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            match = re.fullmatch(r"(\w+)\s*=\s*(-?\d{1,9})", part)
            if not match:
                raise MeshError(f'mesh "{text}": cannot read "{part}"; {example}')
            name, size = match[1], int(match[2])
            if name not in names:
                raise MeshError(f'mesh "{text}": unknown axis "{name}"; {example}')
            if name in sizes:
                raise MeshError(f'mesh "{text}": axis "{name}" is given twice')
            sizes[name] = size
        if not sizes:
            raise MeshError(f'mesh "{text}": names no axis; {example}')
        return cls(**sizes)

    @property
    def size(self) -> int:
        """Number of devices of the mesh. No axis size may be -1."""
        return self.data * self.sequence * self.tensor

    def resolve(self, num_devices: int, planned: bool = False) -> MeshSpec:
        """Replace an axis size of -1 with the number that uses all devices, and check that there are enough devices.

        Args:
          num_devices: the number of devices.
          planned: whether they belong to a machine that is only planned for, on which none can be simulated.

        Raises:
          MeshError: the number of devices is not a multiple of the product of the other sizes, or is too small.
        """
        unknown = [field.name for field in fields(self) if getattr(self, field.name) == -1]
        if unknown:
            fixed = abs(self.size)
            if fixed > num_devices or num_devices % fixed:
                raise MeshError(f"mesh {self}: the number of devices, {num_devices}, is not a multiple of {fixed}")
            return replace(self, **{unknown[0]: num_devices // fixed})
        if self.size > num_devices:
            hint = "" if planned else f" (on CPU, --devices={self.size} simulates {self.size} devices)"
            raise MeshError(
                f"mesh {self} needs {self.size} devices, and there are {num_devices}; a mesh that fits: "
                f"data={num_devices}{hint}"
            )
        return self

    def __str__(self) -> str:
        return f"data={self.data},sequence={self.sequence},tensor={self.tensor}"


def build_mesh(spec: MeshSpec, heads: HeadLayout, devices: Sequence[Any]) -> Mesh:
    """Build a JAX mesh with the axes ``data, sequence, kv, group``; see :func:`arrange_devices`."""
    return Mesh(arrange_devices(spec, heads, devices), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def mesh_beside(other: Mesh, heads: HeadLayout) -> Mesh:
    """Build the mesh of a second model on the devices of another mesh, in the same order.

    One program can then run both models. Only the split of the tensor axis differs.

    Args:
      other: a mesh from :func:`build_mesh`.
      heads: split of the tensor axis for the second model, of the same size.
    """
    data, sequence = other.devices.shape[:2]
    devices = other.devices.reshape(data, sequence, heads.kv, heads.group)
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def has_reduce_scatter(devices: np.ndarray) -> bool:
    """Return whether the TPU compiler has a reduce-scatter over the tensor axis of a mesh.

    Without one, the compiler runs an all-reduce, and every device keeps a part of the result. There is a reduce-scatter
    if the chips of a slice form several groups over the tensor axis. If a single group spans all chips of the slice,
    there is one only on a two-dimensional slice that has up to 2x2 chips, or more chips along y than along x, such as
    2x4. This was found by compiling for v4, v5e, v5p and v6e; a test compares it with the compiler.

    Args:
      devices: devices of the mesh ``[data, sequence, kv, group]``, as :func:`arrange_devices` returns them.
    """
    data, sequence = devices.shape[:2]
    if data * sequence > len({getattr(device, "slice_index", 0) for device in devices.flat}):
        return True
    x, y, z = np.ptp([device.coords for device in devices[0].flat], axis=0) + 1
    return bool(z == 1 and (x < y or x * y <= 4))


def arrange_devices(spec: MeshSpec, heads: HeadLayout, devices: Sequence[Any]) -> np.ndarray:
    """Arrange devices into an array ``[data, sequence, kv, group]``.

    Within a TPU slice, the axes are mapped to the interconnect (ICI). Between slices is the slower data-center network
    (DCN), which only ``data`` may cross, so ``data`` must be a multiple of the number of slices.

    Args:
      spec: the mesh, without -1.
      heads: split of the tensor axis, with ``heads.kv * heads.group == spec.tensor``.
      devices: at least ``spec.size`` devices: real ones, those of an AOT topology, or :class:`sharding.topology.Place`.

    Raises:
      MeshError: there are too few devices, ``data`` is not a multiple of the number of slices, the mesh leaves devices
        out and the used ones do not form a box of the interconnect, or JAX finds no way to map the axes onto the box.
    """
    if spec.size > len(devices):
        raise MeshError(f"mesh {spec} needs {spec.size} devices, and there are {len(devices)}")
    shape = (spec.data, spec.sequence, heads.kv, heads.group)
    used = list(devices[: spec.size])
    if used[0].platform != "tpu":
        return np.asarray(used, dtype=object).reshape(shape)
    slices = {getattr(device, "slice_index", 0) for device in used}
    if spec.data % len(slices):
        raise MeshError(
            f"mesh {spec} on {len(slices)} slices: only the data axis crosses slices, so data must be a multiple "
            f"of {len(slices)}; a mesh that fits: data={len(slices)},tensor={spec.size // len(slices)}"
        )
    try:
        if len(slices) == 1:
            return mesh_utils.create_device_mesh(shape, devices=used, allow_split_physical_axes=True)
        inside, across = (spec.data // len(slices), *shape[1:]), (len(slices), 1, 1, 1)
        return mesh_utils.create_hybrid_device_mesh(inside, across, devices=used, allow_split_physical_axes=True)
    # JAX finds no axes for some meshes on a torus with a side of 20 or 28, and fails with a TypeError on some of them.
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise MeshError(
            f"mesh {spec} cannot be laid out: {_why_not(used, len(devices))}; a mesh that fits: data={len(devices)}"
        ) from error


def _why_not(used: Sequence[Any], count: int) -> str:
    """Return why a mesh on these chips, the first of ``count``, cannot be laid out."""
    inside: dict[int, list[Any]] = {}
    for device in used:
        inside.setdefault(getattr(device, "slice_index", 0), []).append(device.coords)
    boxes = {tuple((np.ptp(coords, axis=0) + 1).tolist()) for coords in inside.values()}
    if len(boxes) == 1 and all(len(coords) == math.prod(*boxes) for coords in inside.values()):
        return f"its axes cannot be mapped onto {'x'.join(map(str, *boxes)).removesuffix('x1')} chips"
    why = "do not form a box of the interconnect" if len(inside) == 1 else "are not the same box in each slice"
    return f"the first {len(used)} of {count} chips {why}"
