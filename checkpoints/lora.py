"""LoRA adapters (Hu et al., 2021) in PEFT's folder layout, merged into a checkpoint's tensors while these are read.

For a matrix W of the model with I inputs and O outputs, an adapter has two matrices, A ``[R, I]`` and B ``[O, R]``.
Merging replaces W by ``W + scale * (B @ A)``. The scale is alpha / R, or alpha / sqrt(R) for a rank-stabilized adapter
(Kalajdzievski, 2023). A part of W is merged with the rows of B and the columns of A that it needs, so memory does not
grow with the size of the adapter. The result does not depend on the parts.

A feature of PEFT that changes the weights in another way is an error that names its key: DoRA, trained biases or whole
modules, initializations that change W.

Dimension letters: O outputs, I inputs, R rank.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MismatchedCheckpointError,
)
from checkpoints.folder import CheckpointFolder
from checkpoints.huggingface import open_file
from checkpoints.source import DTYPES, BytesRead, Index, StoredTensor, StoredTensors
from runtime.models.config import Family
from runtime.models.declarations import ModelLayout
from runtime.models.leaves import WeightLeaf

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"

# PEFT wraps the model in two modules, whose names begin every tensor's name.
_TENSOR_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Keys that say where an adapter comes from, how it was trained, or which matrices it has, which its tensors say too.
# Every other key that is not in _READ_KEYS, known or not, must have a value that switches its feature off.
_FREE_KEYS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
_READ_KEYS = {
    "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules",
    "use_rslora",
}  # fmt: skip
# Initializations that leave W as it is. Others, such as PiSSA's, train the adapter beside a changed W.
_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
# The keys of rank_pattern and alpha_pattern are regular expressions in PEFT. Only expressions without repetition are
# accepted, so that matching takes little time, and each matches texts of one length. An adapter for every matrix of a
# large model has about a thousand names of less than 100 characters.
_MAX_NAMES = 4096
_MAX_NAME = 200
_PLAIN_PATTERN = re.compile(r"\^?(\w|\.|\\\.|\\d)+")
# A part is merged in tiles of this many rows and columns of W, which begin at multiples of this number. Whole tiles
# are computed, so that an element has the same bits whichever part is read: a BLAS may change the order of a sum with
# the shape of a product. The threads of a BLAS wait for each other in every product, so products must not be small.
TILE = 1024


@dataclass(frozen=True)
class _Config:
    """Ranks and scales from ``adapter_config.json``.

    Attributes:
      rank, alpha: rank and alpha of modules that no pattern matches.
      rank_pattern, alpha_pattern: rank and alpha of modules whose names end with a pattern, by pattern.
      rank_stabilized: whether the scale is alpha / sqrt(R).
      targets: names of modules that the adapter changes, or the ends of their names; None if there is no list.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    targets: tuple[str, ...] | None

    def rank_of(self, module: str) -> int:
        """Return the LoRA rank of a module."""
        return _of_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor by which a module's product ``B @ A`` is multiplied."""
        rank, alpha = self.rank_of(module), _of_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def has_target(self, module: str) -> bool:
        """Whether the adapter changes a module."""
        return self.targets is None or any(_is_target(end, module) for end in self.targets)


def _is_target(target: str, module: str) -> bool:
    """Whether one of the ``target_modules`` names a module, or the end of its name."""
    return module == target or module.endswith(f".{target}")


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module's whole name or its last components, as in PEFT."""
    # Most patterns are of another length than every end of the name, so they are not even compiled.
    ends = {len(module), *(len(module) - dot.end() for dot in re.finditer(r"\.", module))}
    return next(
        (value for key, value in patterns.items() if _matched_length(key) in ends and _compile(key).match(module)),
        default,
    )


def _matched_length(pattern: str) -> int:
    """Return the length of the texts that a pattern without repetition matches."""
    return len(pattern) - pattern.count("\\") - pattern.startswith("^")


