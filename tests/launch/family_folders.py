"""Checkpoints of each diffusion family with random weights and the demo's tokenizer, for tests of commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from checkpoints import DEMO

GOLDEN = Path(__file__).parents[1] / "golden"
# The families other than Dream, by the names of their golden folders.
FAMILIES = ("llada", "fast_dllm_v2", "sdar", "dreamon")
SUFFIX = "    return y\n"


def takes_suffix(family: str) -> bool:
    """Whether new tokens of this family see what follows them."""
    return family in ("llada", "dreamon")


def write_family(folder: Path, family: str) -> Path:
    """Write a golden model with the demo's vocabulary; DreamOn has one more token, for expansions."""
    demo: dict[str, Any] = json.loads((DEMO / "config.json").read_text())
    raw: dict[str, Any] = json.loads((GOLDEN / f"{family}_tiny" / "config.json").read_text())
    before, size = raw["vocab_size"], demo["vocab_size"] + (family == "dreamon")
    raw |= {name: demo[name] for name in ("mask_token_id", "pad_token_id", "eos_token_id")} | {"vocab_size": size}
    if "embedding_size" in raw:
        raw["embedding_size"] = size
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    if family == "dreamon":
        raw["expand_token_id"] = demo["vocab_size"]
        expand = tokenizer["added_tokens"][0] | {"id": demo["vocab_size"], "content": "<|expand|>"}
        tokenizer["added_tokens"].append(expand)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(DEMO / "tokenizer_config.json", folder)
    generator = np.random.default_rng(0)
    weights = load_file(GOLDEN / f"{family}_tiny" / "model.safetensors")
    for name, value in weights.items():
        if value.shape[0] == before:  # embedding and head
            weights[name] = generator.normal(scale=value.std(), size=(size, value.shape[1])).astype(value.dtype)
    save_file(weights, folder / "model.safetensors")
    return folder
