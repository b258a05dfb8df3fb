"""GPT-2: learned positions, LayerNorm, a fused projection to queries, keys and values, tied embeddings.

Dimension letters: B batch, S sequence (positions that are computed), P positions of one chunk of the output head, D
embed, K heads (each its own KV head), H head dim, F mlp, V vocab.

Numerics follow the Hugging Face implementation (parity in ``tests/runtime/decoding/test_autoregressive.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax

from runtime.models.config import Family, ModelConfig, check_features, transformer_config
from runtime.models.costs import LayerCost
from runtime.models.declarations import ModelLayout, layers_of, weight
from runtime.models.forward import KV_HEADS, QUERY_HEADS, Forward
from runtime.models.layers import (
    dense_layer_cost,
    embed_tokens,
    layer_norm,
    output_projection,
    vocabulary_logits,
    vocabulary_matrix,
)
from runtime.models.quantization import Matrix

Array = jax.Array

_PREFIX = "transformer."
_BLOCK = _PREFIX + "h.{layer}."


@flax.struct.dataclass
class GPT2Layer:
    """Weights of one transformer layer. GPT-2 stores matrices as ``[in, out]``, unlike torch's linear layers."""

    attention_norm: Array = weight("embed", source=_BLOCK + "ln_1.weight", init="ones")
    attention_norm_bias: Array = weight("embed", source=_BLOCK + "ln_1.bias", init="zeros")
    qkv_proj: Matrix = weight(
        "qkv",
        *KV_HEADS,
        "embed",
        source=_BLOCK + "attn.c_attn.weight",
        source_axes=(("embed",), ("qkv", *KV_HEADS)),
        contracted=("embed",),
    )
    qkv_bias: Array = weight(
        "qkv", *KV_HEADS, source=_BLOCK + "attn.c_attn.bias", source_axes=(("qkv", *KV_HEADS),), init="zeros"
    )
    o_proj: Matrix = weight(
        *QUERY_HEADS,
        "embed",
        source=_BLOCK + "attn.c_proj.weight",
        source_axes=(QUERY_HEADS, ("embed",)),
        contracted=QUERY_HEADS,
    )
    o_bias: Array = weight("embed", source=_BLOCK + "attn.c_proj.bias", init="zeros")
    mlp_norm: Array = weight("embed", source=_BLOCK + "ln_2.weight", init="ones")
    mlp_norm_bias: Array = weight("embed", source=_BLOCK + "ln_2.bias", init="zeros")
    up_proj: Matrix = weight(
        "mlp", "embed", source=_BLOCK + "mlp.c_fc.weight", source_axes=(("embed",), ("mlp",)), contracted=("embed",)
    )
    up_bias: Array = weight("mlp", source=_BLOCK + "mlp.c_fc.bias", init="zeros")
    down_proj: Matrix = weight("mlp", "embed", source=_BLOCK + "mlp.c_proj.weight", contracted=("mlp",))
    down_bias: Array = weight("embed", source=_BLOCK + "mlp.c_proj.bias", init="zeros")

    def project_qkv(self, forward: Forward, x: Array, tables: None) -> tuple[Array, Array, Array]:
        """Compute queries ``[B, S, K, 1, H]``, keys and values ``[B, S, K, H]`` from the residual ``[B, S, D]``."""
        del tables
        x = layer_norm(x, self.attention_norm, self.attention_norm_bias, forward.config.norm_eps)
        with jax.named_scope("qkv"):
            qkv = forward.einsum("bsd,nkhd->bsnkh", x, self.qkv_proj) + self.qkv_bias
            qkv = forward.constrain(qkv, "batch", "canvas", "qkv", *KV_HEADS)
            return qkv[:, :, 0, :, None], qkv[:, :, 1], qkv[:, :, 2]

    def finish(self, forward: Forward, x: Array, attended: Array) -> Array:
        """Add the output projection of attention ``[B, S, K, 1, H]``, then the MLP, to the residual ``[B, S, D]``."""
        x = x + output_projection(forward, self.o_proj, attended) + self.o_bias
        return x + self.mlp(forward, layer_norm(x, self.mlp_norm, self.mlp_norm_bias, forward.config.norm_eps))

    def mlp(self, forward: Forward, x: Array) -> Array:
        """Apply the MLP, with the tanh approximation of GELU: ``[B, S, D]`` -> ``[B, S, D]``."""
        with jax.named_scope("mlp"):
            hidden = jax.nn.gelu(forward.einsum("bsd,fd->bsf", x, self.up_proj) + self.up_bias, approximate=True)
            hidden = forward.constrain(hidden, "batch", "canvas", "mlp")
            down = forward.einsum("bsf,fd->bsd", hidden, self.down_proj, "mlp")
            down = forward.constrain(down, "batch", "residual", "embed")
            return down + self.down_bias


