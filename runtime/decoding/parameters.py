"""The decoding parameters, each declared once and checked before anything is compiled.

To add a parameter, add a field here and use it in the decoding loop; see :mod:`runtime.decoding.schema`. A field with
``in_loop`` reaches the loop without further code. The fields that autoregressive decoding has too are declared in
:mod:`runtime.decoding.autoregressive_parameters`, whose names other packages import from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from runtime.decoding.autoregressive_parameters import MAX_NEW_TOKENS as MAX_NEW_TOKENS
from runtime.decoding.autoregressive_parameters import MAX_SEED as MAX_SEED
from runtime.decoding.autoregressive_parameters import MAX_TEMPERATURE as MAX_TEMPERATURE
from runtime.decoding.autoregressive_parameters import MIN_TEMPERATURE as MIN_TEMPERATURE
from runtime.decoding.autoregressive_parameters import TEMPERATURE
from runtime.decoding.autoregressive_parameters import SamplingConfig as SamplingConfig
from runtime.decoding.draft_counts import AUTO_DRAFTS, DRAFT_AXES, MAX_DRAFT_STEPS
from runtime.decoding.early_stop import MAX_STOP_TOKENS as MAX_STOP_TOKENS
from runtime.decoding.early_stop import decide_early_stop
from runtime.decoding.kinds import Boolean, Choice, Integer, IntegerOrWord, Real, Requirement
from runtime.decoding.sampling import ALGORITHMS, CONFIDENCE_ALGORITHMS
from runtime.decoding.schema import change_settings, exposed_parameters, parameter, same_as, validate
from runtime.models.config import BIDIRECTIONAL_RULES, BLOCK_CAUSAL_RULES, BLOCK_RULES, Family
from runtime.models.dream import DREAM

MAX_STEPS = 1 << 16
# The refresh interval of rows that refresh only on entering a block. No row has as many steps.
NEVER = 1 << 30
CACHES = ("none", "prefix", "dual", "exact")
PARALLEL_RULES = tuple(dict.fromkeys((*BIDIRECTIONAL_RULES, *BLOCK_CAUSAL_RULES)))
DEFAULT_BLOCK_LENGTH = 32
CONFIDENCE_DTYPES = ("float32", "model")

_WITH_CACHE = Requirement("cache", ("dual", "prefix"))
_EXACT_CACHE = Requirement("cache", ("exact",))
_SCHEDULED = Requirement("parallel", ("none",))
_OWN_BLOCK_RULE = Requirement("block_rule", ("default",))
# Otherwise the next block would see positions that no pass has computed.
_REFRESH_PER_BLOCK = Requirement("refresh_blocks", (1,))


@dataclass(frozen=True)
class _OrBlockCausal(Requirement):
    """A requirement that ``more`` values meet with block-causal attention; all of them if it is None."""

    more: tuple[str, ...] | None = None

    def met(self, config: Any) -> bool:
        """Return whether a configuration meets the requirement."""
        meets = self.more is None or getattr(config, self.field) in self.more
        return super().met(config) or (config.attention_block_length > 0 and meets)


def one_step_per_token(new_tokens: int, block_length: int = 0) -> int:
    """Return ``steps`` such that each step commits one new token, within its bounds.

    With a block length, this is the number for whole blocks, which are decoded even if fewer tokens are asked for.
    """
    covered = math.ceil(new_tokens / block_length) * block_length if block_length else new_tokens
    return min(max(covered, 1), MAX_STEPS)


@dataclass(frozen=True)
class DiffusionConfig:
    """Parameters of masked-diffusion decoding. Defaults are those of ``DreamGenerationConfig`` if it has them."""

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
        requires=(_OrBlockCausal("parallel", ("none",), when_given=True, more=("threshold", "sequential")),),
        variable_length=False,
        in_checkpoint="steps",
        flag_help="Default: as many as new tokens, in whole blocks if attention is block-causal.",
    )
    algorithm: str = parameter(
        "origin",
        Choice(ALGORITHMS),
        "How each step picks the positions to fill: at random (origin, random), or those with the highest confidence "
        "by the named measure (the others). Each model family supports some of these.",
        aliases=("alg",),
        offered=lambda family: family.algorithms,
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
        TEMPERATURE,
        "Temperature for sampling the positions to fill by confidence; 0 takes the most confident ones.",
        optional=True,
        idle=(0.0,),
        in_loop=True,
        off=0.0,
        general=1.0,
        in_checkpoint="alg_temp",
        requires=(_SCHEDULED, _OWN_BLOCK_RULE, Requirement("algorithm", CONFIDENCE_ALGORITHMS, when_given=True)),
    )
    eps: float = parameter(
        1e-3,
        Real(0.0, 1.0, exclusive=True),
        "Time at which the linear noise schedule ends (it starts at 1).",
        in_checkpoint="eps",
        requires=(Requirement("parallel", ("none",), when_given=True),),
        variable_length=False,
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
        "blocks of the attention mask, counted from position 0, which are compiled in; the default is the model's.",
        optional=True,
        compiled=_OrBlockCausal("cache", ("dual", "prefix")),
        off=DEFAULT_BLOCK_LENGTH,
        variable_length=False,
        mode=True,
    )
    sub_block_length: int | None = parameter(
        None,
        Integer(1, MAX_NEW_TOKENS),
        "Positions per sub-block (block-causal models). The sub-blocks of a block are filled one after another. "
        "Default: the whole block.",
        optional=True,
        compiled=_EXACT_CACHE,
        offered=lambda family: family.block_causal,
        mode=True,
    )
    sub_block_cache: bool = parameter(
        False,
        Boolean(),
        "Compute only the current sub-block once its first position is committed. This is faster and approximate.",
        compiled=_EXACT_CACHE,
        requires=(_EXACT_CACHE, Requirement("sub_block_length", None)),
        mode=True,
        flag_default=False,
    )
    attention_block_length: int = parameter(
        0,
        Integer(0, MAX_NEW_TOKENS),
        "Block length of block-causal attention, set from block_length and the model; 0 for other models.",
        compiled=True,
        in_loop=True,
        from_model=True,
    )
    cache: str = parameter(
        "none",
        Choice(CACHES),
        "Reuse the keys and values of positions outside the current block (dual) or before it (prefix) between steps. "
        "This is faster and approximate. none recomputes every position in every step. exact reuses those of "
        "finished blocks (block-causal models only) and generates the same tokens as none.",
        compiled=True,
        offered=lambda family: family.caches,
        mode=True,
        flag_help="For autoregressive models, none recomputes the whole sequence for every token.",
    )
    refresh_interval: int | None = parameter(
        None,
        Integer(1, MAX_NEW_TOKENS),
        "Refresh the cache at least every n-th denoise step. With 1 and without suffix_window, the tokens equal "
        "decoding without a cache. Default: refresh only on entering a block.",
        optional=True,
        in_loop=True,
        off=NEVER,
        requires=(_WITH_CACHE, _OWN_BLOCK_RULE),
        mode=True,
    )
    refresh_blocks: int = parameter(
        1,
        Integer(0, MAX_NEW_TOKENS),
        "Refresh the cache on entering every n-th block; 0 refreshes only for the first block. If a block is entered "
        "without a refresh, its first forward pass also recomputes the previous block.",
        compiled=Requirement("cache", ("dual",)),
        variant=True,  # programs with the wide window, which includes the previous block, also have the narrow one
        requires=(_WITH_CACHE, _OWN_BLOCK_RULE),
        mode=True,
    )
    suffix_window: int | None = parameter(
        None,
        Integer(0, MAX_NEW_TOKENS),
        "A block sees everything before it, but only this many positions after it and the last position of the canvas, "
        "so a refresh computes only these. Position ids do not change. This is an approximation. Default: a block "
        "sees the whole canvas.",
        optional=True,
        variant=True,  # programs for parts of a canvas also have passes over the whole canvas
        in_loop=True,
        off=NEVER,
        requires=(_WITH_CACHE, _OWN_BLOCK_RULE, _REFRESH_PER_BLOCK),
        mode=True,
    )
    block_rule: str = parameter(
        "default",
        Choice(BLOCK_RULES),
        "How blocks are decoded with a cache: by this library's rule (default), or exactly as Fast-dLLM does for Dream "
        "(fast_dllm), except that the best other token replaces a predicted mask token. With fast_dllm, a refresh "
        "commits the first mask of its block alone, windows begin with the block, threshold also commits tokens whose "
        "probability equals it, and the schedule ranks positions by entropy for every algorithm.",
        compiled=True,
        in_loop=True,
        requires=(
            _WITH_CACHE,
            Requirement("parallel", ("none", "threshold")),
            Requirement("algorithm", CONFIDENCE_ALGORITHMS),
        ),
        offered=lambda family: family.block_rules,
        mode=True,
    )
    parallel: str = parameter(
        "none",
        Choice(PARALLEL_RULES),
        "How many tokens a step commits: the number that the schedule gives (none), every token whose certainty is "
        "above threshold (threshold), or the n most certain ones, with n determined by factor (factor, frechet) or by "
        "entropy_bound (entropy_bound). threshold, factor and frechet commit at least one token per step: the first "
        "position of a block in the block's first step, afterwards the most certain one. Certainty follows algorithm: "
        "the probability of the chosen token (also for origin), the margin between the two best tokens, or "
        "exp(-entropy). Block-causal models: threshold also commits at least as many tokens as the schedule gives; "
        "sequential commits that number of tokens from left to right; entropy_sum commits the most certain tokens "
        "while their entropies sum to less than entropy_limit.",
        compiled=True,
        in_loop=True,
        offered=lambda family: family.parallel_rules,
        mode=True,
    )
    threshold: float = parameter(
        0.9,
        Real(0.0, 1.0),
        "Commit every token whose certainty (see parallel) is above this value.",
        in_loop=True,
        requires=(Requirement("parallel", ("threshold",)),),
        mode=True,
    )
    threshold_decay: float = parameter(
        0.0,
        Real(0.0, 1.0),
        "How far the threshold falls while a block is filled: it is threshold * (1 - threshold_decay * (1 - share)), "
        "where share is the masked share of the block; 0 keeps it constant.",
        variant=True,  # a program with a decay leaves the threshold of a row with decay 0 unchanged
        in_loop=True,
        requires=(Requirement("parallel", ("threshold",)), _OWN_BLOCK_RULE),
        offered=lambda family: not family.block_causal and "threshold" in family.parallel_rules,
        mode=True,
    )
    factor: float = parameter(
        1.0,
        Real(0.0, 1e6),
        "Commit the n most certain tokens. With parallel=factor: for the largest n with c_n >= 1 - factor / (n + 1), "
        "where c_n is the n-th highest certainty. With parallel=frechet: for the largest n with L_n - (1 - c_n) > 1 - "
        "factor, where L_n = max(0, c_1 + ... + c_n - (n - 1)) is a lower bound of the probability that all n are "
        "right.",
        in_loop=True,
        requires=(Requirement("parallel", ("factor", "frechet")),),
        mode=True,
    )
    entropy_bound: float = parameter(
        0.1,
        Real(0.0, 1e6),
        "With parallel=entropy_bound, commit the n tokens of lowest entropy, for the largest n at which the entropies "
        "of the first n - 1 sum to at most this number of nats. Entropies are those of the distributions after "
        "temperature and filters.",
        in_loop=True,
        requires=(Requirement("parallel", ("entropy_bound",)),),
        mode=True,
    )
    entropy_limit: float = parameter(
        0.35,
        Real(0.0, 1e6),
        "With parallel=entropy_sum, the entropies of the tokens committed in one step sum to less than this many nats.",
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
        offered=lambda family: family.guidance,
        mode=True,
    )
    draft_steps: int | str = parameter(
        0,
        IntegerOrWord(Integer(0, MAX_DRAFT_STEPS), AUTO_DRAFTS),
        "Speculative decoding: draft the canvases after up to this many further steps, and verify them in the same "
        "forward pass, which makes one step and one more for each accepted draft. The tokens do not change. No effect "
        "with cache=exact or refresh_interval=1. auto: data axis / rows - 1 with draft_axis=data, if cache and "
        "parallel are none; otherwise 0. A server compiles a fixed number; in a request, this is an upper bound.",
        idle=(0, AUTO_DRAFTS),
        variable_length=False,
        speed_only=True,
    )
    draft_axis: str = parameter(
        "none",
        Choice(DRAFT_AXES),
        "Divide the drafts of a row over this axis of the mesh, so that a few rows use all of its devices: data, or "
        "none, which keeps a row's drafts on its own shard. The tokens do not change.",
        requires=(Requirement("cache", ("none",)),),
        variable_length=False,
        speed_only=True,
    )
    initial_masks: int = parameter(
        4,
        Integer(1, MAX_NEW_TOKENS),
        "Number of masks that a row starts with if its prompt has none; at most max_new_tokens. Only for models whose "
        "canvas changes its length.",
        variable_length=True,
        mode=True,
    )
    number_transfer_tokens: int = parameter(
        1,
        Integer(1, MAX_NEW_TOKENS),
        "Number of tokens that each step commits. Only for models whose canvas changes its length.",
        in_loop=True,
        variable_length=True,
        mode=True,
    )
    expand_budget: int | None = parameter(
        None,
        Integer(0, MAX_NEW_TOKENS),
        "How many times a mask may split in two. Only for models whose canvas changes its length. Default: twice the "
        "number of positions from the first mask to the end of the canvas at its maximum length.",
        optional=True,
        variable_length=True,
        mode=True,
    )
    pad_delete_to_right: bool = parameter(
        False,
        Boolean(),
        "Once the canvas has a delete token, delete all masks after it too. Only for models whose canvas changes its "
        "length.",
        in_loop=True,
        variable_length=True,
        mode=True,
        flag_default=False,
    )
    variable_length: bool = parameter(
        False,
        Boolean(),
        "Whether the model's canvases have a variable length, set from the model.",
        compiled=True,
        in_loop=True,
        from_model=True,
    )
    early_stop: bool | None = same_as(SamplingConfig, "early_stop")
    stop_token_ids: Sequence[int] = same_as(SamplingConfig, "stop_token_ids")

    def __post_init__(self) -> None:
        validate(self)

    @property
    def in_blocks(self) -> bool:
        """Whether this configuration asks for block decoding rather than the original algorithm."""
        return self.block_length is not None or self.cache != "none" or self.parallel != "none"

    @property
    def drafts(self) -> int:
        """Drafts per row: ``draft_steps``; 0 for ``auto`` before a run, and where a pass can make only one step."""
        none = self.cache == "exact" or self.variable_length or self.refresh_interval == 1
        return 0 if none or isinstance(self.draft_steps, str) else self.draft_steps

    @classmethod
    def published(
        cls, max_new_tokens: int = 256, temperature: float | None = None, **overrides: Any
    ) -> DiffusionConfig:
        """Return the settings that the authors of Dream and DiffuCoder publish, with one step per token.

        The default temperature is that of base models; Instruct and cpGRPO checkpoints have others. For a loaded model
        of any family, see :meth:`runtime.Engine.published`.
        """
        given: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
        return cls.published_for(DREAM, "", max_new_tokens=max_new_tokens, **given, **overrides)

    @classmethod
    def published_for(
        cls, family: Family, checkpoint_name: str, *, max_new_tokens: int = 256, **overrides: Any
    ) -> DiffusionConfig:
        """Return a family's published settings for a checkpoint of this name, changed by ``overrides``.

        All publish one step per token; for a loaded model, :meth:`runtime.Engine.published` counts the tokens of whole
        blocks where the family does so. What it does not set has its default. An empty name stands for base models.
        """
        new = Integer(0, MAX_NEW_TOKENS).read("max_new_tokens", max_new_tokens)
        lengths = {"max_new_tokens": new} | ({} if family.variable_length else {"steps": one_step_per_token(new)})
        return change_settings(cls(**(family.published_settings(checkpoint_name) | lengths)), overrides)

    @classmethod
    def fast_dllm(cls, max_new_tokens: int = 256, **overrides: Any) -> DiffusionConfig:
        """Return the preset of Fast-dLLM for Dream (Wu et al., 2025), changed by ``overrides``.

        The settings are a dual cache, blocks of 32 and a threshold of 0.9. With ``parallel="none"``, its schedule has
        one step per token.
        """
        own: dict[str, Any] = {"block_rule": "fast_dllm", "cache": "dual", "block_length": DEFAULT_BLOCK_LENGTH}
        own |= {"algorithm": "maskgit_plus", "parallel": "threshold", "threshold": 0.9}
        lengths = {"max_new_tokens": max_new_tokens, "steps": one_step_per_token(max_new_tokens)}
        return cls(**(own | lengths | overrides))

    def replace(self, **changes: Any) -> DiffusionConfig:
        """Return a copy with these fields changed, after validating it."""
        return replace(self, **changes)

    def with_end_tokens(self, end_token_ids: Sequence[int], default: bool) -> DiffusionConfig:
        """Return a copy with ``early_stop`` and stop tokens decided; see :func:`decide_early_stop`."""
        return replace(self, **decide_early_stop(self.early_stop, self.stop_token_ids, end_token_ids, default))


# The parameters that flags and requests can set: for models of any kind, and for autoregressive models.
EXPOSED_PARAMETERS = exposed_parameters(DiffusionConfig, SamplingConfig)
AUTOREGRESSIVE_PARAMETERS = exposed_parameters(SamplingConfig)
