"""DreamOn (Wu et al., 2025): Dream with tokens that add a mask to the canvas or remove one, for infilling.

The checkpoint is told from Dream's by ``expand_token_id`` in its ``config.json``. The delete token is the end token.

Decoding follows the published generation code (``generation_dreamon.py``), with these differences:

* Batches have several rows, each with a window of its own. The original decodes one row.
* A step commits at most as many tokens as there are masks. The original fails if there are fewer.
* No more masks are added once the budget is 0 or less. The original compares with 0 only, which several expansions in
  one step can jump over.
* The limit of the window is exact. If a step predicts more expansions than there is room for, the leftmost ones add a
  mask, and the others become a mask again.

As in the original, an expand token of the prompt also becomes two masks in the first step, and ``pad_delete_to_right``
counts a delete token anywhere, also in the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.models.config import (
    ConfigError,
    Family,
    ModelConfig,
    PublishedSettings,
    check_features,
    read_integer,
    transformer_config,
)
from runtime.models.qwen2 import FEATURES, SEVEN_BILLION, Qwen2Weights


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    check_features(DREAMON, raw, FEATURES)
    made = transformer_config(DREAMON, raw)
    if not made.end_token_ids:
        raise ConfigError('config.json: "eos_token_id" is missing; it is the delete token')
    end, last = made.end_token_ids[0], made.vocab_size - 1
    expand = read_integer(raw, "expand_token_id", 0, last)
    delete = read_integer(raw, "delete_token_id", 0, last, default=end)
    if delete != end:
        raise ConfigError(f'config.json: "delete_token_id" is {delete}; only the end token ({end}) is supported')
    if len({made.mask_token_id, expand, delete}) < 3:
        raise ConfigError(
            f"config.json: mask_token_id {made.mask_token_id}, expand_token_id {expand} and eos_token_id {delete} have "
            "to be three different tokens"
        )
    # Whatever is left of the canvas after a row's end is not text.
    return replace(made, expand_token_id=expand, delete_token_id=delete, pad_token_id=delete)


# From the quick start of DreamLM/DreamOn. top_k is transformers' default, which the original code inherits.
_PUBLISHED: dict[str, Any] = {"algorithm": "entropy", "temperature": 0.2, "top_p": 0.9, "top_k": 50, "alg_temp": 0.0}

DREAMON = Family(
    name="dreamon",
    model_type="Dream",
    architecture="DreamModel",
    config_key="expand_token_id",
    parse=_parse,
    weights=Qwen2Weights,
    tied_weights=None,
    attention="bidirectional",
    objective="masked_diffusion",
    prediction_offset=1,
    transformers_class="Qwen2ForCausalLM",
    schedule="constant",
    algorithms=("maskgit_plus", "topk_margin", "entropy"),
    parallel_rules=("none",),
    variable_length=True,
    mask_token_id=151666,
    end_token_ids=(151643,),
    end_tokens=("<|im_end|>", "<|dlm_pad|>", "<|endoftext|>"),
    published=(PublishedSettings("", _PUBLISHED),),
    presets={
        "dreamon-7b": SEVEN_BILLION
        | {"model_type": "Dream", "mask_token_id": 151666, "expand_token_id": 151667, "eos_token_id": 151643}
    },
    golden_cases=17,
)
