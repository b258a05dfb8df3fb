"""Reads and writes the arrays of an Orbax checkpoint with TensorStore, on a disk or in an object store.

Orbax restores whole trees onto shardings. Loading here reads parts of arrays on the host, in whole chunks of those that
have digests (:mod:`checkpoints.manifest`). So it opens the arrays with TensorStore's own drivers for Zarr and for
OCDBT, the database that contains them.

Orbax itself writes most checkpoints on a disk (:mod:`checkpoints.orbax`). In two cases its public interface is not
enough, and this module writes the arrays; Orbax's description of them is added afterwards.
``tests/checkpoints/test_orbax_limits.py`` shows both limits with the installed version.

* Object stores. ``partial.finalize`` renames files, which an object store cannot do. Here each process writes its own
  database in its final place, and in the end one process writes the database that refers to all of them.
* Digest chunks into which a dimension does not divide evenly, and arrays on a single device. Orbax cuts an array into
  equal chunks, along the dimension that is sharded over devices, or else along the largest one. A vocabulary of 50257
  would be one chunk, and each host would read all of it. ``StorageOptions.shard_axes`` does not help: it cuts the array
  into single rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import tensorstore

from checkpoints.errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError
from checkpoints.folder import CheckpointFolder
from checkpoints.source import BytesRead, Index, StoredTensor, StoredTensors
from checkpoints.storage import Storage, first_line, storage_context

# A chunk that has a digest is stored as smaller chunks of whole rows, of at most about this size, because large chunks
# are slower to read.
_STORAGE_CHUNK_BYTES = 8 << 20
# Limit on the bytes that wait to be written, besides the current part.
_BYTES_IN_FLIGHT = 256 << 20
# OCDBT configured as Orbax does it: metadata of arrays inline, a single manifest, one writer.
_DATABASE = {
    "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"},
    "assume_config": True,
    "target_data_file_size": 128 << 20,
}


def storage_chunk(digest_chunk: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the shape of stored chunks: a digest chunk, split into pieces of equally many rows and bounded size."""
    rows = digest_chunk[0]
    fewest = min(rows, -(-math.prod(digest_chunk) * itemsize // _STORAGE_CHUNK_BYTES))
    equal = next((parts for parts in range(fewest, 4 * fewest) if rows % parts == 0), fewest)
    return (-(-rows // equal), *digest_chunk[1:])


def _database(storage: Storage) -> Any:
    return tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": storage.spec, **_DATABASE}, context=storage_context()
    ).result()


class ArrayWriter:
    """Writes the arrays of one process, part by part: ``with ArrayWriter(arrays, process) as writer:``.

    All parts are stored when the ``with`` block ends. If it ends with an error, no write is left running.

    Raises:
      CheckpointError: an array cannot be written.
    """

    def __init__(self, arrays: Storage, process: int) -> None:
        """Write into the folder ``arrays``, as the process of this index."""
        self._part = arrays.child(f"ocdbt.process_{process}")
        self._pending: deque[tuple[Any, int]] = deque()
        self._in_flight = 0

    def create(self, tensors: dict[str, tuple[tuple[int, ...], str, tuple[int, ...]]]) -> dict[str, Any]:
        """Create arrays for :meth:`write`, given their shape, dtype and chunk shape by name; return them by name."""
        opening = {name: self._create(name, *described) for name, described in tensors.items()}
        for future in opening.values():
            future.exception()  # waits, so that no request is left running if one has failed
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
        """Start writing a part of an array that consists of whole chunks. ``data`` must never change afterwards."""
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
        except Exception as error:  # the library raises many exception types
            raise CheckpointError(f"{self._part.place}: cannot be written ({first_line(error)})") from error

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            while kind is None and self._pending:
                self._wait_for_one()
        finally:
            for writing, _ in self._pending:
                writing.exception()  # waits


def merge_databases(arrays: Storage, processes: int) -> None:
    """Write the OCDBT database of all arrays, which refers to the data in the databases that the processes wrote.

    Args:
      arrays: the folder of the arrays.
      processes: number of processes that wrote.

    Raises:
      CheckpointError: it cannot be written.
    """
    try:
        whole, transaction = _database(arrays), tensorstore.Transaction(atomic=True)
        copies = [
            _database(arrays.child(f"ocdbt.process_{process}")).experimental_copy_range_to(
                whole.with_transaction(transaction)
            )
            for process in range(processes)
        ]
        for copy in copies:
            copy.result()
        transaction.commit_async().result()
    except Exception as error:  # the library raises many exception types
        raise CheckpointError(f"{arrays.place}: cannot be written ({first_line(error)})") from error


def open_arrays(folder: CheckpointFolder, keys: Mapping[str, str]) -> StoredTensors:
    """Open arrays of an Orbax checkpoint, without reading their data.

    Args:
      folder: the checkpoint.
      keys: Orbax's key of each array, by the model's name for it.

    Raises:
      IncompleteCheckpointError: the folder has no Orbax arrays.
      CorruptCheckpointError: an array is not there or cannot be opened.
    """
    arrays = folder.arrays
    database = arrays.read("manifest.ocdbt") is not None
    if not database and arrays.read("_METADATA") is None:
        raise IncompleteCheckpointError(f"{arrays.place}: incomplete or damaged Orbax checkpoint")
    found: dict[str, list[StoredTensor]] = {}
    count = BytesRead()
    opening = {name: _open_array(arrays, key, database) for name, key in keys.items()}
    for name, future in opening.items():
        try:
            array = future.result()
        except Exception as error:  # the library raises many exception types
            raise CorruptCheckpointError(
                f"{folder.place}: tensor {name:.200} cannot be opened ({first_line(error)})"
            ) from error
        chunk = tuple(array.chunk_layout.read_chunk.shape or ())  # a scalar has no chunks
        reader = partial(_read, array, chunk, name, folder.place, count)
        rows = chunk[0] if chunk else 1
        found[name] = [StoredTensor(name, tuple(array.shape), array.dtype.name, reader, rows)]
    return StoredTensors(found, bytes_read=count)


def _open_array(arrays: Storage, key: str, database: bool) -> Any:
    store = {"driver": "ocdbt", "base": arrays.spec, "path": f"{key}/"} if database else arrays.child(key).spec
    # Orbax's interface v1 writes Zarr 3, v0 writes Zarr 2.
    return tensorstore.open({"driver": "auto", "kvstore": store}, open=True, read=True, context=storage_context())


def _read(array: Any, chunk: tuple[int, ...], name: str, place: str, count: BytesRead, index: Index) -> np.ndarray:
    try:
        data = np.asarray(array[index].read().result())
    except Exception as error:  # the library raises many exception types
        raise CorruptCheckpointError(f"{place}: tensor {name} cannot be read ({first_line(error)})") from error
    # Chunks are read whole.
    touched = [
        min(-(-part.stop // step) * step, size) - part.start // step * step
        for part, step, size in zip(index, chunk, array.shape, strict=True)
    ]
    count.add(math.prod(touched) * data.itemsize)
    return data
