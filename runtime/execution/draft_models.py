"""A draft model beside a model: whether the two fit together, and the draft model's layout on the same devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from runtime.execution.runner import check_memory, weight_bytes
from runtime.models.config import ModelConfig
from runtime.models.declarations import ModelLayout
from runtime.models.families import model_layout
from sharding.errors import InputError
from sharding.mesh import mesh_beside

_FIELD = "draft_checkpoint"


@dataclass(frozen=True)
class DraftModel:
    """The draft model of an autoregressive model.

    Attributes:
      config: its configuration.
      quantization: quantization of its weights: ``none``, ``int8`` or ``int4``.
    """

    config: ModelConfig
    quantization: str = "none"


def check_draft_objectives(model: ModelConfig, draft: ModelConfig, name: str) -> None:
    """Check that both models are autoregressive, which is all that their configurations tell about a draft model.

    Raises:
      InputError: one of them is not.
    """
    if model.objective != "autoregressive":
        raise InputError(f"{name} cannot be a draft model: only autoregressive models have one", field=_FIELD)
    if draft.objective != "autoregressive":
        raise InputError(f"{name} cannot be a draft model: it is a diffusion model", field=_FIELD)


def check_draft_model(
    model: ModelConfig, draft: ModelConfig, name: str, vocabularies: tuple[dict[str, int] | None, dict[str, int] | None]
) -> None:
    """Check that a model can check the tokens of a draft model. No device is used.

    Args:
      model, draft: configurations of both models.
      name: name of the draft model, for messages.
      vocabularies: the ids of all tokens of the model's tokenizer and of the draft model's; None for no tokenizer.
        Without two tokenizers, the numbers of tokens have to be equal. With them, they may be padded differently.

    Raises:
      InputError: a model is not autoregressive, or the vocabularies differ.
    """
    check_draft_objectives(model, draft, name)
    own, other = vocabularies
    if own is None or other is None:
        if model.vocab_size != draft.vocab_size:
            raise InputError(
                f"{name} cannot be a draft model: it has {draft.vocab_size} tokens, and the model {model.vocab_size}; "
                "both need the same vocabulary",
                field=_FIELD,
            )
    elif own != other:
        token = min(token for token, _ in own.items() ^ other.items())
        raise InputError(
            f"{name} cannot be a draft model: it has another vocabulary; {token!r:.100} has the id {other.get(token)}, "
            f"and {own.get(token)} in the model's",
            field=_FIELD,
        )


def layout_beside(model: ModelLayout, dtype: Any, draft: ModelConfig, quantization: str = "none") -> ModelLayout:
    """Lay a draft model out on the devices of a model, and check that the weights of both fit.

    Args:
      model: the model's layout, with a mesh.
      dtype: dtype of the weights of both models.
      draft: the draft model's configuration.
      quantization: one of :data:`runtime.models.quantization.QUANTIZATIONS`.

    Raises:
      MeshError: the draft model cannot be divided over the mesh, or the weights do not fit.
    """
    assert model.mesh is not None, "a model that runs has a mesh"
    made = model_layout(draft, model.spec, quantization=quantization)
    layout = replace(made, mesh=mesh_beside(model.mesh, made.heads), scan_layers=model.scan_layers)
    check_memory(layout, dtype, model.mesh.devices.flat[0], weight_bytes(model, dtype))
    return layout
