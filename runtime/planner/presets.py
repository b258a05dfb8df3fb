"""Configurations of published models by name, so that planning needs no download."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.models.config import ModelConfig
from runtime.models.families import FAMILIES, parse_config
from sharding.errors import InputError

PRESETS: dict[str, Mapping[str, Any]] = {name: raw for family in FAMILIES for name, raw in family.presets.items()}


def preset(name: str) -> ModelConfig:
    """Return the configuration of a preset.

    Raises:
      InputError: there is no preset of this name.
    """
    if name not in PRESETS:
        raise InputError(f'unknown preset "{name}"; expected one of {", ".join(PRESETS)}')
    return parse_config(PRESETS[name])
