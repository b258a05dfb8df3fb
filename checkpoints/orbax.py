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
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import tensorstore

from checkpoints.errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError
from checkpoints.folder import CheckpointFolder
from checkpoints.manifest import Manifest
from checkpoints.source import BytesRead, Index, StoredTensor, StoredTensors
from checkpoints.storage import Storage, first_line, storage_context

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


def open_canonical(folder: CheckpointFolder, manifest: Manifest) -> StoredTensors:
    """Open the tensors that the manifest lists.

    Raises:
      IncompleteCheckpointError: there is no database of tensors.
      CorruptCheckpointError: a tensor is not there or is not what the manifest says.
    """
    tree = folder.weights.child(_TREE)
    if tree.read("manifest.ocdbt") is None:
        raise IncompleteCheckpointError(f"{folder.weights.place}: not a whole Orbax checkpoint")
    found: dict[str, list[StoredTensor]] = {}
    count = BytesRead()
    opening = {name: _open(tree, name) for name in manifest.tensors}
    for name, entry in manifest.tensors.items():
        try:
            array = opening[name].result()
        except Exception as error:  # the library raises many kinds
            raise CorruptCheckpointError(
                f"{folder.place}: tensor {name:.200} cannot be opened ({first_line(error)})"
            ) from error
        shape, dtype = tuple(array.shape), array.dtype.name
        if (shape, dtype) != (entry.shape, entry.dtype):
            raise CorruptCheckpointError(
                f"{folder.place}: tensor {name:.200} is {dtype} {list(shape)}; the manifest has {entry.dtype} "
                f"{list(entry.shape)}"
            )
        chunk = tuple(array.chunk_layout.read_chunk.shape)
        reader = partial(_read, array, chunk, name, folder.place, count)
        found[name] = [StoredTensor(name, shape, dtype, reader, chunk[0])]
    return StoredTensors(found, bytes_read=count)


def _open(tree: Storage, name: str) -> Any:
    spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": tree.spec, "path": f"{name}/"}}
    return tensorstore.open(spec, open=True, read=True, context=storage_context())


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
