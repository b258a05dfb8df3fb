"""The cases that are compared with PyTorch: their sizes, and the work of each library in them.

A case belongs to a part. ``forward`` is one pass of a bidirectional model. ``generate`` is masked diffusion; half of
each canvas is prompt. ``autoregressive`` is cached greedy decoding by a causal model of the same sizes, and ``gpt2`` is
the same for GPT-2 124M.

Dimension letters: B batch, S canvas, P prompt, D embed, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks.models import CAUSAL, DIFFUSION, checkpoint_config
from benchmarks.records import integers
from benchmarks.torch_models import diffusion_generate, gpt2_model, greedy_generate, torch_model
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.engine import Engine
from runtime.execution.programs import ProgramCache, compiler_options, lower_hidden, put
from runtime.execution.result import GenerationResult
from runtime.models.attention import choose_attention
from runtime.models.config import ModelConfig
from runtime.models.families import Weights, parse_config
from runtime.models.forward import Forward
from runtime.models.transformer import hidden_states, project_logits
from runtime.planner.presets import preset

# Parts that run once for each model, and parts that bring their own model.
PARTS_OF_A_MODEL = ("forward", "generate", "autoregressive")
PARTS = (*PARTS_OF_A_MODEL, "gpt2")
DTYPES = ("float32", "bfloat16")
# On CPU, canvases from this length on are generated in the smallest batch alone: several rows would take minutes.
_LONG_CANVAS = 1024
_SAMPLING = ("temperature", "top_p", "top_k")


def define_case_flags(values: flags.FlagValues) -> None:
    """Define the flags for the sizes of the cases and for their decoding."""

    def integer(name: str, default: int | None, text: str) -> None:
        flags.DEFINE_integer(name, default, text, 1, flag_values=values)

    flags.DEFINE_list("batch", ["1", "4"], "Numbers of rows.", flag_values=values)
    canvases = ["128", "512", "1024", "2048"]
    flags.DEFINE_list("canvas", canvases, "Positions per row of a diffusion model.", flag_values=values)
    integer("steps", 8, "Denoise steps.")
    text = "Temperature of masked diffusion; 0 is greedy. Default: as published."
    flags.DEFINE_float("temperature", None, text, 0.0, flag_values=values)
    text = "Top-p filter of masked diffusion; 1 turns it off. Default: as published."
    flags.DEFINE_float("top_p", None, text, 0.0, 1.0, flag_values=values)
    integer("top_k", None, "Top-k filter of masked diffusion. Default: as published.")
    flags.DEFINE_list("new_tokens", ["15", "128"], "New tokens of autoregressive generations.", flag_values=values)
    integer("prompt", 16, "Prompt tokens of autoregressive generations.")


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
      part: one of ``PARTS``.
      batch: B.
      canvas: S, positions per row, new tokens included.
      new_tokens: tokens to generate per row; 0 for a forward pass.
      config: decoding parameters of both libraries; None for a forward pass.
    """

    part: str
    batch: int
    canvas: int
    new_tokens: int = 0
    config: DiffusionConfig | SamplingConfig | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that identify the case within its part."""
        if isinstance(self.config, DiffusionConfig):
            new = {"new_tokens": self.new_tokens, "steps": self.config.steps}
            return {"batch": self.batch, "canvas": self.canvas} | new
        if self.config is not None:
            return {"batch": self.batch, "prompt": self.canvas - self.new_tokens, "new_tokens": self.new_tokens}
        return {"batch": self.batch, "canvas": self.canvas}

    @property
    def is_autoregressive(self) -> bool:
        """Whether the case's model is causal."""
        return isinstance(self.config, SamplingConfig)

    def prompts(self, vocab_size: int) -> np.ndarray:
        """Return random tokens, int64 ``[B, P]``; a forward pass has S of them. The last two tokens are left out."""
        return np.random.default_rng(0).integers(0, vocab_size - 2, (self.batch, self.canvas - self.new_tokens))


def published(values: flags.FlagValues, new_tokens: int) -> DiffusionConfig:
    """Return the published decoding parameters, with the steps and the sampling that the flags give."""
    given = {name: values[name].value for name in _SAMPLING if values[name].value is not None}
    # As in the published code, logits are filtered and ranked in their own dtype.
    given |= {"steps": values.steps, "confidence_dtype": "model"}
    return DiffusionConfig.published_for(DIFFUSION, "", max_new_tokens=new_tokens, **given)


