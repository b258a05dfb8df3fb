"""Block length, steps per block, and the widths of the windows that cached steps compute."""

from __future__ import annotations

import math

from runtime.decoding.parameters import DEFAULT_BLOCK_LENGTH, DiffusionConfig


def block_schedule(config: DiffusionConfig, width: int) -> tuple[int, int]:
    """Return the positions per block, and the maximum number of steps per block.

    A parallel rule commits at least one token per step, so a block has at most as many steps as positions. Otherwise
    the steps of the request are divided among the blocks of its new tokens.

    Args:
      config: the request.
      width: positions of the canvas.
    """
    length = config.block_length or (width if config.cache == "none" else DEFAULT_BLOCK_LENGTH)
    length = min(length, width)
    if config.parallel != "none":
        return length, length
    return length, max(1, math.ceil(config.steps / max(1, math.ceil(config.max_new_tokens / length))))


def window_widths(cache: str, length: int, span: int, refresh_blocks: int = 1, *, offset: int) -> tuple[int, ...]:
    """Return the window widths to compile, in descending order.

    A dual cache needs windows of one block, and windows of two blocks if blocks may be entered without a refresh. A
    prefix cache needs windows up to the end of the row. Their widths are ``span`` halved repeatedly, down to at most
    two blocks, so that a window is at most about twice as wide as needed.

    Args:
      cache: ``none``, ``prefix`` or ``dual``.
      length: positions per block.
      span: the largest distance in any row from its first mask to its end, in positions.
      refresh_blocks: refresh on entering every n-th block; 0 refreshes only for the first block.
      offset: number of positions before the block that a window must include to predict the block's first token, see
        :attr:`runtime.models.config.Family.prediction_offset`.
    """
    if cache == "none":
        return ()
    if cache == "dual":
        widths = [length] if refresh_blocks == 1 else [2 * length, length]
    else:
        widths = [span]
        while widths[-1] > 2 * length:
            widths.append(-(-widths[-1] // 2))
    return tuple(width + offset for width in widths)
