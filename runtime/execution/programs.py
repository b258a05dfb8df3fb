"""Lowering and caching of the compiled programs.

Every program is lowered from a layout and shapes only, without data. So the program that a machine would run can also
be compiled ahead of time, without the machine.

Dimension letters: B batch, S canvas, T cache length, P positions of one chunk of the output head, D embed, V vocab, R
length of a row's ratio table (the steps of a block, padded).
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from runtime.decoding.autoregressive import decode, prefill, prefill_chunks
from runtime.decoding.decode_state import DecodeProgram, DecodeRequest, DecodeState, DraftedWeights
from runtime.decoding.diffusion import denoise, denoise_with_logits
from runtime.decoding.parameters import MAX_STOP_TOKENS
from runtime.decoding.sampling import log_probabilities, mark_non_finite
from runtime.decoding.state import ENTRIES_PER_STEP, DenoiseProgram, DenoiseRequest, DenoiseState
from runtime.models.arrays import abstract, shardings
from runtime.models.declarations import ModelLayout, shard_shape
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.kv_cache import abstract_cache
from runtime.models.transformer import hidden_states, project_logits
from sharding.settings import own_settings

Array = jax.Array
Request = TypeVar("Request", DenoiseRequest, DecodeRequest)
State = TypeVar("State", DenoiseState, DecodeState)

_SEED_WORDS = 2
# XLA on GPU merges the products of queries, keys and values of at most about this many positions.
_MERGED_POSITIONS = 64
# JAX's monitoring event for a program found in its persistent cache.
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


@functools.cache
def _cache_hits() -> threading.local:
    """Return a thread-local whose ``count`` is the number of programs that a thread found in JAX's persistent cache."""
    found = threading.local()

    def on_event(event: str, **_: Any) -> None:
        if event == _CACHE_HIT:
            found.count = getattr(found, "count", 0) + 1

    jax.monitoring.register_event_listener(on_event)
    return found


def _merged_megabytes(layout: ModelLayout, dtype: Any) -> int:
    """Return the size of the largest matrix products that XLA on GPU should merge, in MiB.

    XLA merges products with the same operand (queries, keys and values) if one of them has at most this size, both
    operands and the result included. For few positions, one kernel then reads all their weights. For many positions,
    the product is that of a library, and XLA first writes the weights side by side.
    """
    sizes = []
    for leaf in layout.leaves:
        if leaf.layers and leaf.contracted:
            shape = dict(zip(leaf.axes, shard_shape(leaf, layout), strict=True))
            matrix = math.prod(size for axis, size in shape.items() if axis != "layers")
            rows = math.prod(shape[axis] for axis in leaf.contracted)
            sizes.append(matrix + _MERGED_POSITIONS * (rows + matrix // rows))
    return math.ceil(min(sizes) * jnp.dtype(dtype).itemsize / 2**20)


def compiler_options(layout: ModelLayout, dtype: Any) -> dict[str, str | bool] | None:
    """Return the options of XLA for a model's programs, in addition to the defaults; None if there are none.

    Args:
      layout: the model's layout, with a mesh.
      dtype: dtype of weights and activations.
    """
    assert layout.mesh is not None, "programs are compiled for the devices of a mesh"
    platform = layout.mesh.devices.flat[0].platform
    if platform == "gpu":
        return {"xla_gpu_dot_merger_threshold_mb": str(_merged_megabytes(layout, dtype))}
    if platform == "tpu":
        # Overlap the all-gather of the residual with every matrix product that needs it, even if several do (gate, up).
        return {
            "xla_tpu_decompose_all_gather_with_multiple_einsums": True,
            "xla_tpu_skip_checking_windowed_einsum_users": True,
        }
    # Only a CPU computes matrix products in float32 and converts all other weights.
    if layout.quantization == "none" and jnp.dtype(dtype) == jnp.float32:
        return None
    # On CPU, XLA converts bfloat16 and int8 weights to float32 for matrix products. With these options it converts one
    # layer at a time. Otherwise it converts all layers first, or before the loop over steps, and keeps all copies.
    return {
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
        "xla_disable_hlo_passes": "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion",
    }


def put(value: Any, sharding: jax.sharding.Sharding) -> Array:
    """Put a host array onto the mesh. With several processes, each process provides the shards of its own devices."""
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def put_tree(layout: ModelLayout, tree: Any) -> Any:
    """Put a struct of declared host arrays onto the mesh, with the shardings of their declarations.

    Arrays that are there already are kept.
    """

    def place(value: Any, sharding: jax.sharding.Sharding) -> Array:
        there = isinstance(value, jax.Array) and value.sharding == sharding
        # For small arrays, ``put`` takes less time than ``jax.device_put`` of the whole tree.
        return value if there else put(value, sharding)

    return jax.tree.map(place, tree, shardings(layout, tree))


def shapes_of(tree: Any) -> tuple[Any, ...]:
    """Return the shapes and dtypes of a tree's leaves, as a hashable key."""
    return tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))


