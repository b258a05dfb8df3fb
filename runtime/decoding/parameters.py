"""What a generation is asked to do: every decoding parameter, declared once and checked before anything is compiled.

A new parameter is one more field here and its use in the decoding loop; see :mod:`runtime.decoding.schema`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from runtime.decoding.sampling import ALGORITHMS, CONFIDENCE_ALGORITHMS
from runtime.decoding.schema import (
    Boolean,
    Choice,
    Integer,
    Real,
    Requirement,
    Seeds,
    TokenIds,
    declared_parameters,
    exposed_parameters,
    parameter,
    same_as,
    validate,
)
from runtime.models.config import BIDIRECTIONAL_RULES, BLOCK_CAUSAL_RULES
from runtime.models.masks import MAX_BLOCK_LENGTH

MAX_STEPS = 1 << 16
MAX_NEW_TOKENS = 1 << 20
MIN_TEMPERATURE = 1e-4
MAX_TEMPERATURE = 1e4
MAX_SEED = (1 << 63) - 1
MAX_STOP_TOKENS = 64
CACHES = ("none", "prefix", "dual", "exact")
PARALLEL_RULES = tuple(dict.fromkeys((*BIDIRECTIONAL_RULES, *BLOCK_CAUSAL_RULES)))
DEFAULT_BLOCK_LENGTH = 32
CONFIDENCE_DTYPES = ("float32", "model")

# Less than the smallest temperature is 0 to logits in float32.
_TEMPERATURE = Real(0.0, MAX_TEMPERATURE, smallest=MIN_TEMPERATURE)
_TOKEN_IDS = TokenIds(MAX_STOP_TOKENS, 1 << 30)
_WITH_CACHE = Requirement("cache", ("dual", "prefix"))
_EXACT_CACHE = Requirement("cache", ("exact",))
_SCHEDULED = Requirement("parallel", ("none",))


@dataclass(frozen=True)
class _Steps(Requirement):
    """A rule that goes by the schedule: with block-causal attention sequential does, and threshold at the least."""

    def met(self, config: Any) -> bool:
        """Whether a configuration has such a rule."""
        return super().met(config) or (
            config.attention_block_length > 0 and config.parallel in ("threshold", "sequential")
        )


@dataclass(frozen=True)
class SamplingConfig:
    """Parameters of autoregressive decoding."""

    max_new_tokens: int = parameter(
        32,
        Integer(1, MAX_NEW_TOKENS),
        "Tokens to generate at most.",
        aliases=("max_tokens", "max_completion_tokens"),
        http="max_tokens",
    )
    temperature: float = parameter(
        0.0, _TEMPERATURE, "Temperature of sampling; 0 takes the most probable token.", in_checkpoint="temperature"
    )
    top_p: float | None = parameter(
        None,
        Real(0.0, 1.0),
        "Keep the most probable tokens up to and including the one that crosses this mass; 1 keeps all.",
        optional=True,
        in_checkpoint="top_p",
    )
    top_k: int | None = parameter(
        None,
        Integer(1, 1 << 30),
        "Keep this many most probable tokens, ties at the last included; 0 keeps all.",
        optional=True,
        in_checkpoint="top_k",
        zero_is_none=True,
    )
    seed: int | Sequence[int] = parameter(
        0,
        Seeds(Integer(0, MAX_SEED)),
        "One seed for the batch, or one per row.",
        flag_default="0",
        flag_help="Several are separated by commas.",
    )
    early_stop: bool | None = parameter(
        None,
        Boolean(),
        "End a row when an end token of the model and everything before it is there; off, a row fills all of its "
        "positions, and its text ends at the same place.",
        optional=True,
        mode=True,
        flag_default=True,
    )
    stop_token_ids: Sequence[int] = parameter(
        (),
        _TOKEN_IDS,
        "End a row when one of these and everything before it is there, whatever early_stop says.",
        exposed=False,
    )
    log_probabilities: bool = parameter(
        False,
        Boolean(),
        "Return the log-probability of every generated token.",
        aliases=("logprobs",),
        http=None,
        flag_default=False,
        flag_help="With --json.",
    )
    use_cache: bool = parameter(
        True,
        Boolean(),
        "Keep keys and values; without them every token costs a forward pass over everything before it.",
        compiled=True,
        exposed=False,
    )

    def __post_init__(self) -> None:
        validate(self)

    def replace(self, **changes: Any) -> SamplingConfig:
        """A copy with these fields changed, validated again."""
        return replace(self, **changes)

    def with_end_tokens(self, end_token_ids: Sequence[int], default: bool) -> SamplingConfig:
        """The configuration with ``early_stop`` decided; see :func:`decide_early_stop`."""
        return replace(self, **decide_early_stop(self, end_token_ids, default))


@dataclass(frozen=True)
class DiffusionConfig:
    """Parameters of masked-diffusion decoding, named and defaulted as in Dream's ``DreamGenerationConfig``."""

    max_new_tokens: int = parameter(
        256,
        Integer(0, MAX_NEW_TOKENS),
        "Tokens to add to each prompt; 0 only fills masks in the prompts.",
        aliases=("max_tokens", "max_completion_tokens"),
        http="max_tokens",
        in_checkpoint="max_new_tokens",
        flag_help="Default 64.",
    )
    steps: int = parameter(
        512,
        Integer(1, MAX_STEPS),
        "Denoise steps, shared among the blocks of the new tokens.",
        requires=(_Steps("parallel", ("none",), when_given=True),),
        in_checkpoint="steps",
        flag_help="Default: as many as new tokens.",
    )
    algorithm: str = parameter(
        "origin",
        Choice(ALGORITHMS),
        "How positions are chosen: at random (origin; LLaDA: random), or by the confidence that is named (LLaDA: "
        "low_confidence).",
        aliases=("alg",),
        in_checkpoint="alg",
        compiled=True,
        mode=True,
    )
    temperature: float = same_as(SamplingConfig, "temperature")
    top_p: float | None = same_as(SamplingConfig, "top_p")
    top_k: int | None = same_as(SamplingConfig, "top_k")
    alg_temp: float | None = parameter(
        None,
        _TEMPERATURE,
        "Temperature of sampling positions by confidence; 0 takes the most confident.",
        optional=True,
        idle=(0.0,),
        in_checkpoint="alg_temp",
        requires=(_SCHEDULED, Requirement("algorithm", CONFIDENCE_ALGORITHMS, when_given=True)),
    )
    eps: float = parameter(
        1e-3,
        Real(0.0, 1.0, exclusive=True),
        "Time at which the schedule ends.",
        in_checkpoint="eps",
        requires=(Requirement("parallel", ("none",), when_given=True),),
    )
    seed: int | Sequence[int] = same_as(SamplingConfig, "seed")
    confidence_dtype: str = parameter(
        "float32",
        Choice(CONFIDENCE_DTYPES),
        "Dtype in which logits are filtered and ranked: float32, or the model's as in the original, which makes many "
        "more ties.",
        compiled=True,
        mode=True,
        flag_default="float32",
    )
    suppress_mask: bool = parameter(
        False, Boolean(), "Never choose the mask token.", compiled=True, mode=True, flag_default=False
    )
    log_probabilities: bool = same_as(SamplingConfig, "log_probabilities")
    block_length: int | None = parameter(
        None,
        Integer(1, MAX_NEW_TOKENS),
        "Fill blocks of this many positions one after another, from the first mask on. Default: one block, and with a "
        f"cache blocks of {DEFAULT_BLOCK_LENGTH}. With block-causal attention its blocks, counted from position 0; "
        "default: the model's.",
        optional=True,
        compiled=_WITH_CACHE,
        mode=True,
    )
    sub_block_length: int | None = parameter(
        None,
        Integer(1, MAX_NEW_TOKENS),
        "Fill each block in parts of this many positions, one after another (block-causal models). Default: one part.",
        optional=True,
        compiled=_EXACT_CACHE,
        mode=True,
    )
    sub_block_cache: bool = parameter(
        False,
        Boolean(),
        "Run a sub-block alone once its first position is committed, which is faster and not exact.",
        compiled=_EXACT_CACHE,
        requires=(_EXACT_CACHE,),
        mode=True,
        flag_default=False,
    )
    attention_block_length: int = parameter(
        0,
        Integer(0, MAX_BLOCK_LENGTH),
        "Positions of a block of block-causal attention, 0 for other models; decided by block_length and the model.",
        compiled=True,
        exposed=False,
    )
    cache: str = parameter(
        "none",
        Choice(CACHES),
        "Reuse keys and values of everything outside the block (dual) or before it (prefix), which is faster and not "
        "exact; none computes everything in every step. Block-causal models: exact keeps those of finished blocks, "
        "and changes no token.",
        compiled=True,
        mode=True,
        flag_help="Autoregressive: none computes everything for every token.",
    )
    refresh_interval: int | None = parameter(
        None,
        Integer(1, MAX_NEW_TOKENS),
        "Forward passes from one refresh of the cache to the next at most; 1 is exact again. Default: a refresh only "
        "when a block is entered.",
        optional=True,
        requires=(_WITH_CACHE,),
        mode=True,
    )
    refresh_blocks: int = parameter(
        1,
        Integer(0, MAX_NEW_TOKENS),
        "Refresh the cache on entering every n-th block; 0 refreshes for the first alone. The first forward pass of a "
        "block entered without a refresh computes the block before it again.",
        compiled=Requirement("cache", ("dual",)),
        requires=(_WITH_CACHE,),
        mode=True,
    )
    parallel: str = parameter(
        "none",
        Choice(PARALLEL_RULES),
        "Tokens that a step commits: as many as the schedule says (none), all that are more certain than threshold, or "
        "the n most certain as factor says. A rule commits at least one: the first position when a block is entered, "
        "then the most certain. Certainty is the confidence of algorithm: the probability of the chosen token, for "
        "origin too, the margin, or the exponential of the negative entropy. Block-causal models: threshold commits as "
        "many as the schedule says at least; sequential as many, the first ones; entropy_sum the most certain ones "
        "whose entropies add up to less than entropy_limit.",
        compiled=True,
        mode=True,
    )
    threshold: float = parameter(
        0.9,
        Real(0.0, 1.0),
        "Certainty above which tokens are committed together.",
        requires=(Requirement("parallel", ("threshold",)),),
        mode=True,
    )
    factor: float = parameter(
        1.0,
        Real(0.0, 1e6),
        "The n most certain tokens are committed together while the n-th is at least 1 - factor / (n + 1).",
        requires=(Requirement("parallel", ("factor",)),),
        mode=True,
    )
    entropy_limit: float = parameter(
        0.35,
        Real(0.0, 1e6),
        "Sum of entropies, in nats, below which tokens are committed together.",
        requires=(Requirement("parallel", ("entropy_sum",)),),
        mode=True,
    )
    greedy: bool = parameter(
        False,
        Boolean(),
        "Choose the most probable token at every temperature, which then shapes the confidence alone.",
        compiled=True,
        mode=True,
        flag_default=False,
    )
    cfg_scale: float = parameter(
        0.0,
        Real(0.0, 100.0),
        "Classifier-free guidance: how far logits are moved away from those without the prompt, for a second forward "
        "pass in each step; 0 for none.",
        requires=(Requirement("cache", ("none",)),),
        mode=True,
    )
    early_stop: bool | None = same_as(SamplingConfig, "early_stop")
    stop_token_ids: Sequence[int] = same_as(SamplingConfig, "stop_token_ids")

    def __post_init__(self) -> None:
        validate(self)

    @property
    def in_blocks(self) -> bool:
        """Whether the request is for block decoding, else for the original algorithm."""
        return self.block_length is not None or self.cache != "none" or self.parallel != "none"

    @classmethod
    def published(cls, max_new_tokens: int = 256, temperature: float = 0.2, **overrides: Any) -> DiffusionConfig:
        """The settings behind DiffuCoder's published runs: entropy, top_p .95, top_k 50, as many steps as tokens.

        The temperature is that of the checkpoint's kind: 0.2 for base models, 0.3 for Instruct, 0.4 for cpGRPO.
        """
        settings: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "steps": max(max_new_tokens, 1),
            "algorithm": "entropy",
            "temperature": temperature,
            "top_p": 0.95,
            "top_k": 50,
            "alg_temp": 0.0,
        }
        return cls(**(settings | overrides))

    def replace(self, **changes: Any) -> DiffusionConfig:
        """A copy with these fields changed, validated again."""
        return replace(self, **changes)

    def with_end_tokens(self, end_token_ids: Sequence[int], default: bool) -> DiffusionConfig:
        """The configuration with ``early_stop`` decided; see :func:`decide_early_stop`."""
        return replace(self, **decide_early_stop(self, end_token_ids, default))


