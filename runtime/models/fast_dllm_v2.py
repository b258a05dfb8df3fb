"""Fast-dLLM v2 (Wu et al., 2025): Qwen2.5 with block-causal attention, trained to fill masks block by block.

The output at one position predicts the token at the next. The first token of a block is therefore predicted by the
finished block before it, and committed before the other tokens of the block. It is the most probable token at any
temperature, unless that is the mask token.

Decoding follows ``generate`` of the published modelling code, with these differences:

* A prompt of exactly one block stays in the context. The original drops it from its cache.
* Attention excludes the padding on the left of a batch. The original's attention mask does not.
* The number of new tokens is an exact limit. The original counts blocks, and adds one token after the last block.
* Each row ends at its own stop token. The original tests the first row only, and its sampler for batches fails if every
  row ends in its first block.
* If the mask token is predicted for the first position of a block, that position is predicted alone again, from the
  output before it, and drawn at the request's temperature. The original then predicts it from its own output, with the
  rest of its sub-block.
* With ``sub_block_cache``, each row decides on its own whether to compute only its sub-block. The original decides for
  the whole batch: by whether any row has a mask at the sub-block's first position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.models import qwen2
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

_BLOCK_LENGTH = 32


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    check_features(FAST_DLLM_V2, raw, qwen2.FEATURES)
    length = read_integer(raw, "bd_size", 1, MAX_BLOCK_LENGTH, default=_BLOCK_LENGTH)
    return transformer_config(FAST_DLLM_V2, raw, attention_block_length=length)


# The defaults of the published chat and evaluation scripts.
_PUBLISHED: dict[str, Any] = {
    "algorithm": "maskgit_plus",
    "temperature": 0.0,
    "cache": "exact",
    "parallel": "threshold",
    "threshold": 0.9,
    "sub_block_length": 8,
}

FAST_DLLM_V2 = Family(
    name="fast_dllm_v2",
    model_type="Fast_dLLM_Qwen",
    architecture="Fast_dLLM_QwenForCausalLM",
    parse=_parse,
    weights=qwen2.Qwen2Weights,
    tied_weights=qwen2.TiedQwen2Weights,
    attention="block_causal",
    objective="masked_diffusion",
    prediction_offset=1,
    schedule="even_block",
    algorithms=("maskgit_plus",),
    parallel_rules=BLOCK_CAUSAL_RULES,
    filters_when_greedy=False,
    reads_generation_config=False,
    mask_token_id=151665,
    end_token_ids=(151645,),
    end_tokens=qwen2.END_TOKENS,
    published=(PublishedSettings("", _PUBLISHED),),
    presets={
        "fast_dllm_v2-7b": qwen2.SEVEN_BILLION
        | {"model_type": "Fast_dLLM_Qwen", "bd_size": _BLOCK_LENGTH, "eos_token_id": 151645, "mask_token_id": 151665}
    },
    golden_cases=22,
)
