"""The decoding modes that are compared, and how a mode completes prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.fast_dllm_baseline import FastDLLMBaseline
from launch.process.startup import this_host
from runtime import DiffusionConfig, Engine
from runtime.execution.rows import bucket_length
from runtime.models.kv_cache import cache_bytes_per_device, cache_dtype

# Completes a prompt ``[S]``: returns the new tokens, the number of forward passes, and that of computed positions.
Completer = Callable[[np.ndarray], tuple[np.ndarray, int, int]]


@dataclass(frozen=True)
class Mode:
    """A decoding mode.

    Attributes:
      changes: fields that differ from the exact configuration.
      quantize: quantization of the weights.
      dtype: dtype of weights that are not quantized, and of activations.
      kv_cache: dtype of the cache.
    """

    changes: dict[str, Any]
    quantize: str = "none"
    dtype: str = "float32"
    kv_cache: str = "model"

    def flags(self, new_tokens: int) -> str:
        """Return the flags of ``diffumesh generate`` that select the mode; by schedule, a step commits one token."""
        lengths = {"max_new_tokens": new_tokens} | ({} if "parallel" in self.changes else {"steps": new_tokens})
        weights = {"quantize": self.quantize, "kv_cache": self.kv_cache, "dtype": self.dtype}
        given = {"preset": "class", **lengths, "algorithm": "entropy", **self.changes, **weights}
        return " ".join(f"--{name}={value}" for name, value in given.items())

    def completer(self, engine: Engine, base: DiffusionConfig) -> Completer:
        """Return a function that completes one prompt in this mode; ``base`` is the exact configuration."""
        config = base.replace(**self.changes)

        def complete(prompt: np.ndarray) -> tuple[np.ndarray, int, int]:
            made = engine.generate_tokens(prompt[None], None, config)
            return made.sequences[0, len(prompt) :], made.stats.forwards, made.stats.positions

        return complete

    def baseline(self, engine: Engine, base: DiffusionConfig) -> Completer:
        """Return a function that completes one prompt by Fast-dLLM's rule in the baseline's loop.

        With ``base.early_stop``, the baseline ends a row after the block with its end token; this mode's own loop, at
        the end token.
        """
        ends = engine.end_token_ids if base.early_stop else ()
        loop = FastDLLMBaseline(engine, base.max_new_tokens, self.changes["block_length"], ends)
        return lambda prompt: loop(prompt[None])

    def cache_bytes(self, engine: Engine, length: int) -> int:
        """Return the bytes of the cache of one row of this length; 0 if the mode has no cache."""
        if self.changes.get("cache", "none") == "none":
            return 0
        return cache_bytes_per_device(engine.layout, 1, bucket_length(length), cache_dtype(self.kv_cache, engine.dtype))


_THRESHOLD = {"parallel": "threshold", "algorithm": "maskgit_plus"}
_DUAL_32 = {"cache": "dual", "block_length": 32, **_THRESHOLD}
_DUAL_8 = {**_DUAL_32, "block_length": 8}
_ONCE = {**_DUAL_8, "refresh_blocks": 0}
# Fast-dLLM's published setting: the dual cache, blocks of 32 and a threshold of 0.9.
PUBLISHED = "fast_dllm"
# The modes whose rule is Fast-dLLM's, which the baseline's loop has too.
FAST_DLLM = (PUBLISHED, "fast_dllm_8")
MODES = {
    "exact": Mode({}),
    "threshold_32": Mode({"block_length": 32, **_THRESHOLD}),
    PUBLISHED: Mode({**_DUAL_32, "block_rule": "fast_dllm"}),
    "fast_dllm_8": Mode({**_DUAL_8, "block_rule": "fast_dllm"}),
    "dual_8_schedule": Mode({"cache": "dual", "block_length": 8}),
    "dual_32": Mode(_DUAL_32),
    "dual_8": Mode(_DUAL_8),
    "dual_8_drafts": Mode({**_DUAL_8, "draft_steps": 3}),
    "dual_16_suffix": Mode({**_DUAL_8, "block_length": 16, "suffix_window": 8}),
    "dual_12_suffix": Mode({**_DUAL_8, "block_length": 12, "suffix_window": 0}),
    "dual_8_once": Mode(_ONCE),
    "dual_8_once_at_0.8": Mode({**_ONCE, "threshold": 0.8}),
    "dual_8_once_decay": Mode({**_ONCE, "threshold_decay": 0.25}),
    "dual_8_once_frechet": Mode({**_ONCE, "parallel": "frechet"}),
    "dual_8_once_entropy_bound": Mode({**_ONCE, "parallel": "entropy_bound"}),
    "dual_4_once_at_0.7": Mode({**_ONCE, "block_length": 4, "threshold": 0.7}),
    "dual_8_once_int8": Mode(_ONCE, "int8", kv_cache="int8"),
}


def up_to_end(new: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """Return the new tokens up to and including the first end token."""
    return new[: next((place + 1 for place, token in enumerate(new.tolist()) if token in ends), len(new))]


def complete_all(
    complete: Completer, prompts: Sequence[np.ndarray], ends: Sequence[int]
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Complete every prompt. Return new tokens up to the first end token, and passes and positions per token."""
    made = []
    for prompt in prompts:
        made.append(complete(prompt))
        this_host().mark()  # the benchmark is slow, but does not hang
    completions = [up_to_end(new, ends) for new, _, _ in made]
    tokens = sum(map(len, completions))
    cost = {
        "tokens": tokens,
        "forwards_per_token": sum(forwards for _, forwards, _ in made) / tokens,
        "positions_per_token": sum(positions for _, _, positions in made) / tokens,
    }
    return completions, cost
