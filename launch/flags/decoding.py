"""Decoding flags, derived from the parameter schema, and the decoding configuration made from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from absl import flags

from runtime import (
    AUTOREGRESSIVE_PARAMETERS,
    DEFAULT_DRAFT_TOKENS,
    EXPOSED_PARAMETERS,
    MAX_SAMPLES,
    Boolean,
    CheckpointFolder,
    Choice,
    DiffusionConfig,
    Family,
    InputError,
    Integer,
    IntegerOrWord,
    ModelConfig,
    Parameter,
    ParameterError,
    Real,
    SamplingConfig,
    check_given,
    declared_parameters,
    default_steps,
    own_names,
    uses_cache,
    with_model_blocks,
)

# Number of new tokens if neither a flag nor the checkpoint sets it.
_NEW_TOKENS = 64
# Keys of generation_config.json that change tokens and are not supported, with the values that turn them off.
_UNSUPPORTED: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "num_beams": 1,
    "suppress_tokens": None,
    "bad_words_ids": None,
}
# The value of --preset for which :meth:`DiffusionConfig.fast_dllm` gives the defaults.
FAST_DLLM = "fast-dllm"


def define_request_flags(values: flags.FlagValues) -> None:
    """Define what a command sets for each of its prompts, besides decoding parameters."""
    flags.DEFINE_bool(
        "chat", False, "Format each prompt as a user message with the checkpoint's chat template.", flag_values=values
    )
    flags.DEFINE_integer("num_return_sequences", 1, "Completions per prompt.", 1, MAX_SAMPLES, flag_values=values)
    flags.DEFINE_multi_string(
        "stop", [], "Stop string that ends a completion; also the text of a special token", flag_values=values
    )


def define_decoding_flags(values: flags.FlagValues) -> None:
    """Define ``--preset`` and a flag for every decoding parameter. None means the value of the checkpoint or preset."""
    flags.DEFINE_enum(
        "preset",
        "published",
        ("published", "class", FAST_DLLM),
        "Where the defaults of decoding parameters come from: published (the model authors' settings), class (the "
        "defaults of DiffusionConfig or SamplingConfig) or fast-dllm (Fast-dLLM's settings for Dream; if the model "
        "predicts the mask token, the best other token is taken).",
        flag_values=values,
    )
    for parameter in EXPOSED_PARAMETERS.values():
        define_flag(parameter, values)


def define_flag(parameter: Parameter, values: flags.FlagValues) -> None:
    """Define the flag of one parameter. The configuration checks its bounds; absl does not."""
    name, default, kind = parameter.name, parameter.flag_default, parameter.kind
    text = f"{parameter.help} {parameter.flag_help}".strip()
    if name not in AUTOREGRESSIVE_PARAMETERS:
        text = f"Diffusion: {text[0].lower()}{text[1:]}"
    elif not hasattr(DiffusionConfig, name):
        text = f"Autoregressive: {text[0].lower()}{text[1:]}"
    if isinstance(kind, Boolean):
        flags.DEFINE_bool(name, default, text, flag_values=values)
    elif isinstance(kind, Integer):
        flags.DEFINE_integer(name, default, text, flag_values=values)
    elif isinstance(kind, Real):
        flags.DEFINE_float(name, default, text, flag_values=values)
    elif isinstance(kind, Choice):
        flags.DEFINE_enum(name, default, kind.choices, text, flag_values=values)
    else:
        flags.DEFINE_string(name, default, text, flag_values=values)


def given_flags(values: flags.FlagValues) -> dict[str, Any]:
    """Return the decoding flags that do not have their default values, by parameter name. Bounds are not checked.

    Raises:
      InputError: a value cannot be parsed.
    """
    found = {}
    for name, parameter in EXPOSED_PARAMETERS.items():
        value = values[name].value
        if value is None or value == parameter.flag_default:
            continue
        if isinstance(value, str):
            value = parameter.kind.parse(text := value)
            if isinstance(value, str) and not _is_word(parameter, value):
                raise InputError(f"--{name}={text}: expected {parameter.kind.expected}", field=name)
        found[name] = parameter.from_request(value)
    return found


def _is_word(parameter: Parameter, value: str) -> bool:
    """Return whether a text can be the value of a parameter, as a name or as the word in place of a number."""
    kind = parameter.kind
    return isinstance(kind, Choice) or (isinstance(kind, IntegerOrWord) and value == kind.word)


def steps_follow_tokens(values: flags.FlagValues, folder: CheckpointFolder, family: Family) -> bool:
    """Whether the number of denoise steps equals the number of new tokens, because nothing sets it."""
    if values.preset == "class" or values["steps"].value is not None:
        return False
    return "steps" not in _diffusion_settings(values, folder, family)


def decoding_config(
    values: flags.FlagValues, folder: CheckpointFolder, model: ModelConfig
) -> DiffusionConfig | SamplingConfig:
    """Return the decoding configuration: flags override the checkpoint's generation config, which overrides the preset.

    ``early_stop`` comes from the flag. End tokens are added later by ``with_end_tokens``, because a request may set
    ``early_stop`` differently.

    Args:
      values: parsed flags, as :func:`define_decoding_flags` defines them.
      folder: the checkpoint.
      model: its architecture, which determines the class of the configuration.

    Raises:
      InputError: a parameter is out of its range or does not apply to this model.
    """
    given = given_flags(values)
    try:
        if model.objective == "autoregressive":
            return _sampling_config(values, folder, model, given).replace(early_stop=values.early_stop)
        return _diffusion_config(values, folder, model, given).replace(early_stop=values.early_stop)
    except ParameterError as error:
        # Values from the checkpoint's generation config are named without dashes.
        wrong = error.field
        text = error.spelled(lambda name: name if name == wrong and name not in given else f"--{name}")
        raw = _stored_settings(values, folder, model.family)
        stored = [one.name for one in declared_parameters(DiffusionConfig) if one.in_checkpoint in raw]
        where = f"{folder.place}/generation_config.json: " if wrong in stored and wrong not in given else ""
        raise InputError(f"{where}{text}", field=wrong) from error


def _diffusion_config(
    values: flags.FlagValues,
    folder: CheckpointFolder,
    model: ModelConfig,
    given: dict[str, Any],
) -> DiffusionConfig:
    if wrong := [name for name in given if not hasattr(DiffusionConfig, name)]:
        names = ", ".join(f"--{name}" for name in wrong)
        raise InputError(f"{folder.name} is a diffusion model; only autoregressive models have {names}", field=wrong[0])
    _check_preset(values, model.family)
    said: dict[str, Any] = {}
    defaults = DiffusionConfig()
    if values.preset == "published":
        said = _diffusion_settings(values, folder, model.family)
        asked = {"max_new_tokens": _NEW_TOKENS} | said | given
        defaults = DiffusionConfig.published_for(model.family, folder.model_names, **asked)
    elif values.preset == FAST_DLLM:
        defaults = DiffusionConfig.fast_dllm(_NEW_TOKENS)
    fields = said | given
    if steps_follow_tokens(values, folder, model.family) or (model.family.variable_length and "steps" not in fields):
        own = defaults.replace(**fields)
        fields["steps"] = default_steps(model, own.max_new_tokens, own.block_length)
    config = with_model_blocks(defaults.replace(**fields), model)
    check_given(config, given)
    return config


def _check_preset(values: flags.FlagValues, family: Family) -> None:
    """Check that a diffusion model has the block rule of ``--preset=fast-dllm``, if that is given.

    Raises:
      InputError: it does not. The error of the rule would name flags that nobody gave.
    """
    if values.preset != FAST_DLLM or "fast_dllm" in family.block_rules:
        return
    similar = "dual" in family.caches and "threshold" in family.parallel_rules
    advice = "use --cache=dual --parallel=threshold" if similar else "leave it out: the defaults are the authors'"
    raise InputError(
        f"--preset={FAST_DLLM} is for Dream and DiffuCoder; for {family.name} models {advice}", field="preset"
    )


def _sampling_config(
    values: flags.FlagValues,
    folder: CheckpointFolder,
    model: ModelConfig,
    given: dict[str, Any],
) -> SamplingConfig:
    if values.preset == FAST_DLLM:
        raise InputError(
            f"--preset={FAST_DLLM} is for diffusion models; {folder.name} is autoregressive", field="preset"
        )
    fields = own_names(SamplingConfig, given)
    wrong = [name for name in given if name in fields and name not in AUTOREGRESSIVE_PARAMETERS]
    if wrong:
        own = [f"--{name}" for name in AUTOREGRESSIVE_PARAMETERS]
        raise InputError(
            f"{folder.name} is autoregressive and does not support {', '.join(f'--{name}' for name in wrong)}; it "
            f"supports {', '.join(own)} and --cache=none",
            field=wrong[0],
        )
    said: dict[str, Any] = {"max_new_tokens": _NEW_TOKENS}
    # Only generating commands have the flag; documents and tests define decoding flags alone.
    if "draft_checkpoint" in values and values.draft_checkpoint is not None:
        said["draft_tokens"] = DEFAULT_DRAFT_TOKENS
    elif given.get("draft_tokens"):
        raise InputError("--draft_tokens requires --draft_checkpoint", field="draft_tokens")
    # The checkpoint's sampling parameters apply only if it sets do_sample.
    stored = _stored_settings(values, folder, model.family)
    if stored.get("do_sample") is True:
        said |= {"temperature": 1.0} | _parsed(stored, SamplingConfig)
    return SamplingConfig(**(said | fields))


def _stored_settings(values: flags.FlagValues, folder: CheckpointFolder, family: Family) -> dict[str, Any]:
    """Return the checkpoint's ``generation_config.json``; empty if the preset or the family does not use it."""
    return folder.generation_config if values.preset == "published" and family.reads_generation_config else {}