def request_sizes(batch: int, positions: int, steps: int = 1, drafts: int = 0) -> dict[str, int]:
    """Return the sizes of the logical axes that requests and states of decoding loops use.

    Args:
      batch: B, a multiple of the data axis.
      positions: S or T, a multiple of the sequence axis.
      steps: R.
      drafts: K.
    """
    return {
        "batch": batch,
        "positions": positions,
        "steps": steps,
        "drafts": drafts,
        "stop_tokens": MAX_STOP_TOKENS,
        "seed_words": _SEED_WORDS,
        "entries": ENTRIES_PER_STEP,
    }


def _abstract_loop(
    layout: ModelLayout,
    kinds: tuple[type[Request], type[State]],
    sizes: dict[str, int],
    cache_dtype: Any,
    **features: bool,
) -> tuple[Request, State]:
    """Return request and state of a loop that has these features, see :class:`ArrayDeclaration`."""
    chosen = [name for name, wanted in features.items() if wanted]
    request, state = kinds
    cache = None if cache_dtype is None else abstract_cache(layout, sizes["batch"], sizes["positions"], cache_dtype)
    return abstract(layout, request, sizes, chosen), replace(abstract(layout, state, sizes, chosen), cache=cache)


def abstract_denoise(
    layout: ModelLayout,
    batch: int,
    canvas: int,
    steps: int,
    cache_dtype: Any = None,
    *,
    log_probabilities: bool = False,
    history: bool = False,
    drafts: int = 0,
) -> tuple[DenoiseRequest, DenoiseState]:
    """Return the arguments of the denoise loop as ``ShapeDtypeStruct``, for compiling without data.

    Args:
      layout: the model's layout on a mesh.
      batch: B, a multiple of the data axis.
      canvas: S, a multiple of the sequence axis.
      steps: R.
      cache_dtype: dtype of the cache, see :func:`runtime.models.kv_cache.abstract_cache`; None for no cache.
      log_probabilities: whether the state records log-probabilities.
      history: whether the state keeps the canvases of the last iteration (variable length).
      drafts: K, guessed canvases of each row.
    """
    return _abstract_loop(
        layout,
        (DenoiseRequest, DenoiseState),
        request_sizes(batch, canvas, steps, drafts),
        cache_dtype,
        log_probabilities=log_probabilities,
        history=history,
        drafts=drafts > 0,
        variable_length=layout.config.family.variable_length,
    )


def abstract_decode(
    layout: ModelLayout,
    batch: int,
    length: int,
    cache_dtype: Any,
    *,
    log_probabilities: bool = False,
    drafts: bool = False,
    draft: tuple[ModelLayout, Any] | None = None,
) -> tuple[DecodeRequest, DecodeState]:
    """Return the arguments of autoregressive decoding as ``ShapeDtypeStruct``, for compiling without data.

    Args:
      layout: the model's layout on a mesh.
      batch: B, a multiple of the data axis.
      length: T, a multiple of the sequence axis.
      cache_dtype: see :func:`abstract_denoise`.
      log_probabilities: whether the state records log-probabilities.
      drafts: whether passes draft tokens.
      draft: layout and cache dtype of the draft model; None without one.
    """
    kinds, sizes = (DecodeRequest, DecodeState), request_sizes(batch, length)
    features = {"log_probabilities": log_probabilities, "drafts": drafts}
    request, state = _abstract_loop(layout, kinds, sizes, cache_dtype, **features)
    if draft is not None:
        state = replace(state, draft_cache=abstract_cache(draft[0], batch, length, draft[1]))
    return request, state


