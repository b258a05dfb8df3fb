"""Tensors of a legacy pickle, with the names and dimension order that they have in a Hugging Face folder.

The file is a Flax tree from an earlier port of Dream. Its kernels have the shape ``[in, out]``. It has no q, k and v
biases, because the port lost them: they are taken from a Hugging Face folder of the same model, or are zeros.
"""

from __future__ import annotations

import math
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.folder import CheckpointFolder
from checkpoints.legacy.pickle_file import LegacyPickle
from checkpoints.opening import open_tensors
from checkpoints.source import Index, StoredTensor, StoredTensors
from runtime.models.declarations import ModelLayout

_ROOT = "params/DreamModel_0"
_OUTSIDE_LAYERS = {
    f"{_ROOT}/Embed_0/embedding": "model.embed_tokens.weight",
    f"{_ROOT}/DreamRMSNorm_0/weight": "model.norm.weight",
    "params/Dense_0/kernel": "lm_head.weight",
}
_IN_LAYER = {
    **{f"DreamAttention_0/{name}_proj/kernel": f"self_attn.{name}_proj.weight" for name in "qkvo"},
    "DreamMLP_0/Dense_0/kernel": "mlp.gate_proj.weight",
    "DreamMLP_0/Dense_1/kernel": "mlp.up_proj.weight",
    "DreamMLP_0/Dense_2/kernel": "mlp.down_proj.weight",
    "DreamRMSNorm_0/weight": "input_layernorm.weight",
    "DreamRMSNorm_1/weight": "post_attention_layernorm.weight",
}
_LAYER = re.compile(rf"{_ROOT}/layers_(\d{{1,6}})/(.+)")
_TRANSPOSED_ROWS = 64
_BIAS = re.compile(r"model\.layers\.\d+\.self_attn\.[qkv]_proj\.bias")


def source_name(path: str) -> str | None:
    """Return the Hugging Face name of the tensor at a path of the pickled tree; None if the path is unknown."""
    match = _LAYER.fullmatch(path)
    if match is None:
        return _OUTSIDE_LAYERS.get(path)
    place = _IN_LAYER.get(match[2])
    return None if place is None else f"model.layers.{int(match[1])}.{place}"


def open_legacy(
    path: Path,
    layout: ModelLayout,
    stack: ExitStack,
    *,
    biases_from: CheckpointFolder | None = None,
    zero_biases: bool = False,
) -> StoredTensors:
    """Open the tensors of a legacy pickle without executing anything in it.

    Args:
      path: the file.
      layout: layout of the expected model.
      stack: closes the file in the end.
      biases_from: a folder of the same model to take the q, k and v biases from.
      zero_biases: whether to set these biases to zero instead.

    Raises:
      CheckpointError: the file is not a legacy pickle, or its biases are missing and nothing replaces them.
    """
    pickle = stack.enter_context(LegacyPickle(path))
    found: dict[str, list[StoredTensor]] = {}
    for tensor in pickle.tensors.values():
        name = source_name(tensor.path)
        if name is None:
            raise CheckpointError(f"{path}: {tensor.path} is not a path of the legacy tree of Dream")
        transposed = tensor.path.endswith("/kernel")
        shape = tensor.shape[::-1] if transposed else tensor.shape
        reader = partial(_read, pickle, tensor.path, transposed)
        found.setdefault(name, []).append(StoredTensor(name, shape, tensor.dtype, reader))
    wanted = {source: leaf.source_shape for leaf in layout.leaves for source in leaf.sources}
    biases = [name for name in wanted if _BIAS.fullmatch(name) and name not in found]
    if biases and biases_from is not None:
        donor = open_tensors(biases_from)
        absent = [name for name in biases if name not in donor.by_name]
        if absent:
            raise CheckpointError(
                f"{biases_from.path}: lacks {len(absent)} of the q, k and v biases, for example {absent[0]}"
            )
        found |= {name: donor.by_name[name] for name in biases}
    elif biases and zero_biases:
        dtype = next(iter(found.values()))[0].dtype
        found |= {name: [StoredTensor(name, wanted[name], dtype, partial(_zeros, dtype))] for name in biases}
    elif biases:
        count = sum(math.prod(wanted[name]) for name in biases)
        raise CheckpointError(
            f"{path}: the q, k and v biases are missing ({len(biases)} tensors, {count:,} parameters). The port that "
            "wrote this file lost them, and without them the model computes something else. --biases_from=FOLDER "
            "takes them from a Hugging Face folder of the same model; --zero_biases accepts the loss"
        )
    return StoredTensors(found)


def _read(pickle: LegacyPickle, path: str, transposed: bool, index: Index) -> np.ndarray:
    return _transpose(pickle.read(path, index[::-1])) if transposed else pickle.read(path, index)


def _transpose(data: np.ndarray) -> np.ndarray:
    # A few rows at a time stay in the processor's cache. This is several times as fast as a single copy with NumPy.
    out = np.empty(data.shape[::-1], data.dtype)
    for first in range(0, len(data), _TRANSPOSED_ROWS):
        out[:, first : first + _TRANSPOSED_ROWS] = data[first : first + _TRANSPOSED_ROWS].T
    return out


def _zeros(dtype: str, index: Index) -> np.ndarray:
    return np.zeros([part.stop - part.start for part in index], dtype)
