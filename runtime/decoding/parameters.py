"""What a generation is asked to do, validated before anything is compiled."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from runtime.decoding.sampling import ALGORITHMS
from sharding.errors import InputError

MAX_STEPS = 1 << 16
MAX_NEW_TOKENS = 1 << 20
MIN_TEMPERATURE = 1e-4
MAX_TEMPERATURE = 1e4
MAX_SEED = (1 << 63) - 1
MAX_STOP_TOKENS = 64
CACHES = ("none", "prefix", "dual")
PARALLEL_RULES = ("none", "threshold", "factor")
DEFAULT_BLOCK_LENGTH = 32
CONFIDENCE_DTYPES = ("float32", "model")


@dataclass(frozen=True)
class SamplingConfig:
    """Parameters of autoregressive decoding.

    Attributes:
      max_new_tokens: tokens generated at most.
      temperature: 0 takes the most probable token.
      top_p, top_k: as in :class:`DiffusionConfig`.
      seed: one seed for the batch (see :func:`runtime.execution.rows.row_seed`), or one per row.
      stop_token_ids: a row ends with the first of these.
      log_probabilities: hand back the log-probability of every token that is generated.
      use_cache: keep keys and values; without it every token costs a forward pass over everything before it.
    """

    max_new_tokens: int = 32
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | Sequence[int] = 0
    stop_token_ids: Sequence[int] = ()
    log_probabilities: bool = False
    use_cache: bool = True

    def __post_init__(self) -> None:
        _set(self, "max_new_tokens", _integer("max_new_tokens", self.max_new_tokens, 1, MAX_NEW_TOKENS))
        _check_sampling(self)
        _set(self, "stop_token_ids", _stop_tokens(self.stop_token_ids))

    def replace(self, **changes: Any) -> SamplingConfig:
        """A copy with these fields changed, validated again."""
        return replace(self, **changes)


@dataclass(frozen=True)
class DiffusionConfig:
    """Parameters of masked-diffusion decoding, named and defaulted as in Dream's ``DreamGenerationConfig``.

    Attributes:
      max_new_tokens: masks appended to every prompt; 0 only fills masks in the prompts.
      steps: denoise steps.
      algorithm: ``origin``, ``maskgit_plus``, ``topk_margin`` or ``entropy``.
      temperature: 0 takes the most probable token from the unscaled distribution.
      top_p: keep the most probable tokens up to and including the one that crosses this mass; None for all.
      top_k: keep this many most probable tokens, ties at the last included; None for all.
      alg_temp: temperature of sampling positions by confidence; None or 0 takes the most confident.
      eps: the time at which the schedule ends.
      seed: one seed for the batch (see :func:`runtime.execution.rows.row_seed`), or one per row.
      confidence_dtype: dtype in which logits are filtered and ranked: ``float32``, or ``model`` for the model's own
        as in the original, which makes many more ties.
      suppress_mask: never choose the mask token.
      log_probabilities: hand back the log-probability of every token when it was committed.
      block_length: fill blocks of this many positions one after another, from the first mask on; None for one block
        (32 with a cache). Steps are shared among the blocks of the new tokens.
      cache: ``none`` computes everything in every step, which is exact. ``dual`` keeps keys and values of everything
        outside the block, ``prefix`` of everything before it.
      refresh_interval: forwards from one refresh of the cache to the next at most; None refreshes only when a block is
        entered, 1 in every step, which is exact again.
      refresh_blocks: blocks from one that is entered with a refresh to the next; 0 refreshes for the first alone. The
        first forward of a block that is entered without one computes the block before it again as well.
      parallel: ``none`` commits as many tokens a step as the schedule says; ``threshold`` all that are more certain
        than ``threshold``; ``factor`` the n most certain as long as the n-th is at least 1 - factor / (n + 1). Both
        set one in any case, the first position when a block is entered and the most certain after that, and do
        without ``steps``. Certainty is the confidence of ``algorithm``: the chosen token's
        probability (for ``origin`` too), the margin, or for ``entropy`` the exponential of the negative entropy.
      threshold: from 0 to 1; of that rule.
      factor: 0 or more; of that rule.
      stop_token_ids: a row is done when one of these and everything before it is committed.
    """

    max_new_tokens: int = 256
    steps: int = 512
    algorithm: str = "origin"
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    alg_temp: float | None = None
    eps: float = 1e-3
    seed: int | Sequence[int] = 0
    confidence_dtype: str = "float32"
    suppress_mask: bool = False
    log_probabilities: bool = False
    block_length: int | None = None
    cache: str = "none"
    refresh_interval: int | None = None
    refresh_blocks: int = 1
    parallel: str = "none"
    threshold: float = 0.9
    factor: float = 1.0
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        _set(self, "max_new_tokens", _integer("max_new_tokens", self.max_new_tokens, 0, MAX_NEW_TOKENS))
        _set(self, "steps", _integer("steps", self.steps, 1, MAX_STEPS))
        if self.algorithm not in ALGORITHMS:
            raise InputError(f"algorithm {self.algorithm!r} is not one of {', '.join(ALGORITHMS)}")
        _check_sampling(self)
        if self.alg_temp is not None:
            _set(self, "alg_temp", _temperature("alg_temp", self.alg_temp))
        _set(self, "eps", _real("eps", self.eps, 0.0, 1.0))
        if not 0.0 < self.eps < 1.0:
            raise InputError(f"eps is {self.eps!r}; it must lie between 0 and 1, both excluded")
        if self.confidence_dtype not in CONFIDENCE_DTYPES:
            raise InputError(f"confidence_dtype {self.confidence_dtype!r} is not one of {', '.join(CONFIDENCE_DTYPES)}")
        self._check_blocks()

    def _check_blocks(self) -> None:
        for name, choices in (("cache", CACHES), ("parallel", PARALLEL_RULES)):
            if getattr(self, name) not in choices:
                raise InputError(f"{name} {getattr(self, name)!r} is not one of {', '.join(choices)}")
        for name in ("block_length", "refresh_interval"):
            if getattr(self, name) is not None:
                _set(self, name, _integer(name, getattr(self, name), 1, MAX_NEW_TOKENS))
        _set(self, "refresh_blocks", _integer("refresh_blocks", self.refresh_blocks, 0, MAX_NEW_TOKENS))
        _set(self, "threshold", _real("threshold", self.threshold, 0.0, 1.0))
        _set(self, "factor", _real("factor", self.factor, 0.0, 1e6))
        _set(self, "stop_token_ids", _stop_tokens(self.stop_token_ids))
        if self.cache == "none":
            for name, unset in (("refresh_interval", None), ("refresh_blocks", 1)):
                if getattr(self, name) != unset:
                    raise InputError(f"{name} is of a cache; give cache='dual' or 'prefix' too")
        for rule, default in (("threshold", 0.9), ("factor", 1.0)):
            if self.parallel != rule and getattr(self, rule) != default:
                raise InputError(f"{rule} is of a parallel rule; give parallel={rule!r} too")
        if self.parallel != "none" and self.alg_temp:
            raise InputError(f"alg_temp draws the positions of a schedule; parallel={self.parallel!r} has none")

    def check_schedule(self) -> None:
        """Check that there is a schedule, for a caller who says how many ``steps`` there are to be or its ``eps``.

        Raises:
          InputError: a parallel rule decides by certainty alone.
        """
        if self.parallel != "none":
            raise InputError(
                f"steps and eps are of a schedule; parallel={self.parallel!r} takes as many steps as it needs"
            )

    @property
    def in_blocks(self) -> bool:
        """Whether the request is for block decoding, else for the original algorithm."""
        return bool(
            self.block_length is not None or self.cache != "none" or self.parallel != "none" or self.stop_token_ids
        )

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


def _set(config: Any, name: str, value: Any) -> None:
    # Numbers of numpy become Python's, so that what follows can rely on them.
    object.__setattr__(config, name, value)


def _check_sampling(config: DiffusionConfig | SamplingConfig) -> None:
    _set(config, "temperature", _temperature("temperature", config.temperature))
    if config.top_p is not None:
        _set(config, "top_p", _real("top_p", config.top_p, 0.0, 1.0))
    if config.top_k is not None:
        _set(config, "top_k", _integer("top_k", config.top_k, 1, 1 << 30))
    seeds: Any = config.seed
    if isinstance(seeds, numbers.Number):
        _set(config, "seed", _integer("seed", seeds, 0, MAX_SEED))
        return
    try:
        if isinstance(seeds, (str, bytes)):
            raise TypeError
        _set(config, "seed", tuple(_integer("seed", seed, 0, MAX_SEED) for seed in seeds))
    except TypeError:
        raise InputError(f"seed is {seeds!r}; expected an integer, or one per row") from None


def _stop_tokens(tokens: Sequence[int]) -> tuple[int, ...]:
    try:
        found = tuple(_integer("stop_token_ids", token, 0, 1 << 30) for token in tokens)
    except TypeError:
        raise InputError(f"stop_token_ids is {tokens!r}; expected token ids") from None
    if len(found) > MAX_STOP_TOKENS:
        raise InputError(f"{len(found)} stop_token_ids; at most {MAX_STOP_TOKENS}")
    return found


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise InputError(f"{name} is {value!r}; expected an integer from {low} to {high}")
    return int(value)


def _temperature(name: str, value: Any) -> float:
    number = _real(name, value, 0.0, MAX_TEMPERATURE)
    if 0.0 < number < MIN_TEMPERATURE:
        raise InputError(
            f"{name} is {value!r}; 0, or a number from {MIN_TEMPERATURE:g} on: less is 0 to float32 logits"
        )
    return number


def _real(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise InputError(f"{name} is {value!r}; expected a finite number")
    if not low <= float(value) <= high:
        raise InputError(f"{name} is {value!r}; expected a number from {low:g} to {high:g}")
    return float(value)
