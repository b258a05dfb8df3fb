"""What a masked-diffusion generation is: the parts that are compiled in, the request, and the state of the loop.

Dimension letters: B batch, S canvas, R padded steps of a block, E stop tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import flax.struct
import jax.numpy as jnp

from runtime.decoding.sampling import SamplingRule
from runtime.models.arrays import Leaf, array

_INTEGER, _REAL = jnp.int32, jnp.float32


@dataclass(frozen=True)
class DenoiseProgram:
    """The parts of a generation that are compiled in.

    Attributes:
      algorithm: one of :data:`runtime.decoding.sampling.ALGORITHMS`.
      sampling: how tokens are chosen.
      sample_positions: draw the positions to commit by confidence (``alg_temp`` above 0), else take the best.
      chunk: positions per row that the head is run on at a time.
      schedule: how many masks a step fills, see :data:`runtime.models.config.UnmaskingSchedule`.
      guided: run a second forward pass without the prompt, for classifier-free guidance of rows that ask for it.
      log_probabilities: keep the log-probability of every token that is committed.
      parallel: ``none`` (the schedule says how many tokens a step commits), ``threshold`` or ``factor``.
      windows: widths that a cached step may compute, descending; empty without a cache.
      within_block: a window ends with its row's block (dual cache), else with the row (prefix cache).
      attention_block_length: positions of a block of block-causal attention, which are then the blocks that are filled;
        0 with other attention.
      first_alone: the first position of such a block is predicted by the block before it, and committed alone.
      sub_block_window: run a sub-block alone where its first position is committed.
    """

    algorithm: str
    sampling: SamplingRule
    sample_positions: bool
    chunk: int
    schedule: str = "linear_time"
    guided: bool = False
    log_probabilities: bool = False
    parallel: str = "none"
    windows: tuple[int, ...] = ()
    within_block: bool = False
    attention_block_length: int = 0
    first_alone: bool = False
    sub_block_window: bool = False


@flax.struct.dataclass
class DenoiseRequest:
    """Run-time arguments of a generation.

    Attributes:
      lengths: int32 ``[B]``, canvas length of each row, prompt and new tokens, and what fills the last block of
        block-causal attention.
      ends: int32 ``[B]``, the same without the latter: a row is done when nothing before its end is masked.
      prompts: int32 ``[B]``, length of each prompt, its masks included.
      first: int32 ``[B]``, position at which each row's first block starts.
      seeds: uint32 ``[B, 2]``, key data of each row.
      ratios: float32 ``[B, R]``, share of a block's remaining masks that each of its steps commits.
      block_length: int32 ``[B]``, positions per block.
      sub_block_length: int32 ``[B]``, positions of the parts that blocks of block-causal attention are filled in.
      steps_per_block: int32 ``[B]``, steps of a block at most.
      block_steps: int32 ``[B]``, steps among which the ``even_block`` schedule shares a block.
      refresh_interval: int32 ``[B]``, forward passes from one refresh to the next at most, the refresh included.
      refresh_blocks: int32 ``[B]``, refresh on entering every n-th block; 0 for the first block alone.
      stop_tokens: int32 ``[B, E]``; a row is done when a new token is one of these and all before it is committed. -1
        for none.
      threshold, factor, entropy_limit: float32 ``[B]``, of the parallel rules.
      cfg_scale: float32 ``[B]``, of classifier-free guidance; 0 for none.
      temperature, top_p, alg_temp: float32 ``[B]``, read where the program uses them; ``alg_temp`` 0 takes the most
        confident positions.
      top_k: int32 ``[B]``, likewise.
      max_iterations: int32, the loop ends after this many iterations.
      step_limit: int32, no row begins this step of its own, or a later one.
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
    refresh_interval: Leaf = array("batch", dtype=_INTEGER)
    refresh_blocks: Leaf = array("batch", dtype=_INTEGER)
    stop_tokens: Leaf = array("batch", "stop_tokens", dtype=_INTEGER)
    threshold: Leaf = array("batch", dtype=_REAL)
    factor: Leaf = array("batch", dtype=_REAL)
    entropy_limit: Leaf = array("batch", dtype=_REAL)
    cfg_scale: Leaf = array("batch", dtype=_REAL)
    temperature: Leaf = array("batch", dtype=_REAL)
    top_p: Leaf = array("batch", dtype=_REAL)
    top_k: Leaf = array("batch", dtype=_INTEGER)
    alg_temp: Leaf = array("batch", dtype=_REAL)
    max_iterations: Leaf = array(dtype=_INTEGER)
    step_limit: Leaf = array(dtype=_INTEGER)


@flax.struct.dataclass
class DenoiseState:
    """What a generation carries from iteration to iteration; in each, every row that is not done runs one forward pass.

    Attributes:
      canvas: int32 ``[B, S]``, start-aligned; the mask token where nothing is committed yet.
      commit_steps: int32 ``[B, S]``, the row's step that committed a position, -1 where none has.
      block: int32 ``[B]``, the block a row is in.
      step_in_block: int32 ``[B]``, the next step within it.
      steps_until_refresh: int32 ``[B]``, forward passes that may follow before the next refresh; 0 asks for one.
      previous_block_stale: int32 ``[B]``, 1 where the cache holds keys and values of the block before from when it had
        masks, else 0.
      refreshes: int32 ``[B]``, forward passes over the whole canvas.
      window_positions: int32 ``[B]``, positions computed in windows.
      done: bool ``[B]``.
      iteration: int32, iterations so far.
      log_probabilities: float32 ``[B, S]`` of committed tokens, or None.
      cache: of keys and values, see :data:`runtime.models.kv_cache.Cache`, or None.
    """

    canvas: Leaf = array("batch", "positions", dtype=_INTEGER)
    commit_steps: Leaf = array("batch", "positions", dtype=_INTEGER)
    block: Leaf = array("batch", dtype=_INTEGER)
    step_in_block: Leaf = array("batch", dtype=_INTEGER)
    steps_until_refresh: Leaf = array("batch", dtype=_INTEGER)
    previous_block_stale: Leaf = array("batch", dtype=_INTEGER)
    refreshes: Leaf = array("batch", dtype=_INTEGER)
    window_positions: Leaf = array("batch", dtype=_INTEGER)
    done: Leaf = array("batch", dtype=jnp.bool_)
    iteration: Leaf = array(dtype=_INTEGER)
    log_probabilities: Leaf = array("batch", "positions", dtype=_REAL, optional=True)
    cache: Leaf = None


def row_steps(request: DenoiseRequest, state: DenoiseState) -> Leaf:
    """The next step of each row, counted over all of its blocks: int32 ``[B]``."""
    return state.block * request.steps_per_block + state.step_in_block


def block_start(request: DenoiseRequest, block: Leaf) -> Leaf:
    """Position at which each row's block of this number ``[B]`` starts: int32 ``[B]``."""
    return request.first + block * request.block_length
