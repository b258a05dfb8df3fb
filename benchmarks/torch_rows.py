"""Comparisons with PyTorch: for each case a check of both libraries' results, then their times, taking turns.

Dimension letters: B batch, S canvas, P prompt, N new tokens, V vocab.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks.models import forward_flops
from benchmarks.records import Timing, time_alternating
from benchmarks.torch_cases import (
    Case,
    ForwardPass,
    as_float32,
    case_config,
    jax_generation,
    random_torch_model,
    torch_generation,
)
from benchmarks.torch_models import (
    backends,
    first_log_probabilities,
    greedy_generate,
    run_in_onednn,
    save_torch_model,
    wait_for,
    wider_copy,
    with_backend,
)
from launch.process.profiling import profile_again
from runtime.decoding.parameters import DiffusionConfig
from runtime.engine import Engine
from runtime.models.attention import dot_product_attention
from runtime.models.config import ModelConfig

# Largest relative difference of the logits: the norm of the difference, divided by the norm of PyTorch's logits.
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}
# Deep models and long canvases amplify rounding. If the logits are further apart than that, JAX's must be as close to
# PyTorch's logits in a wider dtype as PyTorch's own, up to this factor.
_AS_EXACT = 1.1
_WIDER = {"bfloat16": "float32", "float32": "float64"}
# PyTorch's libraries are compared on passes over at most this many positions; longer ones use the same kernels.
_PROBE_POSITIONS = 512
_PROBE_NEW_TOKENS = 8
_PROBE_SECONDS = 3.0
# Calls of a part of the work, such as the products alone, at most; as many as a limit of time allows.
_REPEATS_OF_PARTS = 20
# Their limit, as a share of --row_seconds.
_SHARE_OF_PARTS = 0.25
# Of a greedy generation that is only compared, and not timed.
_GREEDY_STEPS = 2
# The mean log-likelihoods of both libraries' samples may differ by this many standard errors.
_STANDARD_ERRORS = 4.0
_LEAST_IN_SUPPORT = 0.99


@dataclass
class Sides:
    """One model in JAX and in PyTorch.

    Attributes:
      name: the model's name.
      engine: the model in JAX.
      torch: the ``torch`` module.
      models: the model in PyTorch, by the library that computes its matrix products.
      device: PyTorch's name of the device that both use.
      probed: medians in milliseconds by library, for each kind of work that the libraries were compared on.
    """

    name: str
    engine: Engine
    torch: Any
    models: dict[str, Any]
    device: str
    probed: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)

    @classmethod
    def make(cls, name: str, part: str, sizes: dict[str, int], dtype: str, torch: Any, device: str) -> Sides:
        """Make a part's model in PyTorch, and load its weights in JAX."""
        model = random_torch_model(part, sizes, dtype, device)
        with tempfile.TemporaryDirectory() as folder:
            if part == "gpt2":
                model.save_pretrained(folder)
            else:
                save_torch_model(model, case_config(part, sizes, dtype), Path(folder))
            engine = Engine.load(folder, mesh="data=1", dtype=dtype, devices=jax.devices()[:1])
        models = {backend: with_backend(torch, model, backend) for backend in backends(device, dtype)}
        return cls(name, engine, torch, models, device)

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.engine.config

    def tokens(self, ids: np.ndarray) -> Any:
        """Convert integers to a PyTorch tensor on the device."""
        return self.torch.from_numpy(ids).to(self.device)

    def theirs(self, call: Callable[[], Any]) -> Callable[[], None]:
        """Wrap a PyTorch call so that it returns when its work is done."""

        def run() -> None:
            with self.torch.inference_mode():
                call()
            wait_for(self.torch, self.device)

        return run

    def faster_backend(self, key: tuple[str, int], call: Callable[[Any], Any]) -> str:
        """Return the library with which a call of the model takes less time. The times are kept under ``key``."""
        if key not in self.probed:
            calls = {name: self.theirs(partial(call, model)) for name, model in self.models.items()}
            several = len(calls) > 1
            timings = time_alternating(calls, _REPEATS_OF_PARTS, 1, _PROBE_SECONDS) if several else {}
            self.probed[key] = {name: timing.median for name, timing in timings.items()}
        times = self.probed[key]
        return min(times, key=times.__getitem__) if times else next(iter(self.models))

    def choose(self, case: Case, ids: np.ndarray) -> tuple[Any, dict[str, Any]]:
        """Return the model with the faster library for a case with prompts ``[B, P]``, and facts for its row."""
        if case.is_autoregressive:
            key: tuple[str, int] = "decode", case.batch
            tokens = self.tokens(ids)
            backend = self.faster_backend(key, lambda model: greedy_generate(model, tokens, _PROBE_NEW_TOKENS))
        else:
            key = "pass", min(case.batch * case.canvas, _PROBE_POSITIONS)
            probe = self.tokens(np.random.default_rng(0).integers(0, self.config.vocab_size - 2, (1, key[1])))
            backend = self.faster_backend(key, lambda model: model(probe, use_cache=False))
        return self.models[backend], {"torch_backend": backend, "torch_backends_ms": self.probed[key]}