@flax.struct.dataclass
class GPT2Weights:
    """Weights of a GPT-2 model. The head is tied to the embedding."""

    embedding: Matrix = vocabulary_matrix(_PREFIX + "wte.weight")
    position_embedding: Array = weight("positions", "embed", source=_PREFIX + "wpe.weight")
    layers: GPT2Layer = layers_of(GPT2Layer)
    final_norm: Array = weight("embed", source=_PREFIX + "ln_f.weight", init="ones")
    final_norm_bias: Array = weight("embed", source=_PREFIX + "ln_f.bias", init="zeros")

    @staticmethod
    def cost(layout: ModelLayout) -> LayerCost:
        """Return the cost of a layer on one device."""
        return dense_layer_cost(layout, gated=False)

    def embed(self, forward: Forward, tokens: Array, positions: Array) -> Array:
        """Embed int32 tokens ``[B, S]`` at positions ``[S]`` or ``[B, S]`` -> ``[B, S, D]``."""
        x = embed_tokens(forward, self.embedding, tokens, self.final_norm.dtype)
        return x + self.position_embedding.at[positions].get(mode="clip")

    def position_tables(self, forward: Forward, positions: Array, dtype: Any) -> None:
        """Return None: the layers do not use positions."""
        del forward, positions, dtype

    def normalize(self, forward: Forward, x: Array) -> Array:
        """Apply the norm before the head: ``[B, S, D]`` -> ``[B, S, D]``."""
        return layer_norm(x, self.final_norm, self.final_norm_bias, forward.config.norm_eps)

    def head(self, forward: Forward, hidden: Array) -> Array:
        """Compute logits in the weights' dtype: ``[B, P, D]`` -> ``[B, P, V]``, where V includes padding."""
        return vocabulary_logits(forward, hidden, self.embedding)


# Supported features, by key of config.json: (value that an absent key means, values that the forward pass supports).
_FEATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
    "scale_attn_weights": (True, (True,)),
    "scale_attn_by_inverse_layer_idx": (False, (False, None)),
    "add_cross_attention": (False, (False, None)),
}

# Maps GPT-2's configuration keys to the common ones.
_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
}


def _with_common_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    common = {key: value for key, value in raw.items() if key not in _NAMES.values()}
    common |= {common_name: raw[own] for own, common_name in _NAMES.items() if raw.get(own) is not None}
    width = common.get("hidden_size")
    if isinstance(width, int) and not isinstance(width, bool):
        common.setdefault("intermediate_size", 4 * width)
    common["num_key_value_heads"] = common.get("num_attention_heads")
    common.setdefault("rms_norm_eps", 1e-5)
    common.pop("head_dim", None)
    return common


# In the first published GPT-2 folders, tensor names lack the prefix "transformer.", and causal masks are tensors too.
_BARE = re.compile(r"(h\.\d+|wte|wpe|ln_f)\.")
_CAUSAL_MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")


def _tensor_name(name: str) -> str | None:
    if _CAUSAL_MASK.fullmatch(name):
        return None
    return _PREFIX + name if _BARE.match(name) else name


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    check_features(GPT2, raw, _FEATURES)
    return transformer_config(GPT2, _with_common_names(raw), renamed=_NAMES, rotary=False, tied_by_default=True)


GPT2 = Family(
    name="gpt2",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    parse=_parse,
    weights=None,
    tied_weights=GPT2Weights,
    attention="causal",
    objective="autoregressive",
    prediction_offset=1,
    transformers_class="GPT2LMHeadModel",
    tokenizer_class="GPT2TokenizerFast",
    end_tokens=("<|im_end|>", "<|endoftext|>"),  # the first one in chats with ChatML
    tensor_name=_tensor_name,
    presets={
        "gpt2": {
            "model_type": "gpt2",
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "torch_dtype": "float32",
        }
    },
    reference="transformers",
)
