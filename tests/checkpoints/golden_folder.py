"""Copies of the golden checkpoint, damaged or in several files, and the errors of loading them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import CheckpointError
from runtime import Engine
from sharding.errors import InputError
from tests import golden_cases

GOLDEN = golden_cases.FOLDER
HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; the value ``...`` removes a key."""
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def split(folder: Path, tensors: dict[str, np.ndarray], files: int = 3) -> dict[str, str]:
    """Rewrite a folder as several files and an index; return the index's map."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    claims = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[number::files]}
        save_file(part, folder / file)
        claims |= dict.fromkeys(part, file)
    write_index(folder, claims)
    return claims


def write_index(folder: Path, claims: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": claims}))


def load(folder: Any, **options: Any) -> Engine:
    return Engine.load(folder, **({"mesh": "data=1"} | options))


def same_weights(one: Engine, other: Engine) -> None:
    leaves = zip(jax.tree.leaves(one.weights), jax.tree.leaves(other.weights), strict=True)
    for first, second in leaves:
        assert first.dtype == second.dtype
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


def fails(folder: Any, *parts: str, error: type[Exception] = CheckpointError, **options: Any) -> str:
    """Check that loading fails with an error whose message has all these parts; return the message."""
    with pytest.raises(error) as caught:
        load(folder, **options)
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    assert isinstance(caught.value, InputError)
    return message


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (self.marker,)
