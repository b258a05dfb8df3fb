"""Qwen2, and Dream / DiffuCoder, which have its weights and attend both ways.

Dimension letters: B batch, S sequence (positions that are computed), P positions of one head chunk, D embed, K kv
heads, G query heads per KV head, H head dim, F mlp, V vocab.

Numerics follow the Hugging Face implementation (parity in ``tests/runtime/models/test_parity.py``): RMSNorm and softmax
in float32, RoPE angles in float32, the rest in the weights' dtype.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from runtime.models.config import ModelConfig
from runtime.models.declarations import stacked, weight
from runtime.models.forward import KV_HEADS, QUERY_HEADS, Forward, output_projection
from runtime.models.quantization import Matrix, take_rows

Array = jax.Array
# Cosines and sines of the positions that are computed.
Rotary = tuple[Array, Array]


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """RMSNorm of ``x`` ``[..., D]``: normalised in float32, cast back, then scaled (Zhang & Sennrich, 2019)."""
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normal.astype(x.dtype) * scale


def rotary_tables(config: ModelConfig, positions: Array, dtype: Any) -> tuple[Array, Array]:
    """Cosines and sines ``[..., H]`` of rotary position embedding (Su et al., 2021) for positions ``[...]``."""
    half = config.head_dim // 2
    frequencies = 1.0 / config.rope_theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def apply_rotary(x: Array, cosine: Array, sine: Array) -> Array:
    """Rotate ``x`` ``[B, S, ..., H]`` by tables ``[S, H]`` or ``[B, S, H]``; the two halves of H are the pairs."""
    shape = (*cosine.shape[:-1], *(1,) * (x.ndim - 3), cosine.shape[-1])
    first, second = jnp.split(x, 2, axis=-1)
    rotated = jnp.concatenate([-second, first], axis=-1)
    return x * cosine.reshape(shape) + rotated * sine.reshape(shape)


@flax.struct.dataclass
class Qwen2Layer:
    """Weights of one transformer block. ``embed`` comes last: TPU tiles then fit at every size of the tensor axis."""

    input_norm: Array = weight("embed", source="model.layers.{layer}.input_layernorm.weight", init="ones")
    q_proj: Matrix = weight(
        *QUERY_HEADS,
        "embed",
        source="model.layers.{layer}.self_attn.q_proj.weight",
        source_axes=(QUERY_HEADS, ("embed",)),
        contracted=("embed",),
    )
    q_bias: Array = weight(
        *QUERY_HEADS, source="model.layers.{layer}.self_attn.q_proj.bias", source_axes=(QUERY_HEADS,), init="zeros"
    )
    k_proj: Matrix = weight(
        *KV_HEADS,
        "embed",
        source="model.layers.{layer}.self_attn.k_proj.weight",
        source_axes=(KV_HEADS, ("embed",)),
        contracted=("embed",),
    )
    k_bias: Array = weight(
        *KV_HEADS, source="model.layers.{layer}.self_attn.k_proj.bias", source_axes=(KV_HEADS,), init="zeros"
    )
    v_proj: Matrix = weight(
        *KV_HEADS,
        "embed",
        source="model.layers.{layer}.self_attn.v_proj.weight",
        source_axes=(KV_HEADS, ("embed",)),
        contracted=("embed",),
    )
    v_bias: Array = weight(
        *KV_HEADS, source="model.layers.{layer}.self_attn.v_proj.bias", source_axes=(KV_HEADS,), init="zeros"
    )
    o_proj: Matrix = weight(
        *QUERY_HEADS,
        "embed",
        source="model.layers.{layer}.self_attn.o_proj.weight",
        source_axes=(("embed",), QUERY_HEADS),
        contracted=QUERY_HEADS,
    )
    post_attention_norm: Array = weight(
        "embed", source="model.layers.{layer}.post_attention_layernorm.weight", init="ones"
    )
    gate_proj: Matrix = weight(
        "mlp", "embed", source="model.layers.{layer}.mlp.gate_proj.weight", contracted=("embed",)
    )
    up_proj: Matrix = weight("mlp", "embed", source="model.layers.{layer}.mlp.up_proj.weight", contracted=("embed",))
    down_proj: Matrix = weight(
        "mlp",
        "embed",
        source="model.layers.{layer}.mlp.down_proj.weight",
        source_axes=(("embed",), ("mlp",)),
        contracted=("mlp",),
    )

    def project_qkv(self, forward: Forward, x: Array, rotary: Rotary) -> tuple[Array, Array, Array]:
        """Activations ``[B, S, D]`` -> rotated queries ``[B, S, K, G, H]`` and keys, and values ``[B, S, K, H]``."""
        x = rms_norm(x, self.input_norm, forward.config.norm_eps)
        with jax.named_scope("qkv"):
            q = forward.einsum("bsd,kghd->bskgh", x, self.q_proj) + self.q_bias
            k = forward.einsum("bsd,khd->bskh", x, self.k_proj) + self.k_bias
            v = forward.einsum("bsd,khd->bskh", x, self.v_proj) + self.v_bias
            q = forward.constrain(apply_rotary(q, *rotary), "batch", "canvas", *QUERY_HEADS)
            return q, apply_rotary(k, *rotary), v

    def finish(self, forward: Forward, x: Array, attended: Array) -> Array:
        """Residual ``[B, S, D]`` and attention output ``[B, S, K, G, H]`` -> the block's output ``[B, S, D]``."""
        x = x + output_projection(forward, self.o_proj, attended)
        return x + self.mlp(forward, rms_norm(x, self.post_attention_norm, forward.config.norm_eps))

    def mlp(self, forward: Forward, x: Array) -> Array:
        """Gated MLP (SwiGLU; Shazeer, 2020): ``[B, S, D]`` -> ``[B, S, D]``."""
        with jax.named_scope("mlp"):
            gate = forward.einsum("bsd,fd->bsf", x, self.gate_proj)
            hidden = jax.nn.silu(gate) * forward.einsum("bsd,fd->bsf", x, self.up_proj)
            hidden = forward.constrain(hidden, "batch", "canvas", "mlp")
            return forward.constrain(forward.einsum("bsf,fd->bsd", hidden, self.down_proj), "batch", "canvas", "embed")


