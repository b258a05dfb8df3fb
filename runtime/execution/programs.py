"""Programs: what is compiled, for which shapes, and how often.

Everything the devices run is lowered here from a layout and shapes alone, so that the very program that generates can
also be compiled for a machine that is not there.

Dimension letters: B batch, S canvas, P positions of one head chunk, D embed, V vocab, R padded steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from runtime.decoding.autoregressive import DecodeProgram, DecodeRequest, DecodeState, decode, prefill, prefill_inserted
from runtime.decoding.block_diffusion import denoise_blocks
from runtime.decoding.blocks import BlockProgram, BlockRequest, BlockState
from runtime.decoding.diffusion import DenoiseProgram, DenoiseState, Request, denoise, denoise_with_logits
from runtime.decoding.parameters import MAX_STOP_TOKENS
from runtime.decoding.sampling import log_probabilities
from runtime.models.declarations import ModelLayout
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.kv_cache import KVCache, abstract_cache
from runtime.models.transformer import hidden_states, project_logits

Array = jax.Array


def compiler_options(platform: str) -> dict[str, str | bool] | None:
    """What programs for this platform are compiled with beside the defaults."""
    if platform != "cpu":
        return None
    # XLA would widen all the stacked bfloat16 layers to float32 before the scan; layer by layer is also faster.
    return {"xla_disable_hlo_passes": "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion"}


def put(value: Any, sharding: jax.sharding.Sharding) -> Array:
    """A host array onto the mesh; with several processes each gives the parts of its own devices."""
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fetch(array: Array) -> np.ndarray:
    """An array of the mesh onto this host, whole."""
    if array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def empty_cache(layout: ModelLayout, batch: int, length: int, dtype: Any) -> KVCache:
    """A cache on the mesh with nothing in it; arguments as for :func:`runtime.models.kv_cache.abstract_cache`."""
    shapes = abstract_cache(layout, batch, length, dtype)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), shapes)


def shapes_of(tree: Any) -> tuple[Any, ...]:
    """Shapes and dtypes of a tree's leaves, as a key."""
    return tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tree))


def state_shardings(layout: ModelLayout, log_probabilities: bool) -> DenoiseState:
    """Shardings of a :class:`DenoiseState`: rows over ``data``, positions whole on every device."""
    rows = layout.sharding("batch", None)
    return DenoiseState(
        canvas=rows,
        commit_steps=rows,
        step=layout.replicated,
        forwards=layout.replicated,
        log_probabilities=rows if log_probabilities else None,
    )


def request_shardings(layout: ModelLayout) -> Request:
    """Shardings of a :class:`Request`."""
    whole = layout.replicated
    return Request(
        lengths=layout.sharding("batch"),
        seeds=layout.sharding("batch", None),
        **dict.fromkeys(("ratios", "steps", "limit", "temperature", "top_p", "top_k", "alg_temp"), whole),
    )


def abstract_request(layout: ModelLayout, batch: int, canvas: int, steps: int) -> tuple[Request, DenoiseState]:
    """A generation's arguments as ``ShapeDtypeStruct`` on a layout, for compiling without data.

    Args:
      layout: model and mesh.
      batch: B, a multiple of the data axis.
      canvas: S, a multiple of the sequence axis.
      steps: R.
    """
    integer, real = jnp.int32, jnp.float32
    request = Request(
        lengths=((batch,), integer),
        seeds=((batch, 2), jnp.uint32),
        ratios=((steps,), real),
        steps=((), integer),
        limit=((), integer),
        temperature=((), real),
        top_p=((), real),
        top_k=((), integer),
        alg_temp=((), real),
    )
    rows = ((batch, canvas), integer)
    state = DenoiseState(canvas=rows, commit_steps=rows, step=((), integer), forwards=((), integer))

    return _described(request, request_shardings(layout)), _described(state, state_shardings(layout, False))


