"""Flags of a legacy params.pkl, and the output of ``inspect`` for it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from absl import flags

from checkpoints import LegacyPickle, check_tensors, config_folder, open_legacy
from launch.folders.listing import print_architecture, print_meshes, print_names, print_tensors
from launch.folders.models import layout_of


def define_pickle_flags(values: flags.FlagValues) -> None:
    """Define the flags that supply the configuration and biases that a params.pkl lacks."""
    define_config_flag(values)
    flags.DEFINE_string(
        "biases_from", None, "For a params.pkl: model folder to take the q, k and v biases from.", flag_values=values
    )
    flags.DEFINE_bool(
        "zero_biases",
        False,
        "For a params.pkl: set the missing q, k and v biases to zero. The model's output will be wrong.",
        flag_values=values,
    )


def define_config_flag(values: flags.FlagValues) -> None:
    """Define the flag that names the configuration for a params.pkl."""
    flags.DEFINE_string(
        "config",
        None,
        "For a params.pkl: the model's config.json or its folder. convert also copies the folder's other files.",
        flag_values=values,
    )


def inspect_pickle(path: Path, values: flags.FlagValues) -> None:
    """Print the contents of a legacy params.pkl. It is indexed: nothing in it is executed, and no array is read.

    Raises:
      InputError: the file is not a legacy params.pkl, or its arrays are not those of the model in ``--config``.
    """
    with LegacyPickle(path) as pickle:
        arrays = list(pickle.tensors.values())
    layout = None
    if values.config:
        folder = config_folder(values.config)
        layout = layout_of(folder)
        with ExitStack() as stack:
            check_tensors(folder, layout.leaves, open_legacy(path, layout, stack, zero_biases=True))
    print(f"{path}: legacy pickle, indexed without being unpickled")
    if layout is not None:
        print_architecture(layout)
    print_tensors([(one.path, one.dtype, one.shape, one.nbytes) for one in arrays], "none; a conversion makes them")
    if not any(one.path.endswith("/bias") for one in arrays):
        print("biases        none: the q, k and v biases were lost; diffumesh convert takes them from another folder")
    if layout is not None:
        print_meshes(layout, {one.dtype for one in arrays}, values.device_memory)
    else:
        print("meshes        unknown; --config=FOLDER/config.json lists the possible sizes of the tensor axis")
    if values.tensors:
        print_names([(one.path, one.dtype, one.shape) for one in arrays])
