"""Golden cases: tokens and logits of each family's original code on small random weights (float32; float64 agrees).

A golden folder holds ``config.json``, ``model.safetensors``, ``cases.json`` and ``cases.npz``. Tests run the folders
beside this file, and those that the environment variable ``DIFFUMESH_GOLDEN`` names, separated by colons.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import DiffusionConfig, Engine, SamplingConfig
from runtime.execution import programs
from runtime.execution.programs import compiler_options
from sharding.mesh import MeshSpec
from tests.compilation import AS_RELEASED

FOLDER = Path(__file__).parent / "golden" / "dream_tiny"

Case = dict[str, Any]


def diffusion_config(case: Case) -> DiffusionConfig:
    """The request of one of Dream's cases, whose ``alg`` is the algorithm."""
    return DiffusionConfig(**{"algorithm" if key == "alg" else key: value for key, value in case.items()})


def sampling_config(case: Case) -> SamplingConfig:
    """The request of an autoregressive case; without stop tokens a row never ends.

    ``pad_token_id`` is what the original fills ended rows with, and no parameter of a request.
    """
    given = {key: value for key, value in case.items() if key != "pad_token_id"}
    return SamplingConfig(**given | {"stop_token_ids": given["stop_token_ids"] or ()})


def llada_config(case: Case) -> DiffusionConfig:
    """The request of one of LLaDA's cases, which calls the algorithm ``remasking``."""
    return DiffusionConfig(**{"algorithm" if key == "remasking" else key: value for key, value in case.items()})


# The request of a case, by the model_type of config.json.
CONFIGS: dict[str, Callable[[Case], DiffusionConfig | SamplingConfig]] = {
    "Dream": diffusion_config,
    "llada": llada_config,
    "qwen2": sampling_config,
    "qwen3": sampling_config,
}


@dataclass(frozen=True)
class Golden:
    """One golden folder."""

    folder: Path

    @functools.cached_property
    def cases(self) -> dict[str, Case]:
        """Parameters of every case by its name; ``cases.json`` is a list, or has one beside a text about it."""
        found = json.loads((self.folder / "cases.json").read_text())
        return {case["name"]: case for case in (found["cases"] if isinstance(found, dict) else found)}

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Every array of ``cases.npz``: ``<case>.input_ids``, ``<case>.sequences``, ``forward.logits``."""
        with np.load(self.folder / "cases.npz") as file:
            return dict(file)

    def inputs(self, name: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens and attention mask of a case, ``[B, S]``."""
        return self.arrays[f"{name}.input_ids"], self.arrays.get(f"{name}.attention_mask")

    def config(self, name: str) -> DiffusionConfig | SamplingConfig:
        """The request of a case.

        Raises:
          ValueError: no entry of ``CONFIGS`` says what the parameters of this family's cases mean.
        """
        family = json.loads((self.folder / "config.json").read_text()).get("model_type")
        if family not in CONFIGS:
            raise ValueError(
                f"{self.folder}: golden cases of model_type {family!r} are not known; "
                f"tests.golden_cases.CONFIGS knows {', '.join(CONFIGS)}"
            )
        return CONFIGS[family]({key: value for key, value in self.cases[name].items() if key != "name"})

    def sequences(self, name: str, width: int, pad_token_id: int) -> np.ndarray:
        """Expected tokens ``[B, width]`` of a case, with ``pad_token_id`` after the end of each row.

        The original's array ends where its longest row does, and its padding may be another token.
        """
        expected, case = self.arrays[f"{name}.sequences"], self.cases[name]
        stops = case.get("stop_token_ids")
        if not stops:
            return expected
        prompt = self.inputs(name)[0].shape[1]
        out = np.full((len(expected), width), pad_token_id, expected.dtype)
        for row, tokens in enumerate(expected):
            ends = np.flatnonzero(np.isin(tokens[prompt:], stops))
            end = prompt + ends[0] + 1 if ends.size else len(tokens)
            out[row, :end] = tokens[:end]
        return out


DREAM = Golden(FOLDER)


def golden_folders(environment: Mapping[str, str] = os.environ) -> list[Golden]:
    """The folders beside this file, and those that ``DIFFUMESH_GOLDEN`` names."""
    own = sorted(path.parent for path in FOLDER.parent.glob("*/cases.json"))
    named = [Path(path).absolute() for path in environment.get("DIFFUMESH_GOLDEN", "").split(":") if path]
    return [Golden(folder) for folder in [*own, *named]]


def engine(mesh: str = "data=1", folder: Path = FOLDER) -> Engine:
    """The engine of a golden folder in float32; all ways to write a mesh name one engine, with its programs."""
    return _engine(MeshSpec.parse(mesh), folder)


def engine_as_released(mesh: str = "data=1", folder: Path = FOLDER) -> Engine:
    """The same, whose programs are compiled as they are for users."""
    return _engine(MeshSpec.parse(mesh), folder, True)


@functools.cache
def _engine(spec: MeshSpec, folder: Path, as_released: bool = False) -> Engine:
    asked = []

    def options(platform: str) -> dict[str, Any]:
        asked.append(platform)
        return (compiler_options(platform) or {}) | (AS_RELEASED if as_released else {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "compiler_options", options)
        found = Engine.load(folder, spec, dtype="float32")
    assert asked, "an engine asks for its options when it is made"
    return found
