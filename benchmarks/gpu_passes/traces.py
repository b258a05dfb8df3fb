"""What a GPU did in a trace: its kernels, and the time in which none ran."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

# Lines of a GPU's plane that list what ran on a stream; the others group the same events.
_STREAM = "Stream"


@dataclass(frozen=True)
class Kernel:
    """One kernel or copy in a trace: its name, and its start and end in nanoseconds."""

    name: str
    start: float
    end: float


def read_trace(folder: Path) -> list[Kernel]:
    """Read the kernels of the first GPU from a folder that ``jax.profiler.trace`` has written; none without a GPU."""
    found = []
    for path in sorted(folder.rglob("*.xplane.pb")):
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        for plane in [one for one in planes if one.name.startswith("/device:")][:1]:
            for line in plane.lines:
                if line.name.startswith(_STREAM):
                    found += [Kernel(one.name, one.start_ns, one.start_ns + one.duration_ns) for one in line.events]
    return sorted(found, key=lambda one: one.start)


def busy_seconds(kernels: Iterable[Kernel]) -> float:
    """Return the time in which at least one of these kernels ran, which are sorted by start."""
    busy, until = 0.0, 0.0
    for one in kernels:
        busy += max(0.0, one.end - max(one.start, until))
        until = max(until, one.end)
    return busy / 1e9


def summarize(whole: Sequence[Kernel], others: Sequence[Kernel], passes: int, largest: int = 12) -> dict[str, Any]:
    """Return what a pass runs: the kernels of a generation, without those of its passes of other kinds, per pass.

    Args:
      whole: the kernels of the whole generation, sorted by start.
      others: the kernels of a generation that consists of the other passes.
      passes: number of passes that ``whole`` has and ``others`` has not.
      largest: number of groups of kernels to list. Kernels whose names differ in their number alone are a group.
    """
    groups: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for sign, kernels in ((1, whole), (-1, others)):
        for one in kernels:
            group = groups[re.sub(r"[._]\d+", "", one.name)]
            group[0] += sign * (one.end - one.start) / 1e6 / passes
            group[1] += sign / passes
    return {
        "busy_ms": round(1e3 * (busy_seconds(whole) - busy_seconds(others)) / passes, 3),
        "kernels": round((len(whole) - len(others)) / passes, 1),
        "largest": [
            {"name": name, "ms": round(ms, 3), "kernels": round(number, 1)}
            for name, (ms, number) in sorted(groups.items(), key=lambda item: -item[1][0])[:largest]
        ],
    }
