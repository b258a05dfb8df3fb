"""Checks whether a model can be divided over a mesh, without devices.

JAX silently replicates a dimension that is not a multiple of its mesh axis. Here this is an error, and the message
names a mesh that works.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sharding.errors import MeshError
from sharding.heads import HeadLayout
from sharding.mesh import MeshSpec
from sharding.rules import PartitionRules


@dataclass(frozen=True)
class NamedShape:
    """The name of a tensor, its logical axes, and their unpadded sizes."""

    name: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]


# Axes that the runtime pads to a multiple of the mesh axis, so that any size works.
PADDED_AXES = ("queries_per_kv", "vocab")


def _problems(
    shapes: Iterable[NamedShape], rules: PartitionRules, sizes: Mapping[str, int], user_axis: Mapping[str, str]
) -> list[str]:
    found: dict[tuple[str, int], str] = {}
    for shape in shapes:
        for axis, size in zip(shape.axes, shape.sizes, strict=True):
            shards = rules.shards(axis, sizes)
            if axis not in PADDED_AXES and size % shards and (axis, size) not in found:
                names = "*".join(dict.fromkeys(user_axis[mesh_axis] for mesh_axis in rules.mesh_axes(axis)))
                found[axis, size] = (
                    f'tensor "{shape.name}": dimension "{axis}" of size {size} is not divisible by {names}={shards}'
                )
    return list(found.values())


def mesh_problems(shapes: Sequence[NamedShape], spec: MeshSpec, num_heads: int, num_kv_heads: int) -> list[str]:
    """Return one sentence for each dimension that cannot be divided over the mesh; none if the mesh works."""
    heads = HeadLayout.for_tensor(num_heads, num_kv_heads, spec.tensor)
    sizes = {"data": spec.data, "sequence": spec.sequence, "kv": heads.kv, "group": heads.group}
    user_axis = {"data": "data", "sequence": "sequence", "kv": "tensor", "group": "tensor"}
    return _problems(shapes, PartitionRules.for_heads(heads), sizes, user_axis)


def working_tensor_sizes(shapes: Sequence[NamedShape], limit: int, num_heads: int, num_kv_heads: int) -> list[int]:
    """Return the tensor axis sizes up to ``limit`` that every tensor can be divided by, in ascending order."""
    return [
        size
        for size in range(1, limit + 1)
        if not mesh_problems(shapes, MeshSpec(tensor=size), num_heads, num_kv_heads)
    ]


def check_mesh(
    shapes: Sequence[NamedShape], spec: MeshSpec, num_heads: int, num_kv_heads: int, otherwise: str = ""
) -> None:
    """Check that every tensor can be divided over the mesh.

    Args:
      shapes: the tensors.
      spec: sizes of the mesh axes.
      num_heads: number of query heads.
      num_kv_heads: number of KV heads.
      otherwise: the end of the message, for what helps besides another mesh.

    Raises:
      MeshError: a dimension is not divisible. The message names the tensor, the dimension, its size and the mesh axis,
        and the mesh that works with the largest smaller tensor axis, with the number of devices that it needs.
    """
    problems = mesh_problems(shapes, spec, num_heads, num_kv_heads)
    if not problems:
        return
    # An axis that is not padded has at most as many parts as entries.
    parts = (size for one in shapes for axis, size in zip(one.axes, one.sizes, strict=True) if axis not in PADDED_AXES)
    working = working_tensor_sizes(shapes, min(spec.tensor, max(parts)), num_heads, num_kv_heads)
    suggestion = replace(spec, tensor=working[-1])
    raise MeshError(
        f"the model cannot be divided over mesh {spec}: {'; '.join(problems)}. "
        f"A mesh that works on {_needed_devices(suggestion)}: {suggestion}{otherwise}"
    )


def _needed_devices(spec: MeshSpec) -> str:
    """Return how many devices a mesh needs, in words. How many there are is not known before they are used."""
    count = abs(spec.size)
    if -1 in (spec.data, spec.sequence, spec.tensor):
        return "any number of devices" if count == 1 else f"a multiple of {count} devices"
    return "1 device" if count == 1 else f"{count} devices"