def _diffusion_settings(values: flags.FlagValues, folder: CheckpointFolder, family: Family) -> dict[str, Any]:
    """Return the decoding parameters of a diffusion model that its ``generation_config.json`` decides.

    A value that is the default of the original class decides nothing: transformers has written these defaults into the
    files of Dream and DiffuCoder (``alg=origin``, ``steps=512``), whose authors decode with other settings.
    """
    usual = DiffusionConfig()
    fixed = {one.name for one in declared_parameters(DiffusionConfig) if one.variable_length is False}
    return {
        name: value
        for name, value in _parsed(_stored_settings(values, folder, family), DiffusionConfig).items()
        if value != getattr(usual, name) and not (family.variable_length and name in fixed)
    }


def _parsed(raw: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return the decoding parameters that a parsed ``generation_config.json`` sets, keyed by our names."""
    stored = [one for one in declared_parameters(kind) if one.in_checkpoint and raw.get(one.in_checkpoint) is not None]
    return {one.name: one.from_request(raw[one.in_checkpoint]) for one in stored}


def notices(
    values: flags.FlagValues,
    folder: CheckpointFolder,
    family: Family,
    configs: Sequence[DiffusionConfig | SamplingConfig],
    *,
    draft: CheckpointFolder | None = None,
    requests: Iterable[DiffusionConfig | SamplingConfig] = (),
) -> list[str]:
    """Return sentences about settings that have no effect, of the checkpoint and of a run's configurations.

    Args:
      values: parsed flags.
      folder: the checkpoint.
      family: the model's family.
      configs: the configurations that flags make.
      draft: the draft model's checkpoint, if there is one.
      requests: those of requests that set parameters themselves.
    """
    found = ignored_notice(values, folder, family) + prompt_notice(folder) + quantize_notice(values, folder)
    found += [] if draft is None else quantize_notice(values, draft, "the draft model's weights")
    found += [sentence for config in configs for sentence in draft_notice(config)]
    found += cache_notice(values, chain(configs, requests))
    return list(dict.fromkeys(found))


def ignored_notice(values: flags.FlagValues, folder: CheckpointFolder, family: Family) -> list[str]:
    """Return a sentence that names what ``generation_config.json`` sets without effect; an empty list if nothing.

    That is what no decoder here does or, for a family whose original code does not read the file, every setting.
    """
    raw = folder.generation_config if values.preset == "published" else {}
    if family.reads_generation_config:
        wrong = {name for name, off in _UNSUPPORTED.items() if raw.get(name) not in (None, off, [])}
        why = "which is not supported"
    else:
        wrong = {one.in_checkpoint for one in declared_parameters(DiffusionConfig) if raw.get(one.in_checkpoint)}
        why = f"because {family.name}'s own code does not read that file"
    named = [f"{name}={raw[name]}" for name in raw if name in wrong]
    return [f"ignored: {', '.join(named):.300} of generation_config.json, {why}"] if named else []


def prompt_notice(folder: CheckpointFolder) -> list[str]:
    """Return a sentence that says which token transformers would add to plain prompts; an empty list if none."""
    raw = folder.read_json("tokenizer_config.json") or {}
    token = raw.get("bos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if raw.get("add_bos_token") is not True or not isinstance(text, str):
        return []
    why = "add_bos_token of tokenizer_config.json is not supported"
    return [f"{why}: without --chat, begin prompts with {text!r:.100}"]


def quantize_notice(values: flags.FlagValues, folder: CheckpointFolder, weights: str = "the weights") -> list[str]:
    """Return a sentence that says how the weights are stored, if ``--quantize`` names another way; empty if not."""
    asked, stored = values.quantize if "quantize" in values else "none", folder.quantization
    if "none" in (asked, stored) or asked == stored:
        return []
    return [f"ignored: --quantize={asked}; {weights} are stored as {stored} and stay so"]


def cache_notice(values: flags.FlagValues, configs: Iterable[DiffusionConfig | SamplingConfig]) -> list[str]:
    """Return a sentence that says that ``--kv_cache`` has no effect, if none of the configurations has a cache."""
    dtype = values.kv_cache if "kv_cache" in values else "model"
    if dtype == "model" or any(map(uses_cache, configs)):
        return []
    return [f"--kv_cache={dtype} has no effect with --cache=none, which keeps no keys and values"]


def draft_notice(config: DiffusionConfig | SamplingConfig) -> list[str]:
    """Return a sentence that says why the drafts that a run asks for have no effect; an empty list if they have one."""
    name = "draft_steps"
    if isinstance(config, SamplingConfig):
        name = "draft_tokens" if config.draft_tokens else "prompt_lookup"
    asked = getattr(config, name)
    if config.drafts or not asked or isinstance(asked, str):
        return []
    if isinstance(config, SamplingConfig):
        setting, why = "cache=none", "every pass computes whole rows"
    elif config.refresh_interval == 1:
        setting, why = "refresh_interval=1", "every step is a refresh"
    else:
        setting, why = "cache=exact", "its passes have no drafts"
    return [f"--{name}={asked} has no effect with --{setting}: {why}"]


def describe(config: DiffusionConfig | SamplingConfig) -> str:
    """Return one line with the effective decoding parameters."""
    fields = dataclasses.asdict(config)
    return "decoding: " + ", ".join(f"{name}={value}" for name, value in fields.items())
