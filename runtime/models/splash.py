"""Splash attention, JAX's flash-attention kernel for TPU, with the attention masks of this package.

This module is imported only when splash attention is selected, because importing Pallas takes long.

Dimension letters: B batch, S query positions, T key positions, K kv heads, G query heads per KV head, H head dim.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from runtime.models.masks import AttentionMask
from runtime.models.splash_blocks import splash_blocks

Array = jax.Array


class PositionMask(splash_attention_mask.Mask):
    """An attention mask ``[S, T]`` over positions from 0, which the library evaluates block by block while tracing."""

    def __init__(self, mask: AttentionMask, shape: tuple[int, int]) -> None:
        self._mask, self._shape = mask, shape

    @property
    def shape(self) -> tuple[int, int]:
        """S and T."""
        return self._shape

    def __getitem__(self, index: Any) -> np.ndarray:
        queries, keys = (np.arange(size)[part] for size, part in zip(self._shape, index, strict=True))
        visible: np.ndarray = self._mask.visible(queries[:, None], keys[None, :])
        return visible

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PositionMask) and (self._mask, self._shape) == (other._mask, other._shape)

    def __hash__(self) -> int:
        return hash((self._mask, self._shape))


def _kernel_mask(mask: AttentionMask, shape: tuple[int, int]) -> Any:
    # The kernel computes the library's own masks itself. Other masks are read from memory for partially visible blocks.
    if mask.kind == "bidirectional":
        return splash_attention_mask.FullMask(shape)
    if mask.kind == "causal":
        return splash_attention_mask.CausalMask(shape)
    return PositionMask(mask, shape)


def splash_attention(
    q: Array, k: Array, v: Array, lengths: Array, mask: AttentionMask, *, interpret: bool = False
) -> Array:
    """Compute attention of whole rows on one device.

    Args:
      q: queries ``[B, S, K, G, H]``.
      k: keys ``[B, T, K, H]``. S and T are the same positions unless ``mask`` is bidirectional.
      v: values, like ``k``.
      lengths: int32 ``[B]``, at least 1. Keys at or after them are masked.
      mask: the attention mask.
      interpret: run the kernel in interpreter mode, which is slow but needs no TPU.

    Returns:
      ``[B, S, K, G, H]`` in the dtype of ``q``.
    """
    S, T, G = q.shape[1], k.shape[1], q.shape[3]
    heads = splash_attention_mask.MultiHeadMask([_kernel_mask(mask, (S, T))] * G)
    sizes = splash_blocks(mask, S, T, k.shape[3] * k.dtype.itemsize)
    blocks = splash_attention_kernel.BlockSizes(*sizes)
    kernel = splash_attention_kernel.make_splash_mqa_single_device(heads, block_sizes=blocks, interpret=interpret)

    def row(q: Array, k: Array, v: Array, length: Array) -> Array:
        # Queries attend to keys of their own segment: real keys are in segment 1, and padding is in segment 0.
        segments = splash_attention_kernel.SegmentIds(
            q=jnp.ones((S,), jnp.int32), kv=(jnp.arange(T) < length).astype(jnp.int32)
        )
        over_kv_heads = jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=segments))
        return over_kv_heads(q, k, v)

    scaled = q / math.sqrt(q.shape[-1])
    heads_first = (scaled.transpose(0, 2, 3, 1, 4), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
    return jax.vmap(row)(*heads_first, lengths).transpose(0, 3, 1, 2, 4).astype(q.dtype)