def ratios(ours: Timing, theirs: Timing) -> dict[str, Any]:
    """Return both times and their ratio, with the spread over pairs of calls."""
    return {
        "jax_ms": ours,
        "torch_ms": theirs,
        "times_as_fast": ours.times_as_fast_as(theirs),
        "times_as_fast_by_processor_time": round(theirs.cpu / ours.cpu, 3) if ours.cpu else None,
    }


def compare(sides: Sides, case: Case, values: flags.FlagValues) -> dict[str, Any]:
    """Check and time a case. Return the facts of its row."""
    if case.config is None:
        return _compare_forward(sides, case, values)
    return _compare_generation(sides, case, values)


def _compare_forward(sides: Sides, case: Case, values: flags.FlagValues) -> dict[str, Any]:
    """Compare the times of a pass over tokens ``[B, S]``, without and with the head, and the logits."""
    engine, config = sides.engine, sides.config
    ids = case.prompts(config.vocab_size)
    ours, tokens = ForwardPass.compile(engine, ids), sides.tokens(ids)
    model, found = sides.choose(case, ids)
    with sides.torch.inference_mode():
        there = model(tokens, use_cache=False).logits.float().cpu().numpy()
    here = as_float32(ours.logits(), config.vocab_size)
    found |= _agreement_of_logits(sides, tokens, here, there)
    del here, there
    calls = {
        "jax transformer": ours.hidden,
        "torch transformer": sides.theirs(lambda: model.model(tokens, use_cache=False)),
        "jax logits": ours.logits,
        "torch logits": sides.theirs(lambda: model(tokens, use_cache=False)),
    }
    timings = time_alternating(calls, values.repeats, warmup=1, seconds=values.row_seconds)
    label = f"{sides.name} forward batch {case.batch} canvas {case.canvas}"
    profile_again(values, label, lambda: jax.block_until_ready(ours.logits()), ours.programs.texts)
    alone = _products_and_attention(sides, case, ours, found["torch_backend"], _SHARE_OF_PARTS * values.row_seconds)
    whole = timings["jax logits"].median
    head_share = round(max(0.0, 1 - timings["jax transformer"].median / whole), 3)
    for part, head in (("transformer", 0), ("logits", case.batch * case.canvas)):
        mine, theirs = timings[f"jax {part}"], timings[f"torch {part}"]
        flops = forward_flops(config, case.batch, case.canvas, head)
        attention = config.num_layers * alone["jax attention"].median
        found[part] = ratios(mine, theirs) | {
            "jax_gflops_per_second": round(flops / mine.median / 1e6, 1),
            "torch_gflops_per_second": round(flops / theirs.median / 1e6, 1),
            "attention_share": round(attention / mine.median, 3),
            "head_share": head_share if head else 0.0,
            "products_gflops_per_second": _product_rates(config, case, alone, bool(head)),
        }
    return found


def _agreement_of_logits(sides: Sides, tokens: Any, here: np.ndarray, there: np.ndarray) -> dict[str, Any]:
    """Compare both libraries' logits ``[B, S, V]``. If they are far apart, also compare them with a wider dtype's.

    Args:
      sides: the models.
      tokens: PyTorch's tokens ``[B, S]``.
      here: JAX's logits.
      there: PyTorch's logits.
    """

    def apart(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.linalg.norm(one - other) / np.linalg.norm(other))

    dtype, difference = str(sides.engine.dtype), apart(here, there)
    found = {"relative_difference_of_logits": difference, "agrees": difference <= TOLERANCE[dtype]}
    if found["agrees"]:
        return found
    wider = _WIDER[dtype]
    with sides.torch.inference_mode():
        model = wider_copy(sides.models["default"], wider, sides.config.rope_theta)
        exact = model(tokens, use_cache=False).logits.cpu().numpy()
    distance = {"jax": apart(here, exact), "torch": apart(there, exact)}
    as_exact = distance["jax"] <= _AS_EXACT * distance["torch"]
    return found | {f"distance_from_{wider}": distance, "agrees": as_exact}


