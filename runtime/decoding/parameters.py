"""The decoding parameters, each declared once and checked before anything is compiled.

To add a parameter, add a field here and use it in the decoding loop; see :mod:`runtime.decoding.schema`. A field with
``in_loop`` reaches the loop without further code.
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
    exposed_parameters,
    parameter,
    same_as,
    validate,
)
from runtime.models.config import BIDIRECTIONAL_RULES, BLOCK_CAUSAL_RULES, Family
from runtime.models.dream import DREAM
from runtime.models.masks import MAX_BLOCK_LENGTH

MAX_STEPS = 1 << 16
MAX_NEW_TOKENS = 1 << 20
# A pass over more canvases is slower than the steps it could save, on any device that the planner knows.
MAX_DRAFT_STEPS = 63
MIN_TEMPERATURE = 1e-4
MAX_TEMPERATURE = 1e4
MAX_SEED = (1 << 63) - 1
MAX_STOP_TOKENS = 64
# No vocabulary has as many tokens, so this value keeps all of them.
MAX_TOP_K = 1 << 30
# The refresh interval of rows that refresh only on entering a block. No row has as many steps.
NEVER = 1 << 30
CACHES = ("none", "prefix", "dual", "exact")
PARALLEL_RULES = tuple(dict.fromkeys((*BIDIRECTIONAL_RULES, *BLOCK_CAUSAL_RULES)))
DEFAULT_BLOCK_LENGTH = 32
CONFIDENCE_DTYPES = ("float32", "model")
DRAFT_AXES = ("none", "data")

# In float32, sampling at a temperature below the smallest allowed one is the same as temperature 0.
_TEMPERATURE = Real(0.0, MAX_TEMPERATURE, smallest=MIN_TEMPERATURE)
_TOKEN_IDS = TokenIds(MAX_STOP_TOKENS, 1 << 30)
_WITH_CACHE = Requirement("cache", ("dual", "prefix"))
_EXACT_CACHE = Requirement("cache", ("exact",))
_SCHEDULED = Requirement("parallel", ("none",))


@dataclass(frozen=True)
class _Steps(Requirement):
    """The requirement that the parallel rule uses the schedule: none, and with block-causal attention two others."""

    def met(self, config: Any) -> bool:
        """Return whether the configuration's rule uses the schedule."""
        return super().met(config) or (
            config.attention_block_length > 0 and config.parallel in ("threshold", "sequential")
        )


@dataclass(frozen=True)
class SamplingConfig:
    """Parameters of autoregressive decoding."""

    max_new_tokens: int = parameter(
        32,
        Integer(1, MAX_NEW_TOKENS),
        "Maximum number of new tokens.",
        aliases=("max_tokens", "max_completion_tokens"),
        http="max_tokens",
    )
    temperature: float = parameter(
        0.0,
        _TEMPERATURE,
        "Sampling temperature; 0 takes the most probable token.",
        in_checkpoint="temperature",
        in_loop=True,
        general=1.0,
    )
    top_p: float | None = parameter(
        None,
        Real(0.0, 1.0),
        "Nucleus sampling: keep the most probable tokens up to and including the one at which their total probability "
        "crosses this value; 1 keeps all.",
        optional=True,
        in_checkpoint="top_p",
        in_loop=True,
        off=1.0,
        general=0.5,  # programs that filter by top_p also filter by top_k
    )
    top_k: int | None = parameter(
        None,
        Integer(1, MAX_TOP_K),
        "Keep this many of the most probable tokens, and tokens tied with the last of them; 0 keeps all.",
        optional=True,
        in_checkpoint="top_k",
        zero_is_none=True,
        in_loop=True,
        off=MAX_TOP_K,
    )
    seed: int | Sequence[int] = parameter(
        0,
        Seeds(Integer(0, MAX_SEED)),
        "Random seed: one for the batch, or one per row.",
        flag_default="0",
        flag_help="Separate several seeds by commas.",
    )
    early_stop: bool | None = parameter(
        None,
        Boolean(),
        "Stop generating a row once an end token of the model and all tokens before it are final. If off, the row "
        "is generated to its full length; its text still ends at the end token.",
        optional=True,
        mode=True,
        flag_default=True,
    )
    stop_token_ids: Sequence[int] = parameter(
        (),
        _TOKEN_IDS,
        "Stop generating a row once one of these tokens and all tokens before it are final, regardless of early_stop.",
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
        general=True,
    )
    use_cache: bool = parameter(
        True,
        Boolean(),
        "Use a KV cache. Without one, every token costs a forward pass over the whole sequence before it.",
        compiled=True,
        exposed=False,
    )

    def __post_init__(self) -> None:
        validate(self)

    @classmethod
    def published_for(cls, family: Family, checkpoint_name: str, **overrides: Any) -> SamplingConfig:
        """Return the settings that a family's authors publish for a checkpoint of this name, with these changes."""
        return cls(**(family.published_settings(checkpoint_name) | overrides))

    def replace(self, **changes: Any) -> SamplingConfig:
        """Return a copy with these fields changed, after validating it."""
        return replace(self, **changes)

    def with_end_tokens(self, end_token_ids: Sequence[int], default: bool) -> SamplingConfig:
        """Return a copy with ``early_stop`` and stop tokens decided; see :func:`decide_early_stop`."""
        return replace(self, **decide_early_stop(self, end_token_ids, default))