def _described(shapes: Any, shardings: Any) -> Any:
    """A tree of (shape, dtype) pairs and a tree of shardings as a tree of ``ShapeDtypeStruct``."""

    def struct(pair: tuple[tuple[int, ...], Any], sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(*pair, sharding=sharding)

    return jax.tree.map(struct, shapes, shardings, is_leaf=lambda value: isinstance(value, tuple))


def decode_state_shardings(layout: ModelLayout, state: DecodeState) -> DecodeState:
    """Shardings of a :class:`DecodeState` with the parts that ``state`` has; rows lie over ``data``."""
    rows = layout.sharding("batch", None)
    return DecodeState(
        tokens=rows,
        lengths=layout.sharding("batch"),
        done=layout.sharding("batch"),
        step=layout.replicated,
        log_probabilities=None if state.log_probabilities is None else rows,
        cache=jax.tree.map(lambda leaf: leaf.sharding, state.cache),
    )


def decode_request_shardings(layout: ModelLayout) -> DecodeRequest:
    """Shardings of a :class:`DecodeRequest`."""
    tables = ("seeds", "stop_tokens")
    names = [field.name for field in fields(DecodeRequest) if field.name not in (*tables, "limit")]
    return DecodeRequest(
        limit=layout.replicated,
        **dict.fromkeys(tables, layout.sharding("batch", None)),
        **dict.fromkeys(names, layout.sharding("batch")),
    )


def abstract_decode(
    layout: ModelLayout, batch: int, length: int, cache_dtype: Any, *, log_probabilities: bool = False
) -> tuple[DecodeRequest, DecodeState]:
    """An autoregressive generation's arguments as ``ShapeDtypeStruct`` on a layout, for compiling without data.

    Args:
      layout: model and mesh.
      batch: B, a multiple of the data axis.
      length: T, a multiple of the sequence axis.
      cache_dtype: see :func:`runtime.models.kv_cache.abstract_cache`.
      log_probabilities: whether they are kept.
    """
    integer, real, rows = jnp.int32, jnp.float32, (batch,)
    request = DecodeRequest(
        seeds=((batch, 2), jnp.uint32),
        prompts=(rows, integer),
        ends=(rows, integer),
        stop_tokens=((batch, MAX_STOP_TOKENS), integer),
        limit=((), integer),
        temperature=(rows, real),
        top_p=(rows, real),
        top_k=(rows, integer),
    )
    cache = abstract_cache(layout, batch, length, cache_dtype)
    state = DecodeState(
        tokens=((batch, length), integer),
        lengths=(rows, integer),
        done=(rows, jnp.bool_),
        step=((), integer),
        log_probabilities=((batch, length), real) if log_probabilities else None,
    )
    shardings = decode_state_shardings(layout, state)
    return _described(request, decode_request_shardings(layout)), replace(_described(state, shardings), cache=cache)


def lower_denoise(
    forward: Forward, program: DenoiseProgram, weights: Weights, request: Request, state: DenoiseState
) -> jax.stages.Lowered:
    """Lower the generation loop for these arguments, real or abstract."""
    jitted = jax.jit(
        partial(denoise, forward, program), out_shardings=state_shardings(forward.layout, program.log_probabilities)
    )
    return jitted.lower(weights, request, state)


def block_request_shardings(layout: ModelLayout) -> BlockRequest:
    """Shardings of a :class:`BlockRequest`."""
    tables = ("seeds", "ratios", "stop_tokens")
    names = [field.name for field in fields(BlockRequest) if field.name not in (*tables, "limit")]
    return BlockRequest(
        limit=layout.replicated,
        **dict.fromkeys(tables, layout.sharding("batch", None)),
        **dict.fromkeys(names, layout.sharding("batch")),
    )


def block_state_shardings(layout: ModelLayout, state: BlockState) -> BlockState:
    """Shardings of a :class:`BlockState` with the parts that ``state`` has; rows lie over ``data``."""
    canvas = layout.sharding("batch", None)
    rows = (
        "block",
        "step_in_block",
        "steps_until_refresh",
        "previous_block_stale",
        "refreshes",
        "window_positions",
        "done",
    )
    return BlockState(
        canvas=canvas,
        commit_steps=canvas,
        step=layout.replicated,
        log_probabilities=None if state.log_probabilities is None else canvas,
        cache=jax.tree.map(lambda leaf: leaf.sharding, state.cache),
        **dict.fromkeys(rows, layout.sharding("batch")),
    )


def abstract_block(
    layout: ModelLayout, batch: int, canvas: int, steps: int, cache_dtype: Any
) -> tuple[BlockRequest, BlockState]:
    """A block generation's arguments as ``ShapeDtypeStruct`` on a layout, for compiling without data.

    Args:
      layout: model and mesh.
      batch: B, a multiple of the data axis.
      canvas: S, a multiple of the sequence axis.
      steps: R.
      cache_dtype: see :func:`runtime.models.kv_cache.abstract_cache`; None for no cache.
    """
    integer, real, rows = jnp.int32, jnp.float32, (batch,)
    integers = ("lengths", "first", "block_length", "steps_per_block", "refresh_interval", "refresh_blocks", "top_k")
    reals = ("threshold", "factor", "temperature", "top_p", "alg_temp")
    request = BlockRequest(
        seeds=((batch, 2), jnp.uint32),
        ratios=((batch, steps), real),
        stop_tokens=((batch, MAX_STOP_TOKENS), integer),
        limit=((), integer),
        **dict.fromkeys(integers, (rows, integer)),
        **dict.fromkeys(reals, (rows, real)),
    )
    state = BlockState(
        canvas=((batch, canvas), integer),
        commit_steps=((batch, canvas), integer),
        step=((), integer),
        done=(rows, jnp.bool_),
        **dict.fromkeys(
            ("block", "step_in_block", "steps_until_refresh", "previous_block_stale", "refreshes", "window_positions"),
            (rows, integer),
        ),
    )
    described = _described(state, block_state_shardings(layout, state))
    cache = None if cache_dtype is None else abstract_cache(layout, batch, canvas, cache_dtype)
    return _described(request, block_request_shardings(layout)), replace(described, cache=cache)


def lower_blocks(
    forward: Forward, program: BlockProgram, weights: Weights, request: BlockRequest, state: BlockState
) -> jax.stages.Lowered:
    """Lower block decoding; the state, its cache included, is donated and updated in place."""
    out = block_state_shardings(forward.layout, state)
    jitted = jax.jit(partial(denoise_blocks, forward, program), out_shardings=out, donate_argnums=2)
    return jitted.lower(weights, request, state)


def lower_prefill(
    forward: Forward, program: DecodeProgram, width: int, weights: Weights, request: DecodeRequest, state: DecodeState
) -> jax.stages.Lowered:
    """Lower the reading of prompts ``width`` wide and their first new token; the state is donated."""
    out = decode_state_shardings(forward.layout, state)
    jitted = jax.jit(partial(prefill, forward, program, width), out_shardings=out, donate_argnums=2)
    return jitted.lower(weights, request, state)


def lower_decode(
    forward: Forward, program: DecodeProgram, weights: Weights, request: DecodeRequest, state: DecodeState
) -> jax.stages.Lowered:
    """Lower the loop over new tokens; the state, its cache included, is donated and updated in place."""
    out = decode_state_shardings(forward.layout, state)
    jitted = jax.jit(partial(decode, forward, program), out_shardings=out, donate_argnums=2)
    return jitted.lower(weights, request, state)


def lower_prefill_inserted(
    forward: Forward,
    program: DecodeProgram,
    width: int,
    weights: Weights,
    request: DecodeRequest,
    state: DecodeState,
    entering: Array,
) -> jax.stages.Lowered:
    """Lower the same for the rows that have just entered; the state is donated."""
    out = decode_state_shardings(forward.layout, state)
    jitted = jax.jit(partial(prefill_inserted, forward, program, width), out_shardings=out, donate_argnums=2)
    return jitted.lower(weights, request, state, entering)


def lower_insert(entering: Array, old: dict[str, Array], new: dict[str, Array]) -> jax.stages.Lowered:
    """Lower the exchange of rows: arrays ``[B, ...]`` of ``new`` where ``entering`` ``[B]``, else of ``old``."""

    def enter(entering: Array, old: dict[str, Array], new: dict[str, Array]) -> dict[str, Array]:
        def pick(old: Array, new: Array) -> Array:
            return jnp.where(entering.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        return jax.tree.map(pick, old, new)

    return jax.jit(enter, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, old)).lower(entering, old, new)


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

    The head is run on ``chunk`` positions of each row at a time; predictions are shifted by one position.
    """

    def score(weights: Weights, tokens: Array, targets: Array, lengths: Array, temperature: Array) -> Array:
        hidden = hidden_states(forward, weights, tokens, lengths)
        starts = jnp.arange(0, tokens.shape[1], chunk)

        def body(start: Array) -> Array:
            positions = start + jnp.arange(chunk)
            logits = project_logits(forward, weights, hidden[:, jnp.maximum(positions - 1, 0)])
            wanted = jax.lax.dynamic_slice_in_dim(targets, start, chunk, axis=1)
            return log_probabilities(logits / temperature, wanted)

        pieces = jax.lax.map(body, starts)
        return jnp.moveaxis(pieces, 0, 1).reshape(tokens.shape)

    jitted = jax.jit(score, out_shardings=forward.layout.sharding("batch", None))
    return jitted.lower(weights, *arguments)


def lower_denoise_with_logits(
    forward: Forward, program: DenoiseProgram, request: Request, state: DenoiseState, logits: Array
) -> jax.stages.Lowered:
    """Lower one step from given logits float32 ``[B, S, V]``."""
    out = state_shardings(forward.layout, program.log_probabilities)
    jitted = jax.jit(partial(denoise_with_logits, forward, program), out_shardings=out)
    return jitted.lower(request, state, logits)


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
