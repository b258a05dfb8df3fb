"""Any checkpoint to a canonical one, a few blocks of its tensors in memory at a time, by one process or several."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.file_list import FILES_FILE, StoredFile, dump_files, list_files, parse_files
from checkpoints.folder import QUANTIZATION_KEY, WEIGHTS_FOLDER, CheckpointFolder
from checkpoints.huggingface import INDEX_FILE
from checkpoints.loading import Progress, check_tensors, stored_leaves
from checkpoints.manifest import MANIFEST_FILE, Digester, Manifest, TensorEntry, chunk_shape, digest, grids
from checkpoints.non_finite import NonFinite
from checkpoints.opening import open_tensors
from checkpoints.orbax import TensorWriter, finish_weights, storage_chunk
from checkpoints.output import MARK_FILE, Output
from checkpoints.processes import Processes
from checkpoints.quantized import quantized_tensors
from checkpoints.source import DTYPES, Index, StoredTensors, read_ahead
from checkpoints.storage import Storage
from runtime.models.declarations import ModelLayout


def convert(
    source: CheckpointFolder,
    layout: ModelLayout,
    output: Output,
    *,
    tensors: StoredTensors | None = None,
    dtype: str | None = None,
    quantize: str = "none",
    progress: Progress | None = None,
    processes: Processes | None = None,
) -> None:
    """Make a canonical checkpoint; ``output.prepare`` comes first.

    Every process reads and writes its share of the tensors; the result does not depend on their number. Peak host
    memory is a small multiple of the largest tensor, or of a block where a tensor is larger. One process writes the
    manifest last, from everyone's digests, so that an interrupted conversion leaves nothing that could be taken for a
    checkpoint.

    Args:
      source: a folder, Hugging Face or canonical, that gives configuration, tokenizer and, by default, the tensors.
      layout: of its model; no mesh is needed.
      output: where, a place that every process sees.
      tensors: the tensors, where they are not the folder's own.
      dtype: ``bfloat16``, ``float32`` or ``float16``; None keeps the stored one.
      quantize: ``int8`` stores matrices as integers with a scale for each output channel; that cannot be undone.
      progress: called with (bytes digested, bytes to digest), of this process's share.
      processes: this one among those that convert together; default it alone.

    Raises:
      CheckpointError: the source is not whole, or not the model that its configuration describes; a tensor holds NaN
        or infinity, or would in ``dtype``; the output cannot be written; another process failed.
    """
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    everyone = processes or Processes()
    target = replace(layout, quantization=source.quantization if quantize == "none" else quantize)
    found = open_tensors(source) if tensors is None else tensors
    conversion = _Conversion(source, target, output, found, dtype, everyone)

    def begin() -> str:
        check_tensors(source, stored_leaves(source, layout), found)
        return conversion.begin(quantize)

    with closing(output):
        mark = everyone.agree(begin)[0]
        parts = everyone.agree(lambda: conversion.write(mark, progress))
        everyone.agree(lambda: conversion.finish(parts))


@dataclass(frozen=True)
class _Conversion:
    """The steps of one conversion. Every process takes each of them and hands on a text to all.

    Attributes:
      source: the folder that is converted.
      target: layout of the model as it is to be stored.
      output: where.
      tensors: what is converted.
      dtype: to store; None keeps the stored one.
      processes: this one among all that convert.
    """

    source: CheckpointFolder
    target: ModelLayout
    output: Output
    tensors: StoredTensors
    dtype: str | None
    processes: Processes

    def begin(self, quantize: str) -> str:
        """Check what is asked for and mark the output; the mark of process 0."""
        stored = self.source.quantization
        if stored != "none" and (self.dtype is not None or quantize not in ("none", stored)):
            raise CheckpointError(f"{self.source.place}: stored as {stored}; that can only be copied")
        if self.dtype is not None and quantize != "none":
            raise CheckpointError(
                f"dtype {self.dtype} and quantization {quantize} are two conversions; make one of them"
            )
        if not self.processes.is_first:
            return ""
        mark = secrets.token_hex(16)
        self.output.begin(mark)
        return mark

    def write(self, mark: str, progress: Progress | None) -> str:
        """Write this process's share of the tensors; their part of the manifest."""
        if self.output.storage.read(MARK_FILE) != mark.encode():
            raise CheckpointError(
                f"{self.output.place}: this process does not see what process 0 writes there; processes on several "
                "machines need a place that all of them see"
            )
        stored = self.tensors
        if self.source.quantization != self.target.quantization:
            stored = quantized_tensors(stored, self.target)
        names = self.processes.share({name: stored[name].bytes for name in stored.by_name})
        weights = self.output.storage.child(WEIGHTS_FOLDER)
        with TensorWriter(weights, self.processes.index) as writer:
            entries = _write_tensors(
                writer, stored, names, self.source.place, grids(self.target, 4), self.dtype, progress
            )
        own = weights.child(writer.folder)
        files = {
            f"{WEIGHTS_FOLDER}/{writer.folder}/{name}": file for name, file in list_files(own, own.names()).items()
        }
        return json.dumps([Manifest(entries, {}).dump(), dump_files(files)])

    def finish(self, parts: Sequence[str]) -> str:
        """On process 0: join the parts of the manifest, write the other files and, last, the manifest."""
        if not self.processes.is_first:
            return ""
        entries: dict[str, TensorEntry] = {}
        written: dict[str, StoredFile] = {}
        for part in parts:
            manifest, files = json.loads(part)
            entries |= Manifest.parse(manifest, self.output.place).tensors
            written |= parse_files(files, self.output.place)
        storage = self.output.storage
        finish_weights(storage.child(WEIGHTS_FOLDER), entries, self.processes.count)
        changes = _dtype_changes(self.source, self.dtype)
        if self.target.quantization != "none":
            changes[QUANTIZATION_KEY] = self.target.quantization
        own = [name for name in storage.names() if name.startswith(f"{WEIGHTS_FOLDER}/") and name not in written]
        storage.write(FILES_FILE, dump_files(written | list_files(storage, own)).encode())
        side_files = copy_side_files(self.source, storage, changes)
        storage.write(MANIFEST_FILE, Manifest(entries, side_files).dump().encode())
        self.output.finish()
        return ""