@dataclass(frozen=True)
class DiffusionConfig:
    """Parameters of masked-diffusion decoding, named and defaulted as in Dream's ``DreamGenerationConfig``."""

    max_new_tokens: int = parameter(
        256,
        Integer(0, MAX_NEW_TOKENS),
        "Number of new tokens, which are masks appended to each prompt; 0 fills only the masks in the prompt itself.",
        aliases=("max_tokens", "max_completion_tokens"),
        http="max_tokens",
        in_checkpoint="max_new_tokens",
        flag_help="Default 64.",
    )
    steps: int = parameter(
        512,
        Integer(1, MAX_STEPS),
        "Number of denoise steps, divided evenly among the blocks of new tokens.",
        requires=(_Steps("parallel", ("none",), when_given=True),),
        in_checkpoint="steps",
        flag_help="Default: as many as new tokens.",
    )
    algorithm: str = parameter(
        "origin",
        Choice(ALGORITHMS),
        "How each step picks the positions to fill: at random (origin, random), or those with the highest confidence "
        "by the named measure (the others). Each model family has some of these algorithms.",
        aliases=("alg",),
        in_checkpoint="alg",
        compiled=True,
        in_loop=True,
        mode=True,
    )
    temperature: float = same_as(SamplingConfig, "temperature")
    top_p: float | None = same_as(SamplingConfig, "top_p")
    top_k: int | None = same_as(SamplingConfig, "top_k")
    alg_temp: float | None = parameter(
        None,
        _TEMPERATURE,
        "Temperature for sampling the positions to fill by confidence; 0 takes the most confident ones.",
        optional=True,
        idle=(0.0,),
        in_loop=True,
        off=0.0,
        general=1.0,
        in_checkpoint="alg_temp",
        requires=(_SCHEDULED, Requirement("algorithm", CONFIDENCE_ALGORITHMS, when_given=True)),
    )
    eps: float = parameter(
        1e-3,
        Real(0.0, 1.0, exclusive=True),
        "Time at which the linear noise schedule ends (it starts at 1).",
        in_checkpoint="eps",
        requires=(Requirement("parallel", ("none",), when_given=True),),
    )
    seed: int | Sequence[int] = same_as(SamplingConfig, "seed")
    confidence_dtype: str = parameter(
        "float32",
        Choice(CONFIDENCE_DTYPES),
        "Dtype in which logits are filtered and ranked: float32, or the model's own dtype as in the original code, "
        "which produces many more ties.",
        compiled=True,
        mode=True,
        flag_default="float32",
    )
    suppress_mask: bool = parameter(
        False, Boolean(), "Never predict the mask token.", compiled=True, mode=True, flag_default=False
    )
    log_probabilities: bool = same_as(SamplingConfig, "log_probabilities")
    block_length: int | None = parameter(
        None,
        Integer(1, MAX_NEW_TOKENS),
        "Positions per block. Blocks are filled one after another, starting at the first mask. Default: "
        f"{DEFAULT_BLOCK_LENGTH} with a cache; without one, a single block for all positions. Block-causal models: the "
        "blocks of the attention mask, counted from position 0; the default is the model's.",
        optional=True,
        compiled=_WITH_CACHE,
        off=DEFAULT_BLOCK_LENGTH,
        mode=True,
    )
    sub_block_length: int | None = parameter(
        None,
        Integer(1, MAX_NEW_TOKENS),
        "Positions per sub-block (block-causal models). The sub-blocks of a block are filled one after another. "
        "Default: the whole block.",
        optional=True,
        compiled=_EXACT_CACHE,
        mode=True,
    )
    sub_block_cache: bool = parameter(
        False,
        Boolean(),
        "Compute only the current sub-block once its first position is committed. This is faster and approximate.",
        compiled=_EXACT_CACHE,
        requires=(_EXACT_CACHE,),
        mode=True,
        flag_default=False,
    )
    attention_block_length: int = parameter(
        0,
        Integer(0, MAX_BLOCK_LENGTH),
        "Block length of block-causal attention, set from block_length and the model; 0 for other models.",
        compiled=True,
        in_loop=True,
        exposed=False,
    )
    cache: str = parameter(
        "none",
        Choice(CACHES),
        "Reuse the keys and values of positions outside the current block (dual) or before it (prefix) between steps. "
        "This is faster and approximate. none recomputes every position in every step, which is exact. exact reuses "
        "those of finished blocks (block-causal models only) and generates the same tokens as none.",
        compiled=True,
        mode=True,
        flag_help="For autoregressive models, none recomputes the whole sequence for every token.",
    )
    refresh_interval: int | None = parameter(
        None,
        Integer(1, MAX_NEW_TOKENS),
        "Refresh the cache at least every n-th forward pass; 1 refreshes in every step, which is exact. Default: "
        "refresh only on entering a block.",
        optional=True,
        in_loop=True,
        off=NEVER,
        requires=(_WITH_CACHE,),
        mode=True,
    )
    refresh_blocks: int = parameter(
        1,
        Integer(0, MAX_NEW_TOKENS),
        "Refresh the cache on entering every n-th block; 0 refreshes only for the first block. If a block is entered "
        "without a refresh, its first forward pass also recomputes the previous block.",
        compiled=Requirement("cache", ("dual",)),
        variant=True,  # programs with the wide window, which also recomputes the previous block, have both windows
        requires=(_WITH_CACHE,),
        mode=True,
    )
    parallel: str = parameter(
        "none",
        Choice(PARALLEL_RULES),
        "How many tokens a step commits: the number that the schedule gives (none), every token whose certainty is "
        "above threshold (threshold), or the n most certain ones, with n determined by factor (factor). threshold and "
        "factor commit at least one token per step: the first position of a block in the block's first step, "
        "afterwards the most certain one. Certainty follows algorithm: the probability of the chosen token (also for "
        "origin), the margin between the two best tokens, or exp(-entropy). Block-causal models: threshold also "
        "commits at least as many tokens as the schedule gives; sequential commits that number of tokens from left to "
        "right; entropy_sum commits the most certain tokens while their entropies sum to less than entropy_limit.",
        compiled=True,
        in_loop=True,
        mode=True,
    )
    threshold: float = parameter(
        0.9,
        Real(0.0, 1.0),
        "Commit every token whose certainty is above this value.",
        in_loop=True,
        requires=(Requirement("parallel", ("threshold",)),),
        mode=True,
    )
    factor: float = parameter(
        1.0,
        Real(0.0, 1e6),
        "Commit the n most certain tokens, for the largest n at which the n-th has a certainty of at least "
        "1 - factor / (n + 1).",
        in_loop=True,
        requires=(Requirement("parallel", ("factor",)),),
        mode=True,
    )
    entropy_limit: float = parameter(
        0.35,
        Real(0.0, 1e6),
        "With parallel=entropy_sum, the sum of entropies in nats that the tokens committed in a step stay below.",
        in_loop=True,
        requires=(Requirement("parallel", ("entropy_sum",)),),
        mode=True,
    )
    greedy: bool = parameter(
        False,
        Boolean(),
        "Take the most probable token at every temperature. The temperature then affects only the confidence.",
        compiled=True,
        mode=True,
        flag_default=False,
    )
    cfg_scale: float = parameter(
        0.0,
        Real(0.0, 100.0),
        "Scale of classifier-free guidance: how far logits are moved away from the logits without the prompt. Any "
        "value above 0 costs a second forward pass per step; 0 turns guidance off.",
        variant=True,  # a program with guidance leaves the logits of a row with scale 0 unchanged
        in_loop=True,
        requires=(Requirement("cache", ("none",)),),
        mode=True,
    )
    draft_steps: int = parameter(
        0,
        Integer(0, MAX_DRAFT_STEPS),
        "Guess the canvases after this many further steps, and compute them in the same forward pass. The pass then "
        "makes one step, and one more for each guess that was right. The tokens do not change. In requests of a "
        "server, which compiles its own number, this is an upper bound.",
        requires=(Requirement("cache", ("none",)),),
    )
    draft_axis: str = parameter(
        "none",
        Choice(DRAFT_AXES),
        "Divide the drafts of a row over this axis of the mesh, so that a few rows use all of its devices: data, or "
        "none, where each row's drafts are with the row. The tokens do not change.",
    )
    early_stop: bool | None = same_as(SamplingConfig, "early_stop")
    stop_token_ids: Sequence[int] = same_as(SamplingConfig, "stop_token_ids")

    def __post_init__(self) -> None:
        validate(self)

    @property
    def in_blocks(self) -> bool:
        """Whether this configuration asks for block decoding rather than the original algorithm."""
        return self.block_length is not None or self.cache != "none" or self.parallel != "none"

    @classmethod
    def published(
        cls, max_new_tokens: int = 256, temperature: float | None = None, **overrides: Any
    ) -> DiffusionConfig:
        """Return the settings that the authors of Dream and DiffuCoder publish, with one step per token.

        Without a temperature, it is the one of base models; Instruct and cpGRPO checkpoints have others. For a loaded
        model of any family, see :meth:`runtime.Engine.published`.
        """
        given: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
        return cls.published_for(DREAM, "", max_new_tokens=max_new_tokens, **given, **overrides)

    @classmethod
    def published_for(
        cls, family: Family, checkpoint_name: str, *, max_new_tokens: int = 256, **overrides: Any
    ) -> DiffusionConfig:
        """Return the settings that a family's authors publish for a checkpoint of this name, with these changes.

        All families publish one step per token. Parameters that the family's record does not set have the defaults of
        this class. An empty name stands for base models.
        """
        lengths = {"max_new_tokens": max_new_tokens, "steps": max(max_new_tokens, 1)}
        return cls(**(family.published_settings(checkpoint_name) | lengths | overrides))

    def replace(self, **changes: Any) -> DiffusionConfig:
        """Return a copy with these fields changed, after validating it."""
        return replace(self, **changes)

    def with_end_tokens(self, end_token_ids: Sequence[int], default: bool) -> DiffusionConfig:
        """Return a copy with ``early_stop`` and stop tokens decided; see :func:`decide_early_stop`."""
        return replace(self, **decide_early_stop(self, end_token_ids, default))


def decide_early_stop(
    config: DiffusionConfig | SamplingConfig, end_token_ids: Sequence[int], default: bool
) -> dict[str, Any]:
    """Decide whether rows stop early, and with which stop tokens.

    Args:
      config: the caller's configuration. Its ``early_stop`` decides, unless it is None.
      end_token_ids: tokens that end a completion of the model. They are added to the stop tokens if rows stop early.
      default: used if ``config.early_stop`` is None. Calls that generate text pass True; calls that reproduce the
        original algorithm pass False.

    Returns:
      The fields ``early_stop`` and ``stop_token_ids`` of the configuration to run.
    """
    ends = default if config.early_stop is None else config.early_stop
    stops = [*config.stop_token_ids, *(end_token_ids if ends else ())]
    return {"early_stop": ends, "stop_token_ids": tuple(dict.fromkeys(stops))}


# The parameters that flags and requests can set: of any model, and of an autoregressive model.
EXPOSED_PARAMETERS = exposed_parameters(DiffusionConfig, SamplingConfig)
AUTOREGRESSIVE_PARAMETERS = exposed_parameters(SamplingConfig)