def _lower_step(function: Callable[..., Any], forward: Forward, *arguments: Any) -> jax.stages.Lowered:
    """Lower ``function(weights, request, state, ...) -> state``. The state and its cache are updated in place."""
    state = arguments[2]
    if isinstance(state, DecodeState) and state.draft_cache is not None:
        # Another model's layout places this cache.
        places = jax.tree.map(lambda leaf: leaf.sharding, state.draft_cache)
        out = replace(shardings(forward.layout, replace(state, draft_cache=None)), draft_cache=places)
    else:
        out = shardings(forward.layout, state)
    return jax.jit(function, out_shardings=out, donate_argnums=2).lower(*arguments)


def lower_denoise(
    forward: Forward, program: DenoiseProgram, weights: Weights, request: DenoiseRequest, state: DenoiseState
) -> jax.stages.Lowered:
    """Lower the loop over denoise steps; the arguments may be arrays or ``ShapeDtypeStruct``."""
    return _lower_step(partial(denoise, forward, program), forward, weights, request, state)


def lower_prefill(
    forward: Forward,
    program: DecodeProgram,
    width: int,
    weights: Weights | DraftedWeights,
    request: DecodeRequest,
    state: DecodeState,
) -> jax.stages.Lowered:
    """Lower the prefill of all rows, ``width`` positions wide, which also generates their first token."""
    return _lower_step(partial(prefill, forward, program, width), forward, weights, request, state)


def lower_prefill_chunks(
    forward: Forward,
    program: DecodeProgram,
    chunk: int,
    weights: Weights | DraftedWeights,
    request: DecodeRequest,
    state: DecodeState,
    chunks: Array,
) -> jax.stages.Lowered:
    """Lower the prefill in chunks of ``chunk`` positions; each ``data`` shard reads at most ``chunks`` chunks."""
    return _lower_step(partial(prefill_chunks, forward, program, chunk), forward, weights, request, state, chunks)


def lower_decode(
    forward: Forward,
    program: DecodeProgram,
    weights: Weights | DraftedWeights,
    request: DecodeRequest,
    state: DecodeState,
) -> jax.stages.Lowered:
    """Lower the loop over the new tokens of an autoregressive model."""
    return _lower_step(partial(decode, forward, program), forward, weights, request, state)


def lower_replicate(layout: ModelLayout, tree: Any) -> jax.stages.Lowered:
    """Lower the replication of every array of a tree on all devices."""
    return jax.jit(lambda tree: tree, out_shardings=layout.replicated).lower(tree)


def lower_hidden(forward: Forward, weights: Weights, tokens: Array, lengths: Array) -> jax.stages.Lowered:
    """Lower the transformer without its head: tokens ``[B, S]`` -> ``[B, S, D]``, sharded over ``data`` only."""
    jitted = jax.jit(partial(hidden_states, forward), out_shardings=forward.layout.sharding("batch", None, "embed"))
    return jitted.lower(weights, tokens, lengths)


def lower_logits(forward: Forward, weights: Weights, hidden: Array) -> jax.stages.Lowered:
    """Lower the head for one chunk of positions: ``[B, P, D]`` -> replicated float32 logits ``[B, P, V]``."""
    jitted = jax.jit(partial(project_logits, forward), out_shardings=forward.layout.replicated)
    return jitted.lower(weights, hidden)


def lower_score(forward: Forward, chunk: int, weights: Weights, *arguments: Array) -> jax.stages.Lowered:
    """Lower scoring: tokens ``[B, S]``, targets ``[B, S]``, lengths ``[B]`` -> log-probabilities float32 ``[B, S]``.

    The head runs on ``chunk`` positions of each row at a time. A target is scored with the output that predicts its
    position. Nothing predicts the first token of an autoregressive row, whose score is 0. The result is replicated, and
    not finite where the logits are not.
    """
    family = forward.config.family
    unpredicted = family.prediction_offset if family.objective == "autoregressive" else 0

    def score(weights: Weights, tokens: Array, targets: Array, lengths: Array, temperature: Array) -> Array:
        hidden = hidden_states(forward, weights, tokens, lengths)
        starts = jnp.arange(0, tokens.shape[1], chunk)

        def body(start: Array) -> Array:
            positions = start + jnp.arange(chunk)
            outputs = jnp.maximum(positions - family.prediction_offset, 0)
            logits = project_logits(forward, weights, hidden[:, outputs])
            logits = mark_non_finite(logits, forward.config.vocab_size)
            wanted = jax.lax.dynamic_slice_in_dim(targets, start, chunk, axis=1)
            found = log_probabilities(logits / temperature, wanted)
            return jnp.where((positions < unpredicted) & jnp.isfinite(found), 0.0, found)

        pieces = jax.lax.map(body, starts)
        return jnp.moveaxis(pieces, 0, 1).reshape(tokens.shape)

    return jax.jit(score, out_shardings=forward.layout.replicated).lower(weights, *arguments)


