"""Flags with real numbers."""

from __future__ import annotations

import math

from absl import flags


def define_real(
    name: str, default: float | None, text: str, low: float, high: float | None = None, *, values: flags.FlagValues
) -> None:
    """Define a flag for a finite number from ``low`` to ``high``; absl's bounds alone let ``nan`` pass."""
    flags.DEFINE_float(name, default, text, low, high, flag_values=values)
    flags.register_validator(
        name,
        lambda value: value is None or math.isfinite(value),
        message=f"--{name}: expected a finite number",
        flag_values=values,
    )
