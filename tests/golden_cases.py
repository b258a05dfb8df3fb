"""Golden cases: tokens and logits of each family's original code on small random weights (float32; float64 agrees).

A golden folder holds ``config.json``, ``model.safetensors``, ``cases.json`` and ``cases.npz``. Tests run the folders
beside this file, and those that the environment variable ``DIFFUMESH_GOLDEN`` names, separated by colons.
"""

from __future__ import annotations

import filecmp
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
from runtime.execution import runner
from runtime.execution.programs import compiler_options
from runtime.models import declarations
from runtime.models.declarations import ModelLayout
from sharding.mesh import MeshSpec
from tests.compilation import AS_RELEASED

FOLDER = Path(__file__).parent / "golden" / "dream_tiny"
MESHES = [
    "data=1",
    "tensor=2",
    "tensor=4",
    "tensor=8",
    "tensor=16",
    "sequence=2",
    "sequence=4",
    "data=2",
    "data=2,tensor=2",
    "data=2,sequence=2",
    "sequence=2,tensor=4",
    "data=2,sequence=2,tensor=4",
]

Case = dict[str, Any]


def diffusion_config(case: Case) -> DiffusionConfig:
    """Return the configuration of one of Dream's cases, where ``alg`` is the algorithm."""
    if "dual_cache" in case:
        return fast_dllm_config(case)
    return DiffusionConfig(**{"algorithm" if key == "alg" else key: value for key, value in case.items()})


def fast_dllm_config(case: Case) -> DiffusionConfig:
    """Return the configuration of a case of Fast-dLLM's block decoder for Dream.

    Without a threshold, it commits by a schedule. The case also has the number of forward passes.
    """
    same = ("max_new_tokens", "steps", "temperature", "top_p", "top_k", "block_length")
    if case["alg"] == "confidence_threshold":
        rule = {"parallel": "threshold", "threshold": case["threshold"]}
    else:
        rule = {"parallel": "none", "algorithm": case["alg"]}
    cache = "dual" if case["dual_cache"] else "prefix"
    return DiffusionConfig.fast_dllm(**{name: case[name] for name in same}, cache=cache, **rule)


def sampling_config(case: Case) -> SamplingConfig:
    """Return the configuration of an autoregressive case. Without stop tokens, rows never end early.

    The original fills ended rows with ``pad_token_id``, which is not a parameter of a request.
    """
    given = {key: value for key, value in case.items() if key != "pad_token_id"}
    return SamplingConfig(**given | {"stop_token_ids": given["stop_token_ids"] or ()})


def llada_config(case: Case) -> DiffusionConfig:
    """Return the configuration of one of LLaDA's cases, which call the algorithm ``remasking``."""
    return DiffusionConfig(**{"algorithm" if key == "remasking" else key: value for key, value in case.items()})


def dreamon_config(case: Case) -> DiffusionConfig:
    """Return the configuration of one of DreamOn's cases, which also say what happened in them."""
    return diffusion_config(
        {key: value for key, value in case.items() if key not in ("expands", "deletes", "forwards")}
    )


