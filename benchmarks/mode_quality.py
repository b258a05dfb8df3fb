"""Quality of completions: which of the written functions pass their tests or parse, and how likely they are."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.demo_quality import parses, share
from checkpoints.demo.sandbox import run_tests
from launch.process.startup import this_host
from runtime import Engine

# Number of noised copies of each completion, for the bound of its likelihood
_COPIES = 8


def likelihood(
    engine: Engine, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], new_tokens: int
) -> float:
    """Return a Monte Carlo upper bound of the nats per token of completions under the model.

    Every call uses the same noise.

    Completions have at most ``new_tokens`` tokens.
    """
    generator = np.random.default_rng(0)
    mask = engine.config.mask_token_id
    nats = tokens = 0.0
    for first in range(0, len(prompts), 32):
        rows, weights = [], []
        for prompt, new in zip(prompts[first : first + 32], completions[first : first + 32], strict=True):
            for copy in range(_COPIES):
                ratio = (copy + 0.5) / _COPIES
                noised = generator.random(new_tokens)[: len(new)] < ratio
                rows.append((prompt, new, noised))
                weights.append(noised / ratio / _COPIES)
            tokens += len(new)
        width = max(len(prompt) + len(new) for prompt, new, _ in rows)
        ids, targets = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.int32)
        real = np.zeros_like(ids)
        for place, (prompt, new, noised) in enumerate(rows):
            own = len(prompt) + len(new)
            targets[place, width - own :] = np.concatenate([prompt, new])
            ids[place, width - own :] = np.concatenate([prompt, np.where(noised, mask, new)])
            real[place, width - own :] = 1
        scores = engine.score(ids, targets, real)
        for score, weight in zip(scores, weights, strict=True):
            nats -= float((score[width - len(weight) :] * weight).sum()) if len(weight) else 0.0
    return nats / max(tokens, 1)


def agreement(ones: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """Return the mean similarity of pairs of token sequences, from 0 to 1."""
    pairs = ((one.tolist(), two.tolist()) for one, two in zip(ones, others, strict=True))
    return float(np.mean([difflib.SequenceMatcher(None, one, two, autojunk=False).ratio() for one, two in pairs]))


@functools.cache
def passes(code: str, tests: tuple[str, ...]) -> bool:
    """Return whether a function passes its tests in a limited child process. Modes often write the same function."""
    this_host().mark()  # the benchmark is slow, but does not hang
    return run_tests(code, tests) == "passed"


def quality(
    scorer: Engine,
    tasks: Sequence[dict[str, Any]],
    prompts: Sequence[np.ndarray],
    made: Sequence[np.ndarray],
    new_tokens: int,
) -> dict[str, Any]:
    """Return the quality of completions: the shares that pass and parse, and the likelihood.

    Args:
      scorer: the engine that scores the completions.
      tasks: rows with a ``prompt`` and ``tests``.
      prompts: their prompts in tokens.
      made: the completions of one mode.
      new_tokens: largest number of tokens of a completion.

    Returns:
      Among others ``passes``: for each task, 1 if its completion passes all tests and 0 otherwise.
    """
    codes = [task["prompt"] + scorer.tokenizer.decode(new.tolist()) for task, new in zip(tasks, made, strict=True)]
    passed = [int(passes(code, tuple(task["tests"]))) for code, task in zip(codes, tasks, strict=True)]
    return {
        **share("passed", sum(passed), len(passed)),
        **share("parse", sum(map(parses, codes)), len(codes)),
        "nats_per_token": likelihood(scorer, prompts, made, new_tokens),
        "passes": passed,
    }
