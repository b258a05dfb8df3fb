"""Say what is inside a checkpoint: architecture, parameters, dtype, bytes, tensors, digests, and which meshes fit.

  diffumesh inspect --checkpoint=DIR [--tensors] [--device_memory=16]        canonical or Hugging Face
  diffumesh inspect --checkpoint=params.pkl --config=FOLDER/config.json       a legacy pickle

Headers and manifests are read, and no weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from absl import flags

from checkpoints import LegacyPickle, check_tensors, open_legacy, open_tensors, read_manifest, stored_leaves
from launch.convert import config_folder, open_model, pickle_path
from launch.process.startup import run_launcher
from runtime import InputError, MeshSpec, ModelLayout
from runtime.planner import WEIGHT_MEMORY_SHARE, tensor_sizes, weight_bytes

_LARGEST_MESH = 64


def define_flags(values: flags.FlagValues) -> None:
    """Define this launcher's flags."""
    flags.DEFINE_string("checkpoint", None, "Checkpoint to look into.", flag_values=values)
    flags.DEFINE_string("config", None, "For a params.pkl: its model's config.json or folder.", flag_values=values)
    flags.DEFINE_bool("tensors", False, "List every tensor with its shape and dtype.", flag_values=values)
    flags.DEFINE_float(
        "device_memory", None, "Gigabytes of one device: say which meshes its weights fit.", 0.001, flag_values=values
    )


def main(values: flags.FlagValues) -> None:
    """Run the launcher."""
    if (legacy := pickle_path(values.checkpoint or "")) is not None:
        inspect_pickle(legacy, values)
        return
    if values.config:
        raise InputError("--config goes with a params.pkl as --checkpoint; a folder has its own")
    folder, layout = open_model(values.checkpoint, "checkpoint")
    manifest = read_manifest(folder)
    found = open_tensors(folder, verify="sizes")
    check_tensors(folder, stored_leaves(folder, layout), found)
    kind = "Hugging Face safetensors" if not folder.is_orbax else "Orbax" if manifest is None else "canonical (Orbax)"
    print(f"{folder.place}: {kind}")
    print_architecture(layout)
    tensors = [copies[0] for copies in found.by_name.values()]
    print_tensors(
        [(tensor.name, tensor.dtype, tensor.shape, tensor.bytes) for tensor in tensors],
        "none; diffumesh verify --write_manifest makes them" if manifest is None else "of every chunk",
    )
    print_meshes(layout, {tensor.dtype for tensor in tensors if tensor.dtype != "int8"}, values.device_memory)
    if values.tensors:
        print_tree([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors])


def inspect_pickle(path: Path, values: flags.FlagValues) -> None:
    """Say what a legacy params.pkl holds. It is indexed: nothing in it is executed, and no payload is read.

    Raises:
      InputError: not such a pickle, or not of the model that ``--config`` describes.
    """
    with LegacyPickle(path) as pickle:
        arrays = list(pickle.tensors.values())
    layout = None
    if values.config:
        folder, layout = open_model(config_folder(values.config), "config")
        with ExitStack() as stack:
            check_tensors(folder, layout.leaves, open_legacy(path, layout, stack, zero_biases=True))
    print(f"{path}: legacy pickle, indexed without being unpickled")
    if layout is not None:
        print_architecture(layout)
    print_tensors([(one.path, one.dtype, one.shape, one.nbytes) for one in arrays], "none; a conversion makes them")
    if not any(one.path.endswith("/bias") for one in arrays):
        print("biases        none: the q, k and v biases were lost; launch.convert takes them from elsewhere")
    if layout is not None:
        print_meshes(layout, {one.dtype for one in arrays}, values.device_memory)
    else:
        print("meshes        --config=FOLDER/config.json says which fit")
    if values.tensors:
        print_tree([(one.path, one.dtype, one.shape) for one in arrays])


def print_architecture(layout: ModelLayout) -> None:
    """Print the model's sizes."""
    config = layout.config
    print(f"architecture  {config.family.name}: {config.num_layers} layers, {config.hidden_size} wide,")
    print(f"              {config.num_heads} query and {config.num_kv_heads} KV heads of {config.head_dim},")
    print(f"              MLP {config.intermediate_size}, vocabulary {config.vocab_size}")


def print_tensors(tensors: Sequence[tuple[str, str, tuple[int, ...], int]], digests: str) -> None:
    """Print what tensors, given by name, dtype, shape and bytes, come to."""
    print(f"parameters    {sum(math.prod(shape) for _, _, shape, _ in tensors):,} in {len(tensors)} tensors")
    dtypes = sorted({dtype for _, dtype, _, _ in tensors})
    print(f"weights       {sum(size for _, _, _, size in tensors):,} bytes, {', '.join(dtypes)}")
    print(f"digests       {digests}")


def print_meshes(layout: ModelLayout, dtypes: set[str], gigabytes: float | None) -> None:
    """Print the tensor axes that divide the model, and what each means for one device."""
    print("meshes        tensor axes that divide the model, GB of weights per device as stored:")
    for size in tensor_sizes(layout.config, layout.weights_class, _LARGEST_MESH):
        print(f"              {mesh_line(layout, size, max(dtypes), gigabytes)}")


def print_tree(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
    """Print every tensor with its dtype and shape."""
    for name, dtype, shape in sorted(tensors):
        print(f"{name}  {dtype} {list(shape)}")


def mesh_line(layout: ModelLayout, tensor: int, dtype: str, gigabytes: float | None) -> str:
    """What a tensor axis of this size means for one device."""
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


def run(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
