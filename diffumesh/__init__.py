"""The public API in one package: all public names of ``runtime``, ``runtime.planner`` and ``checkpoints``.

Names are imported on first use. ``diffumesh.Engine`` and ``runtime.Engine`` are the same class.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints import *  # noqa: F403
    from runtime import *  # noqa: F403
    from runtime.planner import *  # noqa: F403

_PACKAGES = ("runtime", "runtime.planner", "checkpoints")


def _check_folders() -> None:
    """Check that Python imports this library's packages, not other packages of the same names.

    Raises:
      ImportError: another package comes first on the path, such as a ``checkpoints`` folder with an ``__init__.py``
        next to the user's script. A folder without that file does not matter.
    """
    ours = Path(__file__).resolve().parents[1]
    for name in ("checkpoints", "launch", "runtime", "sharding"):
        spec = PathFinder.find_spec(name)
        place = Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None
        if place is None or not place.is_relative_to(ours / name):
            raise ImportError(
                f"diffumesh requires its own package {name} ({ours / name}), but Python finds {place or 'none'} first; "
                "rename that package, or remove its __init__.py"
            )


if sys.platform == "win32":
    raise ImportError("diffumesh runs on Linux and macOS; on Windows, use WSL")
_check_folders()

_HOMES = {name: package for package in _PACKAGES for name in importlib.import_module(package).__all__}

__all__ = sorted(_HOMES)

if not TYPE_CHECKING:  # so that a type checker knows every name, and no other

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return importlib.import_module("launch.process.startup").version()
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)