def block_causal_config(case: Case, length: int, new: int, **own: Any) -> DiffusionConfig:
    """Return the configuration of a case with block-causal attention: ``steps`` per block of ``length`` positions."""
    steps = case["steps"] * -(-new // length)
    return DiffusionConfig(new, steps=steps, algorithm="maskgit_plus", cache="exact", block_length=length, **own)


def sdar_config(case: Case) -> DiffusionConfig:
    """Return the configuration of one of SDAR's cases, where tokens are the most probable ones at any temperature."""
    rules = {"low_confidence_static": "none", "low_confidence_dynamic": "threshold", "sequential": "sequential"}
    rule = rules[case["remasking_strategy"]]
    return block_causal_config(
        {"steps": case["denoising_steps"]},
        case["block_length"],
        case["new_tokens"],
        greedy=True,
        temperature=case["temperature"],
        top_p=case["top_p"],
        top_k=case["top_k"] or None,
        parallel=rule,
        stop_token_ids=case["stop_token_ids"] or (),
        **({"threshold": case["confidence_threshold"]} if rule == "threshold" else {}),
    )


def fast_dllm_v2_config(case: Case) -> DiffusionConfig:
    """Return the configuration of one of Fast-dLLM v2's cases. The original counts blocks, and ignores ``top_p``."""
    return block_causal_config(
        {"steps": case["block_size"]},
        case["block_size"],
        case["new_tokens"],
        parallel="threshold",
        threshold=case["threshold"],
        sub_block_length=case["small_block_size"],
        sub_block_cache=case["use_block_cache"],
        stop_token_ids=(case["stop_token_id"],),
    )


# Functions that make the configuration of a case, by the model_type of config.json, or "DreamOn"
CONFIGS: dict[str, Callable[[Case], DiffusionConfig | SamplingConfig]] = {
    "Dream": diffusion_config,
    "DreamOn": dreamon_config,
    "Fast_dLLM_Qwen": fast_dllm_v2_config,
    "llada": llada_config,
    "qwen2": sampling_config,
    "qwen3": sampling_config,
    "sdar": sdar_config,
}
# Families whose originals return whole blocks, whatever number of new tokens was requested
IN_BLOCKS = ("Fast_dLLM_Qwen", "sdar")


@dataclass(frozen=True)
class Golden:
    """One golden folder."""

    folder: Path

    @functools.cached_property
    def cases(self) -> dict[str, Case]:
        """Parameters of every case by name. ``cases.json`` is a list, or an object with the list and a text."""
        found = json.loads((self.folder / "cases.json").read_text())
        return {case["name"]: case for case in (found["cases"] if isinstance(found, dict) else found)}

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Every array of ``cases.npz``: ``<case>.input_ids``, ``<case>.sequences``, ``forward.logits``."""
        with np.load(self.folder / "cases.npz") as file:
            return dict(file)

    @functools.cached_property
    def family(self) -> str:
        """``model_type`` of the configuration; ``DreamOn`` for Dream with an expand token."""
        config = json.loads((self.folder / "config.json").read_text())
        return "DreamOn" if config.get("expand_token_id") is not None else str(config.get("model_type"))

    @functools.cached_property
    def forwards(self) -> list[str]:
        """Names of the forward passes whose logits are recorded."""
        return [name.removesuffix(".logits") for name in self.arrays if name.endswith(".logits")]

    def has_weights_of(self, other: Golden) -> bool:
        """Whether the weights are a copy of those of another folder."""
        return filecmp.cmp(self.folder / "model.safetensors", other.folder / "model.safetensors", shallow=False)

    def inputs(self, name: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Return tokens and attention mask of a case, ``[B, S]``. Right-padded rows become left-padded."""
        ids, lengths = self.arrays[f"{name}.input_ids"], self.arrays.get(f"{name}.lengths")
        if lengths is None:
            return ids, self.arrays.get(f"{name}.attention_mask")
        mask = (np.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]).astype(np.int32)
        return np.stack([np.roll(row, ids.shape[1] - length) for row, length in zip(ids, lengths, strict=True)]), mask

    def config(self, name: str) -> DiffusionConfig | SamplingConfig:
        """Return the configuration of a case.

        Raises:
          ValueError: ``CONFIGS`` has no entry for this family.
        """
        if self.family not in CONFIGS:
            raise ValueError(
                f"{self.folder}: golden cases of model_type {self.family!r} are not known; "
                f"tests.golden_cases.CONFIGS knows {', '.join(CONFIGS)}"
            )
        case = {key: value for key, value in self.cases[name].items() if key != "name"}
        return CONFIGS[self.family](case | ({"new_tokens": self.new_tokens(name)} if self.in_blocks else {}))

    @property
    def in_blocks(self) -> bool:
        """Whether the original decodes in blocks, and returns whole blocks."""
        return self.family in IN_BLOCKS

    def new_tokens(self, name: str) -> int:
        """Return the number of new tokens of the longest row of a case in blocks, without stop tokens."""
        case, prompts = self.cases[name], self.arrays[f"{name}.input_ids"].shape[1]
        if f"{name}.lengths" in self.arrays:
            return int((self.arrays[f"{name}.sequence_lengths"] - self.arrays[f"{name}.lengths"]).max())
        if "max_new_tokens" in case:
            # Decoded blocks, including the one in which the prompt ends, and the token after the last block.
            length = case["block_size"]
            return (prompts // length + case["max_new_tokens"] // length) * length + 1 - prompts
        return self.arrays[f"{name}.sequences"].shape[1] - prompts

    def passes(self, name: str) -> int | None:
        """Return the number of forward passes of a case in blocks, without the prompt's, from those of the original.

        SDAR stores a finished block in a pass of its own; here, the next block's first pass does. None where rows end
        earlier than in the original, at a stop token, and where the original's passes are not recorded.
        """
        recorded, prompt = self.arrays.get(f"{name}.forward_meta"), self.arrays[f"{name}.input_ids"].shape[1]
        if recorded is None or self.cases[name].get("stop_token_ids"):
            return None
        stores = recorded[:, 2] == 1
        if self.family == "sdar":
            return int((~stores).sum())
        # Here, if the prompt ends with a block, a pass of its own predicts the first token.
        return len(recorded) - int(stores[0] and prompt % self.cases[name]["block_size"] != 0)

    def rows(self, name: str) -> list[np.ndarray]:
        """Return the expected tokens of each row of a case in blocks, up to its first stop token."""
        case, found = self.cases[name], []
        stops = case["stop_token_ids"] or [] if "stop_token_ids" in case else [case["stop_token_id"]]
        lengths = self.arrays.get(f"{name}.lengths", [self.arrays[f"{name}.input_ids"].shape[1]] * 8)
        ends = self.arrays.get(f"{name}.sequence_lengths", [None] * 8)
        for tokens, prompt, end in zip(self.arrays[f"{name}.sequences"], lengths, ends, strict=False):
            met = np.flatnonzero(np.isin(tokens[prompt:end], stops))
            found.append(tokens[: prompt + met[0] + 1] if met.size else tokens[:end])
        return found

    def sequences(self, name: str, width: int, pad_token_id: int) -> np.ndarray:
        """Return the expected tokens ``[B, width]`` of a case, with ``pad_token_id`` after the end of each row.

        The original's array ends at the end of the longest row, and may have another padding token.
        """
        expected, case = self.arrays[f"{name}.sequences"], self.cases[name]
        if self.family == "DreamOn":
            return np.pad(expected, ((0, 0), (0, width - expected.shape[1])), constant_values=pad_token_id)
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
    """Return the folders beside this file, and those that ``DIFFUMESH_GOLDEN`` names."""
    own = sorted(path.parent for path in FOLDER.parent.glob("*/cases.json"))
    named = [Path(path).absolute() for path in environment.get("DIFFUMESH_GOLDEN", "").split(":") if path]
    return [Golden(folder) for folder in [*own, *named]]


def engine(mesh: str = "data=1", folder: Path = FOLDER, scan: bool | None = None) -> Engine:
    """Return the cached float32 engine of a golden folder on a mesh, however the mesh is written.

    It scans its layers on several devices, as on TPU, and not on one, as on CPU, if ``scan`` does not say otherwise. A
    scanned program is compiled in less time, because it has one layer.
    """
    spec = MeshSpec.parse(mesh)
    return _engine(spec, folder, spec.size > 1 if scan is None else scan)


def engine_as_released(mesh: str = "data=1", folder: Path = FOLDER) -> Engine:
    """Return the same engine, with layers and programs as for users of a CPU."""
    return _engine(MeshSpec.parse(mesh), folder, False, True)


@functools.cache
def _engine(spec: MeshSpec, folder: Path, scan: bool, as_released: bool = False) -> Engine:
    asked, quick = [], runner.compiler_options

    def options(layout: ModelLayout, dtype: Any) -> dict[str, Any]:
        asked.append(layout)
        return (compiler_options(layout, dtype) or {}) | AS_RELEASED if as_released else quick(layout, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "compiler_options", options)
        patch.setattr(declarations, "scans_layers", lambda platform: scan)
        found = Engine.load(folder, spec, dtype="float32")
    assert asked, "an engine reads the compiler options when it is created"
    assert found.layout.scan_layers == scan
    return found
