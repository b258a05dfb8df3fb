"""Random LoRA adapters in PEFT's layout, and checkpoints into which NumPy merged them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from checkpoints.lora import CONFIG_FILE, WEIGHTS_FILE
from tests.checkpoints.golden_folder import change_config

RANK, ALPHA = 4, 6
# As PEFT 0.14 writes it.
CONFIG: dict[str, Any] = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "somebody/model",
    "bias": "none",
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": ALPHA,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": RANK,
    "rank_pattern": {},
    "revision": None,
    "target_modules": "all-linear",
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_rslora": False,
}


def write_adapter(
    folder: Path,
    source: Path,
    modules: Iterable[str],
    ranks: dict[str, int] | None = None,
    dtype: Any = np.float32,
    **changes: Any,
) -> Path:
    """Write an adapter for modules of a Hugging Face folder, with random A and B, and changes of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(CONFIG | changes))
    base, generator = load_file(source / "model.safetensors"), np.random.default_rng(1)
    tensors = {}
    for module in modules:
        outputs, inputs = base[f"{module}.weight"].shape[:: -1 if is_conv1d(module) else 1]
        rank = (ranks or {}).get(module, RANK)
        for letter, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[f"base_model.model.{module}.lora_{letter}.weight"] = generator.normal(size=shape).astype(dtype)
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder


def is_conv1d(module: str) -> bool:
    """Whether a module is GPT-2's Conv1D, which stores matrices as ``[inputs, outputs]``."""
    return module.rpartition(".")[2].startswith("c_")


def write_merged(
    folder: Path, source: Path, adapter: Path, scales: dict[str, float] | None = None, dtype: Any = np.float32
) -> Path:
    """Write the checkpoint that a merge of whole matrices in float32 gives.

    Args:
      folder: where to write.
      source: the Hugging Face folder.
      adapter: the adapter.
      scales: factors of the updates by module, where they are not alpha / r.
      dtype: the dtype of all tensors of the result.
    """
    shutil.copytree(source, folder)
    found = load_file(source / "model.safetensors")
    tensors = {name: value.astype(np.float32) for name, value in found.items()}
    factors = load_file(adapter / WEIGHTS_FILE)
    for name in factors:
        if ".lora_A." not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = (factors[name.replace("_A.", f"_{letter}.")].astype(np.float64) for letter in "AB")
        update = (b @ a * (scales or {}).get(module, ALPHA / RANK)).astype(np.float32)
        tensors[f"{module}.weight"] += update.T if is_conv1d(module) else update
    save_file({name: value.astype(dtype) for name, value in tensors.items()}, folder / "model.safetensors")
    change_config(folder, torch_dtype=np.dtype(dtype).name)
    return folder


def rank_stabilized(alpha: float, rank: int) -> float:
    """The factor of an update with ``use_rslora``."""
    return alpha / math.sqrt(rank)


BFLOAT16 = ml_dtypes.bfloat16