@functools.lru_cache(maxsize=2 * _MAX_NAMES)  # all patterns of an adapter; that of the module re is much smaller
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def _read_config(folder: CheckpointFolder) -> _Config:
    """Read an adapter's configuration.

    Raises:
      CheckpointError: the file is missing or damaged, or asks for a feature that is not supported; the message names
        the key.
    """
    raw = folder.read_json(CONFIG_FILE)
    place = folder.path / CONFIG_FILE
    if raw is None:
        raise IncompleteCheckpointError(f"{place}: no such file; the folder of a PEFT adapter has one")

    def check(key: str, supported: bool, expected: str) -> None:
        if not supported:
            raise CheckpointError(f"{place}: {key} is {raw.get(key)!r:.200}; {expected}")

    check("peft_type", raw.get("peft_type") == "LORA", "only 'LORA' is supported")
    check("bias", raw.get("bias", "none") == "none", "only 'none' is supported")
    start = raw.get("init_lora_weights", True)
    check(
        "init_lora_weights",
        any(start is one or (isinstance(start, str) and start == one) for one in _INITIALIZATIONS),
        "an adapter that was trained beside changed weights is not supported; convert it to a plain one with PEFT",
    )
    check("use_rslora", raw.get("use_rslora", False) in (None, True, False), "expected true or false")
    for key in sorted(raw.keys() - _FREE_KEYS - _READ_KEYS):
        check(key, raw[key] in (None, False, "") or raw[key] in ([], {}), "this feature is not supported")
    targets = raw.get("target_modules")
    # A string is a regular expression, or "all-linear"; the tensors tell which modules it matched.
    names = tuple(targets) if isinstance(targets, list) else None
    check("target_modules", all(isinstance(one, str) for one in names or ()), "expected names")
    _check_names(place, "target_modules", names or ())
    check("r", _is_rank(raw.get("r")), "expected an integer from 1 to 1,048,575")
    check("lora_alpha", _is_real(raw.get("lora_alpha")), "expected a number")
    ranks, alphas = raw.get("rank_pattern") or {}, raw.get("alpha_pattern") or {}
    for name, patterns, valid in (("rank_pattern", ranks, _is_rank), ("alpha_pattern", alphas, _is_real)):
        check(name, isinstance(patterns, dict) and all(map(valid, patterns.values())), "expected numbers by name")
        _check_names(place, name, patterns)
        check(name, all(map(_PLAIN_PATTERN.fullmatch, patterns)), "a key is not the end of a module's name")
    stabilized = bool(raw.get("use_rslora"))
    return _Config(raw["r"], raw["lora_alpha"], ranks, alphas, stabilized, names)


def _check_names(place: Path, key: str, names: Collection[str]) -> None:
    """Check that names of modules are few and short, because each is compared with each module.

    Raises:
      CheckpointError: they are not; the message names the key.
    """
    if len(names) > _MAX_NAMES:
        raise CheckpointError(f"{place}: {key} has {len(names)} names; at most {_MAX_NAMES} are supported")
    longest = max(map(len, names), default=0)
    if longest > _MAX_NAME:
        raise CheckpointError(f"{place}: {key} has a name of {longest} characters; at most {_MAX_NAME} are supported")


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 1 << 20


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e12


@dataclass(frozen=True)
class _Update:
    """The update of one matrix by an adapter.

    Attributes:
      a: ``[R, I]``.
      b: ``[O, R]``.
      scale: the factor of their product.
      transposed: whether the matrix is stored as ``[I, O]``.
    """

    a: StoredTensor
    b: StoredTensor
    scale: float
    transposed: bool

    def add_to(self, part: np.ndarray, index: Index) -> None:
        """Add the update to a float32 part of the matrix, in place; ``index`` says which part it is."""
        if self.transposed:
            part, index = part.T, index[::-1]
        (top, bottom, _), (left, right, _) = (
            one.indices(size) for one, size in zip(index, (self.b.shape[0], self.a.shape[1]), strict=True)
        )
        rows, columns = _tiles(top, bottom, self.b.shape[0]), _tiles(left, right, self.a.shape[1])
        b = _read_factor(self.b, (slice(rows[0].start, rows[-1].stop), slice(0, self.b.shape[1])))
        a = _read_factor(self.a, (slice(0, self.a.shape[0]), slice(columns[0].start, columns[-1].stop)))
        for row in rows:
            for column in columns:
                tile = b[_shift(row, rows[0].start)] @ a[:, _shift(column, columns[0].start)]
                wanted = _clip(row, top, bottom), _clip(column, left, right)
                update = tile[_shift(wanted[0], row.start), _shift(wanted[1], column.start)] * self.scale
                part[_shift(wanted[0], top), _shift(wanted[1], left)] += update.astype(np.float32)


