"""A legacy pickle (weights of an earlier Flax port of Dream) with the configuration and biases that it lacks.

The configuration is that of a model folder. The q, k and v biases are from such a folder too, or are zeros.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from checkpoints.downloads import open_folder
from checkpoints.errors import CheckpointError
from checkpoints.fingerprint import file_fingerprint, folder_fingerprint
from checkpoints.folder import CheckpointFolder
from checkpoints.legacy.tensors import open_legacy
from checkpoints.source import StoredTensors
from runtime.models.declarations import ModelLayout

# Endings of the names of legacy pickles.
ENDINGS = (".pkl", ".pickle")


def legacy_path(name: str | None) -> Path | None:
    """Return the path of a legacy pickle; None if ``name`` has another ending than legacy pickles.

    Raises:
      CheckpointError: there is no such file.
    """
    if not name or not name.endswith(ENDINGS):
        return None
    try:
        found = Path(name).expanduser()
        if found.is_file():
            return found
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{name}: {error}") from error
    raise CheckpointError(f"{name}: no such file")


def config_folder(path: str | None) -> CheckpointFolder:
    """Open the folder that has the configuration for a legacy pickle.

    Args:
      path: the folder, or the ``config.json`` in it.

    Raises:
      CheckpointError: there is no path, no such folder or file, or the file is not called ``config.json``.
    """
    if not path:
        raise CheckpointError("--config is missing: name the folder of a model")
    try:
        found = Path(path).expanduser()
        if found.is_dir():
            return open_folder(found)
        if found.name == "config.json" and found.is_file():
            return open_folder(found.parent)
    except (OSError, RuntimeError) as error:  # a name that no file can have, or an unknown user
        raise CheckpointError(f"--config={path}: {error}") from error
    raise CheckpointError(f"--config={path}: expected an existing folder, or a file with the name config.json")


@dataclass(frozen=True)
class LegacySource:
    """A legacy pickle with a configuration.

    Attributes:
      path: the pickle.
      folder: the folder with its configuration. Tokenizer and licence are taken from this folder too.
      biases_from: a folder of the same model to take the q, k and v biases from.
      zero_biases: whether the biases are set to zero instead.
    """

    path: Path
    folder: CheckpointFolder
    biases_from: CheckpointFolder | None
    zero_biases: bool

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the inputs ``config``, ``source`` and ``biases``, which hosts compare with one another."""
        found = {"config": folder_fingerprint(self.folder), "source": file_fingerprint(self.path)}
        if self.biases_from is not None:
            found["biases"] = folder_fingerprint(self.biases_from)
        return found

    @property
    def inputs(self) -> list[CheckpointFolder | Path]:
        """The file and the folder that tensors are read from."""
        return [self.path] if self.biases_from is None else [self.path, self.biases_from]

    def open(self, layout: ModelLayout, stack: ExitStack) -> StoredTensors:
        """Open the pickle's tensors; ``stack`` closes the file.

        Raises:
          CheckpointError: the file is not a legacy pickle, or its biases are missing and nothing replaces them.
        """
        return open_legacy(self.path, layout, stack, biases_from=self.biases_from, zero_biases=self.zero_biases)


def find_legacy(
    name: str | None, *, config: str | None, biases_from: str | None, zero_biases: bool, offline: bool = False
) -> LegacySource | None:
    """Open the source if it is a legacy pickle; None otherwise.

    Args:
      name: the source of the conversion: a path, URL or Hub name.
      config: the folder of its configuration, or the ``config.json`` in it.
      biases_from: the folder of a model to take biases from.
      zero_biases: whether biases are set to zero instead.
      offline: whether ``biases_from`` is not looked for on the Hugging Face Hub.

    Raises:
      CheckpointError: there is no such file or folder, or the flags cannot be combined.
    """
    path = legacy_path(name)
    if path is None:
        if config or biases_from or zero_biases:
            raise CheckpointError("--config, --biases_from and --zero_biases require a params.pkl as --source")
        return None
    if biases_from and zero_biases:
        raise CheckpointError("--biases_from and --zero_biases cannot be combined")
    donor = open_folder(biases_from, offline=offline) if biases_from else None
    return LegacySource(path, config_folder(config), donor, zero_biases)
