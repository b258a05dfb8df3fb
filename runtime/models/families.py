"""Which weights an architecture has."""

from __future__ import annotations

from typing import Any

from runtime.models.config import ModelConfig
from runtime.models.declarations import ModelLayout
from runtime.models.gpt2 import GPT2Weights
from runtime.models.qwen2 import Qwen2Weights, TiedQwen2Weights
from sharding.mesh import MeshSpec

Weights = Qwen2Weights | TiedQwen2Weights | GPT2Weights


def weights_class(config: ModelConfig) -> type:
    """The dataclass that declares a model's weights."""
    if config.architecture == "gpt2":
        return GPT2Weights
    return TiedQwen2Weights if config.tied_embeddings else Qwen2Weights


def model_layout(
    config: ModelConfig, spec: MeshSpec | None = None, devices: Any = None, quantization: str = "none"
) -> ModelLayout:
    """A model on a mesh; see :meth:`runtime.models.declarations.ModelLayout.create`.

    Raises:
      MeshError: the model does not divide over the mesh.
    """
    return ModelLayout.create(config, weights_class(config), spec, devices, quantization)
