"""Programs: what is compiled, for which shapes, and how often.

Everything that runs on the devices is lowered here from a layout and shapes alone, so that the very program that
generates can also be compiled for a machine that is not there.

Dimension letters: B batch, S canvas, T cache length, P positions of one head chunk, D embed, V vocab, R padded steps of
a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from runtime.decoding.autoregressive import DecodeProgram, DecodeRequest, DecodeState, decode, prefill, prefill_inserted
from runtime.decoding.diffusion import denoise, denoise_with_logits
from runtime.decoding.parameters import MAX_STOP_TOKENS
from runtime.decoding.sampling import log_probabilities
from runtime.decoding.state import DenoiseProgram, DenoiseRequest, DenoiseState
from runtime.models.arrays import abstract, shardings
from runtime.models.declarations import ModelLayout
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.kv_cache import Cache, abstract_cache
from runtime.models.transformer import hidden_states, project_logits

Array = jax.Array

_SEED_WORDS = 2


def compiler_options(platform: str) -> dict[str, str | bool] | None:
    """Compiler options for programs of this platform, beside the defaults; None for none."""
    if platform != "cpu":
        return None
    # XLA widens bfloat16 and int8 weights to float32 for its products: with these, a layer at a time. Else it widens
    # those of all layers before it runs the first, or before the loop over steps, and holds them all.
    return {
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
        "xla_disable_hlo_passes": "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion",
    }


def put(value: Any, sharding: jax.sharding.Sharding) -> Array:
    """Put a host array onto the mesh; with several processes each provides the parts of its own devices."""
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fetch(array: Array) -> np.ndarray:
    """Bring a whole array of the mesh to this host."""
    if array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def put_tree(layout: ModelLayout, tree: Any) -> Any:
    """Put a struct of declared host arrays onto the mesh, each where its declaration says."""
    return jax.tree.map(put, tree, shardings(layout, tree))


def empty_cache(layout: ModelLayout, batch: int, length: int, dtype: Any) -> Cache:
    """An empty cache on the mesh; arguments as for :func:`runtime.models.kv_cache.abstract_cache`."""
    shapes = abstract_cache(layout, batch, length, dtype)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), shapes)


def shapes_of(tree: Any) -> tuple[Any, ...]:
    """Shapes and dtypes of a tree's leaves, as a key."""
    return tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tree))


def request_sizes(batch: int, positions: int, steps: int = 1) -> dict[str, int]:
    """Sizes of the logical axes that requests and states of decoding loops name.

    Args:
      batch: B, a multiple of the data axis.
      positions: S or T, a multiple of the sequence axis.
      steps: R.
    """
    return {
        "batch": batch,
        "positions": positions,
        "steps": steps,
        "stop_tokens": MAX_STOP_TOKENS,
        "seed_words": _SEED_WORDS,
    }


def abstract_denoise(
    layout: ModelLayout, batch: int, canvas: int, steps: int, cache_dtype: Any = None
) -> tuple[DenoiseRequest, DenoiseState]:
    """The arguments of masked-diffusion decoding as ``ShapeDtypeStruct`` on a layout, for compiling without data.

    Args:
      layout: model and mesh.
      batch: B, a multiple of the data axis.
      canvas: S, a multiple of the sequence axis.
      steps: R.
      cache_dtype: see :func:`runtime.models.kv_cache.abstract_cache`; None for no cache.
    """
    sizes = request_sizes(batch, canvas, steps)
    state = abstract(layout, DenoiseState, sizes, omit=("log_probabilities",))
    cache = None if cache_dtype is None else abstract_cache(layout, batch, canvas, cache_dtype)
    return abstract(layout, DenoiseRequest, sizes), replace(state, cache=cache)


def abstract_decode(
    layout: ModelLayout, batch: int, length: int, cache_dtype: Any
) -> tuple[DecodeRequest, DecodeState]:
    """The arguments of autoregressive decoding as ``ShapeDtypeStruct`` on a layout, for compiling without data.

    Args:
      layout: model and mesh.
      batch: B, a multiple of the data axis.
      length: T, a multiple of the sequence axis.
      cache_dtype: see :func:`runtime.models.kv_cache.abstract_cache`.
    """
    sizes = request_sizes(batch, length)
    state = abstract(layout, DecodeState, sizes, omit=("log_probabilities",))
    cache = abstract_cache(layout, batch, length, cache_dtype)
    return abstract(layout, DecodeRequest, sizes), replace(state, cache=cache)


def _lower_step(function: Callable[..., Any], forward: Forward, *arguments: Any) -> jax.stages.Lowered:
    """Lower ``function(weights, request, state, ...) -> state``; the state, its cache included, is updated in place."""
    out = shardings(forward.layout, arguments[2])
    return jax.jit(function, out_shardings=out, donate_argnums=2).lower(*arguments)


def lower_denoise(
    forward: Forward, program: DenoiseProgram, weights: Weights, request: DenoiseRequest, state: DenoiseState
) -> jax.stages.Lowered:
    """Lower the loop over denoise steps for these arguments, real or abstract."""
    return _lower_step(partial(denoise, forward, program), forward, weights, request, state)


def lower_prefill(
    forward: Forward, program: DecodeProgram, width: int, weights: Weights, request: DecodeRequest, state: DecodeState
) -> jax.stages.Lowered:
    """Lower the prefill of all prompts, ``width`` positions wide, and their first new token."""
    return _lower_step(partial(prefill, forward, program, width), forward, weights, request, state)


