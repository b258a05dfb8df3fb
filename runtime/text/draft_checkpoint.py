"""The checkpoint of a draft model: opened, and compared with the model whose tokens it guesses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints import CheckpointFolder, load_weights, open_folder
from checkpoints.loading import check_weights, kept_quantization
from runtime.execution.draft_models import DraftModel, check_draft_model, layout_beside
from runtime.execution.runner import Runner
from runtime.models.declarations import ModelLayout
from runtime.models.families import model_layout, parse_config
from runtime.text.tokenizer import TextTokenizer


def open_draft(
    model: CheckpointFolder,
    draft: str | Path | CheckpointFolder,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    verify: str = "full",
) -> CheckpointFolder:
    """Open the checkpoint of a draft model, and check that it fits the model. No weights are read, no device is used.

    Args:
      model: the model's checkpoint.
      draft: the draft model's folder, URL or Hub name, or its opened checkpoint.
      revision, token, offline: see :func:`checkpoints.open_folder`.
      verify: see :func:`checkpoints.loading.check_weights`.

    Raises:
      InputError: the folder has no autoregressive model with the model's vocabulary.
      CheckpointError: its files are incomplete.
    """
    folder = open_folder(draft, revision=revision, token=token, offline=offline)
    config = parse_config(folder.config)
    own, other = TextTokenizer.from_folder(model), TextTokenizer.from_folder(folder)
    vocabularies = (None if own is None else own.vocabulary, None if other is None else other.vocabulary)
    check_draft_model(parse_config(model.config), config, folder.name, vocabularies)
    check_weights(folder, model_layout(config), verify)
    return folder


def draft_model(folder: CheckpointFolder | None, quantize: str) -> DraftModel | None:
    """Return what the planner needs to know about a draft model; None without one.

    Args:
      folder: its checkpoint, from :func:`open_draft`.
      quantize: as in :meth:`runtime.engine.Engine.load`.
    """
    return None if folder is None else DraftModel(parse_config(folder.config), kept_quantization(folder, quantize))


def load_draft(
    folder: CheckpointFolder, model: ModelLayout, dtype: Any, quantize: str, verify: str, attention: str, kv_cache: str
) -> Runner:
    """Load a draft model onto the devices of a model.

    Args:
      folder: its checkpoint, from :func:`open_draft`.
      model: the model's layout, with a mesh.
      dtype: dtype of the weights of both models.
      quantize, verify, attention, kv_cache: as in :meth:`runtime.engine.Engine.load`.

    Raises:
      CheckpointError: a file is damaged.
      InputError: the attention implementation cannot run.
      MeshError: the draft model cannot be divided over the mesh, or the weights of both do not fit.
    """
    layout = layout_beside(model, dtype, parse_config(folder.config), kept_quantization(folder, quantize))
    weights, _ = load_weights(folder, layout, dtype, None, verify)
    return Runner(layout, weights, attention, None, kv_cache)
