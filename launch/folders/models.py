"""The model folder that a flag names, and the adapter that is merged into it."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from absl import flags

from checkpoints import CheckpointFolder, open_folder
from launch.process.startup import progress_bar, say
from runtime import InputError, ModelLayout, model_layout, parse_config


def define_lora_flag(values: flags.FlagValues) -> None:
    """Define ``--lora``, for commands that can merge an adapter into the weights of a model."""
    flags.DEFINE_string(
        "lora", None, "LoRA adapter in PEFT's layout to merge: folder, URL or Hub name.", flag_values=values
    )


def read_lora(values: flags.FlagValues) -> str | None:
    """Return the value of ``--lora``, an option of :func:`checkpoints.open_folder`; None without an adapter.

    Raises:
      InputError: it is empty, for example because a shell variable is not set.
    """
    if values.lora is not None and not values.lora:
        raise InputError("--lora is empty: name the folder of an adapter, or leave the flag out")
    lora: str | None = values.lora
    return lora


def open_named(place: str, **options: Any) -> CheckpointFolder:
    """Open a checkpoint with :func:`checkpoints.open_folder`, and print progress, because it may be downloaded.

    On a terminal, the Hub's library shows bars of its own.
    """
    own_bars = sys.stderr.isatty() and "://" not in place
    with contextlib.nullcontext() if own_bars else progress_bar(f"opening {place}"):
        return open_folder(place, **options)


def open_model(path: str | None, flag: str, **options: object) -> tuple[CheckpointFolder, ModelLayout]:
    """Open the model folder that a flag names.

    Args:
      path: the value of the flag.
      flag: its name, for messages.
      options: options for :func:`checkpoints.open_folder`.

    Returns:
      The folder, and the layout of its model without a mesh.

    Raises:
      InputError: the flag is missing, or the folder does not contain a supported model.
    """
    if not path:
        raise InputError(f"--{flag} is empty or missing: name a folder, a URL or a Hub name")
    folder = open_named(path, **options)
    return folder, layout_of(folder)


def layout_of(folder: CheckpointFolder) -> ModelLayout:
    """Lay out a folder's model without a mesh.

    Raises:
      InputError: the model is not supported.
    """
    return model_layout(parse_config(folder.config), quantization=folder.quantization)


def print_licence(folder: CheckpointFolder) -> None:
    """Print the first line of the weights' licence, if the folder has one."""
    for name in folder.side_files():
        if name.startswith("LICENSE"):
            lines = [line.strip() for line in folder.read_bytes(name).decode("utf-8", "replace").splitlines()]
            first = next((line for line in lines if line), "")
            say(f"the weights' licence, {name}: {first[:200]}")
