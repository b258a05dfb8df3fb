"""LLaDA and LLaDA 1.5 (Nie et al., 2025): a Llama-like transformer with bidirectional attention and no output shift.

The decoding follows ``generate.py`` of ML-GSAI/LLaDA, with three differences. Left padding is masked out, whereas
copies of the modelling code from before October 2025 add a causal bias to batches with padding. Classifier-free
guidance works without an attention mask, whereas the original fails without one. The number of new tokens need not be a
multiple of the block length: the last block is shorter then, because attention is bidirectional, so that masks beyond
the last new token would change the others.

Dimension letters: B batch, S sequence (positions that are computed), D embed, K kv heads, G query heads per KV head,
H head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from runtime.models import qwen2
from runtime.models.config import (
    ConfigError,
    Family,
    ModelConfig,
    PublishedSettings,
    check_features,
    transformer_config,
)
from runtime.models.declarations import layers_of
from runtime.models.forward import Forward
from runtime.models.layers import (
    Rotary,
    gated_mlp,
    grouped_query_projections,
    key_value_matrix,
    mlp_in_matrix,
    mlp_out_matrix,
    norm_scale,
    output_matrix,
    output_projection,
    query_matrix,
    rms_norm,
    rotary_tables,
    vocabulary_matrix,
)
from runtime.models.quantization import Matrix

Array = jax.Array

_LAYER = "model.transformer.blocks.{layer}."


@flax.struct.dataclass
class LLaDALayer:
    """Weights of one transformer layer."""

    input_norm: Array = norm_scale(_LAYER + "attn_norm.weight")
    q_proj: Matrix = query_matrix(_LAYER + "q_proj.weight")
    k_proj: Matrix = key_value_matrix(_LAYER + "k_proj.weight")
    v_proj: Matrix = key_value_matrix(_LAYER + "v_proj.weight")
    o_proj: Matrix = output_matrix(_LAYER + "attn_out.weight")
    post_attention_norm: Array = norm_scale(_LAYER + "ff_norm.weight")
    gate_proj: Matrix = mlp_in_matrix(_LAYER + "ff_proj.weight")
    up_proj: Matrix = mlp_in_matrix(_LAYER + "up_proj.weight")
    down_proj: Matrix = mlp_out_matrix(_LAYER + "ff_out.weight")

    def project_qkv(self, forward: Forward, x: Array, rotary: Rotary) -> tuple[Array, Array, Array]:
        """Project ``[B, S, D]`` to queries ``[B, S, K, G, H]``, keys and values ``[B, S, K, H]``; rotate q and k."""
        normal = rms_norm(x, self.input_norm, forward.config.norm_eps)
        return grouped_query_projections(forward, normal, rotary, self.q_proj, self.k_proj, self.v_proj)

    def finish(self, forward: Forward, x: Array, attended: Array) -> Array:
        """Add the output projection of attention ``[B, S, K, G, H]``, then the MLP, to the residual ``[B, S, D]``."""
        x = x + output_projection(forward, self.o_proj, attended)
        normal = rms_norm(x, self.post_attention_norm, forward.config.norm_eps)
        return x + gated_mlp(forward, normal, self.gate_proj, self.up_proj, self.down_proj)


@flax.struct.dataclass
class LLaDAWeights(qwen2.Qwen2Weights):
    """Weights of a LLaDA model."""

    embedding: Matrix = vocabulary_matrix("model.transformer.wte.weight")
    layers: Any = layers_of(LLaDALayer)
    final_norm: Array = norm_scale("model.transformer.ln_f.weight")
    lm_head: Matrix = vocabulary_matrix("model.transformer.ff_out.weight")

    def position_tables(self, forward: Forward, positions: Array, dtype: Any) -> Rotary:
        """Compute rotary tables for positions ``[S]`` or ``[B, S]``, in float32 for any ``dtype`` of the weights."""
        del dtype
        return rotary_tables(forward.config.head_dim, forward.config.rope_theta, positions, jnp.float32)


# Supported features, by key of config.json: (value that an absent key means, values that the forward pass supports).
_FEATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "block_type": (None, ("llama",)),
    "activation_type": (None, ("silu",)),
    "layer_norm_type": (None, ("rms",)),
    "rope": (None, (True,)),
    "rope_full_precision": (True, (True,)),
    "alibi": (False, (False,)),
    "attention_layer_norm": (False, (False,)),
    "input_emb_norm": (False, (False,)),
    "scale_logits": (False, (False,)),
    "include_bias": (False, (False,)),
    "include_qkv_bias": (False, (False, None)),
    "multi_query_attention": (None, (None, False)),
}

# Maps LLaDA's configuration keys to the common ones.
_NAMES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
}


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    check_features(LLADA, raw, _FEATURES)
    common = {key: value for key, value in raw.items() if key not in _NAMES.values()}
    common |= {common_name: raw[own] for own, common_name in _NAMES.items() if raw.get(own) is not None}
    common.setdefault("num_key_value_heads", common.get("num_attention_heads"))
    common.setdefault("rms_norm_eps", 1e-5)  # the default of LLaDA's own configuration
    renamed = _NAMES
    # The embedding and the head have embedding_size rows; vocab_size is the size of the tokenizer's vocabulary.
    if raw.get("embedding_size") is not None:
        common["vocab_size"] = raw["embedding_size"]
        renamed = _NAMES | {"embedding_size": "vocab_size"}
        _check_vocabulary(raw)
    common.pop("head_dim", None)
    if not (raw.get("torch_dtype") or raw.get("dtype")):
        common["torch_dtype"] = "bfloat16"  # that of the authors' weights, which their config.json does not name
    return transformer_config(LLADA, common, renamed=renamed)


def _check_vocabulary(raw: Mapping[str, Any]) -> None:
    rows, tokens = raw["embedding_size"], raw.get("vocab_size")
    if isinstance(rows, int) and isinstance(tokens, int) and tokens > rows:
        raise ConfigError(f"config.json: vocab_size {tokens} is larger than embedding_size {rows}")


_PUBLISHED: dict[str, Any] = {
    "algorithm": "low_confidence",
    "temperature": 0.0,
    "block_length": 32,
}
_EIGHT_BILLION: dict[str, Any] = {
    "model_type": "llada",
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "rope": True,
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "max_sequence_length": 4096,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "weight_tying": False,
    "mask_token_id": 126336,
    "eos_token_id": 126081,
    "pad_token_id": 126081,
    "torch_dtype": "bfloat16",
}

LLADA = Family(
    name="llada",
    model_type="llada",
    architecture="LLaDAModelLM",
    parse=_parse,
    weights=LLaDAWeights,
    tied_weights=None,
    attention="bidirectional",
    objective="masked_diffusion",
    prediction_offset=0,
    schedule="even",
    algorithms=("low_confidence", "random"),
    guidance=True,
    reads_generation_config=False,
    mask_token_id=126336,
    end_token_ids=(126081,),
    end_tokens=("<|eot_id|>", "<|endoftext|>"),  # the first one ends the turns of a chat
    # From the README of ML-GSAI/LLaDA: one step per token, blocks of 32.
    published=(PublishedSettings("", _PUBLISHED),),
    presets={"llada-8b": _EIGHT_BILLION},
    golden_cases=14,
)
