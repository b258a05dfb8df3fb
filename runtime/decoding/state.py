"""Inputs and state of the masked-diffusion loop: compiled settings, run-time arguments, and the loop's carry.

Dimension letters: B batch, S canvas, R padded steps of a block, E stop tokens, K drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.struct
import jax.numpy as jnp

from runtime.decoding.loop_parameters import compiled_settings, row_arrays
from runtime.decoding.parameters import DiffusionConfig
from runtime.decoding.sampling import SamplingRule
from runtime.models.arrays import Leaf, array
from runtime.models.config import UnmaskingSchedule

_INTEGER, _REAL = jnp.int32, jnp.float32
# Canvases that a step of a row with a variable length may leave in a history, see :attr:`DenoiseState.entries`.
ENTRIES_PER_STEP = 3
_Rows: Any = row_arrays(DiffusionConfig)
_Settings: Any = compiled_settings(DiffusionConfig)


@dataclass(frozen=True, kw_only=True)
class DenoiseProgram(_Settings):
    """Settings of a generation that are compiled into the program.

    The compiled parameters of :class:`DiffusionConfig` that the loop reads are fields too: ``algorithm``, ``parallel``,
    ``block_rule``, ``attention_block_length`` (0 if attention is not block-causal) and ``variable_length``.

    Attributes:
      sampling: how tokens are chosen.
      sample_positions: sample the positions to commit by confidence where ``alg_temp`` is above 0; otherwise take the
        most confident ones.
      chunk: number of positions per row that the output head runs on at a time.
      schedule: how many masks a step fills, see :data:`runtime.models.config.UnmaskingSchedule`.
      guided: run a second forward pass without the prompt, for classifier-free guidance of rows that ask for it.
      log_probabilities: record the log-probability of every committed token.
      decaying: the threshold falls while a block is filled, in rows that ask for it.
      windows: window widths of cached steps, in descending order; empty without a cache.
      refresh_widths: numbers of positions that refreshes are compiled for, in descending order, if blocks of some rows
        see a part of the canvas only (``suffix_window``); otherwise empty.
      within_block: a window ends at the end of the row's block (dual cache); otherwise at the end of the row (prefix
        cache).
      first_alone: commit the first position of a block alone, because the previous block's last output predicts it.
      sub_block_window: compute only the current sub-block once its first position is committed.
      drafts: K, guessed canvases that a pass computes after each row's own; see :mod:`runtime.decoding.drafts` and,
        with a cache, :mod:`runtime.decoding.drafted_windows`.
      over_data: the canvases of a pass are divided over the ``data`` axis, and the rows are on all of its shards.
    """

    sampling: SamplingRule
    sample_positions: bool
    chunk: int
    schedule: UnmaskingSchedule
    guided: bool = False
    log_probabilities: bool = False
    decaying: bool = False
    windows: tuple[int, ...] = ()
    refresh_widths: tuple[int, ...] = ()
    within_block: bool = False
    first_alone: bool = False
    sub_block_window: bool = False
    drafts: int = 0
    over_data: bool = False


@flax.struct.dataclass
class DenoiseRequest(_Rows):
    """Run-time arguments of a generation.

    The run-time parameters of :class:`DiffusionConfig` that the loop reads are fields too, as arrays ``[B]``: for
    example ``temperature`` and ``threshold``. Programs that do not use a parameter ignore its array.

    Attributes:
      lengths: int32 ``[B]``, length of each row's canvas: prompt, new tokens and suffix, rounded up to whole blocks if
        attention is block-causal. If canvases have a variable length, this is its limit.
      ends: int32 ``[B]``, prompt plus new tokens. A row is done when no mask is left before this position.
      prompts: int32 ``[B]``, length of each prompt, masks inside it included.
      first: int32 ``[B]``, position at which each row's first block starts.
      seeds: uint32 ``[B, 2]``, each row's PRNG key data.
      ratios: float32 ``[B, R]``, fraction of a block's remaining masks that each step of the block commits.
      block_length: int32 ``[B]``, positions per block.
      sub_block_length: int32 ``[B]``, positions per sub-block of block-causal attention.
      steps_per_block: int32 ``[B]``, maximum number of steps per block.
      block_steps: int32 ``[B]``, number of steps that the ``even_block`` schedule divides a block into.
      refresh_blocks: int32 ``[B]``, refresh on entering every n-th block; 0 refreshes only for the first block.
      stop_tokens: int32 ``[B, E]``, padded with -1. A row is done when one of these is among its new tokens and no mask
        is left before it.
      expand_budget: int32 ``[B]``, how many masks may become two, or None if canvases have a fixed length. So are the
        parameters that are only for canvases of a variable length.
      draft_steps: int32 ``[B]``, most steps of a pass after its first; None without drafts.
      max_iterations: int32, the loop ends after this many iterations.
      min_running: int32, at least 1; the loop ends when fewer rows than this are running.
      step_limit: int32, no row starts a step with this number or a later one. Steps count from 0 in each row.
    """

    lengths: Leaf = array("batch", dtype=_INTEGER)
    ends: Leaf = array("batch", dtype=_INTEGER)
    prompts: Leaf = array("batch", dtype=_INTEGER)
    first: Leaf = array("batch", dtype=_INTEGER)
    seeds: Leaf = array("batch", "seed_words", dtype=jnp.uint32)
    ratios: Leaf = array("batch", "steps", dtype=_REAL)
    block_length: Leaf = array("batch", dtype=_INTEGER)
    sub_block_length: Leaf = array("batch", dtype=_INTEGER)
    steps_per_block: Leaf = array("batch", dtype=_INTEGER)
    block_steps: Leaf = array("batch", dtype=_INTEGER)
    refresh_blocks: Leaf = array("batch", dtype=_INTEGER)
    stop_tokens: Leaf = array("batch", "stop_tokens", dtype=_INTEGER)
    max_iterations: Leaf = array(dtype=_INTEGER)
    min_running: Leaf = array(dtype=_INTEGER)
    step_limit: Leaf = array(dtype=_INTEGER)
    expand_budget: Leaf = array("batch", dtype=_INTEGER, feature="variable_length")
    draft_steps: Leaf = array("batch", dtype=_INTEGER, feature="drafts")


@flax.struct.dataclass
class DenoiseState:
    """State of the denoise loop. In each iteration, every row that is not done runs one forward pass.

    Attributes:
      canvas: int32 ``[B, S]``, start-aligned; uncommitted positions hold the mask token.
      commit_steps: int32 ``[B, S]``, the row's step that committed each position; -1 if none has.
      block: int32 ``[B]``, index of the row's current block.
      step_in_block: int32 ``[B]``, index of the next step within the block.
      steps_until_refresh: int32 ``[B]``, denoise steps left before the next refresh; at 0 the next one is a refresh.
      previous_block_stale: int32 ``[B]``, 1 if the cached keys and values of the previous block were computed while it
        still had masks, else 0.
      refreshes: int32 ``[B]``, forward passes over the whole canvas so far.
      window_positions: int32 ``[B]``, positions computed so far in windows, and in refreshes of a part of the canvas.
      done: bool ``[B]``, rows that have ended.
      non_finite: bool ``[B]``, rows that have ended because the model's logits were NaN or infinite.
      iteration: int32, iterations so far.
      log_probabilities: float32 ``[B, S]``, log-probabilities of committed tokens, or None.
      lengths: int32 ``[B]``, current length of each row's canvas, or None if canvases have a fixed length.
      expansions_left: int32 ``[B]``, how many masks may still become two, or None if canvases have a fixed length.
      entries: int32 ``[B, 3, S]``, each row's canvas in the last iteration after the commit, after deletions and after
        expansions; -1 beyond its length, and everywhere if nothing happened. None unless a history is recorded.
      drafts: int32 ``[B, K, S]``, guesses of each row's canvases after its next steps, or None without drafts.
      made_steps: int32 ``[B]``, denoise steps so far, or None without drafts.
      passes: int32 ``[B]``, forward passes so far, or None without drafts.
      cache: the KV cache, see :data:`runtime.models.kv_cache.Cache`, or None.
    """

    canvas: Leaf = array("batch", "positions", dtype=_INTEGER)
    commit_steps: Leaf = array("batch", "positions", dtype=_INTEGER, empty=-1)
    block: Leaf = array("batch", dtype=_INTEGER)
    step_in_block: Leaf = array("batch", dtype=_INTEGER)
    steps_until_refresh: Leaf = array("batch", dtype=_INTEGER)
    previous_block_stale: Leaf = array("batch", dtype=_INTEGER)
    refreshes: Leaf = array("batch", dtype=_INTEGER)
    window_positions: Leaf = array("batch", dtype=_INTEGER)
    done: Leaf = array("batch", dtype=jnp.bool_)
    non_finite: Leaf = array("batch", dtype=jnp.bool_)
    iteration: Leaf = array(dtype=_INTEGER)
    log_probabilities: Leaf = array("batch", "positions", dtype=_REAL, feature="log_probabilities")
    lengths: Leaf = array("batch", dtype=_INTEGER, feature="variable_length")
    expansions_left: Leaf = array("batch", dtype=_INTEGER, feature="variable_length")
    entries: Leaf = array("batch", "entries", "positions", dtype=_INTEGER, feature="history")
    drafts: Leaf = array("batch", "drafts", "positions", dtype=_INTEGER, feature="drafts")
    made_steps: Leaf = array("batch", dtype=_INTEGER, feature="drafts")
    passes: Leaf = array("batch", dtype=_INTEGER, feature="drafts")
    cache: Leaf = None


def row_steps(request: DenoiseRequest, state: DenoiseState) -> Leaf:
    """Return the number of each row's next step, counted over all of its blocks: int32 ``[B]``."""
    return state.block * request.steps_per_block + state.step_in_block


def block_start(request: DenoiseRequest, block: Leaf) -> Leaf:
    """Return the position at which block ``block`` ``[B]`` of each row starts: int32 ``[B]``."""
    return request.first + block * request.block_length
