"""The model folder that a flag names."""

from __future__ import annotations

from checkpoints import CheckpointFolder, open_folder
from launch.process.startup import say
from runtime import InputError, ModelLayout, model_layout, parse_config


def open_model(path: str | None, flag: str, **options: object) -> tuple[CheckpointFolder, ModelLayout]:
    """Open the folder that a flag names.

    Args:
      path: the value of the flag.
      flag: its name, for messages.
      options: of :func:`checkpoints.open_folder`.

    Returns:
      The folder, and the layout of its model without a mesh.

    Raises:
      InputError: the flag is missing, or the folder is not a model's.
    """
    if not path:
        raise InputError(f"--{flag} is missing: name the folder of a model")
    folder = open_folder(path, **options)  # type: ignore[arg-type]
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
