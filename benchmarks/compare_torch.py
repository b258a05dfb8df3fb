"""Compare with PyTorch (transformers): both do the same work on the same device in one process, alternating.

  python -m benchmarks.compare_torch                     a mid-size model in float32, about 15 minutes on 2 cores
  python -m benchmarks.compare_torch --dtype=bfloat16 --record=compare_torch_bfloat16
  python -m benchmarks.compare_torch --random=diffucoder-7b --dtype=bfloat16 --batch=1,8 --canvas=512,1024   on a GPU

Parts: ``forward`` is one pass of a bidirectional model, without and with its output head. ``generate`` compares
masked diffusion with the published loop; half of each canvas is prompt, and half is generated greedily by entropy.
``autoregressive`` is a causal model of the same sizes with its cache, and ``gpt2`` is GPT-2 124M; both are compared
with greedy generation of transformers. Both sides have the same prompts and the same weights, which are made in PyTorch
and read here from a checkpoint. Calls alternate after a warm-up with the timed shapes. Results are compared too:
logits, and the share of equal tokens.

Dimension letters: B batch, S canvas, V vocab.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks.models import CAUSAL, DIFFUSION, checkpoint_config, define_model_flags, forward_flops, model_sizes
from benchmarks.records import (
    Timing,
    build_record,
    define_record_flags,
    integers,
    kind_of_devices,
    load_notes,
    note_lines,
    time_alternating,
    use_cores,
    write_record,
)
from benchmarks.roofline import fits_or_none
from benchmarks.torch_models import (
    diffusion_generate,
    gpt2_model,
    greedy_generate,
    import_torch,
    save_torch_model,
    torch_device,
    torch_model,
    wait_for,
)
from launch.process.profiling import check_profiling, define_profiling_flags, profile_again
from launch.process.startup import run_launcher
from runtime.decoding.parameters import DiffusionConfig, SamplingConfig
from runtime.engine import Engine
from runtime.execution.programs import ProgramCache, lower_hidden, put, widens_weights
from runtime.models.attention import choose_attention
from runtime.models.families import Weights
from runtime.models.forward import Forward
from runtime.models.transformer import hidden_states, project_logits
from sharding.errors import InputError

PARTS = ("forward", "generate", "autoregressive", "gpt2")
# Largest relative difference of the logits: the norm of the difference, divided by the norm of PyTorch's logits.
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}
_SHAPES = ("batch", "canvas", "prompt", "new_tokens", "steps")


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    define_profiling_flags(values)
    define_model_flags(values)

    def integer(name: str, default: int | None, text: str) -> None:
        flags.DEFINE_integer(name, default, text, 1, flag_values=values)

    flags.DEFINE_list("parts", list(PARTS), f"Which of {', '.join(PARTS)} to run.", flag_values=values)
    flags.DEFINE_enum("dtype", "float32", tuple(TOLERANCE), "Dtype of weights and activations.", flag_values=values)
    flags.DEFINE_list("batch", ["1", "4"], "Numbers of rows.", flag_values=values)
    flags.DEFINE_list("canvas", ["128", "512"], "Positions per row of a diffusion model.", flag_values=values)
    integer("steps", 8, "Denoise steps.")
    flags.DEFINE_float(
        "top_p", None, "Top-p filter before confidences are computed. Default: none.", 0.0, 1.0, flag_values=values
    )
    integer("top_k", None, "Top-k filter before confidences are computed. Default: none.")
    flags.DEFINE_list("new_tokens", ["15", "128"], "New tokens of autoregressive generations.", flag_values=values)
    integer("prompt", 16, "Prompt tokens of autoregressive generations.")
    integer("repeats", 5, "Timed calls per comparison.")
    integer("cores", None, "Processor cores to use. Default: all.")


@dataclass(frozen=True)
class Sides:
    """One model in JAX and in PyTorch.

    Attributes:
      engine: the model in JAX.
      torch: the ``torch`` module.
      model: the model in PyTorch.
      device: PyTorch's name of the device that both use.
    """

    engine: Engine
    torch: Any
    model: Any
    device: str

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


def ratios(ours: Timing, theirs: Timing) -> dict[str, Any]:
    """Return both times and their ratio, with the spread over pairs of calls."""
    return {
        "jax_ms": ours,
        "torch_ms": theirs,
        "times_as_fast": ours.times_as_fast_as(theirs),
        "times_as_fast_by_processor_time": round(theirs.cpu / ours.cpu, 3) if ours.cpu else None,
    }


def compare_forward(sides: Sides, batch: int, canvas: int, values: flags.FlagValues) -> dict[str, Any]:
    """Compare the times of a pass over tokens ``[B, S]``, without and with the head, and the logits."""
    engine, layout, config = sides.engine, sides.engine.layout, sides.engine.config
    ids = np.random.default_rng(0).integers(0, config.vocab_size - 2, (batch, canvas))
    forward = Forward(layout, choose_attention("auto", engine.platform, layout, canvas, engine.dtype))
    arguments = (
        engine.weights,
        put(ids.astype(np.int32), layout.sharding("batch", None)),
        put(np.full(batch, canvas, np.int32), layout.sharding("batch")),
    )

    def logits(weights: Weights, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        hidden = hidden_states(forward, weights, tokens, lengths)
        # Logits in the model's dtype, as in PyTorch.
        return project_logits(forward, weights, hidden).astype(engine.dtype)

    programs = ProgramCache(engine.platform, widens_weights(engine.layout, engine.dtype))
    transformer = programs.get(("transformer", ids.shape), lambda: lower_hidden(forward, *arguments))
    whole = programs.get(("logits", ids.shape), lambda: jax.jit(logits).lower(*arguments))
    tokens = sides.tokens(ids)
    with sides.torch.inference_mode():
        there = sides.model(tokens).logits.float().cpu().numpy()
    here = np.asarray(whole(*arguments).astype(jnp.float32))[..., : config.vocab_size]
    difference = float(np.linalg.norm(here - there) / np.linalg.norm(there))
    calls = {
        "jax transformer": lambda: transformer(*arguments),
        "torch transformer": sides.theirs(lambda: sides.model.model(tokens)),
        "jax logits": lambda: whole(*arguments),
        "torch logits": sides.theirs(lambda: sides.model(tokens)),
    }
    timings = time_alternating(calls, values.repeats)
    label = f"forward batch {batch} canvas {canvas}"
    profile_again(values, label, lambda: jax.block_until_ready(whole(*arguments)), programs.texts)
    found: dict[str, Any] = {
        "relative_difference_of_logits": difference,
        "agrees": difference <= TOLERANCE[values.dtype],
    }
    for part, head in (("transformer", 0), ("logits", batch * canvas)):
        ours, theirs = timings[f"jax {part}"], timings[f"torch {part}"]
        flops = forward_flops(config, batch, canvas, head)
        found[part] = ratios(ours, theirs) | {
            "jax_gflops_per_second": round(flops / ours.median / 1e6, 1),
            "torch_gflops_per_second": round(flops / theirs.median / 1e6, 1),
        }
    return found


def compare_generation(
    sides: Sides, prompt: np.ndarray, request: Any, theirs: Callable[[Any], Any], values: flags.FlagValues
) -> dict[str, Any]:
    """Compare the times of a generation from prompts ``[B, P]``, and the new tokens.

    Args:
      sides: the model.
      prompt: the prompts.
      request: decoding parameters for JAX.
      theirs: runs the generation in PyTorch, given the prompts.
      values: the flags.
    """
    tokens = sides.tokens(prompt)
    found: dict[str, Any] = {}

    def ours() -> None:
        found["jax"] = sides.engine.generate_tokens(prompt, config=request)

    def there() -> None:
        found["torch"] = theirs(tokens)

    timings = time_alternating({"jax": ours, "torch": sides.theirs(there)}, values.repeats, warmup=1)
    batch, width = prompt.shape
    label = f"generation batch {batch} prompt {width} new {request.max_new_tokens}"
    profile_again(values, f"{sides.engine.config.family.name} {label}", ours, sides.engine.program_texts)
    stats, new = found["jax"].stats, request.max_new_tokens
    same = found["jax"].sequences[:, width:] == found["torch"].cpu().numpy()[:, width:]
    return ratios(timings["jax"], timings["torch"]) | {
        "jax_forwards": stats.forwards,
        "compiled_in_the_last_run": stats.compiled_programs,
        "jax_tokens_per_second": round(1e3 * batch * new / timings["jax"].median, 2),
        "torch_tokens_per_second": round(1e3 * batch * new / timings["torch"].median, 2),
        "share_of_equal_new_tokens": float(same.mean()),
    }


def both_sides(part: str, torch: Any, device: str, values: flags.FlagValues) -> Sides:
    """Make a part's model in JAX and in PyTorch, with the same weights."""
    dtype = values.dtype
    with tempfile.TemporaryDirectory() as folder:
        if part == "gpt2":
            model = gpt2_model(dtype, device)
            model.save_pretrained(folder)
        else:
            family = CAUSAL if part == "autoregressive" else DIFFUSION
            config = checkpoint_config(model_sizes(values), dtype, family)
            model = torch_model(config, dtype, device)
            save_torch_model(model, config, Path(folder))
        engine = Engine.load(folder, mesh="data=1", dtype=dtype, devices=jax.devices()[:1])
    return Sides(engine, torch, model, device)