def _tiles(low: int, high: int, size: int) -> list[slice]:
    """Return the tiles of a dimension that overlap a range of it."""
    return [slice(first, min(first + TILE, size)) for first in range(low - low % TILE, high, TILE)]


def _shift(one: slice, start: int) -> slice:
    return slice(one.start - start, one.stop - start)


def _clip(one: slice, low: int, high: int) -> slice:
    return slice(max(one.start, low), min(one.stop, high))


def _read_factor(tensor: StoredTensor, index: Index) -> np.ndarray:
    """Read a part of A or B in float64, in which rounding in their product is far below the precision of float32.

    Raises:
      CorruptCheckpointError: it contains NaN or infinity.
    """
    data = tensor.read(index).astype(np.float64)
    if not np.isfinite(data).all():
        raise CorruptCheckpointError(f"{WEIGHTS_FILE}: {tensor.name:.200} contains NaN or infinity")
    return data


def _open_weights(folder: CheckpointFolder, count: BytesRead) -> list[StoredTensor]:
    """Open an adapter's tensors. A pickle is never opened.

    Raises:
      CheckpointError: the file is missing, damaged, or a link out of the folder.
    """
    path = folder.path / WEIGHTS_FILE
    if path.is_file():
        folder.check_file(WEIGHTS_FILE)
        return open_file(path, count)
    if (folder.path / _PICKLE_FILE).exists():
        raise CheckpointError(
            f"{folder.path / _PICKLE_FILE}: a pickle, which may run code when it is loaded, is not read; save the "
            f"adapter as {WEIGHTS_FILE} (PEFT's save_pretrained with safe_serialization)"
        )
    raise IncompleteCheckpointError(f"{path}: no such file; the folder of a PEFT adapter has one")


def open_adapter(folder: CheckpointFolder, layout: ModelLayout, count: BytesRead | None = None) -> dict[str, _Update]:
    """Open the adapter of a checkpoint, and check it against the model. Only its configuration and headers are read.

    Args:
      folder: the checkpoint, with or without an adapter.
      layout: the layout of its model; it needs no mesh.
      count: counts the bytes that are read from the adapter later.

    Returns:
      The updates by the name of the stored tensor that they change; none without an adapter.

    Raises:
      CheckpointError: a file is missing or damaged, the adapter needs a feature that is not supported, or the
        checkpoint is quantized.
      MismatchedCheckpointError: lists all tensors that are unknown, missing or mis-shaped.
    """
    if folder.lora is None:
        return {}
    if folder.quantization != "none":
        raise MismatchedCheckpointError(
            f"{folder.place}: stored as {folder.quantization}; a LoRA adapter is merged into the original weights, "
            "which are quantized afterwards, so give a checkpoint that is not quantized"
        )
    config = _read_config(folder.lora)
    tensors = _open_weights(folder.lora, count or BytesRead())
    matrices = _matrices(layout)
    pairs, problems = _pairs(tensors, config, layout.config.family, matrices.keys())
    updates = {}
    for source, pair in pairs.items():
        leaf = matrices[source]
        rank, transposed = config.rank_of(pair.module), leaf.contracted_dimensions == (0,)
        outputs, inputs = leaf.source_shape[::-1] if transposed else leaf.source_shape
        for letter, wanted in (("A", (rank, inputs)), ("B", (outputs, rank))):
            problems += _problems_of(pair, letter, wanted)
        if pair.tensors.keys() == {"A", "B"}:
            updates[source] = _Update(pair.tensors["A"], pair.tensors["B"], config.scale_of(pair.module), transposed)
    if not tensors:
        problems.append("there are no tensors")
    # As in PEFT, targets that the model does not have are ignored: one list often serves several families.
    modules = [source.removesuffix(".weight") for source in matrices]
    for target in config.targets or ():
        there = any(_is_target(target, module) for module in modules)
        if there and not any(_is_target(target, pair.module) for pair in pairs.values()):
            problems.append(f"missing: no tensors of {target!r:.200}, one of the target_modules of {CONFIG_FILE}")
    if problems:
        raise MismatchedCheckpointError(
            f"{folder.lora.place}: the LoRA adapter does not match {folder.name}:\n  " + "\n  ".join(problems)
        )
    return updates


