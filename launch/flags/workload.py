"""Flags that describe the workload of ``diffumesh plan``: the model, the batch and how it is decoded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from absl import flags

from launch.flags.decoding import define_flag
from runtime import (
    EXPOSED_PARAMETERS,
    QUANTIZATIONS,
    STORED_DTYPES,
    DraftModel,
    InputError,
    IntegerOrWord,
    ModelConfig,
    check_draft_objectives,
    default_steps,
    parse_config,
)
from runtime.planner import PRESETS, Workload, preset

_DRAFTS = EXPOSED_PARAMETERS["draft_steps"]
assert isinstance(_DRAFTS.kind, IntegerOrWord)
# Decoding parameters of the workload of a diffusion model. Autoregressive models are always planned with a cache.
_DECODING = {
    "steps": EXPOSED_PARAMETERS["steps"],
    "cache": replace(
        EXPOSED_PARAMETERS["cache"],
        flag_help=f"Default: that of the settings that the model's authors publish, otherwise {Workload.cache}.",
    ),
    "block_length": EXPOSED_PARAMETERS["block_length"],
    # A plan compares meshes, and "auto" depends on the mesh.
    "draft_steps": replace(
        _DRAFTS, kind=_DRAFTS.kind.integer, flag_help="A plan requires a number, and assumes that no draft is accepted."
    ),
    "draft_axis": EXPOSED_PARAMETERS["draft_axis"],
}


def define_workload_flags(values: flags.FlagValues) -> None:
    """Define the flags from which :func:`read_workload` makes a workload."""

    def integer(name: str, default: int, text: str) -> None:
        flags.DEFINE_integer(name, default, text, 1, flag_values=values)

    flags.DEFINE_enum("model", None, tuple(PRESETS), "Architecture by name; no download.", flag_values=values)
    flags.DEFINE_string(
        "checkpoint", None, "Model folder, URL or Hub name; only its config.json is read.", flag_values=values
    )
    flags.DEFINE_enum(
        "draft_model",
        None,
        tuple(PRESETS),
        "Draft model of an autoregressive model, by name. A plan counts its weights and cache but not its passes, as "
        "what drafts save depends on the text. Vocabularies are not compared.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "draft_checkpoint",
        None,
        "Draft model by folder, URL or Hub name, instead of --draft_model; only its config.json is read.",
        flag_values=values,
    )
    flags.DEFINE_enum("dtype", None, STORED_DTYPES, "Dtype of the weights. Default: as stored.", flag_values=values)
    integer("batch", 1, "Rows that are generated together.")
    integer("prompt", 256, "Length of each prompt, in tokens.")
    integer("new_tokens", 256, "Tokens to generate for each row.")
    for parameter in _DECODING.values():
        define_flag(parameter, values)
    flags.DEFINE_enum(
        "quantize",
        "none",
        QUANTIZATIONS,
        "Plan with int8 or int4 weights. A quantized checkpoint is always planned as stored.",
        flag_values=values,
    )


class _Model(NamedTuple):
    """A model that a flag names: its name, configuration, stored quantization and published settings."""

    name: str
    config: ModelConfig
    stored: str
    published: dict[str, Any]


def _read_model(values: flags.FlagValues, prefix: str = "") -> _Model:
    """Read the model that one of two flags names.

    Raises:
      InputError: the flag is empty, or there is no such checkpoint.
    """
    model, checkpoint = values[f"{prefix}model"].value, values[f"{prefix}checkpoint"].value
    if model is not None:
        config = preset(model)
        return _Model(model, config, "none", config.family.published_settings(model))
    from checkpoints import open_folder

    if not checkpoint:
        raise InputError(f"--{prefix}checkpoint is empty: name a folder, a URL or a Hub name")
    folder = open_folder(checkpoint, weights=False)
    config = parse_config(folder.config)
    published = config.family.published_settings(folder.model_names)
    if own := config.attention_block_length:
        # The block length of a run by default, which the name of a block-causal checkpoint may determine.
        config = replace(config, attention_block_length=published.get("block_length", own))
    return _Model(folder.name, config, folder.quantization, published)


def _read_draft(values: flags.FlagValues, config: ModelConfig) -> tuple[str, DraftModel] | None:
    """Return the draft model and its name; None if no flag names one.

    Raises:
      InputError: both flags are given, or a model is not autoregressive.
    """
    if values.draft_model is None and values.draft_checkpoint is None:
        return None
    if values.draft_model is not None and values.draft_checkpoint is not None:
        raise InputError("give either --draft_model or --draft_checkpoint, not both", field="draft_checkpoint")
    found = _read_model(values, "draft_")
    check_draft_objectives(config, found.config, found.name)
    return found.name, DraftModel(found.config, values.quantize if found.stored == "none" else found.stored)


def read_workload(values: flags.FlagValues) -> tuple[str, Workload]:
    """Return the names of the models and the workload that the flags describe.

    Raises:
      InputError: no model is given, or the values contradict each other.
    """
    if (values.model is None) == (values.checkpoint is None):
        raise InputError(f"give either --model={'|'.join(PRESETS)} or --checkpoint=DIR")
    name, config, stored, published = _read_model(values)
    draft = _read_draft(values, config)
    given = [f"--{flag}" for flag in _DECODING if values[flag].present]
    if config.objective == "autoregressive" and given:
        raise InputError(
            f"{', '.join(given)}: {name} is autoregressive, and planned with a KV cache and one pass per token; leave "
            "them out"
        )
    cache = values.cache or published.get("cache", Workload.cache)
    if values.block_length is not None and cache == "none":
        raise InputError(
            "--block_length needs --cache=prefix, dual or exact: a plan without a cache has the published blocks",
            field="block_length",
        )
    if values.draft_axis is not None and not values.draft_steps:
        raise InputError("--draft_axis needs --draft_steps", field="draft_axis")
    block_length = values.block_length
    if block_length is None:
        block_length = config.attention_block_length or Workload.block_length
    return name if draft is None else f"{name} with the draft model {draft[0]}", Workload(
        config,
        values.dtype or config.dtype,
        values.batch,
        values.prompt,
        values.new_tokens,
        default_steps(config, values.new_tokens, block_length) if values.steps is None else values.steps,
        cache,
        block_length,
        values.quantize if stored == "none" else stored,
        values.draft_steps or 0,
        values.draft_axis or Workload.draft_axis,
        None if draft is None else draft[1],
    )
