"""Lossless speculation with a KV cache: windows of each row's canvas and of its drafts, which share the cache.

As without a cache (:mod:`runtime.decoding.drafts`), a pass computes the outputs for K + 1 canvases of each row, and the
row makes steps as long as the canvas that a step leaves is among them. Steps within a block have the same window, and
leave the cache outside it unchanged. So the windows of all canvases read one cache, each with its own keys and values
inside the window, and afterwards the cache gets those of the last canvas whose outputs were used: what it would hold
without drafts.

A refresh makes one step. So does the first window of a block that is entered without a refresh, because it also
computes the previous block, which the windows of later steps read from the cache. A chain of steps ends where the next
step is a refresh, or is in another block.

Dimension letters: B batch, K drafts, N = K + 1 canvases, S canvas, W window, D embed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from runtime.decoding.cached_steps import CachedStep, run_if
from runtime.decoding.choices import Choices, choose_on_canvas
from runtime.decoding.draft_chain import DraftChain
from runtime.decoding.progress import next_step
from runtime.decoding.state import DenoiseProgram, DenoiseState, block_start, row_steps
from runtime.decoding.windows import cut, paste, pull_last, text_positions
from runtime.models.canvases import empty_windows, run_canvases, write_canvas
from runtime.models.kv_cache import Cache

Array = jax.Array
# Outputs of all canvases around each row's block, [B, N, W, D], and the keys and values of their windows.
_Outputs = tuple[Array, Cache]


@dataclass(frozen=True)
class _WindowChain(DraftChain):
    """The steps of every row around one pass with a cache.

    Attributes:
      block: int32 ``[B]``, each row's block in the pass.
      rows: bool ``[B]``, the rows that have windows in the pass.
      entered: bool ``[B]``, those among them whose window includes the previous block.
    """

    block: Array
    rows: Array
    entered: Array

    def most(self) -> Array:
        return jnp.where(self.entered, 0, super().most())

    def may_guess(self, state: DenoiseState) -> Array:
        return (state.block == self.block) & (state.steps_until_refresh > 0)

    def may_make(self, state: DenoiseState) -> Array:
        return self.rows & self.may_guess(state)

    def count(self, state: DenoiseState, stepped: Array) -> DenoiseState:
        return replace(
            super().count(state, stepped),
            steps_until_refresh=jnp.maximum(state.steps_until_refresh - stepped, 0),
            previous_block_stale=jnp.where(stepped, 0, state.previous_block_stale),
        )


@dataclass(frozen=True)
class DraftedStep(CachedStep):
    """One pass of every row with a KV cache and drafts, and all steps that it allows."""

    def make_steps(self, state: DenoiseState) -> tuple[DenoiseState, Array, Array]:
        """Refresh the rows that are due for a refresh, and run windows of all canvases of the other rows.

        A row makes at least one step, and at most one more than the smaller of ``request.draft_steps`` and K.

        Returns:
          The state with new drafts, advanced like that of :func:`runtime.decoding.progress.next_step`; and the other
          results of ``next_step``.
        """
        active, block = self.wanted.any(axis=1), state.block
        due = active & (state.steps_until_refresh == 0)
        canvases = jnp.concatenate([state.canvas[:, None], state.drafts], axis=1)
        norm, width = self.weights.final_norm, self.program.windows[-1]
        near: Array | None = self._placed(jnp.zeros((len(active), width, norm.shape[-1]), norm.dtype))
        with jax.named_scope("refresh"):
            state, waiting, near = self._refresh(replace(state, drafts=None), due, near)
        assert near is not None
        with jax.named_scope("block_step"):
            # The mask depends on the loop over refreshes, see :meth:`run`.
            rows = active & ~(due | waiting)
            chain = _WindowChain(
                self.forward, self.program, self.request, block, rows, rows & (state.previous_block_stale > 0)
            )
            first = self._block_at(state)
            start, stop, (hidden, windows), state = self._compute(state, canvases, self.wanted & rows[:, None])
            state, cache = replace(chain.count(state, due), cache=None), state.cache
            state, wanted, counts = next_step(self.forward, self.program, self.request, state)

            def select(index: Array) -> Array:
                # A gather by row would be divided across devices less well than this sum with one term that is not 0.
                here = jnp.arange(canvases.shape[1]) == index[:, None]
                return self._placed(jnp.where(here[..., None, None], hidden, 0).sum(axis=1))

            def choose_at(state: DenoiseState, wanted: Array, index: Array) -> Choices:
                return self._choose(select(index), first, self.program, state, wanted)

            state, wanted, counts, last = chain.make_steps(state, wanted, counts, canvases, choose_at)
            cache = write_canvas(self.forward, cache, windows, last, start, stop)
            with jax.named_scope("drafts"):
                near = jnp.where(rows[:, None, None], select(last), near)
                drafts = self._guess(chain, near, first, state, wanted, counts)
        return replace(state, drafts=drafts, cache=cache), wanted, counts

    def _compute(
        self, state: DenoiseState, canvases: Array, wanted: Array
    ) -> tuple[Array, Array, _Outputs, DenoiseState]:
        """Run one forward pass over the windows of all canvases ``[B, N, S]`` of the rows marked in ``wanted``.

        All windows have the narrowest compiled width that covers every one of them. If no row is marked, no forward
        pass runs.

        Returns:
          The bounds of each row's window, int32 ``[B]``; the outputs, with all keys and values at the widest width; and
          the state with the computed positions.
        """
        rows, number, _ = canvases.shape
        start, stop, chosen = self._spans(state, wanted)
        widths, norm = self.program.windows, self.weights.final_norm
        lengths, visible, first = self.request.lengths, self._visible(state), self._block_at(state)
        if visible is not None:
            canvases = self.forward.on_rows(_pull_last_of_each, canvases, lengths, visible)

        def compute(width: int, outputs: _Outputs) -> _Outputs:
            positions, own = None, lengths
            if visible is not None:
                own = visible
                positions = text_positions(start[:, None] + jnp.arange(width), visible, lengths)
            tokens = self.forward.on_rows(partial(_cut_each, width), start, canvases)
            hidden, windows = run_canvases(
                self.forward, self.weights, state.cache, tokens, start, own, stop, positions=positions
            )
            hidden = self.forward.on_rows(partial(_cut_outputs, widths[-1]), first - start, hidden)
            return self._placed(hidden), jax.tree.map(lambda new, old: _widened(new, old.shape[3]), windows, outputs[1])

        outputs = (
            self._placed(jnp.zeros((rows, number, widths[-1], norm.shape[-1]), norm.dtype)),
            empty_windows(self.forward, state.cache, rows * number, widths[0]),
        )
        for which, width in enumerate(widths):
            outputs = run_if(chosen == which, partial(compute, width), outputs)
        computed = jnp.where(wanted.any(axis=1), number * jnp.array(widths)[chosen], 0)
        return start, stop, outputs, replace(state, window_positions=state.window_positions + computed)

    def _placed(self, values: Array) -> Array:
        """Constrain activations ``[B, ..., D]`` of windows to be whole on every ``sequence`` shard."""
        return self.forward.window.constrain(values, "batch", *[None] * (values.ndim - 2), "embed")

    def _choose(
        self, near: Array, first: Array, program: DenoiseProgram, state: DenoiseState, wanted: Array
    ) -> Choices:
        """Choose tokens for wanted positions ``[B, S]`` from outputs ``[B, W, D]`` that begin at ``first``, ``[B]``."""
        width = near.shape[1]
        (own,) = self.forward.on_rows(cut(width), first, wanted)
        choices = choose_on_canvas(
            self.forward.window,
            replace(program, chunk=min(program.chunk, width)),
            self.weights,
            self.request,
            row_steps(self.request, state),
            near,
            own,
            offset=first,
        )
        placed: Choices = self.forward.on_rows(paste(width), first, state.canvas, choices)
        return placed

    def _guess(
        self, chain: _WindowChain, near: Array, first: Array, state: DenoiseState, wanted: Array, counts: Array
    ) -> Array:
        """Guess the canvases of the next pass: int32 ``[B, K, S]``; copies where the next step is in another block."""
        begin = block_start(self.request, state.block)
        end = jnp.minimum(begin + self.request.block_length, self.request.lengths)
        places = jnp.arange(state.canvas.shape[1])
        masks = (state.canvas == self.forward.config.mask_token_id) & (places >= begin[:, None])
        following = wanted.any(axis=1) & chain.may_guess(state)
        masks &= (places < end[:, None]) & following[:, None]

        def guess(_: Array) -> Array:
            return chain.guess(state, wanted, counts, masks, partial(self._choose, near, first))

        copies = jnp.repeat(state.canvas[:, None], self.program.drafts, axis=1)
        return run_if(following.any(), guess, copies)


def _pull_last_of_each(canvases: Array, lengths: Array, visible: Array) -> Array:
    """Apply :func:`pull_last` to each of the canvases ``[B, N, S]`` of all rows."""
    return jax.vmap(pull_last, in_axes=(1, None, None), out_axes=1)(canvases, lengths, visible)


def _cut_each(width: int, start: Array, canvases: Array) -> Array:
    """Cut windows at ``start`` ``[B]`` out of canvases ``[B, N, S]``: ``[B, N, width]``."""
    (windows,) = jax.vmap(cut(width), in_axes=(None, 1), out_axes=1)(start, canvases)
    return windows


def _cut_outputs(width: int, first: Array, hidden: Array) -> Array:
    """Return ``width`` outputs from index ``first`` ``[B]`` on: ``[B, N, W, D]`` -> ``[B, N, width, D]``."""
    places = jnp.minimum(first[:, None] + jnp.arange(width), hidden.shape[2] - 1)
    return jnp.take_along_axis(hidden, places[:, None, :, None], axis=2)


def _widened(windows: Array, width: int) -> Array:
    """Pad keys, values or scales ``[L, B * N, K, W, ...]`` of windows to a width."""
    padding = [(0, 0)] * windows.ndim
    padding[3] = 0, width - windows.shape[3]
    return jnp.pad(windows, padding)