def _dtype_changes(source: CheckpointFolder, dtype: str | None) -> dict[str, str]:
    """Changes of the configuration where the dtype was changed: transformers calls it "dtype" since 4.56."""
    if dtype is None:
        return {}
    said = [key for key in ("torch_dtype", "dtype") if key in source.config]
    return dict.fromkeys(said or ["torch_dtype"], dtype)


def _write_tensors(
    writer: TensorWriter,
    found: StoredTensors,
    names: list[str],
    place: str,
    cuts: dict[str, tuple[int, ...]],
    dtype: str | None,
    progress: Progress | None,
) -> dict[str, TensorEntry]:
    """Write tensors, making their entries on the way. Reading, digesting and writing overlap."""

    wrong = NonFinite()

    def read(name: str, block: Index) -> np.ndarray:
        data = found[name].read(block)
        with np.errstate(over="ignore"):  # what becomes infinite is counted
            data = np.ascontiguousarray(data if dtype is None else data.astype(dtype, copy=False))
        wrong.count(name, data)
        return data

    described, blocks = {}, []
    for name in names:
        tensor, kept = found[name], dtype or found[name].dtype
        chunk = storage_chunk(chunk_shape(tensor.shape, cuts[name]), np.dtype(kept).itemsize)
        described[name] = (tensor.shape, kept, chunk)
        blocks += [(name, block) for block in tensor.blocks(chunk[0])]
    targets = writer.create(described)
    entries: dict[str, TensorEntry] = {}
    done, total = 0, sum(math.prod(found[name].shape) * np.dtype(dtype or found[name].dtype).itemsize for name in names)
    reads = (partial(read, name, block) for name, block in blocks)
    for (name, block), data in zip(blocks, read_ahead(reads), strict=True):
        shape, row = found[name].shape, block[0]
        if row.start == 0:
            digester = Digester(shape, str(data.dtype), cuts[name])
        writer.write(targets[name], block, data)
        digester.update(data)
        if row.stop == shape[0]:
            entries[name] = digester.entry
        done += data.nbytes
        del data
        if progress is not None:
            progress(done, total)
    wrong.check(place)
    return entries


def copy_side_files(source: CheckpointFolder, target: Storage, changes: Mapping[str, str]) -> dict[str, str]:
    """Copy configuration, tokenizer and licence, and say their digests. Changes are written into the config."""
    digests = {}
    for name in source.side_files():
        if name in (INDEX_FILE, MANIFEST_FILE, FILES_FILE):
            continue
        data = source.read_bytes(name)
        if name == "config.json" and changes:
            data = (json.dumps(source.config | dict(changes), indent=2) + "\n").encode()
        target.write(name, data)
        digests[name] = digest(data)
    return digests
