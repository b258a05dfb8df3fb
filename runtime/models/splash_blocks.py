"""The block sizes of splash attention, in a module without Pallas: the memory estimate needs them too."""

from __future__ import annotations

from runtime.models.masks import AttentionMask

# The width of a TPU's vector lanes: positions in every block are a multiple of it.
LANES = 128
# Sizes of a matrix product in positions: the size that is fastest, and the largest size allowed.
_PRODUCT, _LARGEST_PRODUCT = 512, 1024
# Bytes of keys that are loaded into vector memory at a time: 2048 keys of 128 bfloat16 numbers.
_KEY_BLOCK_BYTES = 2048 * 128 * 2
_FLOAT = 4


def splash_fits(head_dim: int, positions: int, sequence: int) -> bool:
    """Return whether the splash kernel's blocks divide every canvas shard and the head dimension."""
    return head_dim % LANES == 0 and positions % (LANES * sequence) == 0


def splash_blocks(mask: AttentionMask, queries: int, keys: int, key_bytes: int) -> tuple[int, int, int]:
    """Choose the kernel's block sizes: queries, keys loaded at a time, and keys per matrix product.

    Products of about 512 by 512 keep the matrix units busy; with the kernel's default of 128, overhead between products
    dominates. The number of keys loaded at a time is limited by vector memory. It is smaller for masks that hide keys,
    because the kernel skips blocks that are entirely hidden.

    Args:
      mask: the attention mask of the model.
      queries: S, a multiple of 128.
      keys: T, a multiple of 128.
      key_bytes: bytes of one key.
    """
    compute = _near_product(keys)
    at_a_time = compute
    if not mask.depends_on_position:
        most = max(compute, min(keys, _KEY_BLOCK_BYTES // key_bytes))
        at_a_time = max(size for size in range(compute, most + 1, compute) if keys % size == 0)
    return _near_product(queries), at_a_time, compute


def splash_running_sums(rows: int, kv_heads: int, queries: int, head_dim: int) -> int:
    """Return the bytes of the kernel's running sums, which it leaves in device memory as three float32 outputs.

    They are the maxima and the sums of the softmax, each repeated over the lanes, and the unnormalised output, for one
    block of queries of one query head, for each row and each KV head.

    Args:
      rows: B.
      kv_heads: K.
      queries: S, a multiple of 128.
      head_dim: H.
    """
    return rows * kv_heads * _near_product(queries) * (2 * LANES + head_dim) * _FLOAT


def _near_product(positions: int) -> int:
    """Return the divisor of ``positions`` closest in ratio to 512, among the multiples of 128 up to 1024."""
    sizes = [size for size in range(LANES, _LARGEST_PRODUCT + 1, LANES) if positions % size == 0]
    return min(sizes, key=lambda size: max(size / _PRODUCT, _PRODUCT / size))
