"""Dream and DiffuCoder: the weights of Qwen2 with bidirectional attention, trained to fill masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.models.config import (
    BLOCK_RULES,
    ConfigError,
    Family,
    ModelConfig,
    PublishedSettings,
    check_features,
    transformer_config,
)
from runtime.models.qwen2 import FEATURES, SEVEN_BILLION, Qwen2Weights

# The settings with which the authors of DiffuCoder, Dream and Dream-Coder run their checkpoints, as their READMEs show.
# The temperature depends on the kind of checkpoint. top_k is transformers' default, which the original code inherits.
_PUBLISHED: dict[str, Any] = {"algorithm": "entropy", "top_p": 0.95, "top_k": 50, "alg_temp": 0.0}
_SEVEN_BILLION = SEVEN_BILLION | {"model_type": "Dream", "mask_token_id": 151666}


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    check_features(DREAM, raw, FEATURES)
    if raw.get("delete_token_id") is not None:  # half of DreamOn's configuration
        raise ConfigError('config.json: "delete_token_id" requires "expand_token_id"')
    return transformer_config(DREAM, raw)


DREAM = Family(
    name="dream",
    model_type="Dream",
    architecture="DreamModel",
    parse=_parse,
    weights=Qwen2Weights,
    tied_weights=None,
    attention="bidirectional",
    objective="masked_diffusion",
    prediction_offset=1,
    transformers_class="Qwen2ForCausalLM",
    end_tokens=("<|im_end|>", "<|dlm_pad|>", "<|endoftext|>"),
    schedule="linear_time",
    algorithms=("origin", "maskgit_plus", "topk_margin", "entropy"),
    block_rules=BLOCK_RULES,
    published=(
        PublishedSettings("dream-coder-v0-instruct", _PUBLISHED | {"temperature": 0.1}),
        PublishedSettings("dream-v0-instruct", _PUBLISHED | {"temperature": 0.2}),
        PublishedSettings("cpgrpo", _PUBLISHED | {"temperature": 0.4}),
        PublishedSettings("instruct", _PUBLISHED | {"temperature": 0.3}),
        PublishedSettings("", _PUBLISHED | {"temperature": 0.2}),
    ),
    presets={"diffucoder-7b": _SEVEN_BILLION, "dream-7b": _SEVEN_BILLION},
    golden_cases=43,
)
