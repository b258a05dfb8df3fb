"""Flags of decoding, and what they come to for a checkpoint: shared by every launcher that generates."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from absl import flags

from checkpoints import CheckpointFolder
from runtime.decoding.parameters import (
    CACHES,
    CONFIDENCE_DTYPES,
    MAX_STEPS,
    PARALLEL_RULES,
    DiffusionConfig,
    SamplingConfig,
)
from runtime.decoding.sampling import ALGORITHMS
from runtime.models.config import ModelConfig
from sharding.errors import InputError

# Flags that set the field of the same name, of both kinds of configuration and of diffusion's alone.
_COMMON = ("max_new_tokens", "temperature", "top_p", "top_k")
_SCHEDULE = ("steps", "algorithm", "alg_temp", "eps")
_BLOCKS = ("block_length", "cache", "refresh_interval", "refresh_blocks", "parallel", "threshold", "factor")
_DIFFUSION_SWITCHES = ("suppress_mask", "early_stop")


def define_decoding_flags(values: flags.FlagValues) -> None:
    """Define them. None is a default: what it means depends on the checkpoint."""

    def integer(name: str, text: str) -> None:
        flags.DEFINE_integer(name, None, text, flag_values=values)

    def real(name: str, text: str) -> None:
        flags.DEFINE_float(name, None, text, flag_values=values)

    def choice(name: str, default: str | None, choices: tuple[str, ...], text: str) -> None:
        flags.DEFINE_enum(name, default, choices, text, flag_values=values)

    choice(
        "preset",
        "published",
        ("published", "class"),
        "Where decoding parameters start: as the model's authors run it, or the original class's defaults.",
    )
    integer("max_new_tokens", "Tokens to add; 0 only fills masks. Default 64.")
    real("temperature", "0 takes the most probable token.")
    real("top_p", "Keep the most probable tokens up to this mass; 1 for all.")
    integer("top_k", "Keep this many most probable tokens; 0 for all.")
    flags.DEFINE_string("seed", "0", "An integer, or one per prompt separated by commas.", flag_values=values)
    flags.DEFINE_bool(
        "log_probabilities", False, "With --json: the log-probability of every token.", flag_values=values
    )
    integer("steps", "Diffusion: denoise steps. Default: as many as new tokens.")
    choice("algorithm", None, ALGORITHMS, "Diffusion: how positions are chosen.")
    real("alg_temp", "Diffusion: temperature of choosing positions; 0 takes the most confident.")
    real("eps", "Diffusion: time at which the schedule ends.")
    choice(
        "confidence_dtype",
        "float32",
        CONFIDENCE_DTYPES,
        "Diffusion: rank in float32, or in the model's dtype as the original does.",
    )
    flags.DEFINE_bool(
        "suppress_mask", False, "Diffusion: never let the model choose the mask token.", flag_values=values
    )
    integer("block_length", "Diffusion: fill blocks of this many positions one after another. Default: one block.")
    choice(
        "cache",
        None,
        CACHES,
        "Diffusion: keep keys and values of everything outside the block (dual) or before it (prefix); faster, not "
        "exact. Autoregressive: none computes everything for every token.",
    )
    integer("refresh_interval", "Diffusion: forwards between two refreshes of the cache. Default: once a block.")
    integer("refresh_blocks", "Diffusion: refresh the cache on entering every n-th block; 0 for the first. Default 1.")
    choice(
        "parallel",
        None,
        PARALLEL_RULES,
        "Diffusion: commit every token that is certain enough, by --threshold or --factor, not one at a time.",
    )
    real("threshold", "Diffusion: certainty from which tokens are committed together. Default 0.9.")
    real("factor", "Diffusion: the n-th most certain needs at least 1 - factor / (n + 1). Default 1.")
    flags.DEFINE_bool(
        "early_stop", False, "Diffusion: a row is done when an end token and all before it stand.", flag_values=values
    )


def parse_seed(text: str) -> int | list[int]:
    """``"7"`` or ``"7,8,9"``.

    Raises:
      InputError: not integers.
    """
    if not re.fullmatch(r"\d{1,19}(,\d{1,19})*", text):
        raise InputError(
            f"--seed={text}: expected an integer, or one per prompt separated by commas, such as 7 or 7,8,9"
        )
    seeds = [int(part) for part in text.split(",")]
    return seeds[0] if len(seeds) == 1 else seeds


def published_temperature(folder: CheckpointFolder) -> float:
    """The published temperature of a checkpoint's kind, told by its name: cpGRPO .4, Instruct .3, base .2."""
    name = f"{folder.name} {folder.config.get('_name_or_path', '')}".lower()
    return 0.4 if "cpgrpo" in name else 0.3 if "instruct" in name else 0.2


