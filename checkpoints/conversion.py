"""Converts a checkpoint of any format to a canonical one: an Orbax checkpoint with a manifest.

Tensors are converted a group at a time, in one process or several.
"""

from __future__ import annotations

import functools
import glob
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from checkpoints import orbax
from checkpoints.arrays import merge_databases
from checkpoints.errors import CheckpointError
from checkpoints.file_list import FILES_FILE, StoredFile, dump_files, list_files, parse_files
from checkpoints.folder import MARK_FILE, QUANTIZATION_KEY, TREE_FILE, WEIGHTS_FOLDER, CheckpointFolder
from checkpoints.huggingface import INDEX_FILE
from checkpoints.loading import Progress, check_tensors, check_tied_head, stored_leaves
from checkpoints.lora import merged_tensors, open_adapter
from checkpoints.manifest import MANIFEST_FILE, Manifest, TensorEntry, chunk_grid, digest
from checkpoints.non_finite import NonFinite
from checkpoints.opening import open_tensors
from checkpoints.output import FolderOutput, Output
from checkpoints.processes import Processes
from checkpoints.quantized import quantized_tensors
from checkpoints.source import DTYPES, StoredTensors
from checkpoints.storage import Storage
from checkpoints.writing import Cut, Sources, orbax_cuts, write_groups, write_parts
from runtime.models.declarations import ModelLayout
from runtime.models.families import find_family


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
    others: Sequence[CheckpointFolder | Path] = (),
) -> None:
    """Write a canonical checkpoint. Call ``output.prepare`` first.

    Every process reads and writes a share of the tensors; tensors and manifest do not depend on the number of
    processes. Process 0 writes the manifest last, so an interrupted conversion leaves nothing that could be taken for a
    checkpoint.

    Peak host memory does not grow with the checkpoint, but for the scales of a quantized one (int4: 1/32 of bfloat16).
    It is about four times a group of tensors (512 MB, see :mod:`checkpoints.writing`), or the largest tensor if that is
    larger: the group, the copies that Orbax writes, and the tensor that is read next. ``benchmarks.full_checkpoint``
    measured 4.5 GB resident for a checkpoint of 15.2 GB whose largest tensor has 1.1 GB.

    Args:
      source: a folder of any format, with configuration, tokenizer and, by default, the tensors. Its LoRA adapter, if
        it has one, is merged in float32, and the result has ``dtype``.
      layout: the layout of its model; it needs no mesh.
      output: where to write; all processes must see it.
      tensors: the tensors to convert; by default those of the folder.
      dtype: ``bfloat16``, ``float32`` or ``float16``; None keeps the stored one.
      quantize: ``int8`` stores matrices as integers with a scale per output channel, ``int4`` with one per group of
        weights; this cannot be undone.
      progress: called with (bytes done, bytes to do).
      processes: the processes that convert together; by default only this one.
      others: files and folders that ``tensors`` are read from, besides the source.

    Raises:
      CheckpointError: the source is incomplete, or does not match its configuration; a tensor contains NaN or infinity,
        or would contain one in ``dtype``; the output cannot be written; or another process failed.
    """
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    everyone = processes or Processes()
    target = replace(layout, quantization=source.quantization if quantize == "none" else quantize)
    found = open_tensors(source) if tensors is None else tensors
    conversion = _Conversion(source, target, output, found, dtype, everyone, others)

    def begin() -> str:
        check_tensors(source, stored_leaves(source, layout), found)
        open_adapter(source, layout)
        return conversion.begin(quantize)

    with closing(output):
        mark = everyone.agree(begin)[0]
        everyone.agree(lambda: conversion.check_mark(mark))
        digests = conversion.write(progress)
        names = json.loads(everyone.agree(conversion.complete)[0])
        files = everyone.agree(lambda: conversion.digest_files(names))
        everyone.agree(lambda: conversion.check_mark(mark))
        everyone.agree(lambda: conversion.finish(digests, files))


