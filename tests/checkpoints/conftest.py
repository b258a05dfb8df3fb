"""Shared fixtures: the golden checkpoint's folder and tensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoints.golden_folder import GOLDEN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the golden checkpoint."""
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, path)
    return path


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "model.safetensors")