def compare_part(part: str, torch: Any, device: str, values: flags.FlagValues) -> list[dict[str, Any]]:
    """Run every comparison of a part, and return the result of each. The models can be freed afterwards."""
    rows = []
    sides = both_sides(part, torch, device, values)
    for sizes, compare in cases(part, sides, values):
        found = fits_or_none(compare)
        row = sizes | ({"out_of_memory": found} if isinstance(found, str) else found)
        rows.append(row)
        print(line(part, sizes, row), flush=True)
    return rows


def free_memory(torch: Any, device: str) -> None:
    """Free unreferenced memory in both frameworks."""
    jax.clear_caches()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def cases(part: str, sides: Sides, values: flags.FlagValues) -> Iterator[tuple[dict[str, int], Callable[[], Any]]]:
    """Yield the comparisons of one part: for each, its sizes, and a function that runs it and returns the result.

    Args:
      part: a name out of ``PARTS``.
      sides: the model in both frameworks.
      values: flags with the sizes to compare.
    """
    generator, vocab = np.random.default_rng(0), sides.engine.config.vocab_size - 2
    for batch in integers("batch", values.batch):
        if part in ("forward", "generate"):
            for canvas in integers("canvas", values.canvas):
                if part == "forward":
                    yield {"batch": batch, "canvas": canvas}, partial(compare_forward, sides, batch, canvas, values)
                    continue
                new, steps = canvas // 2, values.steps
                request = DiffusionConfig(
                    max_new_tokens=new,
                    steps=steps,
                    algorithm="entropy",
                    top_p=values.top_p,
                    top_k=values.top_k,
                    confidence_dtype="model",  # as in the PyTorch loop
                )

                def denoise(tokens: Any, new: int = new) -> Any:
                    config = sides.engine.config
                    mask, offset = config.mask_token_id, config.family.prediction_offset
                    filters = values.top_p, values.top_k
                    return diffusion_generate(sides.model, tokens, mask, offset, new, values.steps, *filters)

                prompt = generator.integers(0, vocab, (batch, canvas - new))
                sizes = {"batch": batch, "canvas": canvas, "new_tokens": new, "steps": steps}
                yield sizes, partial(compare_generation, sides, prompt, request, denoise, values)
        else:
            for new in integers("new_tokens", values.new_tokens):
                prompt = generator.integers(0, vocab, (batch, values.prompt))

                def decode(tokens: Any, new: int = new) -> Any:
                    return greedy_generate(sides.model, tokens, new)

                greedy = SamplingConfig(max_new_tokens=new)
                sizes = {"batch": batch, "prompt": values.prompt, "new_tokens": new}
                yield sizes, partial(compare_generation, sides, prompt, greedy, decode, values)


