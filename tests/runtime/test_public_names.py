"""The public names of ``runtime``."""

from __future__ import annotations

import subprocess
import sys

import pytest

import runtime


def test_every_public_name_is_there() -> None:
    for name in runtime.__all__:
        found = getattr(runtime, name)
        assert getattr(found, "__name__", name) == name


def test_no_other_name_is() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Motor'"):
        _ = runtime.Motor  # type: ignore[attr-defined]


def test_importing_the_package_imports_no_framework() -> None:
    code = "import sys, runtime; print('jax' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
