"""A model's architecture, read from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sharding.errors import InputError

# model_type of config.json -> architecture.
SUPPORTED_ARCHITECTURES = {"Dream": "dream", "qwen2": "qwen2", "gpt2": "gpt2"}
STORED_DTYPES = ("bfloat16", "float32", "float16")

# Bounds on numbers read from a file: generous for any model, small enough that nothing overflows or hangs.
_LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "max_position_embeddings": 1 << 24,
}

# Features that a forward pass here does not have: key -> (what an absent key means, what is supported).
_UNSUPPORTED: dict[str, dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "qwen2": {
        "hidden_act": ("silu", ("silu",)),
        "rope_scaling": (None, (None,)),
        "use_sliding_window": (False, (False, None)),
    },
    "gpt2": {
        "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
        "scale_attn_weights": (True, (True,)),
        "scale_attn_by_inverse_layer_idx": (False, (False, None)),
        "add_cross_attention": (False, (False, None)),
    },
}


class ConfigError(InputError):
    """A model configuration that is incomplete, inconsistent, or of an architecture that is not supported."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a model. Hashable, so that it can be a static argument of a compiled program.

    Attributes:
      architecture: ``dream`` (masked diffusion), ``qwen2`` or ``gpt2`` (autoregressive).
      vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: sizes.
      max_positions: positions the model has, prompt and new tokens together.
      rope_theta: base of rotary position embedding, 0 where positions are learned.
      norm_eps: epsilon of RMSNorm or LayerNorm.
      tied_embeddings: whether the head is the embedding, transposed.
      dtype: dtype the weights are said to be stored in.
      mask_token_id: the token that diffusion fills, -1 for an autoregressive model.
      pad_token_id: what stands where no token does.
      end_token_ids: tokens that end a text.
    """

    architecture: str
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

    @property
    def is_autoregressive(self) -> bool:
        """Whether the model predicts the next token, else it fills masks."""
        return self.architecture != "dream"

    @property
    def prediction_offset(self) -> int:
        """How many positions before a token the output that predicts it is."""
        return 1

    @property
    def dimensions(self) -> dict[str, int]:
        """Size of every logical axis, unpadded, as stored in checkpoints."""
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
        """What makes weights of ``other`` another model, as "field: this and that"."""
        free = ("max_positions", "dtype", "pad_token_id", "end_token_ids")
        names = [field.name for field in fields(self) if field.name not in free]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name}: {mine} and {theirs}" for name, mine, theirs in pairs if mine != theirs]

    @classmethod
    def from_huggingface(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a ``config.json`` that has been parsed into a mapping.

        Raises:
          ConfigError: an unsupported architecture, a missing or out-of-range number, or a feature that the forward
            pass does not have (scaled RoPE, sliding windows, another activation).
        """
        kind = raw.get("model_type")
        if not isinstance(kind, str) or kind not in SUPPORTED_ARCHITECTURES:
            names = ", ".join(sorted(SUPPORTED_ARCHITECTURES))
            raise ConfigError(
                f"config.json: model_type {kind!r:.200} (architectures {raw.get('architectures')!r:.200}) is not "
                f"supported; supported: {names}"
            )
        architecture = SUPPORTED_ARCHITECTURES[kind]
        gpt2 = architecture == "gpt2"
        for key, (absent, supported) in _UNSUPPORTED["gpt2" if gpt2 else "qwen2"].items():
            found = raw.get(key, absent)
            if found not in supported:
                raise ConfigError(
                    f"config.json: {key} is {found!r:.200}; only {supported[0]!r} is supported for {kind}"
                )
        if gpt2:
            raw = _with_common_names(raw)
        tied = raw.get("tie_word_embeddings", gpt2)
        if not isinstance(tied, bool) or (tied and architecture == "dream") or (gpt2 and not tied):
            raise ConfigError(
                f"config.json: tie_word_embeddings is {tied!r:.200}; only {gpt2!r} is supported for {kind}"
            )
        number = {key: _integer(raw, key, 1, limit) for key, limit in _LIMITS.items()}
        heads, kv_heads = number["num_attention_heads"], number["num_key_value_heads"]
        if heads % kv_heads:
            raise ConfigError(f"config.json: {heads} attention heads do not divide into {kv_heads} KV heads")
        head_dim = _integer(raw, "head_dim", 1, 1 << 12, default=number["hidden_size"] // heads)
        if raw.get("head_dim") is None and number["hidden_size"] % heads:
            raise ConfigError(f"config.json: hidden_size {number['hidden_size']} does not divide by {heads} heads")
        if head_dim % 2 and not gpt2:
            raise ConfigError(f"config.json: rotary position embedding needs an even head_dim, not {head_dim}")
        dtype = raw.get("torch_dtype") or raw.get("dtype") or "float32"
        if dtype not in STORED_DTYPES:
            raise ConfigError(f"config.json: dtype {dtype!r:.200} is not one of {', '.join(STORED_DTYPES)}")
        vocab_limit = number["vocab_size"] - 1
        ends = token_ids(raw, "eos_token_id", vocab_limit)
        return cls(
            architecture=architecture,
            vocab_size=number["vocab_size"],
            hidden_size=number["hidden_size"],
            intermediate_size=number["intermediate_size"],
            num_layers=number["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_positions=number["max_position_embeddings"],
            rope_theta=0.0 if gpt2 else _real(raw, "rope_theta", default=_rope_parameters(raw)),
            norm_eps=_real(raw, "rms_norm_eps", default=1e-6),
            tied_embeddings=tied,
            dtype=dtype,
            mask_token_id=_integer(raw, "mask_token_id", 0, vocab_limit) if architecture == "dream" else -1,
            pad_token_id=_integer(raw, "pad_token_id", 0, vocab_limit, default=ends[0] if ends else 0),
            end_token_ids=ends,
        )


def _with_common_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    # GPT-2's configuration has names of its own.
    names = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
        "layer_norm_epsilon": "rms_norm_eps",
    }
    common = {key: value for key, value in raw.items() if key not in names.values()}
    common |= {common_name: raw[own] for own, common_name in names.items() if raw.get(own) is not None}
    width = common.get("hidden_size")
    if isinstance(width, int) and not isinstance(width, bool):
        common.setdefault("intermediate_size", 4 * width)
    common["num_key_value_heads"] = common.get("num_attention_heads")
    common.setdefault("rms_norm_eps", 1e-5)
    common.pop("head_dim", None)
    return common


def _rope_parameters(raw: Mapping[str, Any]) -> float:
    # Folders saved by transformers 5 keep the RoPE base in a mapping of its own.
    parameters = raw.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        return 10000.0
    if parameters.get("rope_type", "default") != "default":
        raise ConfigError(f"config.json: rope_type {parameters['rope_type']!r:.200} is not supported")
    return _real(parameters, "rope_theta", default=10000.0)


def _integer(raw: Mapping[str, Any], key: str, low: int, high: int, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f'config.json: "{key}" is missing')
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f'config.json: "{key}" is {value!r:.200}; expected an integer from {low} to {high}')
    return value


def _real(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
        raise ConfigError(f'config.json: "{key}" is {value!r:.200}; expected a positive number')
    return float(value)


def token_ids(raw: Mapping[str, Any], key: str, high: int) -> tuple[int, ...]:
    """One token id, several, or none, under ``key`` of a configuration.

    Raises:
      ConfigError: an entry is not an integer from 0 to ``high``.
    """
    value = raw.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(_integer({key: one}, key, 0, high) for one in values)
