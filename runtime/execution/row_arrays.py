"""Conversion of row requests to the host arrays that the decoding loops take: run-time arguments and initial state.

Dimension letters: S canvas, R length of a row's ratio table (the steps of a block, padded), T cache length.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from runtime.decoding.block_schedule import block_schedule, steps_of_a_block
from runtime.decoding.decode_state import DecodeRequest, DecodeState
from runtime.decoding.draft_counts import AUTO_DRAFTS
from runtime.decoding.loop_parameters import row_values
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.decoding.schedule import transfer_table
from runtime.decoding.state import DenoiseRequest, DenoiseState
from runtime.execution.row_request import (
    RowRequest,
    expansion_limit,
    first_masks,
    first_position,
    length_limit,
    most_steps_of_row,
)
from runtime.execution.rows import make_canvas, seed_words, stop_rows
from runtime.models.arrays import one_row
from runtime.models.config import ModelConfig

# The value for "no limit" on iterations or steps.
UNLIMITED = int(np.iinfo(np.int32).max)


def filler_token(model: ModelConfig) -> int:
    """Return a token that is not the mask token, so that a row of this token has nothing to denoise."""
    return 0 if model.mask_token_id != 0 else 1


def empty_row(model: ModelConfig, config: DiffusionConfig | SamplingConfig) -> RowRequest:
    """Return the request that stands in for an empty slot: one token, and nothing to generate."""
    return RowRequest([filler_token(model)], config, 0)


def diffusion_row(
    request: RowRequest | None, default: DiffusionConfig, model: ModelConfig, width: int, steps: int
) -> tuple[DenoiseRequest, DenoiseState]:
    """Return the run-time arguments and the initial state of one diffusion row; see :func:`one_row`.

    The state has no cache.

    Args:
      request: the row; None for an empty slot.
      default: the configuration of an empty slot.
      model: the model's configuration.
      width: S.
      steps: R.
    """
    row = request or empty_row(model, default)
    config = row.config
    assert isinstance(config, DiffusionConfig)
    new = first_masks(row, model) if request else 0
    (canvas,), (length,) = make_canvas(row.rows, model, new, width)
    first = length if request is None else first_position(request, model)
    # From the row's own length: its tokens must not depend on the width of the slots.
    block_length, steps_per_block = block_schedule(config, min(row.canvas_length, width))
    ratios = np.zeros(steps, np.float32)
    assert model.family.schedule is not None, "a family that denoises has a schedule"
    ratios[:steps_per_block] = transfer_table(model.family.schedule, steps_per_block, float(config.eps))
    filters = config.temperature > 0 or model.family.filters_when_greedy
    most_drafts = default.drafts if config.draft_steps == AUTO_DRAFTS else config.draft_steps
    arguments = one_row(
        DenoiseRequest,
        lengths=length + len(row.suffix),
        ends=length if request is None else row.length,
        prompts=len(row.tokens),
        first=first,
        seeds=seed_words([row.seed])[0],
        ratios=ratios,
        block_length=block_length,
        sub_block_length=min(config.sub_block_length or block_length, block_length),
        steps_per_block=steps_per_block,
        block_steps=steps_of_a_block(config, block_length),
        refresh_blocks=0 if config.cache == "exact" else config.refresh_blocks,
        stop_tokens=stop_rows(config.stop_token_ids, 1)[0],
        **row_values(config if filters else config.replace(top_p=None, top_k=None)),
        max_iterations=UNLIMITED,
        min_running=1,
        step_limit=UNLIMITED,
        draft_steps=most_drafts if default.drafts else None,
    )
    state = _state_at_start(canvas, bool(first >= length), default)
    return _of_variable_length(row, model, arguments, state) if model.family.variable_length else (arguments, state)


def _state_at_start(canvas: np.ndarray, done: bool, default: DiffusionConfig) -> DenoiseState:
    """Return the state of a row before its first forward pass, with canvas ``[S]``."""
    return one_row(
        DenoiseState,
        canvas=canvas,
        commit_steps=np.full(len(canvas), -1),
        block=0,
        step_in_block=0,
        steps_until_refresh=0,
        previous_block_stale=0,
        refreshes=0,
        window_positions=0,
        done=done,
        non_finite=False,
        iteration=0,
        log_probabilities=np.zeros(len(canvas)) if default.log_probabilities else None,
        # There are no guesses yet, so the drafts are copies.
        drafts=np.tile(canvas, (default.drafts, 1)) if default.drafts else None,
        made_steps=0 if default.drafts else None,
        passes=0 if default.drafts else None,
    )


def _of_variable_length(
    row: RowRequest, model: ModelConfig, request: DenoiseRequest, state: DenoiseState
) -> tuple[DenoiseRequest, DenoiseState]:
    """Return request and state of a row whose canvas has a variable length: its limits, and its length at the start."""
    limit = length_limit(row, model)
    assert isinstance(row.config, DiffusionConfig)
    budget = np.array([expansion_limit(row, model)], np.int32)
    numbers = {
        "lengths": limit,
        "ends": limit - len(row.suffix),
        "steps_per_block": most_steps_of_row(row, model),
    }
    changed = {name: np.array([value], np.int32) for name, value in numbers.items()} | {"expand_budget": budget}
    return replace(request, **changed), replace(state, lengths=request.lengths, expansions_left=budget)


def autoregressive_row(
    request: RowRequest | None, default: SamplingConfig, model: ModelConfig, width: int
) -> tuple[DecodeRequest, DecodeState]:
    """Return the run-time arguments and the initial state of one autoregressive row; see :func:`one_row`.

    The state has no cache.

    Args:
      request: the row; None for an empty slot.
      default: the configuration of an empty slot.
      model: the model's configuration.
      width: T.
    """
    row = request or empty_row(model, default)
    config = row.config
    assert isinstance(config, SamplingConfig)
    new = config.max_new_tokens if request else 0
    (tokens,), (end,) = make_canvas(row.rows, model, new, width)
    prompt = len(row.tokens)
    return one_row(
        DecodeRequest,
        seeds=seed_words([row.seed])[0],
        prompts=prompt,
        turns=0,
        ends=end,
        stop_tokens=stop_rows(config.stop_token_ids, 1)[0],
        # At temperature 0 filters have no effect, because the most probable token passes all of them.
        **row_values(config if config.temperature > 0 else config.replace(top_p=None, top_k=None)),
        max_iterations=UNLIMITED,
        min_running=1,
        drafts=config.draft_bound(default) if default.drafts else None,
    ), one_row(
        DecodeState,
        tokens=tokens,
        lengths=prompt,
        read=0 if request is not None and default.use_cache else prompt,
        done=request is None,
        non_finite=False,
        iteration=0,
        log_probabilities=np.zeros(width) if default.log_probabilities else None,
        passes=0 if default.drafts else None,
    )
