"""The list of supported model families, and the interface that their weights share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax

from runtime.models.config import ConfigError, Family, ModelConfig
from runtime.models.declarations import ModelLayout
from runtime.models.dream import DREAM
from runtime.models.dreamon import DREAMON
from runtime.models.fast_dllm_v2 import FAST_DLLM_V2
from runtime.models.forward import Forward
from runtime.models.gpt2 import GPT2
from runtime.models.llada import LLADA
from runtime.models.qwen2 import QWEN2
from runtime.models.qwen3 import QWEN3
from runtime.models.sdar import SDAR
from sharding.mesh import MeshSpec

Array = jax.Array

# To add a family, write its module and add its record here.
FAMILIES: tuple[Family, ...] = (DREAM, DREAMON, LLADA, FAST_DLLM_V2, SDAR, QWEN2, QWEN3, GPT2)


class Weights(Protocol):
    """Interface of a model's weights: a pytree of arrays, with methods that run the model before and after its layers.

    Dimension letters: B batch, S sequence (positions that are computed), P positions that the head is run on at a time,
    D embed, V vocab.
    """

    layers: Any
    final_norm: Array

    def embed(self, forward: Forward, tokens: Array, positions: Array) -> Array:
        """Embed int32 tokens ``[B, S]`` at positions ``[S]`` or ``[B, S]`` -> ``[B, S, D]``."""

    def position_tables(self, forward: Forward, positions: Array, dtype: Any) -> Any:
        """Compute tables for all layers, such as rotary cosines and sines, from positions ``[S]`` or ``[B, S]``."""

    def normalize(self, forward: Forward, x: Array) -> Array:
        """Apply the norm before the head: ``[B, S, D]`` -> ``[B, S, D]``."""

    def head(self, forward: Forward, hidden: Array) -> Array:
        """Compute logits in the weights' dtype: ``[B, P, D]`` -> ``[B, P, V]``, where V includes padding."""


def find_family(raw: Mapping[str, Any]) -> Family:
    """Return the family of a parsed ``config.json``.

    Raises:
      ConfigError: the model type is not supported, or ``architectures`` does not name the family's class.
    """
    kind = raw.get("model_type")
    # A family with a key of its own comes before the others of its model type.
    for family in sorted(FAMILIES, key=lambda family: not family.config_key):
        if family.model_type == kind and (not family.config_key or raw.get(family.config_key) is not None):
            _check_architectures(family, raw.get("architectures"))
            return family
    names = ", ".join(sorted({family.model_type for family in FAMILIES}))
    raise ConfigError(
        f"config.json: model_type {kind!r:.200} (architectures {raw.get('architectures')!r:.200}) is not "
        f"supported; supported: {names}"
    )


def _check_architectures(family: Family, named: Any) -> None:
    """Refuse models of other classes, which compute or decode in another way. A config may name no class."""
    if not named:
        return
    if not isinstance(named, list):
        raise ConfigError(f"config.json: architectures is {named!r:.200}; expected a list of class names")
    if family.architecture not in named:
        other = next((other for other in FAMILIES if other.architecture in named), None)
        hint = "" if other is None else f"; {other.architecture!r} is of model_type {other.model_type!r}"
        raise ConfigError(
            f"config.json: model_type is {family.model_type!r}, but architectures is {named!r:.200}; expected "
            f"{family.architecture!r}{hint}"
        )


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Build the model configuration from a parsed ``config.json``.

    Raises:
      ConfigError: the model type is not supported, ``architectures`` names another class, a number is missing or out
        of range, or the configuration asks for a feature that the forward pass does not have (such as scaled
        RoPE, sliding windows, another activation).
    """
    return find_family(raw).parse(raw)


def weights_class(config: ModelConfig) -> type[Any]:
    """Return the dataclass that declares a model's weights."""
    found = config.family.tied_weights if config.tied_embeddings else config.family.weights
    assert found is not None, f"the parser of {config.family.name} accepted a head that the family does not have"
    return found


def model_layout(
    config: ModelConfig,
    spec: MeshSpec | None = None,
    devices: Any = None,
    quantization: str = "none",
    scan_layers: bool | None = None,
) -> ModelLayout:
    """Lay a model out on a mesh; see :meth:`runtime.models.declarations.ModelLayout.create`.

    Raises:
      MeshError: the model cannot be divided over the mesh.
    """
    return ModelLayout.create(config, weights_class(config), spec, devices, quantization, scan_layers)
