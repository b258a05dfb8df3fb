"""Conversion of row requests to the host arrays that the decoding loops take: run-time arguments and initial state.

Dimension letters: S canvas, R padded steps of a block, T cache length.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from runtime.decoding.autoregressive import DecodeRequest, DecodeState
from runtime.decoding.block_schedule import block_schedule, steps_of_a_block
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.decoding.schedule import padded_steps, transfer_table
from runtime.decoding.state import DenoiseRequest, DenoiseState
from runtime.execution.row_request import RowRequest, first_position
from runtime.execution.rows import make_canvas, sampling_rows, seed_words, stop_rows
from runtime.models.config import ModelConfig

Tree = TypeVar("Tree")

# The refresh interval of rows that refresh only on entering a block, and the value for "no limit" on iterations or
# steps.
NEVER = 1 << 30
UNLIMITED = np.int32(np.iinfo(np.int32).max)


def filler_token(model: ModelConfig) -> int:
    """Return a token that is not the mask token, so that a row of it has nothing to denoise."""
    return 0 if model.mask_token_id != 0 else 1


def empty_row(model: ModelConfig, config: DiffusionConfig | SamplingConfig) -> RowRequest:
    """Return the request that stands in for an empty slot: one token, and nothing to generate."""
    return RowRequest([filler_token(model)], config, 0)


def diffusion_row(
    request: RowRequest | None, default: DiffusionConfig, model: ModelConfig, width: int, steps: int
) -> tuple[DenoiseRequest, DenoiseState]:
    """Return the run-time arguments and the initial state of one diffusion row, every array ``[1, ...]``.

    The state has no cache.

    Args:
      request: the row; None for an empty slot.
      default: the configuration of an empty slot.
      model: the model's configuration.
      width: S.
      steps: minimum number of steps per block that the ratio table must have room for.
    """
    row = request or empty_row(model, default)
    config = row.config
    assert isinstance(config, DiffusionConfig)
    new = row.canvas_length - len(row.tokens) if request else 0
    canvas, lengths = make_canvas(row.rows, model, new, width)
    first = lengths if request is None else np.array([first_position(request, model)], np.int32)
    length, steps_per_block = block_schedule(config, width)
    ratios = np.zeros((1, padded_steps(max(steps_per_block, steps), width)), np.float32)
    assert model.family.schedule is not None, "a family that denoises has a schedule"
    ratios[:, :steps_per_block] = transfer_table(model.family.schedule, steps_per_block, float(config.eps))
    zero = np.zeros(1, np.int32)
    return DenoiseRequest(
        lengths=lengths,
        ends=lengths if request is None else np.array([row.length], np.int32),
        prompts=row.rows.lengths,
        first=first,
        seeds=seed_words([row.seed]),
        ratios=ratios,
        block_length=np.array([length], np.int32),
        sub_block_length=np.array([min(config.sub_block_length or length, length)], np.int32),
        steps_per_block=np.array([steps_per_block], np.int32),
        block_steps=np.array([steps_of_a_block(config, length)], np.int32),
        refresh_interval=np.array([config.refresh_interval or NEVER], np.int32),
        refresh_blocks=np.array([0 if config.cache == "exact" else config.refresh_blocks], np.int32),
        stop_tokens=stop_rows(config.stop_token_ids, 1),
        threshold=np.array([config.threshold], np.float32),
        factor=np.array([config.factor], np.float32),
        entropy_limit=np.array([config.entropy_limit], np.float32),
        cfg_scale=np.array([config.cfg_scale], np.float32),
        alg_temp=np.array([config.alg_temp or 0.0], np.float32),
        **sampling_rows(config, model.vocab_size, 1),
        max_iterations=UNLIMITED,
        step_limit=UNLIMITED,
    ), DenoiseState(
        canvas=canvas,
        commit_steps=np.full_like(canvas, -1),
        block=zero,
        step_in_block=zero,
        steps_until_refresh=zero,
        previous_block_stale=zero,
        refreshes=zero,
        window_positions=zero,
        done=first >= lengths,
        iteration=np.int32(0),
        log_probabilities=np.zeros(canvas.shape, np.float32) if default.log_probabilities else None,
    )


def autoregressive_row(
    request: RowRequest | None, default: SamplingConfig, model: ModelConfig, width: int
) -> tuple[DecodeRequest, DecodeState]:
    """Return the run-time arguments and the initial state of one autoregressive row, every array ``[1, ...]``.

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
    tokens, ends = make_canvas(row.rows, model, config.max_new_tokens if request else 0, width)
    prompts = row.rows.lengths
    return DecodeRequest(
        seeds=seed_words([row.seed]),
        prompts=prompts,
        ends=ends,
        stop_tokens=stop_rows(config.stop_token_ids, 1),
        # At temperature 0 filters have no effect, because the most probable token passes all of them.
        **sampling_rows(config if config.temperature > 0 else SamplingConfig(), model.vocab_size, 1),
        max_iterations=UNLIMITED,
    ), DecodeState(
        tokens=tokens,
        lengths=prompts,
        read=np.zeros_like(prompts) if request is not None and default.use_cache else prompts,
        done=np.array([request is None]),
        iteration=np.int32(0),
        log_probabilities=np.zeros(tokens.shape, np.float32) if default.log_probabilities else None,
    )
