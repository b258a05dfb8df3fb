"""Meshes that JAX cannot map onto a torus: which ones depends on its version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jax.experimental import mesh_utils


def refuse(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[[tuple[int, ...]], bool], error: Exception | None = None
) -> None:
    """Let JAX fail for meshes whose shape ``[data, sequence, kv, group]`` inside a slice is refused.

    By default it fails as on a torus with a side of 28.
    """
    raised = error or TypeError("int() argument must be a string, a bytes-like object or a real number, not 'NoneType'")

    def checked(real: Callable[..., Any]) -> Callable[..., Any]:
        def create(shape: tuple[int, ...], *rest: Any, **options: Any) -> Any:
            if refused(shape):
                raise raised
            return real(shape, *rest, **options)

        return create

    for name in ("create_device_mesh", "create_hybrid_device_mesh"):
        monkeypatch.setattr(mesh_utils, name, checked(getattr(mesh_utils, name)))
