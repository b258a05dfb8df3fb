"""Quality of decoding modes: functions that pass their tests, and how the modes compare on the same tasks."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.demo_quality import parses, share
from checkpoints.demo.sandbox import run_tests
from runtime import Engine

# Two modes count as equally good if the 95 % interval of their paired difference lies above this.
EQUAL_ABOVE = -0.02
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


def agreement(ones: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Return the mean similarity of pairs of token sequences, from 0 to 1."""
    pairs = zip(ones, others, strict=True)
    return float(np.mean([difflib.SequenceMatcher(None, one, two, autojunk=False).ratio() for one, two in pairs]))


def quality(
    scorer: Engine,
    tasks: Sequence[dict[str, Any]],
    prompts: Sequence[np.ndarray],
    made: Sequence[np.ndarray],
    exact: Sequence[np.ndarray] | None,
    new_tokens: int,
) -> dict[str, Any]:
    """Return the quality of completions: shares that pass and parse, agreement with exact decoding, and likelihood.

    Args:
      scorer: the engine that scores the completions.
      tasks: rows with a ``prompt`` and ``tests``.
      prompts: their prompts in tokens.
      made: the completions of one mode.
      exact: completions of the exact algorithm, if it ran.
      new_tokens: largest number of tokens of a completion.

    Returns:
      Among others ``passes``: for each task, 1 if its completion passes all tests and 0 otherwise.
    """
    codes = [task["prompt"] + scorer.tokenizer.decode(new.tolist()) for task, new in zip(tasks, made, strict=True)]
    passes = [int(run_tests(code, task["tests"]) == "passed") for code, task in zip(codes, tasks, strict=True)]
    return {
        **share("passed", sum(passes), len(passes)),
        **share("parsed", sum(map(parses, codes)), len(codes)),
        "exact_agreement": None
        if exact is None
        else agreement([one.tolist() for one in exact], [two.tolist() for two in made]),
        "nats_per_token": likelihood(scorer, prompts, made, new_tokens),
        "passes": passes,
    }


def paired_difference(ours: Sequence[int], theirs: Sequence[int]) -> dict[str, Any]:
    """Compare two modes on the same tasks.

    Args:
      ours: for each task, whether it was passed.
      theirs: the same of the other mode.

    Returns:
      ``difference``: our share of passed tasks minus theirs. ``interval``: its 95 % interval for matched pairs, with
      half a task added to each of the four outcomes (Agresti and Min, 2005). ``equal``: whether the interval lies
      above :data:`EQUAL_ABOVE`.
    """
    wins = sum(own > other for own, other in zip(ours, theirs, strict=True))
    losses = sum(own < other for own, other in zip(ours, theirs, strict=True))
    total = len(ours) + 2
    middle = (wins - losses) / total
    spread = 1.96 * math.sqrt(wins + losses + 1 - (wins - losses) ** 2 / total) / total
    return {
        "difference": round((wins - losses) / len(ours), 4),
        "interval": [round(middle - spread, 4), round(middle + spread, 4)],
        "equal": middle - spread > EQUAL_ABOVE,
    }


def pareto_front(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the modes that no other mode beats in both computed positions per token and passed tasks, cheapest first.

    Of modes that are equal in both, the first one is returned.
    """
    order = sorted(results, key=lambda name: (results[name]["positions_per_token"], -results[name]["passed"]))
    front: list[str] = []
    for name in order:
        if not front or results[name]["passed"] > results[front[-1]]["passed"]:
            front.append(name)
    return front


def recommended(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return one mode per goal: ``exact``; ``no measured loss`` compared with it, at the fewest positions; ``fastest``.

    The fastest is the one with the most tokens per second.
    """
    equal = {name: row for name, row in results.items() if row.get("to_exact", {}).get("equal")}
    found = {"exact": "exact"} if "exact" in results else {}
    if equal:
        found["no measured loss"] = min(equal, key=lambda name: equal[name]["positions_per_token"])
    found["fastest"] = max(results, key=lambda name: results[name]["tokens_per_second"])
    return found