def decide_early_stop(
    config: DiffusionConfig | SamplingConfig, end_token_ids: Sequence[int], default: bool
) -> dict[str, Any]:
    """Decide whether rows end early: the fields ``early_stop`` and ``stop_token_ids`` of the configuration that is run.

    Args:
      config: as the caller gave it; a value of its ``early_stop`` counts, None leaves it to ``default``.
      end_token_ids: tokens that end a completion of the model; they join the stop tokens where rows end early.
      default: of the call: true where text is generated, false where the original algorithm is.
    """
    ends = default if config.early_stop is None else config.early_stop
    stops = [*config.stop_token_ids, *(end_token_ids if ends else ())]
    return {"early_stop": ends, "stop_token_ids": tuple(dict.fromkeys(stops))}


# What flags and requests can set, for any model and for an autoregressive one.
EXPOSED_PARAMETERS = exposed_parameters(DiffusionConfig, SamplingConfig)
AUTOREGRESSIVE_PARAMETERS = exposed_parameters(SamplingConfig)


def compiled_values(config: DiffusionConfig | SamplingConfig) -> dict[str, Any]:
    """Values of the parameters that are compiled in, by name: requests that share slots have these in common.

    Everything else is a run-time argument of each row.
    """
    found = {
        one.name: getattr(config, one.name)
        for one in declared_parameters(type(config))
        if (one.compiled.met(config) if isinstance(one.compiled, Requirement) else one.compiled)
    }
    if isinstance(config, DiffusionConfig) and config.cfg_scale > 0:
        found["cfg_scale"] = config.cfg_scale
    if found.get("attention_block_length") == 0:
        del found["attention_block_length"]
    if "block_length" in found:
        found["block_length"] = found["block_length"] or DEFAULT_BLOCK_LENGTH
    return found


def can_run(compiled: DiffusionConfig | SamplingConfig, asked: DiffusionConfig | SamplingConfig) -> bool:
    """Whether programs compiled for one configuration can run another."""
    theirs, wanted = compiled_values(compiled), compiled_values(asked)
    # Programs with a window for blocks entered without a refresh have the one for other blocks too.
    once, wanted_once = theirs.pop("refresh_blocks", 1) != 1, wanted.pop("refresh_blocks", 1) != 1
    # Guidance is compiled in, and a row without it keeps its logits.
    guided, wanted_guided = theirs.pop("cfg_scale", 0.0) > 0, wanted.pop("cfg_scale", 0.0) > 0
    same = type(compiled) is type(asked) and theirs == wanted
    return same and once >= wanted_once and guided >= wanted_guided
