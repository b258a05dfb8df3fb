"""A legacy pickle with the configuration and biases that it lacks."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.fingerprint import file_fingerprint, folder_fingerprint
from checkpoints.folder import CheckpointFolder, open_folder
from checkpoints.legacy.tensors import open_legacy
from checkpoints.source import StoredTensors
from runtime.models.declarations import ModelLayout

# Endings of the names of legacy pickles.
ENDINGS = (".pkl", ".pickle")


def legacy_path(name: str | None) -> Path | None:
    """Return the path of a legacy pickle; None if ``name`` does not end like one.

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
    """Open the folder of a pickle's configuration, named by itself or by the config.json in it.

    Raises:
      CheckpointError: there is no such folder or file, or the file has another name.
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
      folder: the folder with its configuration; the files beside it are converted too.
      biases_from: a folder of the same model to take the q, k and v biases from.
      zero_biases: whether they are zeros instead.
    """

    path: Path
    folder: CheckpointFolder
    biases_from: CheckpointFolder | None
    zero_biases: bool

    @property
    def fingerprints(self) -> dict[str, str]:
        """Digests of the input files by kind, with which hosts check that they have the same files."""
        found = {"config": folder_fingerprint(self.folder), "source": file_fingerprint(self.path)}
        if self.biases_from is not None:
            found["biases"] = folder_fingerprint(self.biases_from)
        return found

    def open(self, layout: ModelLayout, stack: ExitStack) -> StoredTensors:
        """Open its tensors; ``stack`` closes the file.

        Raises:
          CheckpointError: the file is not such a pickle, or its biases are missing and nothing replaces them.
        """
        return open_legacy(self.path, layout, stack, biases_from=self.biases_from, zero_biases=self.zero_biases)


def find_legacy(
    name: str | None, *, config: str | None, biases_from: str | None, zero_biases: bool
) -> LegacySource | None:
    """Open the source if it is a legacy pickle; None otherwise.

    Args:
      name: the source of the conversion.
      config: the folder of its configuration, or the config.json in it.
      biases_from: the folder of a model to take biases from.
      zero_biases: whether biases are zeros instead.

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
    return LegacySource(path, config_folder(config), open_folder(biases_from) if biases_from else None, zero_biases)
