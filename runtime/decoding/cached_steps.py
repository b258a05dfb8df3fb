"""Masked-diffusion steps with a KV cache: refreshes over the whole canvas, and windows of a few positions.

A *refresh* is a forward pass over a row's whole canvas; it recomputes the cached keys and values of every position. A
*window* is the range of positions that a step between refreshes computes: the row's current block (dual cache), or the
block and everything after it (prefix cache), preceded by the position whose output predicts the block's first token.
Both kinds of step commit tokens. With ``block_rule="fast_dllm"``, a window begins with the block: the refresh has
committed the block's first token.

With ``suffix_window``, a block sees a part of the canvas: the positions before it, the next few, and the last one
(Streaming-dLLM, arXiv 2601.17917). Passes and the cache then hold these positions without a gap, the canvas's last
position after the others, while rotary embedding uses their positions on the canvas. Blocks are entered with a refresh.

The caches follow Fast-dLLM (Wu et al., 2025). Caching a token's keys and values only once it is committed follows
dKV-Cache (Ma et al., 2025).

Dimension letters: B batch, S canvas, W window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from runtime.decoding.block_causal import window_bounds
from runtime.decoding.choices import Choices, choose_on_canvas
from runtime.decoding.commit import commit
from runtime.decoding.progress import step_without_moves
from runtime.decoding.state import DenoiseProgram, DenoiseRequest, DenoiseState, block_start, row_steps
from runtime.decoding.windows import cut, paste, pull_last, refresh_chunk, text_positions, window_chunk
from runtime.models.arrays import only_row_fields
from runtime.models.cached import fill_rows, run_window
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.kv_cache import Cache, copy_row
from runtime.models.transformer import pick_positions

Array = jax.Array
Carry = TypeVar("Carry")


@dataclass(frozen=True)
class CachedStep:
    """One denoise step of every row with a KV cache.

    Attributes:
      forward: layout and attention of the model.
      program: settings that are compiled in.
      weights: the model's weights.
      request: run-time arguments.
      wanted: bool ``[B, S]``, positions for which each row's step needs a token.
      counts: int32 ``[B]``, number of these positions that the schedule commits.
    """

    forward: Forward
    program: DenoiseProgram
    weights: Weights
    request: DenoiseRequest
    wanted: Array
    counts: Array

    def run(self, state: DenoiseState) -> DenoiseState:
        """Refresh the rows that are due for a refresh, run windows for the other rows, and commit tokens in both.

        Steps that consist of windows of the same width follow, and are counted, until a row moves to another block, is
        due for a refresh or skips a step: so the host of a GPU waits for one decision in each of them.
        """
        active = self.wanted.any(axis=1)
        due = active & (state.steps_until_refresh == 0)
        with jax.named_scope("refresh"):
            state, waiting, _ = self._refresh(state, due)
        # No row waits for its refresh any more, so this mask is that of the rows without a refresh. Because it depends
        # on the loop over refreshes, the collectives of both cannot overlap: XLA's CPU runtime would start them in
        # order, but run them concurrently, in an order that differs between hosts.
        with jax.named_scope("block_step"):
            return self._run_windows(_count_down(state, active), self.wanted & ~(due | waiting)[:, None])

    @property
    def _before(self) -> int:
        """Positions before the block that its windows include."""
        return 0 if self.program.block_rule == "fast_dllm" else self.forward.config.family.prediction_offset

    def _commit(self, state: DenoiseState, choices: Choices, wanted: Array) -> DenoiseState:
        return commit(self.forward, self.program, self.request, state, choices, wanted, self.counts)

    # ---- refreshes --------------------------------------------------------------------------------------------

    def _refresh(
        self, state: DenoiseState, due: Array, near: Array | None = None
    ) -> tuple[DenoiseState, Array, Array | None]:
        """Refresh the rows marked in ``due`` bool ``[B]``, one row per ``data`` shard at a time.

        Rows with the same canvas share one forward pass; samples of one prompt start with the same canvas. Each row
        still chooses its own tokens, with its own seed.

        Args:
          state: the state.
          due: the rows to refresh.
          near: activations ``[B, W, D]`` in which to keep those of each refreshed row's block, see :meth:`_block_at`;
            None keeps none.

        Returns:
          The state; the rows that still wait for their refresh, bool ``[B]``: none; and the activations.
        """
        width = self._refresh_outputs if near is None else None
        starts = None if width is None else self._first_outputs()

        def one_each(carry: tuple[DenoiseState, Array, Array | None]) -> tuple[DenoiseState, Array, Array | None]:
            state, waiting, near = carry

            def take(waiting: Array, canvas: Array, sizes: tuple[Array | None, ...]) -> tuple[Any, ...]:
                number, mine = _first(waiting)
                own, own_sizes = _row_of_each((canvas, sizes), waiting)
                sharing = waiting & (canvas == own).all(axis=1)
                for size, one in zip(jax.tree.leaves(sizes), jax.tree.leaves(own_sizes), strict=True):
                    sharing &= size == one
                return number, mine, sharing, own, own_sizes

            visible = self._visible(state)
            sizes = (self.request.lengths, visible, starts)
            number, mine, sharing, canvas, own = self.forward.on_rows(take, waiting, state.canvas, sizes)
            length, own_visible, start = own
            if visible is None:
                outputs = None if width is None else (start, width)
                hidden, cache = fill_rows(
                    self.forward, self.weights, state.cache, canvas, length, number, outputs=outputs
                )
                state = replace(state, cache=cache, refreshes=state.refreshes + mine)
            else:
                hidden, cache = self._fill_part(state.cache, canvas, length, own_visible, number)
                positions = state.window_positions + jnp.where(mine, visible, 0)
                state = replace(state, cache=cache, window_positions=positions)
            state, near = self._decide(state, hidden, start, number, sharing, near)
            return state, waiting & ~sharing, near

        return jax.lax.while_loop(lambda carry: carry[1].any(), one_each, (state, due, near))

    @property
    def _step_positions(self) -> int:
        """The most positions for which the step of a refresh chooses tokens."""
        # The smallest window is one block, or at most two.
        return 1 if self.program.block_rule == "fast_dllm" else self.program.windows[-1] - self._before

    @property
    def _refresh_outputs(self) -> int | None:
        """Number of positions whose activations a refresh computes in the last layer; None for all positions.

        The other positions of the last layer need keys and values only. A single CPU skips the rest of their work: a
        sixth of the time in a model of six layers. A mesh with a sequence axis would have to move the activations.
        """
        if not self.forward.is_single_cpu or self.forward.layout.scan_layers:
            return None
        if self.program.refresh_widths or self.program.attention_block_length:
            return None
        return self._step_positions + self.forward.config.family.prediction_offset

    def _first_outputs(self) -> Array:
        """Return the position whose output is the first that each row's step needs: int32 ``[B]``."""
        first = jnp.argmax(self.wanted, axis=1).astype(jnp.int32)
        return jnp.maximum(first - self.forward.config.family.prediction_offset, 0)

    def _visible(self, state: DenoiseState) -> Array | None:
        """Return how many positions each row's block sees, int32 ``[B]``; None if all rows see their whole canvas."""
        if not self.program.refresh_widths:
            return None
        end = jnp.minimum(block_start(self.request, state.block + 1), self.request.ends)
        return jnp.minimum(end + self.request.suffix_window + 1, self.request.lengths)

    def _fill_part(
        self, cache: Cache, canvas: Array, lengths: Array, visible: Array, first: Array
    ) -> tuple[Array, Cache]:
        """Refresh rows ``[R, S]`` from the ``visible`` positions of each, int32 ``[R]``.

        All rows have the smallest compiled width that is large enough for every one of them; see :meth:`_run_windows`.

        Returns:
          Activations ``[R, S, D]``, 0 beyond that width, and the updated cache.
        """
        widths, size = self.program.refresh_widths, canvas.shape[1]
        chosen = jnp.where(jnp.array([width >= visible.max() for width in widths]), jnp.arange(len(widths)), 0).max()
        norm = self.weights.final_norm
        carry = jnp.zeros((*canvas.shape, norm.shape[-1]), norm.dtype), cache

        def refresh(width: int, carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
            positions = text_positions(jnp.arange(width)[None], visible, lengths)
            tokens = jnp.take_along_axis(canvas, jnp.minimum(positions, size - 1), axis=1)
            filled = fill_rows(self.forward, self.weights, carry[1], tokens, visible, first, positions=positions)
            hidden = jnp.pad(filled[0], ((0, 0), (0, size - width), (0, 0)))
            return self.forward.constrain(hidden, "batch", "canvas", "embed"), filled[1]

        for number, width in enumerate(widths):
            carry = run_if(chosen == number, partial(refresh, width), carry)
        return carry

    def _decide(
        self,
        state: DenoiseState,
        hidden: Array,
        start: Array | None,
        source: Array,
        sharing: Array,
        near: Array | None,
    ) -> tuple[DenoiseState, Array | None]:
        """Commit tokens in every row that shares a refresh, and copy the refreshed cache row to each of them.

        Args:
          state: the state; its cache holds the refreshed row ``source``.
          hidden: activations of the refreshed row, one row per ``data`` shard.
          start: int32 ``[data]``, position of the first of these activations; None for 0, and all positions.
          source: int32 ``[data]``, index of the refreshed row within its shard; -1 if the shard has none.
          sharing: bool ``[B]``, the rows that share the refresh.
          near: see :meth:`_refresh`.
        """
        sequence = self.forward.layout.spec.sequence
        program = replace(self.program, chunk=refresh_chunk(self.program.chunk, self._step_positions, sequence))

        def decide(carry: tuple[DenoiseState, Array, Array | None]) -> tuple[DenoiseState, Array, Array | None]:
            state, waiting, near = carry

            def take(waiting: Array, steps: Array, wanted: Array, request: DenoiseRequest) -> tuple[Any, ...]:
                return *_first(waiting), *(_row_of_each(part, waiting) for part in (steps, wanted, request))

            target, mine, own_steps, own_wanted, own_request = self.forward.on_rows(
                take, waiting, row_steps(self.request, state), self.wanted, only_row_fields(self.request)
            )
            own_wanted = own_wanted & (target >= 0)[:, None]
            if start is not None:
                (own_wanted,) = self.forward.on_rows(cut(hidden.shape[1]), start, own_wanted)
            choices = choose_on_canvas(
                self.forward, program, self.weights, own_request, own_steps, hidden, own_wanted, offset=start
            )
            if start is not None:
                choices = self.forward.on_rows(paste(hidden.shape[1]), start, state.canvas[:1], choices)

            def spread(target: Array, canvas: Array, choices: Choices) -> Choices:
                here = (jnp.arange(len(canvas)) == target)[:, None]
                return jax.tree.map(lambda value: jnp.where(here, value, jnp.zeros_like(value)), choices)

            choices = self.forward.on_rows(spread, target, state.canvas, choices)
            state = replace(
                state,
                cache=copy_row(self.forward.layout, state.cache, source, target),
                steps_until_refresh=jnp.where(mine, self.request.refresh_interval, state.steps_until_refresh),
                previous_block_stale=jnp.where(mine, 0, state.previous_block_stale),
            )
            state = self._commit(state, choices, self.wanted & mine[:, None])
            near = None if near is None else self._keep_block(near, hidden, target, state)
            return state, waiting & ~mine, near

        state, _, near = jax.lax.while_loop(lambda carry: carry[1].any(), decide, (state, sharing, near))
        return state, near

    def _block_at(self, state: DenoiseState) -> Array:
        """Return the position whose output is the first that each row's block needs: int32 ``[B]``."""
        return jnp.maximum(block_start(self.request, state.block) - self._before, 0)

    def _keep_block(self, near: Array, hidden: Array, target: Array, state: DenoiseState) -> Array:
        """Copy activations of a refreshed row, from the first that a block needs, to the row ``target`` ``[data]``.

        The state is that after the row's step. No token is negative, but because the positions depend on the tokens,
        the collectives of this copy cannot overlap with those that chose them; see :meth:`run`.
        """
        width = near.shape[1]
        first = jnp.where(state.canvas[:, 0] < 0, 0, self._block_at(state))

        def places(target: Array, first: Array) -> Array:
            return first[jnp.maximum(target, 0)][:, None] + jnp.arange(width)

        def keep(target: Array, near: Array, picked: Array) -> Array:
            return jnp.where((jnp.arange(len(near)) == target)[:, None, None], picked, near)

        positions = self.forward.on_rows(places, target, first)
        picked = pick_positions(self.forward, hidden, positions, whole=True)
        kept: Array = self.forward.on_rows(keep, target, near, picked)
        return kept

    # ---- windows ----------------------------------------------------------------------------------------------

    def _run_windows(self, state: DenoiseState, wanted: Array) -> DenoiseState:
        """Run one forward pass over the windows of the rows marked in ``wanted``, commit their tokens, and go on.

        All windows have the narrowest compiled width that covers every one of them. If no row is marked, no forward
        pass runs.
        """
        *_, chosen = self._spans(state, wanted)
        counts = self.counts
        for number, width in enumerate(self.program.windows):
            # `chosen` is that of the first step, so that one of these loops runs at most.
            state, wanted, counts, _ = jax.lax.while_loop(
                lambda carry: carry[-1],
                partial(self._window_step, number, width),
                (state, wanted, counts, chosen == number),
            )
        return state

    def _window_step(
        self, number: int, width: int, carry: tuple[DenoiseState, Array, Array, Array]
    ) -> tuple[DenoiseState, Array, Array, Array]:
        """Run one step of windows of one width, and count the next step if it is another one.

        Args:
          number: which of the compiled widths this is.
          width: the width.
          carry: the state; ``wanted`` and ``counts`` of the step, see :class:`CachedStep`; and True.

        Returns:
          The same for the next step, and whether it consists of windows of this width alone.
        """
        state, wanted, counts, _ = carry
        step = replace(self, wanted=wanted, counts=counts)
        start, stop, _ = step._spans(state, wanted)
        state = step._window(width, start, stop, wanted)(state)
        with jax.named_scope("following"):
            state, wanted, counts, moves = step_without_moves(self.forward, self.program, self.request, state)
            active = wanted.any(axis=1)
            due = active & (state.steps_until_refresh == 0)
            *_, chosen = step._spans(state, wanted)
            # A row that must do something else makes the sum negative, so that one sum over all shards is enough.
            running = jnp.where(moves | due, -active.size, active).sum()
            again = (chosen == number) & (running >= self.request.min_running)
            again &= state.iteration + 1 < self.request.max_iterations
            state = replace(_count_down(state, active & again), iteration=state.iteration + again)
        return state, wanted, counts, again

    def _spans(self, state: DenoiseState, wanted: Array) -> tuple[Array, Array, Array]:
        """Return the bounds of each row's window, int32 ``[B]``, and which compiled width covers all, int32 ``[]``.

        The end is 0 in rows that want no position. If there are only such rows, the number of the width is -1.
        """
        active = wanted.any(axis=1)
        start, stop = self._window_bounds(state, wanted)
        stop = jnp.where(active, stop, 0)
        widths = self.program.windows
        needed = jnp.where(active, stop - start, 0).max()
        enough = jnp.array([width >= needed for width in widths])
        return start, stop, jnp.where(active.any(), jnp.where(enough, jnp.arange(len(widths)), 0).max(), -1)

    def _window_bounds(self, state: DenoiseState, wanted: Array) -> tuple[Array, Array]:
        """Return the first position of each row's window, and the position after its last: int32 ``[B]`` each."""
        request = self.request
        if self.program.attention_block_length:
            return window_bounds(self.program, request, state, wanted)
        start = jnp.maximum(block_start(request, state.block - state.previous_block_stale) - self._before, 0)
        if self.program.within_block:
            return start, jnp.minimum(request.ends, block_start(request, state.block + 1))
        visible = self._visible(state)
        return start, request.lengths if visible is None else visible

    def _window(self, width: int, start: Array, stop: Array, wanted: Array) -> Callable[[DenoiseState], DenoiseState]:
        """Return a function that runs windows of one width, over ``[start, stop)`` of each row, and commits tokens."""

        def run(state: DenoiseState) -> DenoiseState:
            active = wanted.any(axis=1)
            lengths, visible, canvas, positions = self.request.lengths, self._visible(state), state.canvas, None
            if visible is not None:
                canvas = self.forward.on_rows(pull_last, canvas, lengths, visible)
                positions = text_positions(start[:, None] + jnp.arange(width), visible, lengths)
                lengths = visible
            tokens, own_wanted = self.forward.on_rows(cut(width), start, canvas, wanted)
            hidden, cache = run_window(
                self.forward, self.weights, state.cache, tokens, start, lengths, stop, positions=positions
            )
            program = replace(self.program, chunk=window_chunk(self.forward, self.program.chunk, width))
            steps = row_steps(self.request, state)
            choices = choose_on_canvas(
                self.forward.window, program, self.weights, self.request, steps, hidden, own_wanted, offset=start
            )
            choices = self.forward.on_rows(paste(width), start, state.canvas, choices)
            state = replace(
                state,
                cache=cache,
                previous_block_stale=jnp.where(active, 0, state.previous_block_stale),
                window_positions=state.window_positions + jnp.where(active, width, 0),
            )
            return self._commit(state, choices, wanted)

        return run


def _count_down(state: DenoiseState, rows: Array) -> DenoiseState:
    """Count one step until the next refresh in the rows marked in ``rows``, bool ``[B]``."""
    return replace(state, steps_until_refresh=jnp.maximum(state.steps_until_refresh - rows, 0))


def run_if(condition: Array, function: Callable[[Carry], Carry], state: Carry) -> Carry:
    """Return ``function(state)`` if ``condition``, bool ``[]``, otherwise ``state``.

    It is a loop of at most one iteration, because compilers update the arrays of a loop in place. Those that a
    conditional returns are copied by XLA on GPU, and by XLA on TPU if several branches write them: here, a whole cache.
    """

    def once(carry: tuple[Carry, Array]) -> tuple[Carry, Array]:
        return function(carry[0]), jnp.zeros_like(carry[1])

    return jax.lax.while_loop(lambda carry: carry[1], once, (state, condition))[0]


def _first(rows: Array) -> tuple[Array, Array]:
    """Return the index of the first true row, int32 ``[1]`` (-1 if none is), and its one-hot mask, bool ``[B]``."""
    row = jnp.argmax(rows)
    return jnp.where(rows.any(), row, -1)[None].astype(jnp.int32), (jnp.arange(len(rows)) == row) & rows


def _row(values: Array, rows: Array) -> Array:
    """Return the row ``[1, ...]`` of ``values`` ``[B, ...]`` at the first true element of ``rows``, bool ``[B]``."""
    return jax.lax.dynamic_slice_in_dim(values, jnp.argmax(rows), 1)


def _row_of_each(tree: Any, rows: Array) -> Any:
    return jax.tree.map(lambda values: _row(values, rows), tree)
