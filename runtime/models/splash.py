"""Splash attention, JAX's flash attention for TPU, under the masks of this package. Imported where it is chosen.

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

Array = jax.Array


# Positions of one product that the matrix units are fast at, and the most that one may have.
_LANES, _PRODUCT, _LARGEST_PRODUCT = 128, 512, 1024
# Keys that are brought into the vector memory at a time: 2048 of 128 numbers in bfloat16.
_KEY_BLOCK_BYTES = 2048 * 128 * 2


class PositionMask(splash_attention_mask.Mask):
    """An attention mask ``[S, T]`` over absolute positions from 0, evaluated a block at a time while tracing."""

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
    # The library's own masks are computed inside the kernel; another one is read from memory where a block is partial.
    if mask.kind == "bidirectional":
        return splash_attention_mask.FullMask(shape)
    if mask.kind == "causal":
        return splash_attention_mask.CausalMask(shape)
    return PositionMask(mask, shape)


def splash_blocks(mask: AttentionMask, queries: int, keys: int, key_bytes: int) -> tuple[int, int, int]:
    """Sizes of the kernel's blocks: queries, keys that are brought in at a time, and those of one product.

    Products of about 512 by 512 fill the matrix units; at the kernel's own default, 128, most of the time goes by
    between them. As many keys come in at a time as leave room in the vector memory. Where a mask hides keys, fewer do:
    the kernel leaves out blocks that are hidden whole.

    Args:
      mask: of the model.
      queries: S, a multiple of 128.
      keys: T, likewise.
      key_bytes: of one key.
    """
    compute = _near_product(keys)
    at_a_time = compute
    if not mask.depends_on_position:
        most = max(compute, min(keys, _KEY_BLOCK_BYTES // key_bytes))
        at_a_time = max(size for size in range(compute, most + 1, compute) if keys % size == 0)
    return _near_product(queries), at_a_time, compute


def _near_product(positions: int) -> int:
    """The divisor of ``positions`` nearest in ratio to 512, of multiples of 128 up to 1024."""
    sizes = [size for size in range(_LANES, _LARGEST_PRODUCT + 1, _LANES) if positions % size == 0]
    return min(sizes, key=lambda size: max(size / _PRODUCT, _PRODUCT / size))


def splash_attention(
    q: Array, k: Array, v: Array, lengths: Array, mask: AttentionMask, *, interpret: bool = False
) -> Array:
    """Attention of whole rows on one device.

    Args:
      q: ``[B, S, K, G, H]``.
      k: ``[B, T, K, H]``; S and T are the same positions unless ``mask`` is bidirectional.
      v: like ``k``.
      lengths: int32 ``[B]``, at least 1; keys at or after them are masked.
      mask: which keys a position attends to.
      interpret: run the kernel without a TPU, slowly.

    Returns:
      ``[B, S, K, G, H]`` in the dtype of ``q``.
    """
    S, T, G = q.shape[1], k.shape[1], q.shape[3]
    heads = splash_attention_mask.MultiHeadMask([_kernel_mask(mask, (S, T))] * G)
    sizes = splash_blocks(mask, S, T, k.shape[3] * k.dtype.itemsize)
    blocks = splash_attention_kernel.BlockSizes(*sizes)
    kernel = splash_attention_kernel.make_splash_mqa_single_device(heads, block_sizes=blocks, interpret=interpret)

    def row(q: Array, k: Array, v: Array, length: Array) -> Array:
        # Keys of segment 0 are filler; every query belongs to segment 1.
        segments = splash_attention_kernel.SegmentIds(
            q=jnp.ones((S,), jnp.int32), kv=(jnp.arange(T) < length).astype(jnp.int32)
        )
        over_kv_heads = jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=segments))
        return over_kv_heads(q, k, v)

    scaled = q / math.sqrt(q.shape[-1])
    heads_first = (scaled.transpose(0, 2, 3, 1, 4), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
    return jax.vmap(row)(*heads_first, lengths).transpose(0, 3, 1, 2, 4).astype(q.dtype)
