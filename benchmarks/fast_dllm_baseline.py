"""Fast-dLLM as published: the baseline for fast decoding, on the same model and machine.

It is a second implementation of ``DiffusionConfig.fast_dllm()``, as plain as the original: one row, one loop, without
slots, run-time parameters and log-probabilities. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from runtime import Engine
from runtime.execution.rows import bucket_length
from runtime.models.cached import fill_rows, run_window
from runtime.models.kv_cache import abstract_cache
from runtime.models.transformer import project_logits


class FastDLLMBaseline:
    """Fast-dLLM's dual cache with threshold (Wu et al., 2025): one compiled program that decodes one row."""

    def __init__(
        self, engine: Engine, new_tokens: int, block: int = 32, ends: Sequence[int] = (), threshold: float = 0.9
    ) -> None:
        """Create the program for a model.

        Args:
          engine: the model.
          new_tokens: a multiple of ``block``.
          block: positions of a block.
          ends: tokens that end a row; it stops after the block that contains one.
          threshold: probability from which on a token is committed.
        """
        self._engine, self._new, self._block, self._threshold = engine, new_tokens, block, threshold
        self._ends = tuple(ends)

    def _generate(self, weights: Any, canvas: jax.Array, length: jax.Array, cache: Any) -> tuple[Any, ...]:
        forward, mask = self._engine.runner.forward(canvas.shape[1]), self._engine.config.mask_token_id
        # The output ``offset`` positions before a token predicts it, except for the first one of a window.
        offset = self._engine.config.family.prediction_offset
        lengths, places = length[None], jnp.arange(self._block)
        outputs = jnp.maximum(places - offset, 0)

        def choose(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
            probabilities = jax.nn.softmax(project_logits(forward, weights, hidden), axis=-1)
            # The original never ends if the model predicts the mask token; here the best other token is used.
            probabilities = probabilities.at[..., mask].set(0.0)
            return probabilities.argmax(axis=-1)[0], probabilities.max(axis=-1)[0]

        def fill_block(carry: Any) -> Any:
            number, canvas, cache, forwards = carry
            start = length - self._new + number * self._block
            hidden, cache = fill_rows(forward, weights, cache, canvas, lengths, jnp.zeros((1,), jnp.int32))
            first, _ = choose(jax.lax.dynamic_slice_in_dim(hidden, start - offset, 1, axis=1))
            canvas = canvas.at[0, start].set(first[0])

            def masked(canvas: jax.Array) -> jax.Array:
                return jax.lax.dynamic_slice_in_dim(canvas[0], start, self._block) == mask

            def window(carry: Any) -> Any:
                canvas, cache, forwards = carry
                tokens = jnp.take(canvas, start + places, axis=1)
                hidden, cache = run_window(forward, weights, cache, tokens, start[None], lengths)
                chosen, certainty = choose(hidden[:, outputs])
                certainty = jnp.where(masked(canvas), certainty, -1.0)
                kept = (certainty >= self._threshold) | (places == certainty.argmax())
                block = jax.lax.dynamic_slice_in_dim(canvas[0], start, self._block)
                block = jnp.where(kept & (certainty >= 0), chosen, block)
                canvas = jax.lax.dynamic_update_slice(canvas, block[None], (0, start))
                return canvas, cache, forwards.at[1].add(1)

            carried = jax.lax.while_loop(
                lambda carry: masked(carry[0]).any(), window, (canvas, cache, forwards.at[0].add(1))
            )
            return number + 1, *carried

        def unfinished(carry: Any) -> jax.Array:
            number, canvas, _, _ = carry
            place = jnp.arange(canvas.shape[1])
            made = (place >= length - self._new) & (place < length)
            ended = jnp.isin(canvas[0], jnp.array(self._ends, jnp.int32)) & made if self._ends else jnp.array([False])
            return (number < self._new // self._block) & ~ended.any()

        # Numbers of passes over the whole canvas, and of passes over windows.
        forwards = jnp.zeros((2,), jnp.int32)
        _, canvas, cache, forwards = jax.lax.while_loop(unfinished, fill_block, (jnp.int32(0), canvas, cache, forwards))
        return canvas, forwards, cache

    def __call__(self, ids: np.ndarray) -> tuple[np.ndarray, int, int]:
        """Complete one row ``[1, S]``. Return new tokens, and the numbers of forward passes and computed positions."""
        length = ids.shape[1] + self._new
        width = bucket_length(length)
        canvas = np.full((1, width), self._engine.config.pad_token_id, np.int32)
        canvas[0, : ids.shape[1]] = ids[0]
        canvas[0, ids.shape[1] : length] = self._engine.config.mask_token_id
        shapes = abstract_cache(self._engine.layout, 1, width, self._engine.dtype)
        cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), shapes)
        arguments = (self._engine.weights, jnp.asarray(canvas), jnp.int32(length), cache)
        # Compile as the engine does, with a cache that is updated in place.
        program = self._engine.runner.programs.get(
            ("fast_dllm", self._block, self._new, self._ends, width),
            lambda: jax.jit(self._generate, donate_argnums=3).lower(*arguments),
        )
        canvas_out, counts, _ = program(*arguments)
        full, windows = np.asarray(counts).tolist()
        new = np.asarray(canvas_out)[0, ids.shape[1] : length]
        return new, full + windows, full * length + windows * self._block