def lower_denoise_with_logits(
    forward: Forward, program: DenoiseProgram, request: DenoiseRequest, state: DenoiseState, logits: Array
) -> jax.stages.Lowered:
    """Lower one denoise step from given logits float32 ``[B, S, V]``."""
    out = shardings(forward.layout, state)
    return jax.jit(partial(denoise_with_logits, forward, program), out_shardings=out).lower(request, state, logits)


class ProgramCache:
    """A thread-safe cache of compiled programs, with counters.

    Attributes:
      compiled: number of programs compiled so far, or read from JAX's persistent cache.
      cached: number of these programs that were read from JAX's persistent cache.
      seconds: time spent on compiling and reading.
      before_run: called before each run of a program; with its lowering if the program has to be compiled first,
        otherwise with None.
      fingerprint: hash of the programs that :meth:`prepare` has returned since the caller cleared it. It is equal on
        hosts that prepared the same programs, and empty if there is only one host.
    """

    fingerprint = ""

    def __init__(self, options: dict[str, str | bool] | None = None) -> None:
        """Create an empty cache; see :func:`compiler_options`."""
        self._options = options
        self._programs: dict[Hashable, Future[jax.stages.Compiled]] = {}
        self._hashes: dict[Hashable, str] = {}
        self._lock = threading.Lock()
        self.compiled = self.cached = 0
        self.seconds = 0.0
        self.before_run: Callable[[jax.stages.Lowered | None], None] | None = None

    def get(self, key: Hashable, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        """Return the program for ``key``, which is about to run. It is lowered and compiled on first use."""
        return self._get(key, lower, self.before_run)

    def prepare(
        self, key: Hashable, lower: Callable[[], jax.stages.Lowered], counts: bool = True
    ) -> jax.stages.Compiled:
        """Return the program for ``key`` without calling ``before_run``, for a program that is not about to run.

        If ``counts`` is False, the program is not counted either.
        """
        program = self._get(key, lower, None, counts)
        if counts and (own := self._hashes.get(key)) is not None:
            self.fingerprint = hashlib.sha256((self.fingerprint + own).encode()).hexdigest()
        return program

    def __contains__(self, key: Hashable) -> bool:
        """Return whether the program has been compiled."""
        program = self._programs.get(key)
        return program is not None and program.done()

    def _get(
        self,
        key: Hashable,
        lower: Callable[[], jax.stages.Lowered],
        tell: Callable[[jax.stages.Lowered | None], None] | None,
        counts: bool = True,
    ) -> jax.stages.Compiled:
        with self._lock:
            program = self._programs.get(key)
            known = program is not None
            if program is None:
                program = self._programs[key] = Future()
        if known:
            if tell is not None:
                tell(None)
            return program.result()
        try:
            program.set_result(self._compile(key, lower, tell, counts))
        except BaseException as error:
            # The next call tries again.
            del self._programs[key]
            program.set_exception(error)
            raise
        return program.result()

    @own_settings()
    def _compile(
        self,
        key: Hashable,
        lower: Callable[[], jax.stages.Lowered],
        tell: Callable[[jax.stages.Lowered | None], None] | None,
        counts: bool,
    ) -> jax.stages.Compiled:
        start, hits = time.perf_counter(), _cache_hits()
        before = getattr(hits, "count", 0)
        lowered = lower()
        if jax.process_count() > 1:
            self._hashes[key] = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        if tell is not None:
            tell(lowered)
        program = lowered.compile(compiler_options=self._options)
        with self._lock:
            self.seconds += time.perf_counter() - start
            self.compiled += counts
            self.cached += counts and getattr(hits, "count", 0) > before
        return program

    def texts(self) -> dict[str, str]:
        """Return the optimized HLO of every program, by a name made of its number and kind."""

        def kind(key: Hashable) -> str:
            while isinstance(key, tuple) and key:
                key = key[0]
            return key if isinstance(key, str) else "program"

        return {
            f"{number:02d}_{kind(key)}": program.result().as_text() or ""
            for number, (key, program) in enumerate(list(self._programs.items()))
        }
