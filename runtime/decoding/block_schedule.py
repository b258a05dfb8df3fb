"""Block length, steps per block, and the widths of the windows that cached steps compute."""

from __future__ import annotations

import math

from runtime.decoding.parameters import DEFAULT_BLOCK_LENGTH, DiffusionConfig, SamplingConfig


def block_schedule(config: DiffusionConfig, width: int) -> tuple[int, int]:
    """Return the number of positions per block, and the maximum number of steps per block.

    A parallel rule commits at least one token per step, so a block has at most as many steps as positions. Otherwise
    ``config.steps`` is divided among the blocks of new tokens. A canvas of variable length is a single block, and the
    limit of its steps is each row's own, see :func:`runtime.execution.row_request.most_steps_of_row`.

    Args:
      config: decoding parameters of the rows.
      width: number of positions of the canvas.
    """
    if config.variable_length:
        return width, 1
    if config.attention_block_length:
        # Every step commits at least one position, unless the model predicts the mask token.
        return config.attention_block_length, config.attention_block_length
    length = config.block_length or (width if config.cache == "none" else DEFAULT_BLOCK_LENGTH)
    length = min(length, width)
    if config.parallel != "none":
        return length, length
    return length, steps_of_a_block(config, length)


def steps_of_a_block(config: DiffusionConfig, length: int) -> int:
    """Return the number of steps per block if ``config.steps`` is divided among blocks of ``length`` new tokens."""
    blocks = max(1, math.ceil(config.max_new_tokens / length))
    if config.block_rule == "fast_dllm":
        return max(1, config.steps // blocks)
    return max(1, math.ceil(config.steps / blocks))


def canvas_length(given: int, config: DiffusionConfig | SamplingConfig) -> int:
    """Return the canvas length for ``given`` and new tokens: whole blocks if attention is block-causal."""
    length = given + config.max_new_tokens
    block = config.attention_block_length if isinstance(config, DiffusionConfig) else 0
    return math.ceil(length / block) * block if block else length


def window_widths(
    cache: str, length: int, span: int, refresh_blocks: int = 1, *, offset: int, sub_block: int | None = None
) -> tuple[int, ...]:
    """Return the window widths to compile, in descending order.

    A dual cache needs windows of one block, and windows of two blocks if blocks may be entered without a refresh. A
    prefix cache needs windows up to the end of the row. Their widths are ``span`` halved repeatedly, down to at most
    two blocks, so that a window is at most about twice as wide as needed. An exact cache needs windows of one block
    and, if the model has no prediction offset, of two; see :mod:`runtime.decoding.block_causal`.

    Args:
      cache: ``none``, ``prefix``, ``dual`` or ``exact``.
      length: positions per block.
      span: the largest distance in any row from its first mask to its end, in positions.
      refresh_blocks: refresh on entering every n-th block; 0 refreshes only for the first block.
      offset: number of positions before the block that a window must include to predict the block's first token, see
        :attr:`runtime.models.config.Family.prediction_offset`.
      sub_block: number of positions of a sub-block if sub-blocks are computed alone; otherwise None.
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
