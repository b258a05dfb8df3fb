"""GPT-2: learned positions, LayerNorm, one projection for queries, keys and values, tied embeddings.

Dimension letters: B batch, S sequence (positions that are computed), P positions of one head chunk, D embed, K heads
(each its own KV head), H head dim, F mlp, V vocab.

Numerics follow the Hugging Face implementation (parity in ``tests/runtime/decoding/test_autoregressive.py``).
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from runtime.models.declarations import stacked, weight
from runtime.models.forward import KV_HEADS, QUERY_HEADS, Forward, output_projection
from runtime.models.quantization import Matrix, take_rows

Array = jax.Array

_PREFIX = "transformer."
_BLOCK = _PREFIX + "h.{layer}."


def layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    """LayerNorm of ``x`` ``[..., D]``, statistics in float32 (Ba et al., 2016)."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normal * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


@flax.struct.dataclass
class GPT2Layer:
    """Weights of one transformer block. The sources are stored ``[in, out]``, unlike torch's linear layers."""

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
        """Activations ``[B, S, D]`` -> queries ``[B, S, K, 1, H]``, keys and values ``[B, S, K, H]``."""
        del tables
        x = layer_norm(x, self.attention_norm, self.attention_norm_bias, forward.config.norm_eps)
        with jax.named_scope("qkv"):
            qkv = forward.einsum("bsd,nkhd->bsnkh", x, self.qkv_proj) + self.qkv_bias
            qkv = forward.constrain(qkv, "batch", "canvas", "qkv", *KV_HEADS)
            return qkv[:, :, 0, :, None], qkv[:, :, 1], qkv[:, :, 2]

    def finish(self, forward: Forward, x: Array, attended: Array) -> Array:
        """Residual ``[B, S, D]`` and attention output ``[B, S, K, 1, H]`` -> the block's output ``[B, S, D]``."""
        x = x + output_projection(forward, self.o_proj, attended) + self.o_bias
        return x + self.mlp(forward, layer_norm(x, self.mlp_norm, self.mlp_norm_bias, forward.config.norm_eps))

    def mlp(self, forward: Forward, x: Array) -> Array:
        """MLP with the tanh approximation of GELU: ``[B, S, D]`` -> ``[B, S, D]``."""
        with jax.named_scope("mlp"):
            hidden = jax.nn.gelu(forward.einsum("bsd,fd->bsf", x, self.up_proj) + self.up_bias, approximate=True)
            hidden = forward.constrain(hidden, "batch", "canvas", "mlp")
            down = forward.constrain(forward.einsum("bsf,fd->bsd", hidden, self.down_proj), "batch", "canvas", "embed")
            return down + self.down_bias


@flax.struct.dataclass
class GPT2Weights:
    """Weights of a GPT-2 model, layers stacked. The head is the embedding."""

    embedding: Matrix = weight("vocab", "embed", contracted=("embed",), source=_PREFIX + "wte.weight")
    position_embedding: Array = weight("positions", "embed", source=_PREFIX + "wpe.weight")
    layers: GPT2Layer = stacked(GPT2Layer)
    final_norm: Array = weight("embed", source=_PREFIX + "ln_f.weight", init="ones")
    final_norm_bias: Array = weight("embed", source=_PREFIX + "ln_f.bias", init="zeros")

    def embed(self, forward: Forward, tokens: Array, positions: Array) -> Array:
        """Token and position embeddings: int32 ``[B, S]`` and ``[S]`` or ``[B, S]`` -> ``[B, S, D]``."""
        tokens = forward.constrain(tokens, "batch", "canvas")
        x = forward.constrain(take_rows(self.embedding, tokens, self.final_norm.dtype), "batch", "canvas", "embed")
        return x + self.position_embedding.at[positions].get(mode="clip")

    def position_tables(self, forward: Forward, positions: Array, dtype: Any) -> None:
        """Nothing: layers do not look at positions."""
        del forward, positions, dtype

    def normalize(self, forward: Forward, x: Array) -> Array:
        """The norm before the head: ``[B, S, D]`` -> ``[B, S, D]``."""
        return layer_norm(x, self.final_norm, self.final_norm_bias, forward.config.norm_eps)

    def head(self, forward: Forward, hidden: Array) -> Array:
        """Logits in the weights' dtype, the vocabulary as padded: ``[B, P, D]`` -> ``[B, P, V]``."""
        return forward.einsum("bpd,vd->bpv", hidden, self.embedding)
