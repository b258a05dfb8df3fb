"""Comparison of decoding modes on the same tasks: paired differences, the Pareto front, and one mode per goal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Results = Mapping[str, Mapping[str, Any]]

# Two modes count as equally good if the 95 % interval of their paired difference lies above this.
EQUAL_ABOVE = -0.02
# Modes that a plot names
_NAMED = 6


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


def pareto_front(results: Results) -> list[str]:
    """Return the modes that no other mode beats in both computed positions per token and passed tasks, cheapest first.

    Of modes that are equal in both, the first one is returned.
    """
    order = sorted(results, key=lambda name: (results[name]["positions_per_token"], -results[name]["passed"]))
    front: list[str] = []
    for name in order:
        if not front or results[name]["passed"] > results[front[-1]]["passed"]:
            front.append(name)
    return front


def recommended(results: Results) -> dict[str, str]:
    """Return one mode per goal: ``exact``; ``fast at no measured loss``; and ``fastest``.

    Without measured loss are the modes that are equal to the exact one (:func:`paired_difference`); the one with the
    fewest computed positions is returned. The fastest is the one with the most tokens per second.
    """
    equal = {name: row for name, row in results.items() if row.get("to_exact", {}).get("equal")}
    found = {"exact": "exact"} if "exact" in results else {}
    if equal:
        found["fast at no measured loss"] = min(equal, key=lambda name: equal[name]["positions_per_token"])
    found["fastest"] = max(results, key=lambda name: results[name]["tokens_per_second"])
    return found


def half_the_positions(results: Results, published: str) -> dict[str, Any] | None:
    """Compare computed positions with those of the published setting, at equal quality.

    Args:
      results: figures by mode.
      published: the mode with the published setting.

    Returns:
      The ``mode`` with the fewest positions among those that are equal to the published setting or better, its
      positions as a ``share`` of the published ones (both None if there is no such mode), and whether the goal of one
      half is ``met``. None if the published setting or every other mode is missing.
    """
    if published not in results or len(results) == 1:
        return None
    equal = [name for name, row in results.items() if name != published and row.get("to_published", {}).get("equal")]
    if not equal:
        return {"mode": None, "published": published, "share": None, "met": False}
    best = min(equal, key=lambda name: results[name]["positions_per_token"])
    share = results[best]["positions_per_token"] / results[published]["positions_per_token"]
    return {"mode": best, "published": published, "share": round(share, 4), "met": share <= 0.5}


def modes_that_matter(results: Results, goals: Mapping[str, str], published: str) -> list[str]:
    """Return the six modes that a plot names; fewer if fewer ran.

    These are the recommended mode of each goal (exact decoding among them), the published setting, the mode of
    :func:`half_the_positions`, and of the other modes that no mode beats (:func:`pareto_front`) those that pass most
    tasks.

    Args:
      results: figures by mode.
      goals: the recommended mode of each goal.
      published: the mode with the published setting.
    """
    half = half_the_positions(results, published) or {"mode": None}
    best_first = sorted(pareto_front(results), key=lambda name: -results[name]["passed"])
    order = dict.fromkeys((*goals.values(), published, half["mode"], *best_first))
    return [name for name in order if name is not None and name in results][:_NAMED]
