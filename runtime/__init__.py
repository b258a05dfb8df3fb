"""What runs on the devices. The public names are handed on lazily: importing this package touches no device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.completions import Completion
    from runtime.decoding.config import DiffusionConfig, SamplingConfig
    from runtime.engine import Engine
    from runtime.generation import GenerationResult, GenerationStats

__all__ = ["Completion", "DiffusionConfig", "Engine", "GenerationResult", "GenerationStats", "SamplingConfig"]

_HOMES = {
    "Completion": "runtime.completions",
    "DiffusionConfig": "runtime.decoding.config",
    "Engine": "runtime.engine",
    "GenerationResult": "runtime.generation",
    "GenerationStats": "runtime.generation",
    "SamplingConfig": "runtime.decoding.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
