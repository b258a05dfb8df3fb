"""Architectures by name, so that planning needs no download: the ``config.json`` of each, as published."""

from __future__ import annotations

from typing import Any

from runtime.models.config import ModelConfig
from sharding.errors import InputError

_SEVEN_BILLION: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "pad_token_id": 151643,
    "torch_dtype": "bfloat16",
}
_DREAM = _SEVEN_BILLION | {"model_type": "Dream", "mask_token_id": 151666}

PRESETS: dict[str, dict[str, Any]] = {
    "diffucoder-7b": _DREAM,
    "dream-7b": _DREAM,
    "qwen2.5-7b": _SEVEN_BILLION | {"model_type": "qwen2"},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "torch_dtype": "float32",
    },
}


def preset(name: str) -> ModelConfig:
    """The architecture of this name.

    Raises:
      InputError: there is none.
    """
    if name not in PRESETS:
        raise InputError(f'there is no model "{name}" among the presets: {", ".join(PRESETS)}')
    return ModelConfig.from_huggingface(PRESETS[name])
