"""Orbax's public interface: save arrays in groups, finish the checkpoint, and describe what is stored.

A conversion saves groups of tensors with ``partial.save`` and ends with ``partial.finalize``: no more than a group is
in memory. Each tensor is an array over the devices of all processes, so each process writes its own shards. The arrays
are unpadded, one for each tensor of the source (https://orbax.readthedocs.io, "Partial saving").
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from checkpoints.errors import CheckpointError, IncompleteCheckpointError
from checkpoints.folder import CheckpointFolder
from checkpoints.storage import first_line

# The name that Orbax gives to a tree that is saved by itself.
TREE = "state"
# Larger files hold no chunk that is read alone, smaller ones are many.
_DATA_FILE_BYTES = 128 << 20
# What Orbax writes for the arrays' data; the other files describe the arrays.
_DATA_FOLDERS = ("d", "ocdbt.process_0")
_DATABASE_FILE = "manifest.ocdbt"


def _key(path: Any) -> str:
    """The key of a leaf: keys of nested trees are joined with dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _context(chunk_bytes: Mapping[str, int]) -> Any:
    """Orbax's options: uncompressed bytes in chunks of given sizes."""
    from orbax.checkpoint import v1

    def storage(path: Any, value: Any) -> Any:
        return v1.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=chunk_bytes.get(_key(path)))

    context = v1.Context()
    saving = context.array.saving
    saving.scoped_storage_options_creator = storage
    saving.ocdbt_target_data_file_size = _DATA_FILE_BYTES
    saving.use_compression = False  # weights do not compress
    saving.use_replica_parallel = False
    saving.array_metadata_store = None
    context.memory.deepcopy_host_arrays = False
    return context


def save_group(place: Path, arrays: Mapping[str, jax.Array], chunk_bytes: Mapping[str, int]) -> None:
    """Save a group of arrays into a checkpoint that :func:`finalize` completes. All processes call it alike.

    Args:
      place: where the checkpoint will be; there is nothing yet.
      arrays: by name, each over the devices of all processes. Replicas are equal, and the first one is stored.
      chunk_bytes: size of the chunks of an array, by name; an array without one is a chunk for each shard.

    Raises:
      CheckpointError: it cannot be written.
    """
    from orbax.checkpoint import v1

    logger = logging.getLogger("absl")
    logger.addFilter(_is_worth_saying)
    try:
        with _context(chunk_bytes):
            v1.partial.save(place, dict(arrays))
    except Exception as error:  # the library raises many kinds
        raise CheckpointError(f"{place}: cannot be written ({first_line(error)})") from error
    finally:
        logger.removeFilter(_is_worth_saying)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """Leave out Orbax's warning that chunks are below a megabyte: one head is, and is read alone."""
    return "target_byte_size too small" not in record.getMessage()


def finalize(place: Path) -> None:
    """Complete a checkpoint of saved groups. All processes call it alike.

    Raises:
      CheckpointError: it cannot be written.
    """
    from orbax.checkpoint import v1

    try:
        with _context({}):
            v1.partial.finalize(place)
    except Exception as error:  # the library raises many kinds
        raise CheckpointError(f"{place}: cannot be written ({first_line(error)})") from error


def descriptions(names: Iterable[str]) -> dict[str, bytes]:
    """The files by which Orbax describes a checkpoint of arrays of these names, as Orbax writes them.

    Orbax saves a tree of small arrays, and the files that hold their data are left out: shapes and dtypes are stored
    with the arrays themselves.

    Returns:
      Bytes by path within the checkpoint.

    Raises:
      CheckpointError: they cannot be made.
    """
    with tempfile.TemporaryDirectory(prefix="diffumesh-") as folder:
        place = Path(folder, "checkpoint")
        if jax.process_count() == 1:
            _save_names(place, list(names))
        else:
            # A save is a joint act of all processes, and this is one process's own: another one makes it, alone.
            made = subprocess.run(
                [sys.executable, "-m", "checkpoints.orbax", str(place)],
                input="\n".join(names),
                text=True,
                capture_output=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
                check=False,
            )
            if made.returncode:
                raise CheckpointError(f"Orbax cannot describe the checkpoint: {made.stderr.strip()[-500:]}")
        return {
            path.relative_to(place).as_posix(): path.read_bytes()
            for path in sorted(place.rglob("*"))
            if path.is_file() and path.name != _DATABASE_FILE and path.parent.name not in _DATA_FOLDERS
        }


def _save_names(place: Path, names: list[str]) -> None:
    import numpy as np
    from orbax.checkpoint import v1

    try:
        with _context({}):
            v1.save(place, dict.fromkeys(names, np.zeros(1, np.int8)))
    except Exception as error:  # the library raises many kinds
        raise CheckpointError(f"Orbax cannot describe the checkpoint ({first_line(error)})") from error


def stored_keys(folder: CheckpointFolder, tensor_name: Callable[[str], str | None]) -> dict[str, str]:
    """The keys of a checkpoint's arrays, by the model's names of them, as Orbax describes them.

    Args:
      folder: the checkpoint.
      tensor_name: gives the model's name of a key, None for one that is no weight.

    Raises:
      IncompleteCheckpointError: Orbax cannot describe it.
    """
    from orbax.checkpoint import v1

    arrays = folder.arrays.place.removeprefix("file://")
    try:
        # The folder above the arrays describes them, unless the old interface has saved them.
        place = arrays if v1.is_orbax_checkpoint(arrays) else arrays.rpartition("/")[0]
        leaves, _ = jax.tree_util.tree_flatten_with_path(v1.metadata(place).metadata)
    except Exception as error:  # the library raises many kinds
        raise IncompleteCheckpointError(f"{arrays}: not a whole Orbax checkpoint ({first_line(error)})") from error
    if not leaves:
        raise IncompleteCheckpointError(f"{arrays}: not a whole Orbax checkpoint: Orbax cannot describe its arrays")
    keys = [_key(path) for path, _ in leaves]
    return {name: key for key in keys if (name := tensor_name(key)) is not None}


if __name__ == "__main__":
    _save_names(Path(sys.argv[1]), sys.stdin.read().split("\n"))
