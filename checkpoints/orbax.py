"""Tensors of a canonical checkpoint: an Orbax folder with a leaf per tensor of the source, unpadded and mesh-free.

Tensors are written and read through TensorStore a block at a time, so that neither holds the model in memory. The
folder is what Orbax itself writes for a tree of arrays, and Orbax reads it: a Zarr array for each tensor in an OCDBT
database. Each process that writes has a database of its own, in a folder beside the others'; in the end one process
makes the database of all, which refers to their data (https://orbax.readthedocs.io, "Checkpoint format").
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import tensorstore

from checkpoints.errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError
from checkpoints.folder import CheckpointFolder
from checkpoints.manifest import Manifest
from checkpoints.source import BytesRead, Index, StoredTensor, StoredTensors
from checkpoints.storage import Storage, first_line, storage_context

# Gives the model's name of a stored tensor, None for one that is no weight.
TensorName = Callable[[str], str | None]

# The name that Orbax gives to a tree that is saved by itself.
_TREE = "state"
# Storage chunks are chunks of the digests, cut further into rows: a shard's slice reads little besides itself, and no
# chunk is too large to be read fast.
_STORAGE_CHUNK_BYTES = 8 << 20
# What may be on its way to the disk, beyond the block at hand.
_BYTES_IN_FLIGHT = 256 << 20
# OCDBT as Orbax configures it: tensor metadata inline, a single manifest, one writer.
_DATABASE = {
    "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"},
    "assume_config": True,
    "target_data_file_size": 128 << 20,
}
_HANDLER = (
    "orbax.checkpoint.experimental.v1._src.handlers.stateful_checkpointable_handler.StatefulCheckpointableHandler"
)


def storage_chunk(digest_chunk: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The chunks in which a tensor is stored: those of its digests, cut into equal rows of bounded size."""
    rows = digest_chunk[0]
    fewest = min(rows, -(-math.prod(digest_chunk) * itemsize // _STORAGE_CHUNK_BYTES))
    equal = next((parts for parts in range(fewest, 4 * fewest) if rows % parts == 0), fewest)
    return (-(-rows // equal), *digest_chunk[1:])


def _database(storage: Storage) -> Any:
    return tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": storage.spec, **_DATABASE}, context=storage_context()
    ).result()


class TensorWriter:
    """Writes the tensors of one process, a block at a time: ``with TensorWriter(weights, process) as writer:``.

    What has been written is on the disk when the ``with`` ends; where it ends with an error, nothing is under way.

    Attributes:
      folder: what this process writes into, within the folder of the tensors.

    Raises:
      CheckpointError: something cannot be written.
    """

    def __init__(self, weights: Storage, process: int) -> None:
        """Take the folder of the tensors, and the index of this process."""
        self.folder = f"{_TREE}/ocdbt.process_{process}"
        self._part = weights.child(self.folder)
        self._pending: deque[tuple[Any, int]] = deque()
        self._in_flight = 0

    def create(self, tensors: dict[str, tuple[tuple[int, ...], str, tuple[int, ...]]]) -> dict[str, Any]:
        """Make tensors, to be filled by :meth:`write`, of given shape, dtype and storage chunk by name."""
        opening = {name: self._create(name, *described) for name, described in tensors.items()}
        for future in opening.values():
            future.exception()  # waits: none is under way when one has failed
        return {name: self._wait(future) for name, future in opening.items()}

    def _create(self, name: str, shape: tuple[int, ...], dtype: str, chunk: tuple[int, ...]) -> Any:
        return tensorstore.open(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "ocdbt", "base": self._part.spec, "path": f"{name}/", **_DATABASE},
                "store_data_equal_to_fill_value": True,
                "metadata": {
                    "shape": shape,
                    "data_type": dtype,
                    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
                    # Weights do not compress.
                    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
                },
            },
            create=True,
            context=storage_context(),
        )

    def write(self, tensor: Any, index: Index, data: np.ndarray) -> None:
        """Write a block of whole chunks; ``data`` must not change any more."""
        self._pending.append((tensor[index].write(data, can_reference_source_data_indefinitely=True), data.nbytes))
        self._in_flight += data.nbytes
        while self._in_flight > _BYTES_IN_FLIGHT:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        writing, count = self._pending.popleft()
        self._wait(writing)
        self._in_flight -= count

    def _wait(self, future: Any) -> Any:
        try:
            return future.result()
        except Exception as error:  # the library raises many kinds
            raise CheckpointError(f"{self._part.place}: cannot be written ({first_line(error)})") from error

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        while kind is None and self._pending:
            self._wait_for_one()
        for writing, _ in self._pending:
            writing.exception()  # waits


def finish_weights(weights: Storage, names: Iterable[str], processes: int) -> None:
    """Make one Orbax checkpoint of what each process has written.

    Args:
      weights: the folder of the tensors.
      names: of all tensors.
      processes: how many have written.

    Raises:
      CheckpointError: it cannot be written.
    """
    tree = weights.child(_TREE)
    try:
        whole, transaction = _database(tree), tensorstore.Transaction(atomic=True)
        copies = [
            _database(tree.child(f"ocdbt.process_{process}")).experimental_copy_range_to(
                whole.with_transaction(transaction)
            )
            for process in range(processes)
        ]
        for copy in copies:
            copy.result()
        transaction.commit_async().result()
    except Exception as error:  # the library raises many kinds
        raise CheckpointError(f"{tree.place}: cannot be written ({first_line(error)})") from error
    entries = {
        f"({name!r},)": {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for name in sorted(names)
    }
    tree.write(
        "_METADATA",
        _json(
            {
                "tree_metadata": entries,
                "use_ocdbt": True,
                "use_zarr3": True,
                "store_array_data_equal_to_fill_value": True,
                "custom_metadata": None,
            }
        ),
    )
    weights.write(
        "_CHECKPOINT_METADATA",
        _json({"item_handlers": {_TREE: _HANDLER}, "metrics": {}, "performance_metrics": {}, "custom_metadata": {}}),
    )
    weights.write("orbax.checkpoint", b"")
    weights.write("commit_success.txt", b"The weights are complete.\n")


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def open_arrays(folder: CheckpointFolder, manifest: Manifest | None, tensor_name: TensorName) -> StoredTensors:
    """Open the arrays of an Orbax checkpoint, by anybody's hand, without reading their data.

    Args:
      folder: the checkpoint.
      manifest: its manifest, which then says which tensors it has; without one Orbax's own description does.
      tensor_name: gives the model's name of a stored key, None for one that is no weight.

    Raises:
      IncompleteCheckpointError: there are no arrays of Orbax's.
      CorruptCheckpointError: a tensor is not there or cannot be opened.
      CheckpointError: Orbax cannot describe the checkpoint.
    """
    if manifest is None:
        return _open(folder, _stored_keys(folder, tensor_name))
    try:
        return _open(folder, {name: name for name in manifest.tensors})
    except CorruptCheckpointError:
        # The keys of a checkpoint that plain Orbax wrote may be other spellings of the names.
        keys = _stored_keys(folder, tensor_name)
        if keys.keys() != manifest.tensors.keys() or all(name == key for name, key in keys.items()):
            raise
        return _open(folder, keys)


def _stored_keys(folder: CheckpointFolder, tensor_name: TensorName) -> dict[str, str]:
    """The key of every tensor, by the model's name of it; keys of nested trees are joined with dots."""
    import jax
    from orbax.checkpoint import v1

    arrays = folder.arrays.place.removeprefix("file://")
    try:
        # What is saved by itself is described by the folder above it.
        place = arrays if v1.is_orbax_checkpoint(arrays) else arrays.rpartition("/")[0]
        leaves, _ = jax.tree_util.tree_flatten_with_path(v1.metadata(place).metadata)
    except Exception as error:  # the library raises many kinds
        raise IncompleteCheckpointError(f"{arrays}: not a whole Orbax checkpoint ({first_line(error)})") from error
    if not leaves:
        raise IncompleteCheckpointError(f"{arrays}: not a whole Orbax checkpoint: Orbax cannot describe its arrays")
    keys = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return {name: key for key in keys if (name := tensor_name(key)) is not None}


def _open(folder: CheckpointFolder, keys: dict[str, str]) -> StoredTensors:
    """Open arrays by the model's names of them and their keys."""
    arrays = folder.arrays
    database = arrays.read("manifest.ocdbt") is not None
    if not database and arrays.read("_METADATA") is None:
        raise IncompleteCheckpointError(f"{arrays.place}: not a whole Orbax checkpoint")
    found: dict[str, list[StoredTensor]] = {}
    count = BytesRead()
    opening = {name: _open_array(arrays, key, database) for name, key in keys.items()}
    for name, future in opening.items():
        try:
            array = future.result()
        except Exception as error:  # the library raises many kinds
            raise CorruptCheckpointError(
                f"{folder.place}: tensor {name:.200} cannot be opened ({first_line(error)})"
            ) from error
        chunk = tuple(array.chunk_layout.read_chunk.shape or ())  # none of a scalar
        reader = partial(_read, array, chunk, name, folder.place, count)
        rows = chunk[0] if chunk else 1
        found[name] = [StoredTensor(name, tuple(array.shape), array.dtype.name, reader, rows)]
    return StoredTensors(found, bytes_read=count)


def _open_array(arrays: Storage, key: str, database: bool) -> Any:
    store = {"driver": "ocdbt", "base": arrays.spec, "path": f"{key}/"} if database else arrays.child(key).spec
    # Zarr 3 of the new interface, Zarr 2 of the old.
    return tensorstore.open({"driver": "auto", "kvstore": store}, open=True, read=True, context=storage_context())


def _read(array: Any, chunk: tuple[int, ...], name: str, place: str, count: BytesRead, index: Index) -> np.ndarray:
    try:
        data = np.asarray(array[index].read().result())
    except Exception as error:  # the library raises many kinds
        raise CorruptCheckpointError(f"{place}: tensor {name} cannot be read ({first_line(error)})") from error
    # Chunks are read whole.
    touched = [
        min(-(-part.stop // step) * step, size) - part.start // step * step
        for part, step, size in zip(index, chunk, array.shape, strict=True)
    ]
    count.add(math.prod(touched) * data.itemsize)
    return data
