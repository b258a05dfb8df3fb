"""Settings, arguments and state of the autoregressive loop.

Dimension letters: B batch, T cache length, E stop tokens, K drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.struct
import jax.numpy as jnp

from runtime.decoding.loop_parameters import compiled_settings, row_arrays
from runtime.decoding.parameters import SamplingConfig
from runtime.decoding.sampling import SamplingRule
from runtime.models.arrays import Leaf, array
from runtime.models.families import Weights
from runtime.models.forward import Forward

_Rows: Any = row_arrays(SamplingConfig)
_Settings: Any = compiled_settings(SamplingConfig)


@dataclass(frozen=True, kw_only=True)
class DecodeProgram(_Settings):
    """Settings of a generation that are compiled into the program.

    The compiled parameters of :class:`SamplingConfig` that the loop reads are fields too; so far there are none.

    Attributes:
      sampling: how tokens are chosen.
      log_probabilities: record the log-probability of every generated token.
      samples: number of adjacent rows that share a prompt. Prefill processes the prompt once for all of them.
      drafts: K, tokens of each row that a pass drafts.
      draft: layout and attention of the draft model, see :mod:`runtime.decoding.draft_model`; None for drafts by
        :mod:`runtime.decoding.prompt_lookup`, or without drafts.
    """

    sampling: SamplingRule
    log_probabilities: bool
    samples: int = 1
    drafts: int = 0
    draft: Forward | None = None


@flax.struct.dataclass
class DecodeRequest(_Rows):
    """Run-time arguments of a generation.

    The run-time parameters of :class:`SamplingConfig` that the loop reads are fields too, as arrays ``[B]``:
    ``temperature``, ``top_p`` and ``top_k``.

    Attributes:
      seeds: uint32 ``[B, 2]``, each row's PRNG key data.
      prompts: int32 ``[B]``, length of each prompt.
      turns: int32 ``[B]``, the order in which prompts are read in chunks: the lowest number first.
      ends: int32 ``[B]``, length (prompt included) at which each row ends.
      stop_tokens: int32 ``[B, E]``, tokens that end a row, padded with -1.
      max_iterations: int32, the loop ends after this many iterations.
      min_running: int32, at least 1; the loop ends when fewer rows than this are running.
      drafts: int32 ``[B]``, most drafts of a pass that count; None without drafts.
    """

    seeds: Leaf = array("batch", "seed_words", dtype=jnp.uint32)
    prompts: Leaf = array("batch", dtype=jnp.int32)
    turns: Leaf = array("batch", dtype=jnp.int32)
    ends: Leaf = array("batch", dtype=jnp.int32)
    stop_tokens: Leaf = array("batch", "stop_tokens", dtype=jnp.int32)
    max_iterations: Leaf = array(dtype=jnp.int32)
    min_running: Leaf = array(dtype=jnp.int32)
    drafts: Leaf = array("batch", dtype=jnp.int32, feature="drafts")


@flax.struct.dataclass
class DecodeState:
    """State of the decode loop.

    Attributes:
      tokens: int32 ``[B, T]``, start-aligned; positions that are not generated yet hold a filler token.
      lengths: int32 ``[B]``, number of tokens of each row so far, prompt included.
      read: int32 ``[B]``, number of prompt tokens of each row whose keys and values are in the cache. A row gets new
        tokens only after its whole prompt has been read. Without a cache, this is the length of the prompt.
      done: bool ``[B]``, rows that have ended.
      non_finite: bool ``[B]``, rows that have ended because the model's logits were NaN or infinite.
      iteration: int32, iterations so far. Each iteration adds one token to every row that is not done, and more with
        drafts.
      log_probabilities: float32 ``[B, T]``, log-probabilities of the generated tokens, or None.
      passes: int32 ``[B]``, passes that added tokens to the row, its prefill included; None without drafts.
      cache: the KV cache, see :data:`runtime.models.kv_cache.Cache`; None to run without one.
      draft_cache: the KV cache of the draft model; None without one.
    """

    tokens: Leaf = array("batch", "positions", dtype=jnp.int32)
    lengths: Leaf = array("batch", dtype=jnp.int32)
    read: Leaf = array("batch", dtype=jnp.int32)
    done: Leaf = array("batch", dtype=jnp.bool_)
    non_finite: Leaf = array("batch", dtype=jnp.bool_)
    iteration: Leaf = array(dtype=jnp.int32)
    log_probabilities: Leaf = array("batch", "positions", dtype=jnp.float32, feature="log_probabilities")
    passes: Leaf = array("batch", dtype=jnp.int32, feature="drafts")
    cache: Leaf = None
    draft_cache: Leaf = None


class DraftedWeights(NamedTuple):
    """The weights of a program with a draft model: those of the model, and those of the draft model."""

    model: Weights
    draft: Weights