def cases(part: str, values: flags.FlagValues, platform: str) -> Iterator[Case]:
    """Yield the cases of a part, with the sizes of the flags.

    Raises:
      InputError: a size is not a positive integer.
    """
    batches = integers("batch", values.batch)
    for batch in batches:
        if part in ("autoregressive", "gpt2"):
            for new in integers("new_tokens", values.new_tokens):
                yield Case(part, batch, values.prompt + new, new, SamplingConfig(max_new_tokens=new))
            continue
        for canvas in integers("canvas", values.canvas):
            if part == "forward":
                yield Case(part, batch, canvas)
            elif batch == min(batches) or canvas < _LONG_CANVAS or platform != "cpu":
                new = canvas // 2
                yield Case(part, batch, canvas, new, published(values, new))


def case_config(part: str, sizes: dict[str, int], dtype: str) -> dict[str, Any]:
    """Return the ``config.json`` of a part's random model; ``gpt2`` has none here, because its sizes are fixed."""
    return checkpoint_config(sizes, dtype, CAUSAL if part == "autoregressive" else DIFFUSION)


def random_torch_model(part: str, sizes: dict[str, int], dtype: str, device: str) -> Any:
    """Make the random model of a part in PyTorch, with weights at which generations do not repeat a token."""
    if part == "gpt2":
        return gpt2_model(dtype, device)
    return torch_model(case_config(part, sizes, dtype), dtype, device)


@dataclass(frozen=True)
class ForwardPass:
    """Compiled programs of one pass over tokens ``[B, S]``, with their arguments.

    Attributes:
      forward: layout and attention implementation.
      programs: the cache that has compiled them.
      hidden: runs the pass without the head -> ``[B, S, D]``.
      logits: runs the pass with the head -> ``[B, S, V]`` in the model's dtype, padding of the vocabulary included.
      lengths: int32 ``[B]``, all S.
    """

    forward: Forward
    programs: ProgramCache
    hidden: Callable[[], jax.Array]
    logits: Callable[[], jax.Array]
    lengths: jax.Array

    @classmethod
    def compile(cls, engine: Engine, ids: np.ndarray) -> ForwardPass:
        """Compile the passes of a model over tokens ``[B, S]``."""
        layout, (batch, canvas) = engine.layout, ids.shape
        forward = Forward(layout, choose_attention("auto", engine.platform, layout, canvas, engine.dtype))
        arguments = (
            engine.weights,
            put(ids.astype(np.int32), layout.sharding("batch", None)),
            put(np.full(batch, canvas, np.int32), layout.sharding("batch")),
        )

        def whole(weights: Weights, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
            hidden = hidden_states(forward, weights, tokens, lengths)
            # Logits in the model's dtype, as in PyTorch.
            return project_logits(forward, weights, hidden).astype(engine.dtype)

        programs = ProgramCache(compiler_options(layout, engine.dtype))
        hidden = programs.get(("hidden", ids.shape), lambda: lower_hidden(forward, *arguments))
        logits = programs.get(("logits", ids.shape), lambda: jax.jit(whole).lower(*arguments))
        return cls(forward, programs, partial(hidden, *arguments), partial(logits, *arguments), arguments[-1])


def random_engine(part: str, sizes: dict[str, int], dtype: str) -> Engine:
    """Make an engine with the shapes of a part's model, and weights of its own, on the first device."""
    config: ModelConfig = preset("gpt2") if part == "gpt2" else parse_config(case_config(part, sizes, dtype))
    return Engine.random(config, "data=1", dtype, devices=jax.devices()[:1])


def jax_generation(case: Case, engine: Engine, ids: np.ndarray, **changes: Any) -> GenerationResult:
    """Generate from prompts ``[B, P]``, with changes to the decoding parameters."""
    assert case.config is not None
    return engine.generate_tokens(ids, config=case.config.replace(**changes))


def torch_generation(case: Case, model: Any, config: ModelConfig, tokens: Any, **changes: Any) -> Any:
    """Generate from a PyTorch tensor of prompts ``[B, P]``, with changes to the decoding parameters.

    Args:
      case: the sizes.
      model: the model in PyTorch.
      config: the model's configuration.
      tokens: the prompts.
      changes: fields of the decoding parameters.

    Returns:
      int64 ``[B, S]``.
    """
    assert case.config is not None
    changed = case.config.replace(**changes)
    if isinstance(changed, DiffusionConfig):
        return diffusion_generate(model, tokens, config.mask_token_id, config.family.prediction_offset, changed)
    return greedy_generate(model, tokens, changed.max_new_tokens)


def as_float32(logits: jax.Array, vocab_size: int) -> np.ndarray:
    """Return logits ``[B, S, V]`` on the host, in float32 and without padding of the vocabulary."""
    return np.asarray(logits.astype(jnp.float32))[..., :vocab_size]
