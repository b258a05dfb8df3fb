"""Uses Orbax's public interface to save arrays in groups, to complete the checkpoint, and to list stored arrays.

A conversion saves groups of tensors with ``partial.save`` and ends with ``partial.finalize``, so its memory does not
grow with the checkpoint (:func:`checkpoints.conversion.convert` has the numbers). Each tensor is an array over the
devices of all processes, so each process writes its own shards. The arrays are unpadded, one for each tensor of the
source (https://orbax.readthedocs.io, "Partial saving").
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import jax

from checkpoints.errors import CheckpointError, IncompleteCheckpointError, MismatchedCheckpointError
from checkpoints.folder import MAX_SIDE_FILE_BYTES, TREE_FILE, CheckpointFolder
from checkpoints.source import read_ahead
from checkpoints.storage import first_line

# The name that Orbax gives to a tree that is saved by itself.
TREE = "state"
# Target size of Orbax's data files: smaller ones would be too many.
_DATA_FILE_BYTES = 128 << 20
# What Orbax writes for the arrays' data; the other files describe the arrays.
_DATA_FOLDERS = ("d", "ocdbt.process_0")
_DATABASE_FILE = "manifest.ocdbt"
# Descriptions of single arrays, each in a folder of the array if there is no database.
ARRAY_FILES = ("zarr.json", ".zarray")
# A description that only Orbax's new interface writes.
NEW_INTERFACE_FILE = "_CHECKPOINT_METADATA"
# What Orbax and TensorStore read whole to open the arrays.
_DESCRIPTIONS = (
    *(_DATABASE_FILE, *ARRAY_FILES, ".zattrs", ".zgroup", "_strings.json"),
    *(TREE_FILE, "_sharding", NEW_INTERFACE_FILE, "_ROOT_METADATA", "metadata", "commit_success.txt"),
)
_DESCRIPTION_FOLDERS = ("array_metadatas", "custom_metadata", "descriptor", "metadata")
# Marks a folder that Orbax saved.
_INDICATOR = "orbax.checkpoint"
# A file in which old versions keep small values, and one that TensorStore has not finished to write.
_OTHER_FILES = ("checkpoint", f"{_DATABASE_FILE}.__lock")
# Parts of the names of folders that Orbax has not finished to write.
_UNFINISHED = (".orbax-checkpoint-tmp", ".partial_save")
# Number of files whose sizes are checked at the same time, because an object store answers slowly.
_READERS = 8


def _key(path: Any) -> str:
    """Return the name of a leaf of a pytree, given JAX's key path: the keys of nested trees joined with dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _context(chunk_bytes: Mapping[str, int]) -> Any:
    """Return Orbax's options: uncompressed bytes, in chunks of given sizes."""
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
    """Save a group of arrays into a checkpoint that :func:`finalize` completes. All processes make the same call.

    Args:
      place: absolute path of the checkpoint; it does not exist yet.
      arrays: arrays by name, each over the devices of all processes. The first replica of each shard is stored.
      chunk_bytes: size of the chunks of an array, in bytes, by name; without a size, each shard is one chunk.

    Raises:
      CheckpointError: it cannot be written.
    """
    from orbax.checkpoint import v1

    with _writing(place, chunk_bytes):
        v1.partial.save(place, dict(arrays))


