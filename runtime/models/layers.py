"""Layers that model families share: norms, rotary embedding, grouped-query attention, MLPs, embedding and head.

A family declares its weights with the first functions here, and passes them to the others in its forward pass.

Dimension letters: B batch, S sequence (positions that are computed), P positions of one chunk of the output head, D
embed, K kv heads, G query heads per KV head, H head dim, F mlp, V vocab.

Numerics follow the Hugging Face implementations (parity in ``tests/runtime/models``): norms and softmax in float32,
RoPE angles in float32, the rest in the weights' dtype.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from runtime.models.costs import LayerCollective, LayerCost, LiveArrays
from runtime.models.declarations import ModelLayout, shard_shape, weight
from runtime.models.forward import KV_HEADS, QUERY_HEADS, Forward
from runtime.models.quantization import Matrix, Quantized, merge_contracted, take_rows

Array = jax.Array
# Cosines and sines of rotary position embedding, for the positions that are computed.
Rotary = tuple[Array, Array]


def norm_scale(source: str) -> Any:
    """Return the declaration of the scale ``[D]`` of a norm that is applied to the residual."""
    return weight("embed", source=source, init="ones")


def head_norm_scale(source: str) -> Any:
    """Return the declaration of the scale ``[H]`` of a norm that is applied to each attention head."""
    return weight("head_dim", source=source, init="ones")


# ``embed`` is the last axis of every matrix. It is not sharded, so TPU tiles fit at every size of the tensor axis.
def query_matrix(source: str) -> Any:
    """Return the declaration of the query projection ``[K, G, H, D]``, stored as a tensor ``[heads * H, D]``."""
    return weight(*QUERY_HEADS, "embed", source=source, source_axes=(QUERY_HEADS, ("embed",)), contracted=("embed",))


def key_value_matrix(source: str) -> Any:
    """Return the declaration of the key or value projection ``[K, H, D]``, stored as a tensor ``[kv_heads * H, D]``."""
    return weight(*KV_HEADS, "embed", source=source, source_axes=(KV_HEADS, ("embed",)), contracted=("embed",))


def query_bias(source: str) -> Any:
    """Return the declaration of the bias ``[K, G, H]`` of the queries."""
    return weight(*QUERY_HEADS, source=source, source_axes=(QUERY_HEADS,), init="zeros")


def key_value_bias(source: str) -> Any:
    """Return the declaration of the bias ``[K, H]`` of the keys or of the values."""
    return weight(*KV_HEADS, source=source, source_axes=(KV_HEADS,), init="zeros")


def output_matrix(source: str) -> Any:
    """Return the declaration of the output projection ``[K, G, H, D]``, stored as a tensor ``[D, heads * H]``."""
    return weight(*QUERY_HEADS, "embed", source=source, source_axes=(("embed",), QUERY_HEADS), contracted=QUERY_HEADS)


def mlp_in_matrix(source: str) -> Any:
    """Return the declaration of a projection into the MLP, ``[F, D]``, stored in that shape."""
    return weight("mlp", "embed", source=source, contracted=("embed",))


def mlp_out_matrix(source: str) -> Any:
    """Return the declaration of the projection out of the MLP, ``[F, D]``, stored as a tensor ``[D, F]``."""
    return weight("mlp", "embed", source=source, source_axes=(("embed",), ("mlp",)), contracted=("mlp",))


def vocabulary_matrix(source: str) -> Any:
    """Return the declaration of a token embedding or an output head, ``[V, D]``."""
    return weight("vocab", "embed", source=source, contracted=("embed",))


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Apply RMSNorm over the last dimension (Zhang & Sennrich, 2019): normalise in float32, cast back, then scale."""
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normal.astype(x.dtype) * scale


def layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    """Apply LayerNorm over the last dimension (Ba et al., 2016), in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normal * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def rotary_tables(head_dim: int, theta: float, positions: Array, dtype: Any) -> Rotary:
    """Compute cosines and sines ``[..., H]`` of rotary position embedding (Su et al., 2021) at positions ``[...]``."""
    half = head_dim // 2
    frequencies = 1.0 / theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def apply_rotary(x: Array, cosine: Array, sine: Array) -> Array:
    """Rotate ``x`` ``[B, S, ..., H]`` by tables ``[S, H]`` or ``[B, S, H]``. Entry i pairs with entry ``i + H / 2``."""
    shape = (*cosine.shape[:-1], *(1,) * (x.ndim - 3), cosine.shape[-1])
    first, second = jnp.split(x, 2, axis=-1)
    rotated = jnp.concatenate([-second, first], axis=-1)
    return (x * cosine.reshape(shape) + rotated * sine.reshape(shape)).astype(x.dtype)


def grouped_query_projections(
    forward: Forward,
    x: Array,
    rotary: Rotary,
    q_proj: Matrix,
    k_proj: Matrix,
    v_proj: Matrix,
    *,
    biases: tuple[Array, Array, Array] | None = None,
    head_norms: tuple[Array, Array] | None = None,
) -> tuple[Array, Array, Array]:
    """Compute rotated queries, rotated keys, and values of grouped-query attention (Ainslie et al., 2023).

    Args:
      forward: layout and attention implementation.
      x: normalised residual ``[B, S, D]``.
      rotary: rotary tables for the positions.
      q_proj: ``[K, G, H, D]``.
      k_proj: ``[K, H, D]``.
      v_proj: like ``k_proj``.
      biases: ``[K, G, H]``, ``[K, H]`` and ``[K, H]``, added to queries, keys and values.
      head_norms: scales ``[H]`` of an RMSNorm that is applied to each head of queries and keys before rotation.

    Returns:
      Queries ``[B, S, K, G, H]``, keys and values ``[B, S, K, H]``.
    """
    with jax.named_scope("qkv"):
        q = forward.einsum("bsd,kghd->bskgh", x, q_proj)
        k = forward.einsum("bsd,khd->bskh", x, k_proj)
        v = forward.einsum("bsd,khd->bskh", x, v_proj)
        if biases is not None:
            q, k, v = q + biases[0], k + biases[1], v + biases[2]
        else:
            # Without this constraint, the compiler gathers x over the sequence axis instead of the smaller values.
            v = forward.constrain(v, "batch", "canvas", *KV_HEADS)
        if head_norms is not None:
            eps = forward.config.norm_eps
            q, k = rms_norm(q, head_norms[0], eps), rms_norm(k, head_norms[1], eps)
        q = forward.constrain(apply_rotary(q, *rotary), "batch", "canvas", *QUERY_HEADS)
        # Without this constraint, XLA on GPU may gather the keys in float32, before they are rounded.
        k = forward.constrain(apply_rotary(k, *rotary), "batch", "canvas", *KV_HEADS)
        return q, k, v


def output_projection(forward: Forward, kernel: Matrix, attended: Array) -> Array:
    """Multiply attention output ``[B, S, K, G, H]`` by ``[K, G, H, D]`` -> residual update ``[B, S, D]``.

    The first three dimensions of the matrix may be merged already.
    """
    with jax.named_scope("o_proj"):
        B, S = attended.shape[:2]
        # Contracting one merged axis gives a single all-reduce on every backend; two sharded axes give two on some.
        merged = forward.constrain(attended.reshape(B, S, -1), "batch", "canvas", QUERY_HEADS)
        kernel = merge_contracted(kernel)
        if not isinstance(kernel, Quantized):
            kernel = forward.constrain(kernel, QUERY_HEADS, "embed")
        update = forward.einsum("bsx,xd->bsd", merged, kernel, QUERY_HEADS)
        return forward.constrain(update, "batch", "residual", "embed")


def gated_mlp(forward: Forward, x: Array, gate_proj: Matrix, up_proj: Matrix, down_proj: Matrix) -> Array:
    """Apply a gated MLP (SwiGLU; Shazeer, 2020): ``[B, S, D]`` and three matrices ``[F, D]`` -> ``[B, S, D]``."""
    with jax.named_scope("mlp"):
        gate = forward.einsum("bsd,fd->bsf", x, gate_proj)
        hidden = jax.nn.silu(gate) * forward.einsum("bsd,fd->bsf", x, up_proj)
        hidden = forward.constrain(hidden, "batch", "canvas", "mlp")
        return forward.constrain(forward.einsum("bsf,fd->bsd", hidden, down_proj, "mlp"), "batch", "residual", "embed")


def embed_tokens(forward: Forward, embedding: Matrix, tokens: Array, dtype: Any) -> Array:
    """Look up rows of an embedding ``[V, D]``: int32 ``[B, S]`` -> ``[B, S, D]`` in ``dtype``."""
    tokens = forward.constrain(tokens, "batch", "canvas")
    # With the second constraint alone, the compiler shards the tokens over the tensor axis and gathers them again.
    rows = forward.constrain(take_rows(embedding, tokens, dtype), "batch", "canvas", "embed")
    return forward.constrain(rows, "batch", "residual", "embed")


def vocabulary_logits(forward: Forward, hidden: Array, head: Matrix) -> Array:
    """Compute logits in the weights' dtype from ``[B, P, D]`` and a head ``[V, D]`` -> ``[B, P, V]``, V padded."""
    return forward.einsum("bpd,vd->bpv", hidden, head)


def dense_layer_cost(layout: ModelLayout, *, gated: bool = True) -> LayerCost:
    """Return the cost of a dense layer: attention followed by an MLP, with all weights used at every position.

    Each element of a weight counts as one multiplication and one addition per position.

    Args:
      layout: the model's layout.
      gated: whether the MLP multiplies its up projection by a gate. Without one, it has one projection less, and its
        activation function is applied to the up projection.
    """
    config = layout.config
    numbers = sum(math.prod(shard_shape(leaf, layout)) for leaf in layout.leaves if leaf.layers)
    width, mlp, head_dim = (layout.size_per_device(axis) for axis in ("embed", "mlp", "head_dim"))
    query_heads, kv_heads = layout.query_heads_per_device, layout.size_per_device("kv_heads")
    # The residual is read and written by both halves of the layer and by their norms. Gate and up are written and read,
    # and their product is written and read. Without a gate, one array less is written and read.
    mlp_accesses = 5 if gated else 3
    activations = 12 * width + mlp_accesses * mlp + 4 * config.num_heads * config.head_dim // layout.spec.tensor
    return LayerCost(
        flops_per_position=2.0 * numbers / config.num_layers,
        attention_flops_per_pair=4.0 * query_heads * head_dim,
        activations_per_position=float(activations),
        live_in_attention=(LiveArrays("queries, keys and values", 1, (query_heads + 2 * kv_heads) * head_dim),),
        live_in_mlp=(LiveArrays("gate and up" if gated else "up and its activation", 2, mlp),),
        # After the output projection of attention, and after the MLP.
        tensor_collectives=(LayerCollective("all-reduce", width, 2, "residual"),),
    )
