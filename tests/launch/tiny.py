"""A very small checkpoint with random weights and the demo's tokenizer, so that a server answers in milliseconds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from checkpoints import DEMO

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}def answer("


def write_tiny_checkpoint(folder: Path) -> Path:
    """Write the checkpoint. Dream is Qwen2 without a causal mask, and its weights have the same names."""
    demo: dict[str, Any] = json.loads((DEMO / "config.json").read_text())
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=demo["vocab_size"],
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    own = json.loads((folder / "config.json").read_text())
    kept = ("architectures", "model_type", "mask_token_id", "pad_token_id", "bos_token_id", "eos_token_id")
    (folder / "config.json").write_text(json.dumps(own | {name: demo[name] for name in kept}))
    shutil.copy(DEMO / "tokenizer.json", folder)
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return folder
