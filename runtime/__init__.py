"""What runs on the devices. The public names are handed on lazily: importing this package touches no device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
    from runtime.engine import Engine
    from runtime.execution.result import GenerationResult, GenerationStats
    from runtime.text.completions import Completion

__all__ = ["Completion", "DiffusionConfig", "Engine", "GenerationResult", "GenerationStats", "SamplingConfig"]

_HOMES = {
    "Completion": "runtime.text.completions",
    "DiffusionConfig": "runtime.decoding.parameters",
    "Engine": "runtime.engine",
    "GenerationResult": "runtime.execution.result",
    "GenerationStats": "runtime.execution.result",
    "SamplingConfig": "runtime.decoding.parameters",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
