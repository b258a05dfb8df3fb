"""SDAR (Cheng et al., 2025): Qwen3 with block-causal attention, which fills its blocks by masked diffusion, no shift.

The decoding follows ``generate.py`` of JetAstra/SDAR, with these differences. A step commits no more positions than are
masked: where fewer were left than the schedule says, the original overwrites tokens of the prompt or committed ones. A
block in which the model has predicted MASK takes further steps, and keeps the masks that are left then: the original
fails. The last block is cut at the number of new tokens that was asked for. A row ends as soon as a stop token and all
before it are committed, where the original fills its block first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.models import qwen3
from runtime.models.config import (
    BLOCK_CAUSAL_RULES,
    Family,
    ModelConfig,
    PublishedSettings,
    check_features,
    read_integer,
    transformer_config,
)
from runtime.models.masks import MAX_BLOCK_LENGTH

_BLOCK_LENGTH = 4


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    check_features(SDAR, raw, qwen3.FEATURES)
    read_integer(raw, "head_dim", 1, 1 << 12)  # hidden_size / num_attention_heads would be another model
    length = read_integer(raw, "block_size", 1, MAX_BLOCK_LENGTH, default=_BLOCK_LENGTH)
    return transformer_config(SDAR, raw, attention_block_length=length)


# The defaults of the script of JetAstra/SDAR.
_PUBLISHED: dict[str, Any] = {
    "algorithm": "maskgit_plus",
    "temperature": 1.0,
    "top_p": None,
    "top_k": None,
    "cache": "exact",
    "parallel": "threshold",
    "threshold": 0.85,
}

SDAR = Family(
    name="sdar",
    model_type="sdar",
    parse=_parse,
    weights=qwen3.Qwen3Weights,
    tied_weights=qwen3.TiedQwen3Weights,
    attention="block_causal",
    objective="masked_diffusion",
    prediction_offset=0,
    schedule="even_block",
    algorithms=("maskgit_plus",),
    parallel_rules=BLOCK_CAUSAL_RULES,
    mask_token_id=151669,
    end_token_ids=(151643, 151645),
    published=(PublishedSettings("", _PUBLISHED),),
    presets={
        "sdar-8b": dict(qwen3.QWEN3.presets["qwen3-8b"])
        | {"model_type": "sdar", "block_size": _BLOCK_LENGTH, "mask_token_id": 151669, "eos_token_id": 151643}
    },
)