def _product_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """Return inputs and outputs of the matrices of one layer."""
    queries, pairs = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width, inner = config.hidden_size, config.intermediate_size
    return [(width, queries), (width, pairs), (width, pairs), (queries, width), *[(width, inner)] * 2, (inner, width)]


def _products_and_attention(
    sides: Sides, case: Case, ours: ForwardPass, backend: str, seconds: float
) -> dict[str, Timing]:
    """Time the matrix products of one layer and of the head in both libraries, and JAX's attention of one layer.

    Args:
      sides: the model.
      case: the sizes.
      ours: the compiled passes.
      backend: PyTorch's library for the products.
      seconds: limit for the timed calls.

    Returns:
      Timings named ``jax layer``, ``torch layer``, ``jax head``, ``torch head`` and ``jax attention``.
    """
    config, dtype, torch = sides.config, jnp.dtype(sides.engine.dtype), sides.torch
    generator, rows = np.random.default_rng(0), case.batch * case.canvas
    calls: dict[str, Callable[[], Any]] = {}

    def multiply(inputs: list[jax.Array], matrices: list[jax.Array]) -> list[jax.Array]:
        precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
        return [jnp.einsum("nd,md->nm", *pair, precision=precision) for pair in zip(inputs, matrices, strict=True)]

    def apply(layers: Any, inputs: list[Any]) -> list[Any]:
        return [layer(one) for layer, one in zip(layers, inputs, strict=True)]

    for name, shapes in (("layer", _product_shapes(config)), ("head", [(config.hidden_size, config.vocab_size)])):
        drawn = {width: generator.standard_normal((rows, width), np.float32) for width, _ in shapes}
        matrices = [generator.standard_normal((out, width), np.float32) for width, out in shapes]
        here = [jnp.asarray(drawn[width], dtype) for width, _ in shapes], [jnp.asarray(one, dtype) for one in matrices]
        program = ours.programs.get((name, case), partial(jax.jit(multiply).lower, *here))
        calls[f"jax {name}"] = partial(program, *here)
        layers = torch.nn.ModuleList(torch.nn.Linear(*shape, bias=False, device="meta") for shape in shapes)
        for layer, matrix in zip(layers, matrices, strict=True):
            layer.weight = torch.nn.Parameter(sides.tokens(matrix).to(getattr(torch, str(dtype))))
        if backend == "onednn":
            layers = run_in_onednn(torch, layers)
        inputs = [sides.tokens(drawn[width]).to(getattr(torch, str(dtype))) for width, _ in shapes]
        calls[f"torch {name}"] = sides.theirs(partial(apply, layers, inputs))
    groups = config.num_heads // config.num_kv_heads
    shape = (case.batch, case.canvas, config.num_kv_heads, groups, config.head_dim)
    q = jnp.asarray(generator.standard_normal(shape, np.float32), dtype)
    attend = jax.jit(partial(dot_product_attention, ours.forward.attention, ours.forward.layout))
    arguments = q, q[:, :, :, 0], q[:, :, :, 0], ours.lengths
    attention = ours.programs.get(("attention", case), lambda: attend.lower(*arguments))
    calls["jax attention"] = partial(attention, *arguments)
    return time_alternating(calls, _REPEATS_OF_PARTS, 1, seconds)


def _product_rates(config: ModelConfig, case: Case, alone: Mapping[str, Timing], head: bool) -> dict[str, float]:
    """Return each library's rate in the matrix products of a pass, in 1e9 operations per second."""
    rows = case.batch * case.canvas
    flops = 2.0 * rows * config.num_layers * sum(width * out for width, out in _product_shapes(config))
    flops += 2.0 * rows * config.hidden_size * config.vocab_size * head
    rates = {}
    for library in ("jax", "torch"):
        ms = config.num_layers * alone[f"{library} layer"].median + head * alone[f"{library} head"].median
        rates[library] = round(flops / ms / 1e6, 1)
    return rates


