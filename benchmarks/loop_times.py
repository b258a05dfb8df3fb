"""Time of our block decoding beside the baseline's loop, which has the same rule (Fast-dLLM's)."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.decoding_modes import Mode, complete_all
from benchmarks.records import Timing, time_alternating
from runtime import DiffusionConfig, Engine


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a median from order statistics; of few values, their range."""
    ordered = sorted(values)
    lowest = max(0, math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2) - 1)
    return ordered[lowest], ordered[-1 - lowest]


def beside_baseline(
    engine: Engine, mode: Mode, base: DiffusionConfig, prompts: Sequence[np.ndarray], rounds: int
) -> dict[str, Any]:
    """Time a mode with Fast-dLLM's rule and the baseline's loop in turn, prompt by prompt.

    Args:
      engine: the model.
      mode: the mode.
      base: the exact configuration, with or without early stop.
      prompts: prompts ``[S]``. All are completed once before the timed rounds, with the same shapes.
      rounds: how often each prompt is timed.

    Returns:
      ``ours`` and ``baseline``: passes per token, tokens per second, and milliseconds per pass. ``tokens_equal``: the
      share of prompts with equal tokens. ``times_as_fast``: the median of the ratios of all pairs, with its 95 %
      interval, and the ratio of processor times, which other load disturbs less.
    """
    loops = {"ours": mode.completer(engine, base), "baseline": mode.baseline(engine, base)}
    made = {name: complete_all(loop, prompts, engine.end_token_ids) for name, loop in loops.items()}

    def in_turn(name: str) -> Callable[[], Any]:
        each = itertools.cycle(prompts)
        return lambda: loops[name](next(each))

    timings = time_alternating({name: in_turn(name) for name in loops}, rounds * len(prompts), warmup=len(prompts))
    same = [np.array_equal(*pair) for pair in zip(made["ours"][0], made["baseline"][0], strict=True)]
    return {
        **{name: _speed(timings[name], made[name][1], rounds) for name in loops},
        "tokens_equal": sum(same) / len(same),
        "times_as_fast": _ratio(timings["ours"], timings["baseline"]),
        "prompts": len(same),
        "pairs": len(timings["ours"].each),
    }


def _speed(timing: Timing, cost: dict[str, Any], rounds: int) -> dict[str, float]:
    seconds, tokens = sum(timing.each) / 1e3, rounds * cost["tokens"]
    passes = tokens * cost["forwards_per_token"]
    return {
        "forwards_per_token": cost["forwards_per_token"],
        "positions_per_token": cost["positions_per_token"],
        "tokens_per_second": tokens / seconds,
        "milliseconds_per_forward": 1e3 * seconds / passes,
    }


def _ratio(ours: Timing, baseline: Timing) -> dict[str, float]:
    ratios = [theirs / own for own, theirs in zip(ours.each, baseline.each, strict=True)]
    low, high = median_interval(ratios)
    figures = {"median": statistics.median(ratios), "low": low, "high": high, "cpu": baseline.cpu / ours.cpu}
    return {name: round(figure, 4) for name, figure in figures.items()}


def loop_lines(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return a Markdown table of the comparisons in a record."""
    lines = []
    for name, row in results.items():
        for stop, found in row.get("beside_baseline", {}).items():
            ratio, ours, baseline = found["times_as_fast"], found["ours"], found["baseline"]
            cells = [
                f"`{name}`, {stop}",
                f"{ratio['median']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})",
                f"{ratio['cpu']:.2f}x",
                *(
                    f"{ours[figure]:.{digits}f} / {baseline[figure]:.{digits}f}"
                    for figure, digits in (
                        ("tokens_per_second", 0),
                        ("milliseconds_per_forward", 2),
                        ("forwards_per_token", 2),
                    )
                ),
                f"{found['tokens_equal']:.0%} of {found['prompts']}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return []
    head = [
        "| our loop / the baseline's, same rule | as fast (95 % of the median) | by processor time | tokens/s "
        "| ms per pass | passes/token | prompts with equal tokens |",
        f"|---|{'---:|' * 6}",
    ]
    return [*head, *lines, ""]
