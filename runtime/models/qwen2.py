"""Qwen2 and Qwen2.5: causal attention with biases on queries, keys and values; the head is tied or untied.

Dimension letters: B batch, S sequence (positions that are computed), P positions of one chunk of the output head, D
embed, K kv heads, G query heads per KV head, H head dim, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax

from runtime.models.config import Family, InfillingTokens, ModelConfig, check_features, transformer_config
from runtime.models.costs import LayerCost
from runtime.models.declarations import ModelLayout, layers_of
from runtime.models.forward import Forward
from runtime.models.layers import (
    Rotary,
    dense_layer_cost,
    embed_tokens,
    gated_mlp,
    grouped_query_projections,
    key_value_bias,
    key_value_matrix,
    mlp_in_matrix,
    mlp_out_matrix,
    norm_scale,
    output_matrix,
    output_projection,
    query_bias,
    query_matrix,
    rms_norm,
    rotary_tables,
    vocabulary_logits,
    vocabulary_matrix,
)
from runtime.models.quantization import Matrix

Array = jax.Array

_LAYER = "model.layers.{layer}."

# Supported features, by key of config.json: (value that an absent key means, values that the forward pass supports).
FEATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "hidden_act": ("silu", ("silu",)),
    "rope_scaling": (None, (None,)),
    "use_sliding_window": (False, (False, None)),
}


@flax.struct.dataclass
class Qwen2Layer:
    """Weights of one transformer layer."""

    input_norm: Array = norm_scale(_LAYER + "input_layernorm.weight")
    q_proj: Matrix = query_matrix(_LAYER + "self_attn.q_proj.weight")
    q_bias: Array = query_bias(_LAYER + "self_attn.q_proj.bias")
    k_proj: Matrix = key_value_matrix(_LAYER + "self_attn.k_proj.weight")
    k_bias: Array = key_value_bias(_LAYER + "self_attn.k_proj.bias")
    v_proj: Matrix = key_value_matrix(_LAYER + "self_attn.v_proj.weight")
    v_bias: Array = key_value_bias(_LAYER + "self_attn.v_proj.bias")
    o_proj: Matrix = output_matrix(_LAYER + "self_attn.o_proj.weight")
    post_attention_norm: Array = norm_scale(_LAYER + "post_attention_layernorm.weight")
    gate_proj: Matrix = mlp_in_matrix(_LAYER + "mlp.gate_proj.weight")
    up_proj: Matrix = mlp_in_matrix(_LAYER + "mlp.up_proj.weight")
    down_proj: Matrix = mlp_out_matrix(_LAYER + "mlp.down_proj.weight")

    def project_qkv(self, forward: Forward, x: Array, rotary: Rotary) -> tuple[Array, Array, Array]:
        """Project ``[B, S, D]`` to queries ``[B, S, K, G, H]``, keys and values ``[B, S, K, H]``; rotate q and k."""
        return grouped_query_projections(
            forward,
            rms_norm(x, self.input_norm, forward.config.norm_eps),
            rotary,
            self.q_proj,
            self.k_proj,
            self.v_proj,
            biases=(self.q_bias, self.k_bias, self.v_bias),
        )

    def finish(self, forward: Forward, x: Array, attended: Array) -> Array:
        """Add the output projection of attention ``[B, S, K, G, H]``, then the MLP, to the residual ``[B, S, D]``."""
        x = x + output_projection(forward, self.o_proj, attended)
        normal = rms_norm(x, self.post_attention_norm, forward.config.norm_eps)
        return x + gated_mlp(forward, normal, self.gate_proj, self.up_proj, self.down_proj)


@flax.struct.dataclass
class TiedQwen2Weights:
    """Weights of a Qwen2 model whose head is tied to the embedding."""

    embedding: Matrix = vocabulary_matrix("model.embed_tokens.weight")
    layers: Any = layers_of(Qwen2Layer)
    final_norm: Array = norm_scale("model.norm.weight")

    @staticmethod
    def cost(layout: ModelLayout) -> LayerCost:
        """Return the cost of a layer on one device."""
        return dense_layer_cost(layout)

    def embed(self, forward: Forward, tokens: Array, positions: Array) -> Array:
        """Embed int32 tokens ``[B, S]`` -> ``[B, S, D]``. The layers apply ``positions`` later, by rotation."""
        del positions
        return embed_tokens(forward, self.embedding, tokens, self.final_norm.dtype)

    def position_tables(self, forward: Forward, positions: Array, dtype: Any) -> Rotary:
        """Compute rotary tables, which all layers share, for positions ``[S]`` or ``[B, S]``."""
        return rotary_tables(forward.config.head_dim, forward.config.rope_theta, positions, dtype)

    def normalize(self, forward: Forward, x: Array) -> Array:
        """Apply the norm before the head: ``[B, S, D]`` -> ``[B, S, D]``."""
        return rms_norm(x, self.final_norm, forward.config.norm_eps)

    def head(self, forward: Forward, hidden: Array) -> Array:
        """Compute logits in the weights' dtype: ``[B, P, D]`` -> ``[B, P, V]``, where V includes padding."""
        return vocabulary_logits(forward, hidden, self.embedding)


@flax.struct.dataclass
class Qwen2Weights(TiedQwen2Weights):
    """Weights of a Qwen2 or Dream model with an untied head."""

    lm_head: Matrix = vocabulary_matrix("lm_head.weight")

    def head(self, forward: Forward, hidden: Array) -> Array:
        """Compute logits in the weights' dtype: ``[B, P, D]`` -> ``[B, P, V]``, where V includes padding."""
        return vocabulary_logits(forward, hidden, self.lm_head)


# The tokens that end a message and a text.
END_TOKENS = ("<|im_end|>", "<|endoftext|>")
# Those of Qwen2.5-Coder (Hui et al., 2024). In its infilling example, ``ends`` end the text between prompt and suffix.
INFILLING = InfillingTokens(
    prefix="<|fim_prefix|>",
    suffix="<|fim_suffix|>",
    middle="<|fim_middle|>",
    ends=("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)

SEVEN_BILLION: dict[str, Any] = {
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


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    check_features(QWEN2, raw, FEATURES)
    return transformer_config(QWEN2, raw)


QWEN2 = Family(
    name="qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    parse=_parse,
    weights=Qwen2Weights,
    tied_weights=TiedQwen2Weights,
    attention="causal",
    objective="autoregressive",
    prediction_offset=1,
    transformers_class="Qwen2ForCausalLM",
    end_tokens=END_TOKENS,
    infilling=INFILLING,
    presets={"qwen2.5-7b": SEVEN_BILLION | {"model_type": "qwen2"}},
    reference="transformers",
)
