"""Windows: a few positions of each row, cut out of its canvas, and how many of them the output head runs on at a time.

Dimension letters: B batch, S canvas, W window.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from runtime.decoding.choices import Choices
from runtime.models.forward import Forward

Array = jax.Array

# Positions per row of a window on which a single CPU runs the output head at a time, half as many if the head has few
# enough weights to stay in the processor's caches.
_CPU_CHUNK = 16
_WEIGHTS_IN_CPU_CACHES = 1 << 21


def refresh_chunk(chunk: int, block_length: int, sequence: int) -> int:
    """Return how many positions per row the output head runs on at a time after a refresh.

    The step of a refresh needs the logits of one block only, so the chunk need not be larger than a block.

    Args:
      chunk: number of positions per row at a time in steps that may need the whole canvas; an upper bound.
      block_length: positions per block.
      sequence: size of the ``sequence`` mesh axis. A block is rounded up to a multiple of it.
    """
    return min(chunk, -(-block_length // sequence) * sequence)


def window_chunk(forward: Forward, chunk: int, width: int) -> int:
    """Return how many positions per row the output head runs on at a time in a window.

    Accelerators read all weights of the head for each chunk, so there a window is one chunk. On a single CPU, a product
    of few positions takes time in proportion to them, unless it waits for the weights to come from memory.

    Args:
      forward: layout of the model.
      chunk: number of positions per row at a time in steps that may need the whole canvas; an upper bound.
      width: positions of the window.
    """
    if not forward.is_single_cpu:
        return min(chunk, width)
    is_cached = math.prod(forward.layout.head.shape) <= _WEIGHTS_IN_CPU_CACHES
    return min(chunk, width if width <= _CPU_CHUNK else _CPU_CHUNK // 2 if is_cached else _CPU_CHUNK)


def text_positions(places: Array, visible: Array, lengths: Array) -> Array:
    """Map indices of visible positions to positions on the canvas: the last visible one is the canvas's last.

    Args:
      places: int32 ``[B, W]`` or ``[1, W]``.
      visible: int32 ``[B]``, number of visible positions.
      lengths: int32 ``[B]``, number of positions of the canvas.
    """
    return jnp.where(places == visible[:, None] - 1, lengths[:, None] - 1, places)


def pull_last(canvas: Array, lengths: Array, visible: Array) -> Array:
    """Put the last token of each canvas ``[B, S]`` after the other visible ones."""
    last = jnp.take_along_axis(canvas, lengths[:, None] - 1, axis=1)
    return jnp.where(jnp.arange(canvas.shape[1]) == visible[:, None] - 1, last, canvas)


def cut(width: int) -> Callable[..., tuple[Array, ...]]:
    """Return a function that cuts windows ``[B, W]`` at ``start`` ``[B]`` out of arrays ``[B, S]``.

    Window positions beyond the canvas are zero.
    """

    def cut_rows(start: Array, *rows: Array) -> tuple[Array, ...]:
        places = start[:, None] + jnp.arange(width)
        inside = places < rows[0].shape[1]
        clipped = jnp.minimum(places, rows[0].shape[1] - 1)
        return tuple(
            jnp.where(inside, jnp.take_along_axis(values, clipped, axis=1), jnp.zeros((), values.dtype))
            for values in rows
        )

    return cut_rows


def paste(width: int) -> Callable[..., Choices]:
    """Return the inverse of :func:`cut`: it puts windows ``[B, W]`` into arrays ``[B, S]`` that are zero elsewhere."""

    def paste_rows(start: Array, canvas: Array, windows: Choices) -> Choices:
        places = jnp.arange(canvas.shape[1]) - start[:, None]
        inside = (places >= 0) & (places < width)
        clipped = jnp.clip(places, 0, width - 1)
        return jax.tree.map(lambda values: jnp.where(inside, jnp.take_along_axis(values, clipped, axis=1), 0), windows)

    return paste_rows