def main(values: flags.FlagValues) -> None:
    """Run the comparisons, print a line for each shape, and write the record."""
    # Both frameworks share the device's memory, so allocate only what is needed.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    check_profiling(values)
    if not values.parts or set(values.parts) - set(PARTS):
        raise InputError(f"--parts={','.join(values.parts)}: expected some of {', '.join(PARTS)}")
    cores = use_cores(values.cores)
    notes = load_notes(torch_cores=cores)
    torch = import_torch()
    torch.set_num_threads(cores)
    devices = jax.devices()[:1]
    device = torch_device(torch, devices[0].platform)
    results: dict[str, list[dict[str, Any]]] = {}
    for part in values.parts:
        results[part] = compare_part(part, torch, device, values)
        free_memory(torch, device)
    record = build_record(
        "compare_torch",
        kind=kind_of_devices(devices),
        settings={
            **model_sizes(values),
            "dtype": values.dtype,
            "cores": cores,
            "algorithm": "entropy",
            "temperature": 0.0,
            "top_p": values.top_p,
            "top_k": values.top_k,
            "torch_device": device,
            "torch_attention": "sdpa",
            "tolerance_of_logits": TOLERANCE[values.dtype],
        },
        results=results,
        devices=devices,
        notes=notes,
    )
    print(f"written: {write_record(record, values.output_dir, values.record)}")