@dataclass(frozen=True)
class _Conversion:
    """The steps of one conversion, which all processes take together.

    Attributes:
      source: the folder to convert.
      target: layout of the model as it will be stored.
      output: where to write.
      tensors: the tensors to convert.
      dtype: dtype to store; None keeps the stored one.
      processes: the processes that convert together, and which of them this is.
      others: see :func:`convert`.
    """

    source: CheckpointFolder
    target: ModelLayout
    output: Output
    tensors: StoredTensors
    dtype: str | None
    processes: Processes
    others: Sequence[CheckpointFolder | Path]

    def begin(self, quantize: str) -> str:
        """Check the request. Process 0 also creates the output, marks it, and returns the mark."""
        stored = self.source.quantization
        if stored != "none" and (self.dtype is not None or quantize not in ("none", stored)):
            raise CheckpointError(f"{self.source.place}: stored as {stored}, so it can only be copied")
        if self.dtype is not None and quantize != "none":
            raise CheckpointError(f"dtype {self.dtype} and quantization {quantize} cannot be combined; choose one")
        self.output.check_inputs(filter(None, (self.source, self.source.lora, *self.others)))
        if not self.processes.is_first:
            return ""
        check_tied_head(self.source, self.target, self.tensors)
        mark = secrets.token_hex(16)
        self.output.begin(mark)
        return mark

    def check_mark(self, mark: str) -> str:
        """Check that this process sees the output of process 0, and that no other conversion has begun there since.

        Locks prevent that where all processes see them. All processes look before the marker gets another place.
        """
        if self.output.storage.read(MARK_FILE) != mark.encode():
            raise CheckpointError(
                f"{self.output.place}: this process does not see what process 0 writes there, or another conversion "
                "writes there too; processes on several machines need an output that all of them see, such as a shared "
                "file system or gs://"
            )
        return ""

    @functools.cached_property
    def _sources(self) -> Sources:
        """The tensors to write: merged with the source's adapter, then quantized if requested."""
        found = merged_tensors(self.source, self.target, self.tensors, self.dtype)
        wrong, scales = NonFinite(), frozenset[str]()
        if self.target.quantization != self.source.quantization:
            found = quantized_tensors(found, self.target, wrong)
            scales = frozenset(name for leaf in self.target.leaves if leaf.quantized for name in leaf.scales.sources)
        entries = {}
        for leaf in self.target.stored_leaves:
            for name in leaf.sources:
                tensor = found[name]
                grid = chunk_grid(leaf, 4)
                entries[name] = TensorEntry(tensor.shape, self.dtype or tensor.dtype, grid, ())
        return Sources(found, entries, self.source.place, wrong, scales)

    @functools.cached_property
    def _cuts(self) -> dict[str, Cut] | None:
        """The shards that Orbax writes of each tensor; None if TensorStore writes them."""
        here = (self.processes.index, self.processes.count) == (jax.process_index(), jax.process_count())
        if not here or not isinstance(self.output, FolderOutput):
            return None
        # Orbax looks for its unfinished parts with a pattern that begins with this path.
        if glob.has_magic(str(self._orbax_path)):
            return None
        return orbax_cuts(self._sources.entries, jax.device_count())

    @property
    def _weights(self) -> Storage:
        return self.output.storage.child(WEIGHTS_FOLDER)

    @property
    def _orbax_path(self) -> Path:
        return Path(self._weights.place).resolve()  # Orbax requires an absolute path

    def write(self, progress: Progress | None) -> list[str]:
        """Write the tensors; return the digests of all processes as JSON."""
        cuts = self._cuts
        if cuts is None:
            arrays = self._weights.child(orbax.TREE)
            return self.processes.agree(
                lambda: json.dumps(write_parts(self._sources, arrays, self.processes, progress))
            )
        digests = write_groups(self._sources, cuts, self._orbax_path, self.processes, progress)
        return self.processes.agree(lambda: json.dumps(digests))

    def complete(self) -> str:
        """Complete the Orbax checkpoint. Process 0 returns the names of its files, as a JSON list."""
        if self._cuts is not None:
            orbax.finalize(self._orbax_path)
        elif self.processes.is_first:
            merge_databases(self._weights.child(orbax.TREE), self.processes.count)
            for name, data in orbax.descriptions(self._sources.entries).items():
                self._weights.write(name, data)
        if not self.processes.is_first:
            return json.dumps([])
        names = self._weights.names()
        if f"{orbax.TREE}/{TREE_FILE}" not in names:
            raise CheckpointError(f"{self._weights.place}: Orbax did not complete the checkpoint")
        return json.dumps(names)

    def digest_files(self, names: Sequence[str]) -> str:
        """Digest this process's share of the Orbax checkpoint's files; return the list as text."""
        files = list_files(self._weights, names[self.processes.index :: self.processes.count])
        return dump_files({f"{WEIGHTS_FOLDER}/{name}": file for name, file in files.items()})

    def finish(self, digests: Sequence[str], files: Sequence[str]) -> str:
        """On process 0: write the other files and, last, the manifest."""
        if not self.processes.is_first:
            return ""
        joined: dict[str, dict[int, str]] = {name: {} for name in self._sources.entries}
        for part in digests:
            for name, chunks in json.loads(part).items():
                joined[name] |= {int(number): said for number, said in chunks.items()}
        entries = {
            name: replace(entry, digests=tuple(joined[name][number] for number in range(math.prod(entry.grid))))
            for name, entry in self._sources.entries.items()
        }
        changes = _dtype_changes(self.source, self.dtype)
        if self.target.quantization != "none":
            changes[QUANTIZATION_KEY] = self.target.quantization
        storage = self.output.storage
        written: dict[str, StoredFile] = {}
        for part in files:
            written |= parse_files(part, self.output.place)
        storage.write(FILES_FILE, dump_files(written).encode())
        side_files = copy_side_files(self.source, storage, changes)
        storage.write(MANIFEST_FILE, Manifest(entries, side_files).dump().encode())
        self.output.finish()
        return ""


def _dtype_changes(source: CheckpointFolder, dtype: str | None) -> dict[str, str]:
    """Return the changes to ``config.json`` for a new dtype. transformers calls it "dtype" since 4.56."""
    if dtype is None:
        return {}
    said = [key for key in ("torch_dtype", "dtype") if key in source.config]
    return dict.fromkeys(said or ["torch_dtype"], dtype)


def _name_changes(source: CheckpointFolder) -> dict[str, str]:
    """Return the change to ``config.json`` that keeps the source's names, if published settings are chosen by them."""
    family = find_family(source.config)
    if family.published_settings(source.model_names) == family.published_settings(source.configured_name):
        return {}
    return {"_name_or_path": source.model_names}


def copy_side_files(source: CheckpointFolder, target: Storage, changes: Mapping[str, str]) -> dict[str, str]:
    """Copy configuration, tokenizer and licence, and return the digests of the written files by name.

    ``changes`` are new values of keys of the configuration.
    """
    digests, changes = {}, _name_changes(source) | dict(changes)
    for name in source.side_files():
        if name in (INDEX_FILE, MANIFEST_FILE, FILES_FILE):
            continue
        data = source.read_bytes(name)
        if name == "config.json" and changes:
            data = (json.dumps(source.config | changes, indent=2) + "\n").encode()
        target.write(name, data)
        digests[name] = digest(data)
    return digests
