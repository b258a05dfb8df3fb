"""Compare each layer with PyTorch's in float32 on the CPU, on the same input, to check the device's results.

Dimension letters: S sequence, D embed.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models import layer_config
from benchmarks.records import NotRunError
from benchmarks.suite.subject import prompt_ids
from benchmarks.torch_models import import_torch, torch_model
from runtime.engine import Engine
from runtime.execution.programs import put
from runtime.models.attention import choose_attention
from runtime.models.forward import Forward
from runtime.models.leaves import WeightLeaf
from runtime.models.transformer import run_layer

_POSITIONS = 64
# Largest difference, relative to an element's size plus the root mean square: a few roundings of the dtype.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}


def source_tensor(leaf: WeightLeaf, number: int, array: np.ndarray) -> np.ndarray:
    """Convert a layer's weight from a padded array to the format of a checkpoint."""
    axes, shape = leaf.axes, leaf.shape
    if leaf.is_stacked:
        axes, shape, array = axes[1:], shape[1:], array[leaf.layers.index(number)]
    cut = array[tuple(slice(size) for size in shape)]
    order = [axes.index(axis) for merge in leaf.source_axes for axis in merge]
    return np.ascontiguousarray(cut.transpose(order)).reshape(leaf.source_shape)


def layer_parity(engine: Engine, attention: str = "auto", tolerance: float | None = None) -> dict[str, Any]:
    """Return the share of each layer's outputs that are within tolerance of PyTorch's, for the same input.

    Args:
      engine: the model.
      attention: an attention implementation, or ``auto``.
      tolerance: largest difference, relative to an element's size plus the root mean square. Default: by the dtype.

    Raises:
      NotRunError: PyTorch is not installed, or has no such model.
    """
    layout, config = engine.layout, engine.config
    if config.family.transformers_class is None:
        raise NotRunError(f"transformers has no model class for {config.family.model_type}")
    if not config.rope_theta:
        raise NotRunError("layers can be compared with PyTorch only if their positions are rotary")
    if importlib.util.find_spec("torch") is None:
        raise NotRunError("PyTorch is not installed")
    torch = import_torch()
    reference = torch_model(layer_config(config), "float32")
    reference.model.norm = torch.nn.Identity()
    tolerance = tolerance or TOLERANCE[jnp.dtype(engine.dtype).name]
    canvas = min(_POSITIONS * layout.spec.sequence, config.max_positions)
    forward = Forward(layout, choose_attention(attention, engine.platform, layout, canvas, engine.dtype))
    rows = layout.sharding("batch", None)
    batch = layout.spec.data
    tokens = put(np.repeat(prompt_ids(config, 1, canvas), batch, axis=0), rows)
    lengths = put(np.full(batch, canvas, np.int32), layout.sharding("batch"))
    positions = jnp.arange(canvas)
    weights = engine.weights
    x = jax.jit(lambda weights, tokens: weights.embed(forward, tokens, positions))(weights, tokens)

    tables = weights.position_tables(forward, positions, x.dtype)
    named = layout.named(weights)
    program = jax.jit(lambda layer, x: run_layer(forward, layer, x, lengths, tables)[0])
    shares = []
    for number in range(config.num_layers):
        before = np.asarray(x)[:1].astype(np.float32)
        x = program(layout.layer(weights, number), x)
        here = np.asarray(x)[:1].astype(np.float32)
        state = {
            # PyTorch's model has a single layer, which takes the weights of each layer in turn.
            leaf.sources[leaf.layers.index(number)].replace(f".{number}.", ".0.", 1): torch.from_numpy(
                source_tensor(leaf, number, np.asarray(named[leaf.name]).astype(np.float32))
            )
            for leaf in layout.leaves
            if number in leaf.layers
        }
        reference.load_state_dict(state, strict=False)
        with torch.inference_mode():
            there = reference.model(inputs_embeds=torch.from_numpy(before)).last_hidden_state.numpy()
        size = np.abs(there) + np.sqrt(np.mean(there**2))
        shares.append(float(np.mean(np.abs(here - there) <= tolerance * size)))
    return {
        "layers": len(shares),
        "tolerance": tolerance,
        "smallest_share": round(min(shares), 6),
        "shares": [round(share, 6) for share in shares],
    }
