"""Shared by tests of drafts: prompts for the trained demo model, its engines, and marks of parametrized modes."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from checkpoints import DEMO
from runtime import Engine

PROMPTS = ["def add(first, second):\n", "def is_even(number):\n    return", "class"]
# The first tasks that the demo was not trained on.
_TASKS = (DEMO / "held_out_tasks.jsonl").read_text(encoding="utf-8").splitlines()[:20]
HELD_OUT: list[str] = [json.loads(line)["prompt"] for line in _TASKS]


@functools.cache
def trained(mesh: str) -> Engine:
    return Engine.load(DEMO, mesh=mesh)


def marked(names: Iterable[Any], quick: Sequence[Any]) -> list[Any]:
    """Parameters of a test, of which only those in ``quick`` are in the default run."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]
