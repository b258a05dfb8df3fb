"""Grouped-query attention with any attention mask: a dispatcher over three implementations.

Dimension letters: B batch, S query positions, T key positions, K kv heads, G query heads per KV head, H head dim.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from runtime.models.declarations import ModelLayout
from runtime.models.masks import AttentionMask
from runtime.models.splash_blocks import LANES, splash_fits
from runtime.models.xla_attention import xla_attention
from sharding.errors import InputError

Array = jax.Array
Implementation = Literal["auto", "xla", "cudnn", "splash"]
ATTENTION_IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")


def choose_attention(requested: str, platform: str, layout: ModelLayout, positions: int, dtype: Any) -> str:
    """Resolve ``auto`` to an implementation, and check that a requested implementation can run.

    ``auto`` selects cuDNN for 16-bit dtypes on the GPUs that it supports, splash attention on TPU for bfloat16 if its
    blocks divide the canvas, and XLA otherwise.

    Raises:
      InputError: the implementation is unknown, or cannot run on this platform, dtype or canvas.
    """
    if requested not in ATTENTION_IMPLEMENTATIONS:
        raise InputError(f'attention "{requested}" is not one of {", ".join(ATTENTION_IMPLEMENTATIONS)}')
    sixteen_bit = jnp.dtype(dtype).itemsize == 2
    head_dim = layout.config.head_dim
    # The kernels count mask positions from the first query of a shard, which is wrong for all but the first shard.
    whole = layout.spec.sequence == 1 or not layout.config.attention_mask.depends_on_position
    blocks = splash_fits(head_dim, positions, layout.spec.sequence)
    fits = {
        "xla": True,
        "cudnn": platform in ("gpu", "cuda") and sixteen_bit and _cudnn_supports(layout) and whole,
        # The compiler of TPU kernels does not load float16.
        "splash": platform == "tpu" and jnp.dtype(dtype) != jnp.float16 and blocks and whole,
    }
    if requested == "auto":
        return "cudnn" if fits["cudnn"] else "splash" if fits["splash"] and sixteen_bit else "xla"
    if not fits[requested]:
        needs = {
            "cudnn": "an NVIDIA GPU of compute capability 8.0 or newer, a 16-bit dtype, and a head dimension that is a "
            "multiple of 8 and at most 128 (256 from 9.0 on)",
            "splash": "a TPU, bfloat16 or float32, and a head dimension and canvas shards that are multiples of "
            f"{LANES}",
        }
        raise InputError(
            f'attention "{requested}" requires {needs[requested]}; causal and block-causal models also require '
            f"sequence=1. This run has: {platform}, {jnp.dtype(dtype).name}, head dimension {head_dim}, canvas "
            f'{positions}, sequence={layout.spec.sequence}. Use "auto" or "xla"'
        )
    return requested


def _cudnn_supports(layout: ModelLayout) -> bool:
    """Whether cuDNN's attention supports the model's heads on the layout's devices.

    Without devices, or if they do not report their compute capability, 9.0 is assumed.
    """
    device = None if layout.mesh is None else layout.mesh.devices.flat[0]
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", None) or "9.0"))
    if capability is None:  # AMD's GPUs have names there, such as gfx942
        return False
    version, head_dim = (int(capability[1]), int(capability[2])), layout.config.head_dim
    return version >= (8, 0) and head_dim % 8 == 0 and head_dim <= (256 if version >= (9, 0) else 128)


def _cudnn(q: Array, k: Array, v: Array, lengths: Array, mask: AttentionMask) -> Array:
    B, S, K, G, H = q.shape
    full = jnp.full((B,), S, jnp.int32)
    # cuDNN has causal masks built in. A block-causal mask is passed as an explicit mask [1, 1, S, T].
    visible = None
    if mask.kind == "block_causal":
        visible = mask.visible(jnp.arange(S)[:, None], jnp.arange(k.shape[1]))[None, None]
    out = jax.nn.dot_product_attention(
        q.reshape(B, S, K * G, H),
        k,
        v,
        mask=visible,
        is_causal=mask.kind == "causal",
        query_seq_lengths=full,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return out.reshape(B, S, K, G, H)


def _splash(q: Array, k: Array, v: Array, lengths: Array, mask: AttentionMask) -> Array:
    from runtime.models.splash import splash_attention  # pallas takes long to import, and only TPU needs it

    return splash_attention(q, k, v, lengths, mask)


def dot_product_attention(
    implementation: str, layout: ModelLayout, q: Array, k: Array, v: Array, lengths: Array
) -> Array:
    """Compute softmax attention of every position to the first ``lengths`` keys of its row, scaled by ``1 / sqrt(H)``.

    The model's attention mask selects which of these keys a position attends to. For masks other than bidirectional,
    S and T must be the same positions.

    Args:
      implementation: ``xla``, ``cudnn`` or ``splash``.
      layout: the model, its mesh and its partition rules.
      q: queries ``[B, S, K, G, H]``, sharded over batch, canvas, KV heads and query heads.
      k: keys ``[B, T, K, H]``, sharded over batch and KV heads.
      v: values, like ``k``.
      lengths: int32 ``[B]``, number of keys in each row, at least 1.

    Returns:
      ``[B, S, K, G, H]`` in the dtype of ``v``. The softmax is computed in float32.
    """
    if implementation == "xla":
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        return xla_attention(layout, q, k, v, jnp.zeros_like(lengths), lengths, queries="canvas", keys=None)
    kernel = partial({"cudnn": _cudnn, "splash": _splash}[implementation], mask=layout.config.attention_mask)
    if layout.mesh is None:
        return kernel(q, k, v, lengths)
    # The compiler cannot partition hand-written kernels, so each device calls the kernel on its own shard.
    rules = layout.rules
    queries: PartitionSpec = rules.spec("batch", "canvas", "kv_heads", "queries_per_kv", "head_dim")
    keys = rules.spec("batch", None, "kv_heads", "head_dim")
    return jax.shard_map(
        kernel,
        mesh=layout.mesh,
        in_specs=(queries, keys, keys, rules.spec("batch")),
        out_specs=queries,
        check_vma=False,
    )(q, k, v, lengths)
