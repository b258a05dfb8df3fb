"""Qwen3: Qwen2 without biases, with a norm of each head of queries and keys, and with an explicit head_dim.

Dimension letters: B batch, S sequence (positions that are computed), D embed, K kv heads, G query heads per KV head,
H head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax

from runtime.models import qwen2
from runtime.models.config import Family, ModelConfig, check_features, read_integer, transformer_config
from runtime.models.declarations import layers_of
from runtime.models.forward import Forward
from runtime.models.layers import (
    Rotary,
    gated_mlp,
    grouped_query_projections,
    head_norm_scale,
    key_value_matrix,
    mlp_in_matrix,
    mlp_out_matrix,
    norm_scale,
    output_matrix,
    output_projection,
    query_matrix,
    rms_norm,
)
from runtime.models.quantization import Matrix

Array = jax.Array

_LAYER = "model.layers.{layer}."


@flax.struct.dataclass
class Qwen3Layer:
    """Weights of one transformer layer."""

    input_norm: Array = norm_scale(_LAYER + "input_layernorm.weight")
    q_proj: Matrix = query_matrix(_LAYER + "self_attn.q_proj.weight")
    q_norm: Array = head_norm_scale(_LAYER + "self_attn.q_norm.weight")
    k_proj: Matrix = key_value_matrix(_LAYER + "self_attn.k_proj.weight")
    k_norm: Array = head_norm_scale(_LAYER + "self_attn.k_norm.weight")
    v_proj: Matrix = key_value_matrix(_LAYER + "self_attn.v_proj.weight")
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
            head_norms=(self.q_norm, self.k_norm),
        )

    def finish(self, forward: Forward, x: Array, attended: Array) -> Array:
        """Run the part of the layer after attention: output projection and MLP, each added to the residual.

        Args:
          forward: layout and attention implementation.
          x: residual ``[B, S, D]``.
          attended: output of attention ``[B, S, K, G, H]``.

        Returns:
          The residual ``[B, S, D]``.
        """
        x = x + output_projection(forward, self.o_proj, attended)
        normal = rms_norm(x, self.post_attention_norm, forward.config.norm_eps)
        return x + gated_mlp(forward, normal, self.gate_proj, self.up_proj, self.down_proj)


@flax.struct.dataclass
class TiedQwen3Weights(qwen2.TiedQwen2Weights):
    """Weights of a Qwen3 model whose head is tied to the embedding."""

    layers: Any = layers_of(Qwen3Layer)


@flax.struct.dataclass
class Qwen3Weights(qwen2.Qwen2Weights):
    """Weights of a Qwen3 model with an untied head."""

    layers: Any = layers_of(Qwen3Layer)


# Supported features, by key of config.json: (value that an absent key means, values that the forward pass supports).
FEATURES = qwen2.FEATURES | {"attention_bias": (False, (False, None))}

_PUBLISHED: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "torch_dtype": "bfloat16",
}


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    check_features(QWEN3, raw, FEATURES)
    read_integer(raw, "head_dim", 1, 1 << 12)  # required: Qwen3 does not derive it from the hidden size
    return transformer_config(QWEN3, raw)


QWEN3 = Family(
    name="qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    parse=_parse,
    weights=Qwen3Weights,
    tied_weights=TiedQwen3Weights,
    attention="causal",
    objective="autoregressive",
    prediction_offset=1,
    transformers_class="Qwen3ForCausalLM",
    end_token_ids=(151645, 151643),
    end_tokens=qwen2.END_TOKENS,
    infilling=qwen2.INFILLING,
    presets={
        "qwen3-0.6b": _PUBLISHED
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
        "qwen3-8b": _PUBLISHED
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
    },
    reference="transformers",
    golden_cases=18,
)