def check_greedy(sides: Sides, case: Case, model: Any, ids: np.ndarray) -> dict[str, Any]:
    """Compare the tokens of a greedy generation: a short one of masked diffusion, otherwise the one that is timed."""
    changes: dict[str, Any] = {}
    if isinstance(case.config, DiffusionConfig):
        changes = {"temperature": 0.0, "steps": min(_GREEDY_STEPS, case.config.steps)}
    here = jax_generation(case, sides.engine, ids, **changes).sequences[:, ids.shape[1] :]
    there = torch_generation(case, model, sides.config, sides.tokens(ids), **changes).cpu().numpy()[:, ids.shape[1] :]
    most = max(np.unique(row, return_counts=True)[1].max() for row in (*here, *there))
    return {
        "share_of_equal_new_tokens": float((here == there).mean()),
        "compared_steps": changes.get("steps"),
        "share_of_the_most_frequent_token": round(float(most / case.new_tokens), 4),
    }


def check_samples(sides: Sides, case: Case, model: Any, ids: np.ndarray) -> dict[str, Any]:
    """Compare what one step samples, because samples of two generators cannot be equal.

    PyTorch's filtered distributions judge both libraries' tokens: whether each token is one that the filters keep, and
    whether the mean log-likelihoods agree.
    """
    config, width = sides.config, ids.shape[1]
    assert isinstance(case.config, DiffusionConfig)
    tokens = sides.tokens(ids)
    here = jax_generation(case, sides.engine, ids, steps=1).sequences[:, width:]
    there = torch_generation(case, model, config, tokens, steps=1)[:, width:].cpu().numpy()
    offset = config.family.prediction_offset
    distributions = first_log_probabilities(model, tokens, config.mask_token_id, offset, case.config).cpu()
    found: dict[str, Any] = {}
    spread = 0.0
    for library, drawn in (("jax", here), ("torch", there)):
        index = sides.torch.from_numpy(np.ascontiguousarray(drawn, np.int64))
        likelihoods = distributions.gather(-1, index[..., None]).numpy()
        kept = likelihoods[np.isfinite(likelihoods)]
        found[library] = {
            "share_in_pytorch_support": round(len(kept) / likelihoods.size, 5),
            "mean_log_likelihood": round(float(kept.mean()), 4) if len(kept) else None,
        }
        spread += float(kept.var()) / len(kept) if len(kept) else np.inf
    means = [one["mean_log_likelihood"] for one in found.values()]
    alike = None not in means and abs(means[0] - means[1]) <= _STANDARD_ERRORS * spread**0.5
    inside = found["jax"]["share_in_pytorch_support"] >= _LEAST_IN_SUPPORT
    return {"samples": found | {"agree": bool(alike and inside)}}


def _compare_generation(sides: Sides, case: Case, values: flags.FlagValues) -> dict[str, Any]:
    """Compare the times of a generation, and its tokens or what it samples from."""
    ids = case.prompts(sides.config.vocab_size)
    model, found = sides.choose(case, ids)
    # The checks are the warm-up: they run the timed shapes in both libraries.
    found |= check_greedy(sides, case, model, ids)
    if isinstance(case.config, DiffusionConfig) and case.config.temperature > 0:
        found |= check_samples(sides, case, model, ids)
    tokens, compiled = sides.tokens(ids), [0]

    def ours() -> None:
        stats = jax_generation(case, sides.engine, ids).stats
        compiled[0] += stats.compiled_programs
        found["jax_forwards"] = stats.forwards

    if isinstance(case.config, DiffusionConfig):
        # The checks have other numbers of steps, for which there may be other programs.
        ours()
        compiled[0] = 0
    there = sides.theirs(lambda: torch_generation(case, model, sides.config, tokens))
    calls = {"jax": ours, "torch": there}
    timings = time_alternating(calls, values.repeats, warmup=0, seconds=values.row_seconds)
    label = f"{sides.name} {case.part} batch {case.batch} canvas {case.canvas} new {case.new_tokens}"
    profile_again(values, label, ours, sides.engine.program_texts)
    rates = {
        f"{name}_tokens_per_second": round(1e3 * case.batch * case.new_tokens / timing.median, 2)
        for name, timing in timings.items()
    }
    return ratios(timings["jax"], timings["torch"]) | found | rates | {"compiled_when_timed": compiled[0]}
