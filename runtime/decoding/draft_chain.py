"""Chains of denoise steps: those that a pass with drafts makes, and those that it guesses for the next pass.

A pass has outputs for several canvases of each row, see :mod:`runtime.decoding.drafts`. A chain makes steps as long as
the canvas that a step leaves is among them. How tokens are chosen from the outputs, and where a chain has to end,
depends on the kind of pass.

Dimension letters: B batch, K drafts, S canvas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from runtime.decoding.choices import Choices
from runtime.decoding.commit import commit
from runtime.decoding.progress import next_step
from runtime.decoding.state import DenoiseProgram, DenoiseRequest, DenoiseState
from runtime.models.arrays import declarations, row_fields
from runtime.models.forward import Forward

Array = jax.Array

# Positions per row of a head chunk that draws again the tokens of the few positions that a guessed step commits.
_REDRAWN_POSITIONS = 16
# Guesses use the threshold of a row times this number. What a pass computes from an earlier canvas is less certain, so
# a lower threshold might guess more of the tokens that the next step commits. It does not: for each rule, the accepted
# steps per pass that `python -m benchmarks.drafts --tune` prints, for prompts that no record reports, are most at 1.0.
# Tokens never depend on it.
GUESSED_THRESHOLD_SCALE = 1.0
# The rules that compare with a threshold or a factor.
_SCALED_RULES = ("threshold", "factor", "frechet")
# The steps of a pass so far; state, wanted and counts of the next step; the index of each row's canvas, whether its
# outputs are there, and the index of the last canvas whose outputs were used.
_Walk = tuple[Array, DenoiseState, Array, Array, Array, Array, Array]
# Chooses tokens: called with the state before a step, its wanted positions, and the index of each row's canvas.
ChooseAt = Callable[[DenoiseState, Array, Array], Choices]
# Chooses tokens from the last outputs that were used: called with compiled settings, the state and wanted positions.
Choose = Callable[[DenoiseProgram, DenoiseState, Array], Choices]


def redrawn_chunk(sequence: int) -> int:
    """Return the positions per row of a head chunk for a few positions, a multiple of the sequence axis."""
    return math.lcm(_REDRAWN_POSITIONS, sequence)


@dataclass(frozen=True)
class DraftChain:
    """The steps of every row around one pass without a cache. Subclasses end chains earlier.

    Attributes:
      forward: layout and attention of the model.
      program: settings that are compiled in.
      request: run-time arguments.
    """

    forward: Forward
    program: DenoiseProgram
    request: DenoiseRequest

    def most(self) -> Array:
        """Return the largest number of steps after the first one that a chain may have: int32 ``[B]``."""
        return jnp.minimum(self.request.draft_steps, self.program.drafts)

    def may_guess(self, state: DenoiseState) -> Array:
        """Return the rows whose next step depends on the same positions as the pass, bool ``[B]``."""
        return jnp.ones_like(state.done)

    def may_make(self, state: DenoiseState) -> Array:
        """Return the rows whose next step may use outputs of the pass, bool ``[B]``."""
        return self.may_guess(state)

    def count(self, state: DenoiseState, stepped: Array) -> DenoiseState:
        """Count a step of the rows marked in ``stepped``, bool ``[B]``."""
        return replace(state, made_steps=state.made_steps + stepped)

    def make_steps(
        self, state: DenoiseState, wanted: Array, counts: Array, canvases: Array, choose: ChooseAt
    ) -> tuple[DenoiseState, Array, Array, Array]:
        """Make the steps of each row whose canvases are among those of the pass.

        Args:
          state: the state before the steps.
          wanted, counts: see :func:`runtime.decoding.progress.next_step`.
          canvases: int32 ``[B, K + 1, S]``, the canvases of the pass; the first is the row's own.
          choose: chooses tokens from the outputs of the pass.

        Returns:
          The state, ``wanted`` and ``counts`` of the next step, and the index of the last canvas whose outputs were
          used, int32 ``[B]``.
        """
        forward, most = self.forward, self.most()

        def may_step(made: Array, state: DenoiseState, wanted: Array) -> tuple[Array, Array]:
            index, there = forward.on_rows(_find, canvases, state.canvas)
            return index, there & wanted.any(axis=1) & (made <= most) & self.may_make(state)

        def step(carry: _Walk) -> _Walk:
            made, state, wanted, counts, index, going, last = carry
            own = wanted & going[:, None]
            state = self._commit(self.request, state, choose(state, own, index), own, counts)
            state, wanted, counts = next_step(forward, self.program, self.request, self.count(state, going))
            last = jnp.where(going, index, last)
            return made + 1, state, wanted, counts, *may_step(made + 1, state, wanted), last

        none, first = jnp.zeros((), jnp.int32), jnp.zeros(len(wanted), jnp.int32)
        start = (none, state, wanted, counts, *may_step(none, state, wanted), first)
        _, state, wanted, counts, _, _, last = jax.lax.while_loop(lambda carry: carry[5].any(), step, start)
        return state, wanted, counts, last

    def guess(self, state: DenoiseState, wanted: Array, counts: Array, open_positions: Array, choose: Choose) -> Array:
        """Guess the canvases after the next K steps of every row: int32 ``[B, K, S]``.

        The steps are those of the decoder, with their own random bits, but from outputs for an earlier canvas, and by
        the rules of :func:`guessed_request`. The head runs once on all open positions; the tokens that later steps
        sample are drawn for the positions that they commit.

        Args:
          state: the state after the pass.
          wanted, counts: see :func:`runtime.decoding.progress.next_step`.
          open_positions: bool ``[B, S]``, the masks for which there are outputs.
          choose: chooses tokens from the last outputs that were used.
        """
        forward, request = self.forward, guessed_request(self.program, self.request)
        program = replace(self.program, log_probabilities=False)
        first = choose(program, state, open_positions)
        ranks_at_random = program.algorithm == "random" and program.parallel == "none"
        few = replace(program, chunk=min(program.chunk, redrawn_chunk(forward.layout.spec.sequence)))

        def step(carry: tuple[DenoiseState, Array, Array], _: None) -> tuple[tuple[DenoiseState, Array, Array], Array]:
            state, wanted, counts = carry
            stepped = wanted.any(axis=1) & self.may_guess(state)
            wanted &= stepped[:, None]
            choices = choose(program, state, wanted) if ranks_at_random else first
            made = self._commit(request, state, choices, wanted, counts)
            if program.sampling.sampled and not ranks_at_random:
                committed = made.canvas != state.canvas
                tokens = choose(few, state, committed).tokens
                # Without a finite logit, there is no token.
                made = replace(made, canvas=jnp.where(committed & (tokens >= 0), tokens, made.canvas))
            return next_step(forward, program, request, self.count(made, stepped)), made.canvas

        start = (replace(state, log_probabilities=None), wanted, counts)
        _, canvases = jax.lax.scan(step, start, length=program.drafts)
        return jnp.moveaxis(canvases, 0, 1)

    def _commit(
        self, request: DenoiseRequest, state: DenoiseState, choices: Choices, wanted: Array, counts: Array
    ) -> DenoiseState:
        """Commit tokens, see :func:`runtime.decoding.commit.commit`, and leave its arrays divided as they are declared.

        Otherwise the compiler may divide an array further inside a loop, and gather it beside the loop over head
        chunks. XLA's CPU runtime would run their collectives in an order that differs between hosts.
        """
        state = commit(self.forward, self.program, request, state, choices, wanted, counts)
        declared = declarations(DenoiseState)
        placed = {
            name: self.forward.constrain(value, *declared[name].axes) for name, value in row_fields(state).items()
        }
        return replace(state, **placed)


def guessed_request(program: DenoiseProgram, request: DenoiseRequest) -> DenoiseRequest:
    """Return the request with which steps are guessed: thresholds lowered by :data:`GUESSED_THRESHOLD_SCALE`.

    The factor rules allow the n-th token an uncertainty in proportion to the factor, so theirs is raised.
    """
    if program.parallel not in _SCALED_RULES or GUESSED_THRESHOLD_SCALE == 1.0:
        return request
    scale = GUESSED_THRESHOLD_SCALE
    # The schema declares these fields, which a type checker does not know.
    scaled = {"threshold": request.threshold * scale, "factor": request.factor / scale}
    return replace(request, **scaled)


def _find(canvases: Array, canvas: Array) -> tuple[Array, Array]:
    """Return the index of each row's canvas among those of the pass, int32 ``[B]``, and whether it is there."""
    same = (canvases == canvas[:, None]).all(axis=-1)
    return jnp.argmax(same, axis=1).astype(jnp.int32), same.any(axis=1)
