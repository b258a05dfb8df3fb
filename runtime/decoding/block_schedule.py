"""How a canvas is cut into blocks, and how wide the windows of a cached step are."""

from __future__ import annotations

import math

from runtime.decoding.parameters import DEFAULT_BLOCK_LENGTH, DiffusionConfig, SamplingConfig


def block_schedule(config: DiffusionConfig, width: int) -> tuple[int, int]:
    """Positions per block, and the most steps that a block takes.

    A parallel rule commits at least one token per step, so a block has at most as many steps as positions. Otherwise
    the steps of the request are shared among the blocks of its new tokens.

    Args:
      config: the request.
      width: positions of the canvas.
    """
    if config.attention_block_length:
        # Every step commits one position at least, unless the model predicts MASK.
        return config.attention_block_length, config.attention_block_length
    length = config.block_length or (width if config.cache == "none" else DEFAULT_BLOCK_LENGTH)
    length = min(length, width)
    if config.parallel != "none":
        return length, length
    return length, steps_of_a_block(config, length)


def steps_of_a_block(config: DiffusionConfig, length: int) -> int:
    """The steps of a request that fall to each block of ``length`` positions of its new tokens."""
    return max(1, math.ceil(config.steps / max(1, math.ceil(config.max_new_tokens / length))))


def canvas_length(prompt: int, config: DiffusionConfig | SamplingConfig) -> int:
    """Positions that a row needs for its prompt and its new tokens: whole blocks of block-causal attention."""
    block = config.attention_block_length if isinstance(config, DiffusionConfig) else 0
    return math.ceil((prompt + config.max_new_tokens) / max(block, 1)) * max(block, 1)


def window_widths(
    cache: str, length: int, span: int, refresh_blocks: int = 1, *, offset: int, sub_block: int | None = None
) -> tuple[int, ...]:
    """Widths of the windows that are compiled, descending.

    A dual cache has windows of one block, and of two where blocks may be entered without a refresh. A prefix cache has
    windows of all that follows, halved down to a block. An exact cache has windows of one block, and where the first
    position of a block is not committed alone of two; see :mod:`runtime.decoding.block_causal`.

    Args:
      cache: ``none``, ``prefix``, ``dual`` or ``exact``.
      length: positions per block.
      span: positions from the first mask of any row to its end.
      refresh_blocks: blocks from one that is entered with a refresh to the next; 0 for the first alone.
      offset: positions before the block that predict its first token, see
        :attr:`runtime.models.config.Family.prediction_offset`.
      sub_block: positions of sub-blocks that are run alone, None for none.
    """
    if cache == "none":
        return ()
    if cache == "exact":
        widths = [length] if offset else [2 * length, length]
        widths += [sub_block] if sub_block and sub_block < length else []
        return tuple(width + offset for width in widths)
    if cache == "dual":
        widths = [length] if refresh_blocks == 1 else [2 * length, length]
    else:
        widths = [span]
        while widths[-1] > 2 * length:
            widths.append(-(-widths[-1] // 2))
    return tuple(width + offset for width in widths)
