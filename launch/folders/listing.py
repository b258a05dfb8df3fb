"""The output of ``inspect``: a checkpoint's architecture, totals, meshes, and tensors by name."""

from __future__ import annotations

import math
from collections.abc import Sequence

from launch.hosts.messages import printable
from runtime import WEIGHT_MEMORY_SHARE, MeshSpec, ModelLayout, tensor_sizes, weight_bytes

_LARGEST_MESH = 64


def print_architecture(layout: ModelLayout) -> None:
    """Print the sizes of the model's architecture."""
    config = layout.config
    print(f"architecture  {config.family.name}: {config.num_layers} layers, {config.hidden_size} wide,")
    print(f"              {config.num_heads} query and {config.num_kv_heads} KV heads of {config.head_dim},")
    print(f"              MLP {config.intermediate_size}, vocabulary {config.vocab_size}")


def print_tensors(
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]], digests: str, parameters: int | None = None
) -> None:
    """Print the totals of the stored tensors.

    Args:
      tensors: (name, dtype, shape, bytes) of each.
      digests: a text about their digests.
      parameters: number of the model's parameters; by default, that of all elements. A quantized checkpoint has two
        numbers of four bits in an element, and scales.
    """
    count = sum(math.prod(shape) for _, _, shape, _ in tensors) if parameters is None else parameters
    print(f"parameters    {count:,} in {len(tensors)} tensors")
    dtypes = sorted({dtype for _, dtype, _, _ in tensors})
    print(f"weights       {sum(size for _, _, _, size in tensors):,} bytes, {', '.join(dtypes)}")
    print(f"digests       {digests}")


def print_meshes(layout: ModelLayout, dtypes: set[str], gigabytes: float | None) -> None:
    """Print the sizes of the tensor axis that the model can be sharded over, with the weights per device in GB."""
    print("meshes        possible sizes of the tensor axis, and GB of stored weights per device:")
    for size in tensor_sizes(layout.config, layout.weights_class, _LARGEST_MESH, layout.quantization):
        print(f"              {_mesh_line(layout, size, max(dtypes), gigabytes)}")


def print_names(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
    """Print every tensor, given as (name, dtype, shape), sorted by name."""
    for name, dtype, shape in sorted(tensors):
        print(f"{printable(name)}  {dtype} {list(shape)}")


def _mesh_line(layout: ModelLayout, tensor: int, dtype: str, gigabytes: float | None) -> str:
    """Describe one size of the tensor axis: GB of weights per device, and whether they fit."""
    spec = MeshSpec(tensor=tensor)
    needed = (
        weight_bytes(
            ModelLayout.create(layout.config, layout.weights_class, spec, quantization=layout.quantization), dtype
        )
        / 1e9
    )
    line = f"tensor={tensor:<3} {needed:.3f}"
    if gigabytes is None:
        return line
    room = "fits" if needed <= WEIGHT_MEMORY_SHARE * gigabytes else "tight" if needed < gigabytes else "does not fit"
    return f"{line}  {room} in {gigabytes:g} GB"
