"""Shared fixtures: the golden checkpoint's folder and tensors, and a small checkpoint in both formats."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoints.golden_folder import GOLDEN
from tests.checkpoints.small import MICRO, to_canonical, write_source


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


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a few thousand bfloat16 parameters."""
    return write_source(tmp_path_factory.mktemp("micro"), MICRO)


@pytest.fixture(scope="module")
def canonical(micro: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a canonical checkpoint."""
    return to_canonical(micro, tmp_path_factory.mktemp("canonical") / "checkpoint")
