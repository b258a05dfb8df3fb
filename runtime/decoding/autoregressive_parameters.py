"""The parameters of autoregressive decoding, and the bounds of those that masked diffusion has too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from runtime.decoding.early_stop import MAX_STOP_TOKENS, decide_early_stop
from runtime.decoding.kinds import Boolean, Integer, Real, Seeds, TokenIds
from runtime.decoding.schema import parameter, validate
from runtime.models.config import Family

MAX_NEW_TOKENS = 1 << 20
MIN_TEMPERATURE = 1e-4
MAX_TEMPERATURE = 1e4
MAX_SEED = (1 << 63) - 1
MAX_PROMPT_LOOKUP = 63
MAX_DRAFT_TOKENS = 63
# Drafts of a command whose model has a draft model.
DEFAULT_DRAFT_TOKENS = 4
# No vocabulary has as many tokens, so this value keeps all of them.
MAX_TOP_K = 1 << 30

# In float32, sampling at a temperature below the smallest allowed one is the same as temperature 0.
TEMPERATURE = Real(0.0, MAX_TEMPERATURE, smallest=MIN_TEMPERATURE)
_TOKEN_IDS = TokenIds(MAX_STOP_TOKENS, 1 << 30)


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
        TEMPERATURE,
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
        general=0.5,
    )
    top_k: int | None = parameter(
        None,
        Integer(1, MAX_TOP_K),
        "Keep this many of the most probable tokens, and tokens tied with the last of them; 0 keeps all.",
        optional=True,
        general=1,  # with both, programs filter in the order of the family
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
        flag_help="Separate several with commas. To repeat one row with the seed that --json prints, add a comma: 7,",
        request_only=True,
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
        flag_help="Requires --json.",
        general=True,
        count_of="alternative tokens",
        request_only=True,
    )
    use_cache: bool = parameter(
        True,
        Boolean(),
        "Use a KV cache. Without one, every token costs a forward pass over the whole sequence before it.",
        compiled=True,
        exposed=False,
        given_as=("cache", "none"),
    )
    prompt_lookup: int = parameter(
        0,
        Integer(0, MAX_PROMPT_LOOKUP),
        "Speculative decoding with n-grams: find the last earlier occurrence of the row's last three, two or one "
        "tokens, and propose this many of the tokens that followed it. One forward pass verifies them and adds the "
        "accepted ones plus one. The tokens do not change. No effect without a cache. A server compiles a fixed "
        "number; in a request, this is an upper bound.",
        idle=(0,),
        speed_only=True,
    )
    draft_tokens: int = parameter(
        0,
        Integer(0, MAX_DRAFT_TOKENS),
        "Speculative decoding with a draft model: number of tokens that it proposes for each forward pass, which "
        "verifies them and adds one token and one more for each accepted one. The tokens do not change. No effect "
        "without a cache or a draft model (draft_checkpoint); with one, prompt_lookup has no effect. A server compiles "
        "a fixed number; in a request, this is an upper bound.",
        flag_help=f"Default with a draft model: {DEFAULT_DRAFT_TOKENS}.",
        idle=(0,),
        speed_only=True,
    )

    def __post_init__(self) -> None:
        validate(self)

    @property
    def drafts(self) -> int:
        """Drafts per row: ``draft_tokens`` or ``prompt_lookup``; 0 without a cache, where passes are whole rows."""
        return self.draft_bound(self)

    def draft_bound(self, compiled: SamplingConfig) -> int:
        """Return how many drafts a row with this configuration uses in slots compiled for ``compiled``."""
        if not compiled.use_cache:
            return 0
        return self.draft_tokens if compiled.draft_tokens else self.prompt_lookup

    @classmethod
    def published_for(cls, family: Family, checkpoint_name: str, **overrides: Any) -> SamplingConfig:
        """Return a family's published settings for a checkpoint of this name, changed by ``overrides``."""
        return cls(**(family.published_settings(checkpoint_name) | overrides))

    def replace(self, **changes: Any) -> SamplingConfig:
        """Return a copy with these fields changed, after validating it."""
        return replace(self, **changes)

    def with_end_tokens(self, end_token_ids: Sequence[int], default: bool) -> SamplingConfig:
        """Return a copy with ``early_stop`` and stop tokens decided; see :func:`decide_early_stop`."""
        return replace(self, **decide_early_stop(self.early_stop, self.stop_token_ids, end_token_ids, default))
