"""Show what is inside a checkpoint: architecture, parameters, dtype, bytes, tensors, digests, and fitting meshes.

  diffumesh inspect --checkpoint=DIR [--tensors] [--device_memory=16]        canonical or Hugging Face
  diffumesh inspect --checkpoint=params.pkl --config=FOLDER/config.json       a legacy pickle

Only headers and manifests are read, no weights; but a checkpoint on the Hub is downloaded first.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from checkpoints import DEMO, check_tensors, legacy_path, open_tensors, read_manifest, stored_leaves
from launch.folders.listing import print_architecture, print_meshes, print_names, print_tensors
from launch.folders.models import open_model
from launch.folders.pickles import define_config_flag, inspect_pickle
from launch.process.real_flags import define_real
from launch.process.startup import run_launcher
from runtime import STORED_DTYPES, InputError


def define_flags(values: flags.FlagValues) -> None:
    """Define this command's flags."""
    text = "Folder, URL or Hub name, or a legacy params.pkl. Default: the demo."
    flags.DEFINE_string("checkpoint", str(DEMO), text, flag_values=values)
    define_config_flag(values)
    flags.DEFINE_bool("tensors", False, "List every tensor with its shape and dtype.", flag_values=values)
    define_real(
        "device_memory",
        None,
        "Memory per device in GB: also print on which meshes the weights fit.",
        0.001,
        values=values,
    )


def main(values: flags.FlagValues) -> None:
    """Run ``diffumesh inspect``: print a checkpoint's architecture, tensors and digests, and the meshes that fit."""
    if (legacy := legacy_path(values.checkpoint)) is not None:
        inspect_pickle(legacy, values)
        return
    if values.config:
        raise InputError("--config requires a params.pkl as --checkpoint; a folder has its own config.json")
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
        "none; diffumesh verify --write_manifest adds them" if manifest is None else "of every chunk",
        layout.parameter_count,
    )
    dtypes = {tensor.dtype for tensor in tensors if tensor.dtype in STORED_DTYPES}
    print_meshes(layout, dtypes, values.device_memory)
    if values.tensors:
        print_names([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors])


def run(argv: Sequence[str] | None = None) -> None:
    """Run ``diffumesh inspect`` from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
