"""Conversion of a request's decoding parameters to the settings that are compiled into a program."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from runtime.decoding.block_schedule import block_schedule, window_widths
from runtime.decoding.decode_state import DecodeProgram
from runtime.decoding.draft_counts import AUTO_DRAFTS, drafts_on_idle_devices
from runtime.decoding.loop_parameters import setting_values
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.decoding.sampling import CONFIDENCE_ALGORITHMS, SamplingRule
from runtime.decoding.schema import declared_parameters
from runtime.decoding.state import DenoiseProgram
from runtime.execution.runner import Runner
from runtime.models.config import ModelConfig
from runtime.models.forward import Forward


def sampling_rule(config: DiffusionConfig, model: ModelConfig, model_dtype: str) -> SamplingRule:
    """Return how a diffusion request chooses tokens.

    Args:
      config: decoding parameters of the request.
      model: the model's configuration.
      model_dtype: dtype of the model's weights, for ``confidence_dtype="model"``.
    """
    # Parallel rules require a confidence, which the random algorithms do not define.
    confidence = config.algorithm
    if config.parallel != "none":
        confidence = "entropy" if config.parallel in ("entropy_sum", "entropy_bound") else confidence
        confidence = {"origin": "maskgit_plus", "random": "low_confidence"}.get(confidence, confidence)
    if config.block_rule == "fast_dllm":
        confidence = "maskgit_plus" if config.parallel == "threshold" else "entropy"
    filters = _filters(config, model.vocab_size)
    return SamplingRule(
        confidence=confidence,
        sampled=config.temperature > 0,
        filtered=any(filters) and (config.temperature > 0 or model.family.filters_when_greedy),
        top_k_first=all(filters) and model.family.top_k_first,
        suppress_mask=config.suppress_mask,
        confidence_dtype=model_dtype if config.confidence_dtype == "model" else "float32",
        greedy=config.greedy,
        replace_mask=config.block_rule == "fast_dllm",
    )


def divides_drafts(config: DiffusionConfig | SamplingConfig) -> bool:
    """Return whether the canvases of a pass are divided over the ``data`` axis; see ``Runner.over_data``."""
    return isinstance(config, DiffusionConfig) and config.drafts > 0 and config.draft_axis == "data"


def with_own_drafts(
    config: DiffusionConfig | SamplingConfig, data: int, rows: int, draft_model: bool = False
) -> DiffusionConfig | SamplingConfig:
    """Return the configuration with the number of drafts that rows have on this mesh.

    It replaces ``draft_steps="auto"``, with the axis of these drafts: there are some only with the schedule and without
    a cache, where a step computes whole canvases. ``draft_tokens`` is 0 without a draft model.

    Args:
      config: decoding parameters.
      data: size of the ``data`` axis.
      rows: rows that are generated at a time.
      draft_model: whether there is a draft model.
    """
    if isinstance(config, SamplingConfig):
        return config if draft_model or not config.draft_tokens else config.replace(draft_tokens=0)
    if config.draft_steps != AUTO_DRAFTS:
        return config
    exact = config.cache == "none" and config.parallel == "none" and not config.variable_length
    drafts = drafts_on_idle_devices(data, rows) if exact else 0
    return config.replace(draft_steps=drafts, draft_axis="data" if drafts else config.draft_axis)


def without_drafts(config: DiffusionConfig | SamplingConfig) -> DiffusionConfig | SamplingConfig:
    """Return the configuration without drafts, in which each pass makes one step. It generates the same tokens."""
    if isinstance(config, SamplingConfig):
        return config.replace(prompt_lookup=0, draft_tokens=0)
    return config.replace(draft_steps=0)


def denoise_program(
    config: DiffusionConfig,
    model: ModelConfig,
    model_dtype: str,
    *,
    chunk: int,
    width: int,
    span: int,
    parts: Sequence[int] = (),
) -> DenoiseProgram:
    """Return the compiled settings of a diffusion request.

    Args:
      config: decoding parameters of the request.
      model: the model's configuration.
      model_dtype: dtype of the model's weights.
      chunk: number of positions per row that the head runs on at a time.
      width: positions of the canvas.
      span: the largest distance in any row from its first mask to its end, in positions.
      parts: smaller widths that refreshes are compiled for if blocks see a part of the canvas only.
    """
    length, _ = block_schedule(config, width)
    offset, block = model.family.prediction_offset, config.attention_block_length
    assert model.family.block_causal == bool(block), "block-causal attention has blocks"
    assert model.family.schedule is not None, "a family that denoises has a schedule"
    sub_block = config.sub_block_length if config.sub_block_cache else None
    before = 0 if config.block_rule == "fast_dllm" else offset
    widths = window_widths(config.cache, length, span, config.refresh_blocks, offset=before, sub_block=sub_block)
    return DenoiseProgram(
        **setting_values(config),
        sampling=sampling_rule(config, model, model_dtype),
        sample_positions=bool(config.alg_temp) and config.algorithm in CONFIDENCE_ALGORITHMS,
        chunk=chunk,
        schedule=model.family.schedule,
        guided=config.cfg_scale > 0,
        log_probabilities=config.log_probabilities,
        decaying=config.threshold_decay > 0,
        windows=widths,
        refresh_widths=() if config.suffix_window is None else (width, *parts),
        within_block=config.cache in ("dual", "exact"),
        first_alone=bool(block and offset),
        sub_block_window=sub_block is not None,
        drafts=config.drafts,
        over_data=divides_drafts(config),
    )


def decode_program(
    config: SamplingConfig, vocab_size: int, samples: int = 1, draft: Forward | None = None
) -> DecodeProgram:
    """Return the compiled settings of an autoregressive request.

    Args:
      config: decoding parameters of the request.
      vocab_size: size of the model's vocabulary.
      samples: number of adjacent rows that share a prompt, which is prefilled once for all of them.
      draft: layout and attention of the draft model, if there is one; used only with ``draft_tokens``.
    """
    filters = _filters(config, vocab_size)
    return DecodeProgram(
        **setting_values(config),
        sampling=SamplingRule(
            confidence="maskgit_plus",
            sampled=config.temperature > 0,
            # At temperature 0 filters have no effect, because the most probable token passes all of them.
            filtered=any(filters) and config.temperature > 0,
            top_k_first=all(filters) and config.temperature > 0,  # as in transformers
            suppress_mask=False,
            confidence_dtype="float32",
        ),
        log_probabilities=config.log_probabilities,
        samples=samples,
        drafts=config.drafts,
        draft=draft if config.use_cache and config.draft_tokens else None,
    )


def _filters(config: DiffusionConfig | SamplingConfig, vocab_size: int) -> tuple[bool, bool]:
    """Return whether top-p and top-k remove any tokens."""
    return config.top_p is not None and config.top_p < 1.0, config.top_k is not None and config.top_k < vocab_size


def program_key(runner: Runner, config: DiffusionConfig | SamplingConfig, width: int) -> Hashable:
    """Return a key of the compiled settings of a request. Rows can share slots only if their keys are equal.

    All other parameters may differ between rows: seed, lengths, steps, temperature, filters, thresholds, stop tokens,
    and, without a cache, the block length.
    """
    model = runner.layout.config
    if isinstance(config, SamplingConfig):
        draft = None if runner.draft is None else runner.draft.forward(width)
        return decode_program(config, model.vocab_size, draft=draft), config.use_cache
    chunk = runner.chunk(runner.layout.spec.data, width)
    program = denoise_program(config, model, str(runner.dtype), chunk=chunk, width=width, span=width)
    # Windows are compiled for one block length, but follow from it only up to a factor of two.
    length = None if config.cache == "none" else block_schedule(config, width)[0]
    return program, config.cache, length


def generalized(config: DiffusionConfig | SamplingConfig) -> DiffusionConfig | SamplingConfig:
    """Return a configuration whose programs also serve requests that sample, filter or ask for log-probabilities."""
    declared = declared_parameters(type(config))
    return config.replace(
        **{one.name: one.general for one in declared if one.general is not None and one.applies(config)}
    )