def line(part: str, sizes: dict[str, int], row: dict[str, Any]) -> str:
    """Return one line with the results of a comparison."""
    shape = " ".join(f"{name}={size}" for name, size in sizes.items())
    if "out_of_memory" in row:
        return f"{part} {shape}: out of memory"
    compared = {name: row[name] for name in ("transformer", "logits")} if part == "forward" else {"": row}
    texts = []
    for name, found in compared.items():
        fast = found["times_as_fast"]
        texts.append(
            f"{part} {shape} {name}: jax {found['jax_ms'].median:.1f} ms, torch {found['torch_ms'].median:.1f} ms, "
            f"{fast['median']:.2f}x as fast ({fast['minimum']:.2f} to {fast['maximum']:.2f})"
        )
    same = row.get("share_of_equal_new_tokens")
    texts[-1] += (
        f", logits {row['relative_difference_of_logits']:.1e} apart"
        if same is None
        else f", {same:.1%} of tokens equal"
    )
    return "\n".join(texts)


def comparison_table(record: Mapping[str, Any]) -> str:
    """Convert a record to a Markdown table."""
    settings, versions = record["settings"], record["versions"]
    lines = [
        f"{settings['dtype']}, {settings['cores']} cores, {record['machine']['device_kind']}; jax {versions['jax']}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}. {record['kind'].capitalize()}: "
        f"`{record['command']}`.",
        "",
        "| | | JAX ms | PyTorch ms | times as fast, median | minimum to maximum | |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for part, rows in record["results"].items():
        for row in rows:
            shape = ", ".join(f"{name.replace('_', ' ')} {row[name]}" for name in _SHAPES if name in row)
            if "out_of_memory" in row:
                lines.append(f"| {part} | {shape} | out of memory | | | | |")
                continue
            same = row.get("share_of_equal_new_tokens")
            agrees = f"logits {row['relative_difference_of_logits']:.1e} apart" if same is None else f"{same:.1%} equal"
            for name in ("transformer", "logits") if part == "forward" else ("",):
                found = row[name] if name else row
                fast = found["times_as_fast"]
                lines.append(
                    f"| {part} {name} | {shape} | {found['jax_ms']['median']:.1f} | {found['torch_ms']['median']:.1f} "
                    f"| {fast['median']:.2f} | {fast['minimum']:.2f} to {fast['maximum']:.2f} | {agrees} |"
                )
    return "\n".join([*lines, *note_lines(record)])


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