@contextlib.contextmanager
def _writing(place: Path, chunk_bytes: Mapping[str, int]) -> Iterator[None]:
    """Use Orbax's options; an error is a CheckpointError, without the traceback that Orbax also logs."""
    logger, failures = logging.getLogger("absl"), list[logging.LogRecord]()

    def is_useful(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR and record.exc_info:
            failures.append(record)
            return False
        # Chunks are small on purpose: a device can then read its attention heads without reading those of others.
        return "target_byte_size too small" not in record.getMessage()

    logger.addFilter(is_useful)
    try:
        with _context(chunk_bytes):
            yield
    except Exception as error:  # the library raises many exception types
        raise CheckpointError(f"{place}: cannot be written ({first_line(error)})") from error
    finally:
        logger.removeFilter(is_useful)
    for record in failures:  # nothing was raised
        logger.handle(record)


def finalize(place: Path) -> None:
    """Complete a checkpoint of saved groups. All processes make the same call.

    Raises:
      CheckpointError: it cannot be written.
    """
    from orbax.checkpoint import v1

    with _writing(place, {}):
        v1.partial.finalize(place)


def descriptions(names: Iterable[str]) -> dict[str, bytes]:
    """Make Orbax's description of a checkpoint of arrays with these names.

    Orbax saves a tree of tiny arrays, and the files of their data are left out. The description does not contain shapes
    and dtypes, which are stored with the arrays.

    Returns:
      The bytes of each file, by path in the checkpoint.

    Raises:
      CheckpointError: they cannot be made.
    """
    with tempfile.TemporaryDirectory(prefix="diffumesh-") as folder:
        place = Path(folder, "checkpoint")
        if jax.process_count() == 1:
            _save_names(place, list(names))
        else:
            # In a run of several processes, Orbax would wait for all of them, so a separate process saves the tree.
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
    except Exception as error:  # the library raises many exception types
        raise CheckpointError(f"Orbax cannot describe the checkpoint ({first_line(error)})") from error


def is_orbax_file(name: str, names: Set[str], arrays: str) -> bool:
    """Return whether Orbax may have written a file of a folder, given all of its files and the folder of its arrays."""
    above = arrays.rpartition("/")[0]
    inside, above = f"{arrays}/".lstrip("/"), f"{above}/".lstrip("/")
    if not name.startswith(inside):
        # The new interface describes a tree in the folder above its arrays, the old one only in that of the arrays.
        if not name.startswith(above) or f"{above}{NEW_INTERFACE_FILE}" not in names:
            return False
        top, _, rest = name.removeprefix(above).partition("/")
        return top in _DESCRIPTION_FOLDERS and above != "" if rest else _describes(top)
    top, _, rest = name.removeprefix(inside).partition("/")
    if not rest:
        # Below a folder of its user, the names that only some versions use are Orbax's too.
        return _describes(top) or (inside != "" and top in _OTHER_FILES)
    # Without a database, each array is a folder.
    return (
        top in _DESCRIPTION_FOLDERS
        or top == _DATA_FOLDERS[0]
        or top.startswith("ocdbt.process_")
        or any(f"{inside}{top}/{file}" in names for file in ARRAY_FILES)
    )


def is_unfinished(name: str) -> bool:
    """Return whether a file, given its path, is in a folder that Orbax had not finished to write when it ended."""
    return any(part in name.rpartition("/")[0] for part in _UNFINISHED)


def _describes(file: str) -> bool:
    return file in _DESCRIPTIONS or file == _INDICATOR


def check_weight_files(folder: CheckpointFolder) -> None:
    """Check that the weights are files of this folder, and that their descriptions are small enough to be read whole.

    Raises:
      CheckpointError: a description is too large, or a file of the weights is a link out of the folder.
    """
    names = folder.names()
    if folder.remote is None:
        for name in names:
            # A link to a folder is one entry, which may be the folder of the weights itself.
            if folder.is_weight_file(f"{name}/"):
                folder.check_file(name)
    paths = map(PurePosixPath, names)
    found = [str(path) for path in paths if path.name in _DESCRIPTIONS or path.parent.name in _DESCRIPTION_FOLDERS]
    checks = (partial(folder.storage.check_size, name, MAX_SIDE_FILE_BYTES) for name in found)
    for _ in read_ahead(checks, _READERS):
        pass


def stored_keys(folder: CheckpointFolder, tensor_name: Callable[[str], str | None]) -> dict[str, str]:
    """Return the Orbax key of each weight, by the model's name for it, as Orbax's description lists them.

    Args:
      folder: the checkpoint.
      tensor_name: returns the model's name for a key, or None if the key is not a weight.

    Raises:
      IncompleteCheckpointError: Orbax cannot describe the checkpoint.
      MismatchedCheckpointError: two keys have the same name.
    """
    from orbax.checkpoint import v1

    arrays = folder.arrays.place.removeprefix("file://")
    if "://" not in arrays:
        arrays = os.path.abspath(arrays)  # Orbax requires an absolute path
    try:
        # The parent folder has the description, unless the old interface saved the arrays.
        place = arrays if v1.is_orbax_checkpoint(arrays) else arrays.rpartition("/")[0]
        leaves, _ = jax.tree_util.tree_flatten_with_path(v1.metadata(place).metadata)
    except Exception as error:  # the library raises many exception types
        raise IncompleteCheckpointError(
            f"{arrays}: incomplete or damaged Orbax checkpoint ({first_line(error)})"
        ) from error
    if not leaves:
        raise IncompleteCheckpointError(
            f"{arrays}: incomplete or damaged Orbax checkpoint: Orbax cannot describe its arrays"
        )
    found: dict[str, str] = {}
    for key in (_key(path) for path, _ in leaves):
        name = tensor_name(key)
        if name is not None and found.setdefault(name, key) != key:
            raise MismatchedCheckpointError(f"{arrays}: {found[name]:.200} and {key:.200} are both {name}")
    return found


if __name__ == "__main__":
    _save_names(Path(sys.argv[1]), sys.stdin.read().split("\n"))