@flax.struct.dataclass
class TiedQwen2Weights:
    """Weights of a Qwen2 model whose head is its embedding, layers stacked."""

    embedding: Matrix = weight("vocab", "embed", contracted=("embed",), source="model.embed_tokens.weight")
    layers: Qwen2Layer = stacked(Qwen2Layer)
    final_norm: Array = weight("embed", source="model.norm.weight", init="ones")

    def embed(self, forward: Forward, tokens: Array, positions: Array) -> Array:
        """Token embeddings: tokens int32 ``[B, S]`` -> ``[B, S, D]``; ``positions`` come in by rotation, later."""
        del positions
        tokens = forward.constrain(tokens, "batch", "canvas")
        return forward.constrain(take_rows(self.embedding, tokens, self.final_norm.dtype), "batch", "canvas", "embed")

    def position_tables(self, forward: Forward, positions: Array, dtype: Any) -> Rotary:
        """What every layer needs to know of positions ``[S]`` or ``[B, S]``."""
        return rotary_tables(forward.config, positions, dtype)

    def normalize(self, forward: Forward, x: Array) -> Array:
        """The norm before the head: ``[B, S, D]`` -> ``[B, S, D]``."""
        return rms_norm(x, self.final_norm, forward.config.norm_eps)

    def head(self, forward: Forward, hidden: Array) -> Array:
        """Logits in the weights' dtype, the vocabulary as padded: ``[B, P, D]`` -> ``[B, P, V]``."""
        return forward.einsum("bpd,vd->bpv", hidden, self.embedding)


@flax.struct.dataclass
class Qwen2Weights(TiedQwen2Weights):
    """Weights of a Dream or Qwen2 model with a head of its own, layers stacked."""

    lm_head: Matrix = weight("vocab", "embed", contracted=("embed",), source="lm_head.weight")

    def head(self, forward: Forward, hidden: Array) -> Array:
        """Logits in the weights' dtype, the vocabulary as padded: ``[B, P, D]`` -> ``[B, P, V]``."""
        return forward.einsum("bpd,vd->bpv", hidden, self.lm_head)