def steps_follow_tokens(values: flags.FlagValues, folder: CheckpointFolder) -> bool:
    """Whether there are as many denoise steps as new tokens, because nobody says how many."""
    if values.preset != "published" or values["steps"].value is not None:
        return False
    return folder.generation_config.get("steps") is None


def decoding_config(
    values: flags.FlagValues, folder: CheckpointFolder, model: ModelConfig, end_token_ids: tuple[int, ...]
) -> DiffusionConfig | SamplingConfig:
    """What to do: flags over the checkpoint's generation config over the preset.

    Args:
      values: flags as :func:`define_decoding_flags` defines them.
      folder: the checkpoint.
      model: its architecture, which decides the decoder.
      end_token_ids: tokens that end a completion.

    Raises:
      InputError: a parameter out of its range, or one that this model's decoder does not have.
    """
    given = {name: values[name].value for name in (*_COMMON, *_SCHEDULE, *_BLOCKS) if values[name].value is not None}
    common = {"seed": parse_seed(values.seed), "log_probabilities": values.log_probabilities}
    if model.is_autoregressive:
        return _sampling_config(values, folder, given, common | {"stop_token_ids": end_token_ids})
    said: dict[str, Any] = {}
    if values.preset == "published":
        # Dream's name of the parameter is alg; null means that the checkpoint says nothing.
        names = {"algorithm": "alg"} | {name: name for name in (*_COMMON, *_SCHEDULE) if name != "algorithm"}
        raw = folder.generation_config
        said = {name: raw[key] for name, key in names.items() if raw.get(key) is not None}
        defaults = DiffusionConfig.published(64, published_temperature(folder))
    else:
        defaults = DiffusionConfig()
    merged = said | given
    if steps_follow_tokens(values, folder):
        merged["steps"] = min(MAX_STEPS, max(1, merged.get("max_new_tokens", defaults.max_new_tokens)))
    config = defaults.replace(
        **_without_zero_top_k(merged),
        **common,
        confidence_dtype=values.confidence_dtype,
        suppress_mask=values.suppress_mask,
        stop_token_ids=end_token_ids if values.early_stop else (),
    )
    if "steps" in given:
        config.check_schedule()
    return config


def _sampling_config(
    values: flags.FlagValues, folder: CheckpointFolder, given: dict[str, Any], common: dict[str, Any]
) -> SamplingConfig:
    cache = given.pop("cache", None)
    wrong = [name for name in given if name not in _COMMON]
    wrong += [name for name in _DIFFUSION_SWITCHES if values[name].value]
    wrong += ["cache"] if cache in ("prefix", "dual") else []
    if wrong:
        flag_names = ", ".join(f"--{name}" for name in wrong)
        raise InputError(
            f"{folder.name} is autoregressive: {flag_names} is for diffusion models; it has --max_new_tokens, "
            "--temperature, --top_p, --top_k and --cache=none"
        )
    said: dict[str, Any] = {"max_new_tokens": 64}
    raw = folder.generation_config
    # The authors' sampling parameters count where they sample at all.
    if values.preset == "published" and raw.get("do_sample") is True:
        said |= {"temperature": 1.0} | {name: raw[name] for name in _COMMON[1:] if raw.get(name) is not None}
    return SamplingConfig(**_without_zero_top_k(said | given), **common, use_cache=cache != "none")


def _without_zero_top_k(parameters: dict[str, Any]) -> dict[str, Any]:
    return parameters | {"top_k": None} if parameters.get("top_k") == 0 else parameters


def describe(config: DiffusionConfig | SamplingConfig) -> str:
    """The effective decoding parameters, in a line."""
    fields = dataclasses.asdict(config)
    return "decoding: " + ", ".join(f"{name}={value}" for name, value in fields.items())