@dataclass(frozen=True)
class _Pair:
    """A module's name in the adapter, and its LoRA tensors, with the keys ``A`` and ``B``."""

    module: str
    tensors: dict[str, StoredTensor]


def _pairs(
    tensors: list[StoredTensor], config: _Config, family: Family, matrices: Collection[str]
) -> tuple[dict[str, _Pair], list[str]]:
    """Group an adapter's tensors by the stored tensor that they change, and describe the problems with the others."""
    pairs: dict[str, _Pair] = {}
    problems = []
    for tensor in tensors:
        match = _TENSOR_NAME.fullmatch(tensor.name)
        module = match[1] if match else ""
        source = family.tensor_name(f"{module}.weight")
        if match is None or source is None or source not in matrices:
            problems.append(f"unknown: {tensor.name:.200} {list(tensor.shape)}")
        elif not config.has_target(module):
            problems.append(f"unknown: {tensor.name:.200} is not one of the target_modules of {CONFIG_FILE}")
        elif pairs.setdefault(source, _Pair(module, {})).module != module:
            problems.append(f"duplicate: {tensor.name:.200} changes the same matrix as {pairs[source].module:.200}")
        else:
            pairs[source].tensors[match[2]] = tensor
    return pairs, problems


def _matrices(layout: ModelLayout) -> dict[str, WeightLeaf]:
    """Return the leaves that an adapter can change, which are those of linear layers, by names of stored tensors."""
    return {
        source: leaf
        for leaf in layout.leaves
        if leaf.contracted and leaf.name != layout.embedding.name
        for source in leaf.sources
    }


def _problems_of(pair: _Pair, letter: str, shape: tuple[int, ...]) -> list[str]:
    """Describe what is wrong with A or B of a module, which must have this shape."""
    tensor = pair.tensors.get(letter)
    if tensor is None:
        return [f"missing: lora_{letter} of {pair.module:.200}"]
    problems = []
    if tensor.shape != shape:
        problems.append(
            f"shape: {tensor.name:.200} is {list(tensor.shape)}; the model and {CONFIG_FILE} need {list(shape)}"
        )
    if tensor.dtype not in DTYPES:
        problems.append(f"dtype: {tensor.name:.200} is {tensor.dtype}; supported: {', '.join(DTYPES)}")
    return problems


@dataclass(frozen=True)
class _Merged:
    """A stored matrix, the update that is merged into it when it is read, and the dtype of the result."""

    base: StoredTensor
    update: _Update
    dtype: str

    def read(self, index: Index) -> np.ndarray:
        merged = self.base.read(index).astype(np.float32)
        self.update.add_to(merged, index)
        with np.errstate(over="ignore"):  # an overflow to infinity is treated like a stored infinity
            return merged.astype(self.dtype, copy=False)


def merged_tensors(
    folder: CheckpointFolder, layout: ModelLayout, found: StoredTensors, dtype: str | None = None
) -> StoredTensors:
    """Return a checkpoint's tensors, with its adapter merged into those that it changes. No data is read yet.

    Args:
      folder: the checkpoint, with or without an adapter.
      layout: the layout of its model; it needs no mesh.
      found: the checkpoint's own tensors.
      dtype: dtype of merged tensors, which are computed in float32; None for that of the stored tensor.

    Raises:
      CheckpointError: see :func:`open_adapter`. Reading a tensor may raise it too.
    """
    by_name = dict(found.by_name)
    for source, update in open_adapter(folder, layout, found.bytes_read).items():
        base = found[source]
        merged = _Merged(base, update, dtype or base.dtype)
        by_name[source] = [replace(base, dtype=merged.dtype, read=merged.read)]
    return replace(found, by_name=by_name)
