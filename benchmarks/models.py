"""Models for benchmarks: their sizes from flags, and their floating-point operations.

Dimension letters: B batch, S canvas.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from absl import flags

from runtime.models.config import Family, ModelConfig
from runtime.models.families import model_layout, parse_config
from runtime.planner.presets import preset

# The families that benchmarks run: layers of the same sizes, once for masked diffusion and once autoregressive.
DIFFUSION, CAUSAL = preset("diffucoder-7b").family, preset("qwen2.5-7b").family

SIZES = {
    # The shapes of checkpoints/demo.
    "demo": {
        "layers": 6,
        "hidden_size": 256,
        "intermediate_size": 640,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 32,
        "vocab_size": 1536,
    },
    # Qwen2.5-0.5B's shapes with fewer layers and a smaller vocabulary, lm_head untied: 118 million parameters.
    "mid-size": {
        "layers": 4,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "heads": 14,
        "kv_heads": 2,
        "head_dim": 64,
        "vocab_size": 32768,
    },
    # Dream-7B's shapes.
    "diffucoder-7b": {
        "layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "heads": 28,
        "kv_heads": 4,
        "head_dim": 128,
        "vocab_size": 152064,
    },
}


def define_model_flags(values: flags.FlagValues, default: str | tuple[str, ...] | None = "mid-size") -> None:
    """Define ``--random``, a model by name with random weights, and a flag for each size.

    Args:
      values: where to define them.
      default: the default of ``--random``. If it is a tuple, the flag takes several names.
    """
    if isinstance(default, tuple):
        text = f"Random weights with the sizes of these models, of {', '.join(SIZES)}."
        flags.DEFINE_list("random", list(default), text, flag_values=values)
        flags.register_validator(
            "random", lambda names: bool(names) and set(names) <= set(SIZES), f"some of {', '.join(SIZES)}",
            flag_values=values,
        )  # fmt: skip
    else:
        flags.DEFINE_enum(
            "random", default, tuple(SIZES), "Random weights with the sizes of this model.", flag_values=values
        )
    for name in SIZES["mid-size"]:
        text = f"Overrides a size of --random:{name.replace('_', ' ')}."
        flags.DEFINE_integer(name, None, text, 1, flag_values=values)


def model_sizes(values: flags.FlagValues, name: str | None = None) -> dict[str, int]:
    """Read the sizes from flags. ``name`` is one of the models if ``--random`` takes several."""
    sizes = SIZES[name or values.random]
    return {name: size if values[name].value is None else values[name].value for name, size in sizes.items()}


def checkpoint_config(sizes: dict[str, int], dtype: str, family: Family = DIFFUSION) -> dict[str, Any]:
    """Return a checkpoint's ``config.json``. The last two tokens are mask and padding."""
    return {
        "model_type": family.model_type,
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["intermediate_size"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "vocab_size": sizes["vocab_size"],
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "mask_token_id": sizes["vocab_size"] - 1,
        "pad_token_id": sizes["vocab_size"] - 2,
        "torch_dtype": dtype,
    }


def model_config(sizes: dict[str, int], dtype: str, family: Family = DIFFUSION) -> ModelConfig:
    """Return the runtime's configuration of the model.

    Raises:
      ConfigError: the sizes are inconsistent.
    """
    return parse_config(checkpoint_config(sizes, dtype, family))


def causal_twin(config: ModelConfig) -> ModelConfig:
    """Return the configuration of the autoregressive model that runs with the weights of a diffusion model."""
    return replace(config, family=CAUSAL, mask_token_id=-1)


def layer_config(config: ModelConfig) -> dict[str, Any]:
    """Return the ``config.json`` of a model with one layer of the same sizes and a tiny vocabulary."""
    sizes = {
        "layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": 64,
    }
    own = {"rope_theta": config.rope_theta, "rms_norm_eps": config.norm_eps}
    return checkpoint_config(sizes, "float32", config.family) | own


def forward_flops(
    config: ModelConfig, batch: int, canvas: int, head_positions: float, keys: int | None = None
) -> float:
    """Return the floating-point operations of one forward pass. A multiply-add counts as two.

    Args:
      config: the model.
      batch: B.
      canvas: S, positions that are computed per row.
      head_positions: positions that the output head is run on, over all rows.
      keys: number of keys per position; default S.
    """
    layout = model_layout(config)
    layers = sum(math.prod(leaf.shape) for leaf in layout.leaves if leaf.layers and leaf.contracted)
    # Scores, and the weighted sum of values. Masked pairs count, because not every implementation skips them.
    attention = 2 * (keys or canvas) * config.num_heads * config.head_dim * config.num_layers
    return 2.0 * (batch * canvas * (layers + attention) + head_positions * math.prod(layout.head.shape))
