"""Autoregressive decoding: prefill of whole prompts, prefill in chunks, and the loop over new tokens.

Dimension letters: B batch, T cache length, P prompt width, C prompt chunk, D embed, K drafts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from runtime.decoding.decode_state import DecodeProgram, DecodeRequest, DecodeState, DraftedWeights
from runtime.decoding.draft_model import draft_tokens, read_prompt_chunk, read_prompts
from runtime.decoding.next_tokens import draw_tokens
from runtime.decoding.prompt_lookup import accept, look_up
from runtime.decoding.sampling import log_probabilities
from runtime.models.cached import fill_rows, run_window
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.transformer import hidden_states, pick_positions

Array = jax.Array


def _append(
    forward: Forward, program: DecodeProgram, weights: Weights, request: DecodeRequest, state: DecodeState, last: Array
) -> DecodeState:
    """Append one token to each row, chosen from the activations ``[B, 1, D]`` of the row's last position.

    A row whose logits are not finite ends without a token.
    """
    logits, chosen = draw_tokens(forward, program, weights, request, last, state.lengths[:, None])
    non_finite = ~state.done & (chosen[:, 0] < 0)
    ended = state.done | non_finite

    def write(values: Array, new: Array, lengths: Array, done: Array) -> Array:
        places = jnp.where(done, values.shape[1], lengths)
        return values.at[jnp.arange(len(values)), places].set(new[:, 0], mode="drop")

    tokens = forward.on_rows(write, state.tokens, chosen, state.lengths, ended)
    kept = None
    if program.log_probabilities:
        new = log_probabilities(logits, chosen)
        kept = forward.on_rows(write, state.log_probabilities, new, state.lengths, ended)
    lengths = jnp.where(ended, state.lengths, state.lengths + 1)
    done = ended | (chosen == request.stop_tokens).any(axis=1) | (lengths >= request.ends)
    return replace(
        state,
        tokens=tokens,
        lengths=lengths,
        done=done,
        non_finite=state.non_finite | non_finite,
        iteration=state.iteration + 1,
        log_probabilities=kept,
        passes=None if state.passes is None else state.passes + ~ended,
    )


def prefill(
    forward: Forward,
    program: DecodeProgram,
    width: int,
    weights: Weights | DraftedWeights,
    request: DecodeRequest,
    state: DecodeState,
) -> DecodeState:
    """Fill the cache from the first ``width`` positions (P), and generate the first token of every row.

    See :func:`decode` for the weights.
    """
    own = _own_weights(weights)
    first = jnp.zeros((forward.layout.spec.data,), jnp.int32)
    samples = program.samples
    tokens, lengths = forward.on_rows(lambda tokens: tokens[:, :width], state.tokens), state.lengths
    tokens, lengths = tokens[::samples], lengths[::samples]
    if isinstance(weights, DraftedWeights):
        tokens, draft_cache = read_prompts(program, weights.draft, state, tokens, lengths, first)
        state = replace(state, draft_cache=draft_cache)
    hidden, cache = fill_rows(forward, own, state.cache, tokens, lengths, first, samples)
    last_token = lengths[:, None] - 1
    last = pick_positions(forward, hidden, last_token, whole=True)
    last = jnp.repeat(last, samples, axis=0) if samples > 1 else last
    return _append(forward, program, own, request, replace(state, cache=cache, read=request.prompts), last)


def _own_weights(weights: Weights | DraftedWeights) -> Weights:
    """Return the weights of the model itself."""
    return weights.model if isinstance(weights, DraftedWeights) else weights


def prefill_chunks(
    forward: Forward,
    program: DecodeProgram,
    chunk: int,
    weights: Weights | DraftedWeights,
    request: DecodeRequest,
    state: DecodeState,
    chunks: Array,
) -> DecodeState:
    """Read prompts into the cache in chunks of ``chunk`` positions (C).

    Each ``data`` shard reads the prompt of one row at a time, in the order of ``request.turns``. A row gets its first
    token when its prompt has been read to its end.

    Args:
      forward: the model's layout and attention.
      program: compiled settings.
      chunk: C, number of positions per chunk.
      weights: the model's weights, see :func:`decode`.
      request: run-time arguments.
      state: the loop state; it must have a cache.
      chunks: int32, maximum number of chunks that each ``data`` shard reads.
    """
    own = _own_weights(weights)

    def unread(state: DecodeState) -> Array:
        return (state.read < request.prompts) & ~state.done

    def read_chunk(carry: tuple[DecodeState, Array, Array]) -> tuple[DecodeState, Array, Array]:
        state, last, left = carry
        reads, row, tokens, start, stop, prompt = forward.on_rows(
            partial(_next_chunk, chunk), unread(state), request.turns, state.tokens, state.read, request.prompts
        )
        if isinstance(weights, DraftedWeights):
            tokens, draft_cache = read_prompt_chunk(program, weights.draft, state, tokens, start, prompt, stop, row)
            state = replace(state, draft_cache=draft_cache)
        hidden, cache = run_window(forward, own, state.cache, tokens, start, prompt, stop, row)
        last, read = forward.on_rows(_keep_last, reads, hidden, start, stop, last, state.read)
        return replace(state, cache=cache, read=read), last, left - 1

    def unfinished(carry: tuple[DecodeState, Array, Array]) -> Array:
        state, _, left = carry
        return (left > 0) & unread(state).any()

    before = unread(state)
    nothing = jnp.zeros((len(before), 1, forward.config.hidden_size), own.final_norm.dtype)
    nothing = forward.constrain(nothing, "batch", None, "embed")
    state, last, _ = jax.lax.while_loop(unfinished, read_chunk, (state, nothing, chunks))
    whole = before & ~unread(state)
    new = _append(forward, program, own, request, replace(state, done=state.done | ~whole), last)
    return replace(new, done=jnp.where(whole, new.done, state.done), iteration=state.iteration)


def _next_chunk(
    chunk: int, waiting: Array, turns: Array, tokens: Array, read: Array, prompts: Array
) -> tuple[Array, ...]:
    """Return the next chunk of a shard: of the row whose turn it is, of those whose prompts are not read to their end.

    Args:
      chunk: C, number of positions per chunk.
      waiting: bool ``[B]``, rows whose prompts have not been read to their end.
      turns: int32 ``[B]``, see :class:`DecodeRequest`.
      tokens: int32 ``[B, T]``.
      read, prompts: int32 ``[B]``, number of prompt tokens that have been read, and their total.

    Returns:
      The one-hot mask of the row, bool ``[B]``; its index ``[1]``; the tokens of the chunk ``[1, C]``; the first
      position of the chunk ``[1]``; the position after its last ``[1]``; and the length of the prompt ``[1]``. If no
      row waits, the mask is false everywhere and the chunk ends at position 0, so nothing is written.
    """
    row = jnp.argmin(jnp.where(waiting, turns, jnp.iinfo(turns.dtype).max))
    reads = (jnp.arange(len(waiting)) == row) & waiting
    start, prompt = (jax.lax.dynamic_slice_in_dim(values, row, 1) for values in (read, prompts))
    places = jnp.minimum(start[0] + jnp.arange(chunk), tokens.shape[1] - 1)
    own = jax.lax.dynamic_slice_in_dim(tokens, row, 1)[:, places]
    stop = jnp.where(waiting.any(), jnp.minimum(start + chunk, prompt), 0)
    return reads, row[None].astype(jnp.int32), own, start, stop, prompt


def _keep_last(reads: Array, hidden: Array, start: Array, stop: Array, last: Array, read: Array) -> tuple[Array, Array]:
    """Update the entries of the row whose chunk has just been read.

    Args:
      reads: bool ``[B]``, one-hot mask of the row.
      hidden: activations of the chunk, ``[1, C, D]``.
      start, stop: int32 ``[1]``, first position of the chunk, and the position after its last.
      last: activations of each row at the last prompt position that it has read, ``[B, 1, D]``.
      read: int32 ``[B]``, number of prompt tokens that each row has read.

    Returns:
      The new ``last`` and ``read``.
    """
    own = jax.lax.dynamic_slice_in_dim(hidden, jnp.maximum(stop[0] - start[0] - 1, 0), 1, axis=1)
    return jnp.where(reads[:, None, None], own, last), jnp.where(reads, stop, read)


def _drafted_step(
    forward: Forward,
    program: DecodeProgram,
    weights: Weights | DraftedWeights,
    request: DecodeRequest,
    state: DecodeState,
) -> DecodeState:
    """Run one pass over the last token and the drafts of every row, and append all tokens that it allows.

    They are those that as many passes of one token would append, so a row may end in their midst. The entries of the
    cache that belong to wrong drafts are beyond the row's length, and the next pass overwrites them.
    """
    own, last = _own_weights(weights), state.lengths - 1
    if isinstance(weights, DraftedWeights):
        drafts, draft_cache = draft_tokens(forward, program, weights.draft, request, state)
        state = replace(state, draft_cache=draft_cache)
    else:
        drafts = forward.on_rows(partial(look_up, program.drafts), state.tokens, state.lengths)
    newest = forward.on_rows(lambda tokens, at: jnp.take_along_axis(tokens, at, 1), state.tokens, last[:, None])
    tokens = jnp.concatenate([newest, drafts], axis=1)
    # Nothing is computed for positions beyond the row's end: the model may have no such positions.
    lengths = jnp.minimum(state.lengths + program.drafts, request.ends)
    hidden, cache = run_window(forward, own, state.cache, tokens, last, lengths, request.ends)
    places = state.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    logits, drawn = draw_tokens(forward, program, own, request, hidden, places)

    stops = (drawn[..., None] == request.stop_tokens[:, None]).any(axis=-1)
    goes_on = ~stops[:, :-1] & (places[:, 1:] < request.ends[:, None])
    goes_on &= jnp.arange(program.drafts) < request.drafts[:, None]
    reached = accept(tokens[:, 1:], drawn, goes_on) & ~state.done[:, None]
    kept, non_finite = reached & (drawn >= 0), (reached & (drawn < 0)).any(axis=1)

    def write(values: Array, new: Array, places: Array, kept: Array) -> Array:
        rows = jnp.arange(len(values))[:, None]
        return values.at[rows, jnp.where(kept, places, values.shape[1])].set(new, mode="drop")

    if program.log_probabilities:
        new = log_probabilities(logits, drawn)
        state = replace(state, log_probabilities=forward.on_rows(write, state.log_probabilities, new, places, kept))
    lengths = state.lengths + kept.sum(axis=1, dtype=jnp.int32)
    return replace(
        state,
        tokens=forward.on_rows(write, state.tokens, drawn, places, kept),
        lengths=lengths,
        done=state.done | non_finite | (kept & stops).any(axis=1) | (lengths >= request.ends),
        non_finite=state.non_finite | non_finite,
        iteration=state.iteration + 1,
        passes=state.passes + kept[:, 0],
        cache=cache,
    )


def decode(
    forward: Forward,
    program: DecodeProgram,
    weights: Weights | DraftedWeights,
    request: DecodeRequest,
    state: DecodeState,
) -> DecodeState:
    """Generate tokens until every row is done, or until ``request.max_iterations`` iterations have run.

    Rows whose prompts have not been read to their end do not change. The loop also stops when fewer than
    ``request.min_running`` of the other rows are running.

    Args:
      forward: the model's layout and attention.
      program: compiled settings.
      weights: the model's weights; those of both models if the program has a draft model.
      request: run-time arguments.
      state: the loop state.
    """
    unread, own = state.read < request.prompts, _own_weights(weights)

    def step(state: DecodeState) -> DecodeState:
        with jax.named_scope("decode_step"):
            if program.drafts:
                return _drafted_step(forward, program, weights, request, state)
            last_token = state.lengths[:, None] - 1
            if state.cache is None:
                hidden = hidden_states(forward, own, state.tokens, state.lengths)
                last = pick_positions(forward, hidden, last_token, whole=True)
            else:
                newest = forward.on_rows(
                    lambda tokens, at: jnp.take_along_axis(tokens, at, 1), state.tokens, last_token
                )
                last, cache = run_window(forward, own, state.cache, newest, last_token[:, 0], state.lengths)
                state = replace(state, cache=cache)
            return _append(forward, program, own, request, state, last)

    def unfinished(state: DecodeState) -> Array:
        return (state.iteration < request.max_iterations) & ((~state.done).sum() >= request.min_running)

    end = jax.lax.while_loop(unfinished, step, replace(state, done=state.done | unread))
    return replace(end, done=jnp.where(unread, state.done, end.done))
