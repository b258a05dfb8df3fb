"""SDAR (Cheng et al., 2025): the weights of Qwen3 with block-causal attention, trained to fill masks block by block.

Decoding follows ``generate.py`` of JetAstra/SDAR, with these differences:

* A step never commits more positions than are masked. In the original, a step whose count exceeds the masks of the
  block overwrites prompt tokens or committed tokens.
* If the model predicts the mask token, the block gets further steps, up to its length, and then keeps the masks that
  are left. The original fails.
* The number of new tokens is an exact limit: the last block is cut. The original returns whole blocks.
* A row ends as soon as a stop token and everything before it are committed. The original fills the block first.
* Temperature 0 takes the most probable token. The original divides by the temperature and always draws a token.
* ``entropy_sum`` does what the original's ``entropy_bounded`` is meant to do. The original fails there, and sums
  entropies over positions instead of the vocabulary.

The block length is ``block_size`` of ``config.json``, or 4. The published settings of checkpoints such as
SDAR-8B-Chat-b32 set the length in their name, because the original code takes it from the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.models import qwen3
from runtime.models.config import (
    BLOCK_CAUSAL_RULES,
    ConfigError,
    Family,
    ModelConfig,
    PublishedSettings,
    check_features,
    read_integer,
    transformer_config,
)
from runtime.models.masks import MAX_BLOCK_LENGTH

_BLOCK_LENGTH = 4
# Lengths other than 4 that names of published checkpoints end with.
_LENGTHS_IN_NAMES = (8, 16, 32, 64)


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    check_features(SDAR, raw, qwen3.FEATURES)
    read_integer(raw, "head_dim", 1, 1 << 12)  # required, as in Qwen3
    if raw.get("use_regular_causal"):
        raise ConfigError('config.json: "use_regular_causal" is not supported: it makes attention in the prompt causal')
    length = read_integer(raw, "block_size", 1, MAX_BLOCK_LENGTH, default=_BLOCK_LENGTH)
    return transformer_config(SDAR, raw, attention_block_length=length)


# The defaults of generate.py in JetAstra/SDAR.
_PUBLISHED: dict[str, Any] = {
    "algorithm": "maskgit_plus",
    "temperature": 1.0,
    "cache": "exact",
    "parallel": "threshold",
    "threshold": 0.85,
}

SDAR = Family(
    name="sdar",
    model_type="sdar",
    architecture="SDARForCausalLM",
    parse=_parse,
    weights=qwen3.Qwen3Weights,
    tied_weights=qwen3.TiedQwen3Weights,
    attention="block_causal",
    objective="masked_diffusion",
    prediction_offset=0,
    schedule="even_block",
    algorithms=("maskgit_plus",),
    parallel_rules=BLOCK_CAUSAL_RULES,
    top_k_first=True,
    reads_generation_config=False,
    mask_token_id=151669,
    end_token_ids=(151643, 151645),
    end_tokens=qwen3.QWEN3.end_tokens,
    published=(
        *(
            # At the end of a name: a folder above it may be called so for another reason.
            PublishedSettings(rf"sdar[^/]*-b{length}/?(\s|$)", _PUBLISHED | {"block_length": length})
            for length in _LENGTHS_IN_NAMES
        ),
        PublishedSettings("", _PUBLISHED),
    ),
    presets={
        "sdar-8b": dict(qwen3.QWEN3.presets["qwen3-8b"])
        | {"model_type": "sdar", "block_size": _BLOCK_LENGTH, "mask_token_id": 151669, "eos_token_id": 151643}
    },
    golden_cases=22,
)
