"""The record that describes a model family, and the model configuration read from a Hugging Face ``config.json``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from runtime.models.masks import AttentionKind, AttentionMask
from sharding.errors import InputError

STORED_DTYPES = ("bfloat16", "float32", "float16")

Objective = Literal["masked_diffusion", "autoregressive"]
# The code whose tokens and logits tests compare a family with.
Reference = Literal["original code", "transformers"]
# How many masks each denoise step fills. ``linear_time``: time t falls linearly from 1 to eps, and a step fills the
# fraction 1 - t[i+1] / t[i] of the remaining masks. ``even``: each step of a block fills an equal number of masks, and
# the first steps take the remainder. ``even_block``: the same, for a whole block even if part of it is already filled.
# ``constant``: every step fills the number of masks that the request gives.
UnmaskingSchedule = Literal["linear_time", "even", "even_block", "constant"]
# Values of :attr:`runtime.decoding.parameters.DiffusionConfig.parallel`, without and with block-causal attention.
BIDIRECTIONAL_RULES = ("none", "threshold", "factor", "frechet", "entropy_bound")
BLOCK_CAUSAL_RULES = ("none", "threshold", "sequential", "entropy_sum")
# Values of :attr:`runtime.decoding.parameters.DiffusionConfig.block_rule`.
BLOCK_RULES = ("default", "fast_dllm")

# Upper bounds of numbers read from a file: generous for any model, and small enough that nothing overflows or hangs.
_LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "max_position_embeddings": 1 << 24,
}


class ConfigError(InputError):
    """A model configuration that is incomplete, inconsistent, or of a family that is not supported."""


@dataclass(frozen=True)
class PublishedSettings:
    """Decoding settings that a family's authors publish for one kind of checkpoint.

    Attributes:
      name_pattern: regular expression that is found in the lower-case names of such checkpoints; empty matches all.
      settings: names and values of decoding parameters.
    """

    name_pattern: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class InfillingTokens:
    """Special tokens with which an autoregressive family was trained to fill in the middle (Bavarian et al., 2022).

    Attributes:
      prefix: the token before a prompt.
      suffix: the token before the text that follows the completion.
      middle: the token before the completion.
      ends: tokens of the format that are never part of a completion, and end it.
    """

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Family:
    """A model family: everything that the rest of the code needs to know about it.

    Families are compared and hashed by identity.

    Attributes:
      name: name of the family in messages.
      model_type: ``model_type`` in its ``config.json``.
      architecture: the class that ``architectures`` in its ``config.json`` names.
      config_key: a key that its ``config.json`` has and those of other families with the same ``model_type`` lack.
      parse: builds the model configuration from a parsed ``config.json``; raises :class:`ConfigError`.
      weights: the dataclass that declares the weights of a model with an untied head, with their tensor names and the
        cost of a layer; None if the family has no such models.
      tied_weights: the dataclass for models whose head is the embedding (tied); None if the family has no such models.
      attention: which keys a position attends to.
      objective: ``masked_diffusion`` fills mask tokens, ``autoregressive`` predicts the next token.
      prediction_offset: the model's output at ``i - prediction_offset`` predicts position i. The first
        ``prediction_offset`` positions use their own output.
      schedule: how many masks a denoise step fills; None for autoregressive families.
      algorithms: the values of :attr:`runtime.decoding.parameters.DiffusionConfig.algorithm` that the family's original
        code defines.
      parallel_rules: the values of :attr:`runtime.decoding.parameters.DiffusionConfig.parallel` for this family.
      block_rules: the values of :attr:`runtime.decoding.parameters.DiffusionConfig.block_rule` for this family.
      top_k_first: whether the original code applies top-k before top-p, which then counts the mass of the tokens that
        top-k keeps.
      filters_when_greedy: whether top-p and top-k change confidences at temperature 0 too.
      guidance: whether the original code defines classifier-free guidance (``cfg_scale``).
      reads_generation_config: whether the original code decodes with the settings of ``generation_config.json``.
      variable_length: the model also predicts tokens that add a mask to the canvas or remove one, see
        :mod:`runtime.decoding.variable_length`.
      mask_token_id: mask token of checkpoints whose configuration does not name one.
      end_token_ids: end tokens of checkpoints whose configuration does not name any.
      end_tokens: tokens that end a completion too, if the checkpoint's tokenizer has them.
      infilling: tokens around a prompt and its suffix; None if the model does not read a suffix in its prompt.
      transformers_class: name of the model class of transformers with the same layers, configuration keys and tensor
        names. A bidirectional model uses it with its causal mask turned off. None if transformers has no such class.
      tokenizer_class: name of the class of transformers that reads the tokenizer of a checkpoint that has no
        ``tokenizer.json``, but ``vocab.json`` and ``merges.txt``.
      tensor_name: maps a tensor's name in a Hugging Face folder to the declared name, for folders that use other names;
        returns None for a tensor that is not a weight.
      published: published decoding settings. The first entry that matches a checkpoint's name is used.
      presets: ``config.json`` of published checkpoints by name, for planning without a download.
      reference: the code whose logits and tokens tests compare the family with, on small random weights.
      golden_cases: number of the reference's generations that are recorded in ``tests/golden``, and that tests compare
        token by token on several meshes. If it is 0, tests run the reference itself.
    """

    name: str
    model_type: str
    architecture: str
    parse: Callable[[Mapping[str, Any]], ModelConfig]
    weights: type[Any] | None
    tied_weights: type[Any] | None
    attention: AttentionKind
    objective: Objective
    prediction_offset: int
    schedule: UnmaskingSchedule | None = None
    algorithms: tuple[str, ...] = ()
    parallel_rules: tuple[str, ...] = BIDIRECTIONAL_RULES
    block_rules: tuple[str, ...] = ("default",)
    top_k_first: bool = False
    filters_when_greedy: bool = True
    guidance: bool = False
    reads_generation_config: bool = True
    variable_length: bool = False
    config_key: str = ""
    mask_token_id: int | None = None
    end_token_ids: tuple[int, ...] = ()
    end_tokens: tuple[str, ...] = ()
    infilling: InfillingTokens | None = None
    transformers_class: str | None = None
    tokenizer_class: str = "Qwen2TokenizerFast"
    tensor_name: Callable[[str], str | None] = str
    published: tuple[PublishedSettings, ...] = ()
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reference: Reference = "original code"
    golden_cases: int = 0

    @property
    def block_causal(self) -> bool:
        """Whether its attention is block-causal."""
        return self.attention == "block_causal"

    @property
    def caches(self) -> tuple[str, ...]:
        """The values of :attr:`runtime.decoding.parameters.DiffusionConfig.cache` that its attention supports."""
        if self.objective == "autoregressive":
            return ()
        if self.variable_length:
            return ("none",)
        return ("none", "exact") if self.block_causal else ("none", "prefix", "dual")

    @property
    def verified(self) -> str:
        """The reference that tests compare the family with, as text."""
        if self.golden_cases:
            return f"logits and {self.golden_cases} recorded generations: {self.reference}"
        return f"logits and greedy tokens: {self.reference}"

    def __repr__(self) -> str:
        return f"Family({self.name!r})"

    def published_settings(self, checkpoint_name: str) -> dict[str, Any]:
        """Return the published decoding settings for a checkpoint of this name; empty if there are none."""
        name = checkpoint_name.lower()
        found = (dict(kind.settings) for kind in self.published if re.search(kind.name_pattern, name))
        return next(found, {})


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a model. It is hashable, so that it can be a static argument of a compiled program.

    Attributes:
      family: the model's family.
      vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: sizes.
      max_positions: maximum length of prompt and new tokens together.
      rope_theta: base of rotary position embedding; 0 for models with learned positions.
      norm_eps: epsilon of RMSNorm or LayerNorm.
      tied_embeddings: whether the head is the transposed embedding.
      dtype: dtype in which the weights are stored, according to ``config.json``.
      mask_token_id: the mask token; -1 for an autoregressive model.
      pad_token_id: the token that fills positions beyond a row's length.
      end_token_ids: tokens that end a text.
      attention_block_length: positions per block of block-causal attention; 0 for other kinds of attention.
      expand_token_id: the token that becomes two masks; -1 for a model without one.
      delete_token_id: the token whose position is removed from the canvas; -1 for a model without one.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    dtype: str
    mask_token_id: int
    pad_token_id: int
    end_token_ids: tuple[int, ...]
    attention_block_length: int = 0
    expand_token_id: int = -1
    delete_token_id: int = -1

    @property
    def objective(self) -> Objective:
        """The training objective, which determines how the model decodes."""
        return self.family.objective

    @property
    def attention_mask(self) -> AttentionMask:
        """Which keys a position attends to."""
        return AttentionMask(self.family.attention, self.attention_block_length)

    @property
    def dimensions(self) -> dict[str, int]:
        """Unpadded size of every logical axis, as stored in checkpoints."""
        return {
            "vocab": self.vocab_size,
            "embed": self.hidden_size,
            "mlp": self.intermediate_size,
            "layers": self.num_layers,
            "kv_heads": self.num_kv_heads,
            "queries_per_kv": self.num_heads // self.num_kv_heads,
            "head_dim": self.head_dim,
            "positions": self.max_positions,
            "qkv": 3,
        }

    def differences(self, other: ModelConfig) -> list[str]:
        """Describe the fields in which the weights of two models differ, each as "field: this value and that value"."""
        free = ("family", "max_positions", "dtype", "pad_token_id", "end_token_ids")
        names = [one.name for one in fields(self) if one.name not in free]
        pairs = [("architecture", self.family.name, other.family.name)]
        pairs += [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name}: {mine} and {theirs}" for name, mine, theirs in pairs if mine != theirs]


def check_features(
    family: Family, raw: Mapping[str, Any], supported: Mapping[str, tuple[Any, tuple[Any, ...]]]
) -> None:
    """Check that a configuration asks only for features that the family's forward pass has.

    Args:
      family: the family, for the message.
      raw: a parsed ``config.json``.
      supported: maps a key to the value that an absent key means, and to the supported values.

    Raises:
      ConfigError: a key has an unsupported value.
    """
    for key, (absent, values) in supported.items():
        found = raw.get(key, absent)
        if found not in values:
            raise ConfigError(
                f"config.json: {key} is {found!r:.200}; only {values[0]!r} is supported for {family.model_type}"
            )


def transformer_config(
    family: Family,
    raw: Mapping[str, Any],
    *,
    renamed: Mapping[str, str] | None = None,
    rotary: bool = True,
    tied_by_default: bool = False,
    attention_block_length: int = 0,
) -> ModelConfig:
    """Build a model configuration from the key names that Qwen2, Llama and most other families use.

    Args:
      family: the model's family.
      raw: a parsed ``config.json``, with its keys renamed if the family uses other names.
      renamed: maps the names in the file to the new ones, for messages.
      rotary: whether the model uses rotary position embedding, which requires an even ``head_dim``.
      tied_by_default: value of ``tie_word_embeddings`` if it is absent.
      attention_block_length: positions per block of block-causal attention.

    Raises:
      ConfigError: a number is missing or out of range, or the family does not support the head (tied or untied).
    """
    in_file = {new: own for own, new in (renamed or {}).items()}
    tied = _read_tied(family, raw, tied_by_default, in_file.get("tie_word_embeddings", "tie_word_embeddings"))
    number = {key: read_integer(raw, key, 1, limit, shown=in_file.get(key)) for key, limit in _LIMITS.items()}
    head_dim = _head_dim(raw, number, rotary)
    last_token = number["vocab_size"] - 1
    ends = token_ids(raw, "eos_token_id", last_token) or tuple(one for one in family.end_token_ids if one <= last_token)
    mask = -1
    if family.objective == "masked_diffusion":
        mask = read_integer(raw, "mask_token_id", 0, last_token, default=family.mask_token_id)
    return ModelConfig(
        family=family,
        vocab_size=number["vocab_size"],
        hidden_size=number["hidden_size"],
        intermediate_size=number["intermediate_size"],
        num_layers=number["num_hidden_layers"],
        num_heads=number["num_attention_heads"],
        num_kv_heads=number["num_key_value_heads"],
        head_dim=head_dim,
        max_positions=number["max_position_embeddings"],
        rope_theta=_rope_theta(raw) if rotary else 0.0,
        norm_eps=_read_real(raw, "rms_norm_eps", default=1e-6),
        tied_embeddings=tied,
        dtype=_stored_dtype(raw),
        mask_token_id=mask,
        pad_token_id=read_integer(raw, "pad_token_id", 0, last_token, default=ends[0] if ends else 0),
        end_token_ids=ends,
        attention_block_length=attention_block_length,
    )


def _read_tied(family: Family, raw: Mapping[str, Any], default: bool, shown: str) -> bool:
    tied = raw.get("tie_word_embeddings", default)
    if not isinstance(tied, bool) or (family.tied_weights if tied else family.weights) is None:
        raise ConfigError(
            f"config.json: {shown} is {tied!r:.200}; only {default!r} is supported for {family.model_type}"
        )
    return tied


def _stored_dtype(raw: Mapping[str, Any]) -> str:
    dtype = raw.get("torch_dtype") or raw.get("dtype") or "float32"
    if dtype not in STORED_DTYPES:
        raise ConfigError(f"config.json: dtype {dtype!r:.200} is not one of {', '.join(STORED_DTYPES)}")
    return str(dtype)


def _head_dim(raw: Mapping[str, Any], number: Mapping[str, int], rotary: bool) -> int:
    heads, kv_heads = number["num_attention_heads"], number["num_key_value_heads"]
    if heads % kv_heads:
        raise ConfigError(f"config.json: {heads} attention heads are not a multiple of {kv_heads} KV heads")
    head_dim = read_integer(raw, "head_dim", 1, 1 << 12, default=number["hidden_size"] // heads)
    if raw.get("head_dim") is None and number["hidden_size"] % heads:
        raise ConfigError(f"config.json: hidden_size {number['hidden_size']} is not a multiple of {heads} heads")
    if head_dim % 2 and rotary:
        raise ConfigError(f"config.json: rotary position embedding requires an even head_dim, not {head_dim}")
    return head_dim


def _rope_theta(raw: Mapping[str, Any]) -> float:
    # Folders saved by transformers 5 store the RoPE base in the mapping "rope_parameters".
    parameters = raw.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        return _read_real(raw, "rope_theta", default=10000.0)
    if nested := [name for name, value in parameters.items() if isinstance(value, Mapping)]:
        raise ConfigError(f"config.json: rope_parameters of {nested[0]!r:.200} layers alone are not supported")
    kind = parameters.get("rope_type", parameters.get("type", "default"))  # "type" is the older name
    if kind != "default":
        raise ConfigError(f"config.json: rope_type {kind!r:.200} is not supported")
    own = _read_real(parameters, "rope_theta", default=_read_real(raw, "rope_theta", default=10000.0))
    if _read_real(raw, "rope_theta", default=own) != own:
        raise ConfigError(f"config.json: rope_theta is {raw['rope_theta']}, and {own} in rope_parameters")
    return own


def read_integer(
    raw: Mapping[str, Any], key: str, low: int, high: int, default: int | None = None, shown: str | None = None
) -> int:
    """Read an integer from ``low`` to ``high`` from a configuration. Messages name the key ``shown``, if it is given.

    Raises:
      ConfigError: the value is not such an integer, or is missing and has no default.
    """
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f'config.json: "{shown or key}" is missing')
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f'config.json: "{shown or key}" is {value!r:.200}; expected an integer from {low} to {high}')
    return value


def _read_real(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
        raise ConfigError(f'config.json: "{key}" is {value!r:.200}; expected a positive number')
    return float(value)


def token_ids(raw: Mapping[str, Any], key: str, high: int) -> tuple[int, ...]:
    """Read token ids from a configuration: a single id, a list of ids, or none.

    Raises:
      ConfigError: an entry is not an integer from 0 to ``high``.
    """
    value = raw.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(read_integer({key: one}, key, 0, high) for one in values)