def lower_prefill_inserted(
    forward: Forward,
    program: DecodeProgram,
    width: int,
    weights: Weights,
    request: DecodeRequest,
    state: DecodeState,
    inserted: Array,
) -> jax.stages.Lowered:
    """Lower the same for the rows that have just been inserted, bool ``[B]``."""
    return _lower_step(partial(prefill_inserted, forward, program, width), forward, weights, request, state, inserted)


def lower_decode(
    forward: Forward, program: DecodeProgram, weights: Weights, request: DecodeRequest, state: DecodeState
) -> jax.stages.Lowered:
    """Lower the loop over new tokens."""
    return _lower_step(partial(decode, forward, program), forward, weights, request, state)


def lower_insert(inserted: Array, old: Any, new: Any) -> jax.stages.Lowered:
    """Lower the insertion of rows: arrays ``[B, ...]`` of ``new`` where ``inserted`` bool ``[B]``, else of ``old``."""

    def insert(inserted: Array, old: Any, new: Any) -> Any:
        def pick(old: Array, new: Array) -> Array:
            return jnp.where(inserted.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        return jax.tree.map(pick, old, new)

    return jax.jit(insert, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, old)).lower(inserted, old, new)


def lower_hidden(forward: Forward, weights: Weights, tokens: Array, lengths: Array) -> jax.stages.Lowered:
    """Lower the transformer without its head: tokens ``[B, S]`` -> ``[B, S, D]``, rows over ``data`` only."""
    jitted = jax.jit(partial(hidden_states, forward), out_shardings=forward.layout.sharding("batch", None, "embed"))
    return jitted.lower(weights, tokens, lengths)


def lower_logits(forward: Forward, weights: Weights, hidden: Array) -> jax.stages.Lowered:
    """Lower the head on one chunk of positions: ``[B, P, D]`` -> gathered float32 logits ``[B, P, V]``."""
    jitted = jax.jit(partial(project_logits, forward), out_shardings=forward.layout.replicated)
    return jitted.lower(weights, hidden)


def lower_score(forward: Forward, chunk: int, weights: Weights, *arguments: Array) -> jax.stages.Lowered:
    """Lower scoring: tokens ``[B, S]``, targets ``[B, S]``, lengths ``[B]`` -> log-probabilities float32 ``[B, S]``.

    The head is run on ``chunk`` positions of each row at a time. Each target is scored by the output that predicts its
    position.
    """

    def score(weights: Weights, tokens: Array, targets: Array, lengths: Array, temperature: Array) -> Array:
        hidden = hidden_states(forward, weights, tokens, lengths)
        starts = jnp.arange(0, tokens.shape[1], chunk)

        def body(start: Array) -> Array:
            positions = start + jnp.arange(chunk)
            outputs = jnp.maximum(positions - forward.config.family.prediction_offset, 0)
            logits = project_logits(forward, weights, hidden[:, outputs])
            wanted = jax.lax.dynamic_slice_in_dim(targets, start, chunk, axis=1)
            return log_probabilities(logits / temperature, wanted)

        pieces = jax.lax.map(body, starts)
        return jnp.moveaxis(pieces, 0, 1).reshape(tokens.shape)

    jitted = jax.jit(score, out_shardings=forward.layout.sharding("batch", None))
    return jitted.lower(weights, *arguments)


def lower_denoise_with_logits(
    forward: Forward, program: DenoiseProgram, request: DenoiseRequest, state: DenoiseState, logits: Array
) -> jax.stages.Lowered:
    """Lower one step from given logits float32 ``[B, S, V]``."""
    out = shardings(forward.layout, state)
    return jax.jit(partial(denoise_with_logits, forward, program), out_shardings=out).lower(request, state, logits)


class ProgramCache:
    """Compiled programs by what they are compiled for, and how many there have been.

    Attributes:
      compiled: programs compiled so far.
      seconds: time that took.
      before_run: called before each run of a program, with its lowering where it is about to be compiled.
    """

    def __init__(self, platform: str) -> None:
        """Make an empty cache for devices of one platform."""
        self._options = compiler_options(platform)
        self._programs: dict[Hashable, jax.stages.Compiled] = {}
        self.compiled = 0
        self.seconds = 0.0
        self.before_run: Callable[[jax.stages.Lowered | None], None] | None = None

    def get(self, key: Hashable, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        """The program for ``key``, lowered and compiled when it is first asked for."""
        lowered, start = None, time.perf_counter()
        if key not in self._programs:
            lowered = lower()
        if self.before_run is not None:
            self.before_run(lowered)
        if lowered is not None:
            self._programs[key] = lowered.compile(compiler_options=self._options)
            self.seconds += time.perf_counter() - start
            self.compiled += 1
        return self._programs[key]

    def texts(self) -> dict[str, str]:
        """Optimized HLO of every program, by a name of its kind and number."""

        def kind(key: Hashable) -> str:
            while isinstance(key, tuple) and key:
                key = key[0]
            return key if isinstance(key, str) else "program"

        return {
            f"{number:02d}_{kind(key)}": compiled.as_text() or ""
            for number, (key, compiled) in enumerate(self._programs.items())
        }
