"""Measure model families of the same sizes with random weights: tokens per second, and what each token costs.

  python -m benchmarks.families                          118 million parameters, 1 and 8 rows, variants taking turns;
                                                         some 5 minutes on two idle cores
  python -m benchmarks.families --variants=sdar_4,qwen3 --batch=1 --new_tokens=128

A block-causal model (SDAR) with its exact cache is compared with Dream, with and without a dual cache, and with an
autoregressive Qwen3. Tokens are greedy, and every step commits one token of each row; with the dual cache, a refresh
also commits the first mask of its block. What a parallel rule saves depends on how certain the model is, and random
weights say nothing about that. The layers have the same sizes; those of SDAR and Qwen3 also normalise queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from absl import flags

from benchmarks.models import DIFFUSION, define_model_flags, model_config, model_sizes
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
from launch.process.profiling import check_profiling, define_profiling_flags, profile_again
from launch.process.startup import run_launcher
from runtime import DiffusionConfig, Engine, GenerationResult, SamplingConfig
from runtime.models.config import Family
from runtime.models.kv_cache import cache_bytes_per_device
from runtime.planner.presets import preset
from sharding.errors import InputError

_SDAR, _QWEN3 = preset("sdar-8b").family, preset("qwen3-8b").family


@dataclass(frozen=True)
class Variant:
    """A family and its way of decoding.

    Attributes:
      family: the family.
      changes: fields of the decoding parameters that differ from exact decoding.
    """

    family: Family
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def cache(self) -> str:
        """A short name of its cache."""
        return "KV" if self.family.objective == "autoregressive" else str(self.changes.get("cache", "none"))


VARIANTS = {
    "dream": Variant(DIFFUSION),
    "dream_dual_32": Variant(DIFFUSION, {"cache": "dual", "block_length": 32}),
    "sdar_32": Variant(_SDAR, {"cache": "exact", "block_length": 32}),
    "sdar_4": Variant(_SDAR, {"cache": "exact", "block_length": 4}),
    "qwen3": Variant(_QWEN3),
}


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_model_flags(values)
    flags.DEFINE_list("variants", list(VARIANTS), "Which variants.", flag_values=values)
    flags.DEFINE_list("batch", ["1", "8"], "Rows.", flag_values=values)
    flags.DEFINE_integer("prompt", 128, "Tokens in each prompt.", 1, 4096, flag_values=values)
    flags.DEFINE_integer("new_tokens", 64, "Tokens to generate.", 1, 4096, flag_values=values)
    flags.DEFINE_integer("trials", 3, "Rounds in which every variant is timed.", 1, 1000, flag_values=values)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Dtype of the weights.", flag_values=values)
    flags.DEFINE_integer("cores", None, "Processor cores to use. Default: all.", 1, flag_values=values)
    define_record_flags(values)
    define_profiling_flags(values)


def request(variant: Variant, new_tokens: int) -> DiffusionConfig | SamplingConfig:
    """Return the decoding parameters of a variant: greedy, one token per step, and no end before the last token."""
    if variant.family.objective == "autoregressive":
        return SamplingConfig(new_tokens)
    # A block-causal model decodes whole blocks: steps for one token each.
    length = variant.changes.get("block_length", new_tokens)
    steps = length * -(-new_tokens // length)
    fields = {"algorithm": "maskgit_plus", "steps": steps, "suppress_mask": True} | variant.changes
    return DiffusionConfig(new_tokens, **fields)


def measure(
    engines: dict[str, Engine], prompt: np.ndarray, new_tokens: int, trials: int
) -> tuple[list[dict[str, Any]], dict[str, Callable[[], GenerationResult]]]:
    """Time every variant on the same prompts, taking turns.

    Args:
      engines: engines by the names of their variants.
      prompt: int32 ``[B, S]``.
      new_tokens: tokens to generate per row.
      trials: number of rounds.

    Returns:
      One result per variant, and the calls that were timed.
    """
    batch, length = prompt.shape

    def caller(name: str) -> Callable[[], GenerationResult]:
        config = request(VARIANTS[name], new_tokens)
        return lambda: engines[name].generate_tokens(prompt, None, config)

    calls = {name: caller(name) for name in engines}
    made = {name: call() for name, call in calls.items()}  # compiles too, so the timed calls need no warm-up
    times = time_alternating(calls, trials, warmup=0)
    rows = []
    for name, engine in engines.items():
        stats, cache, tokens = made[name].stats, VARIANTS[name].cache, batch * new_tokens
        width = engine.runner.bucket(length + new_tokens)
        row: dict[str, Any] = {
            "variant": name,
            "family": engine.config.family.name,
            "attention": engine.config.family.attention,
            "cache": cache,
            "batch": batch,
            "ms": times[name],
            "tokens_per_second": [round(1e3 * tokens / one, 2) for one in times[name].each],
            "forwards_per_token": stats.forwards / new_tokens,
            "positions_per_token": stats.positions / tokens,
            "cache_bytes": 0
            if cache == "none"
            else cache_bytes_per_device(engine.layout, batch, width, engine.runner.cache_dtype),
            "weight_bytes": engine.layout.bytes_per_device(str(engine.dtype)),
        }
        if "qwen3" in times:
            row["of_autoregressive"] = times[name].times_as_fast_as(times["qwen3"])
        rows.append(row)
        print_row(row)
    return rows, calls


def main(values: flags.FlagValues) -> None:
    """Measure every variant at every batch size, print a line for each, and write the record."""
    check_profiling(values)
    unknown = [name for name in values.variants if name not in VARIANTS]
    if unknown:
        raise InputError(f"--variants: {', '.join(unknown)} is not one of {', '.join(VARIANTS)}")
    batches, sizes = integers("batch", values.batch), model_sizes(values)
    cores = use_cores(values.cores)
    notes = load_notes()
    engines = {
        name: Engine.random(model_config(sizes, values.dtype, VARIANTS[name].family), "data=1", values.dtype)
        for name in values.variants
    }
    # The last two tokens are mask and padding.
    prompts = np.random.default_rng(0).integers(0, sizes["vocab_size"] - 2, (max(batches), values.prompt))
    results: list[dict[str, Any]] = []
    for batch in batches:
        rows, calls = measure(engines, prompts[:batch].astype(np.int32), values.new_tokens, values.trials)
        results += rows
        for name, call in calls.items():
            profile_again(values, f"{name} {batch}", call, engines[name].program_texts)
    settings = {name: values[name].value for name in ("random", "prompt", "new_tokens", "trials", "dtype")}
    settings |= {"cores": cores, "parameters": min(engine.layout.parameter_count for engine in engines.values())}
    devices = jax.devices()[:1]
    record = build_record(
        "families", kind=kind_of_devices(devices), settings=settings, results=results, devices=devices, notes=notes
    )
    print(write_record(record, values.output_dir, values.record))


def families_table(record: dict[str, Any]) -> str:
    """Convert a record to a Markdown table with a row per variant and batch size."""
    settings, machine = record["settings"], record["machine"]
    lines = [
        "| variant | attention | cache | rows | tokens/s | of autoregressive | forwards/token | positions/token "
        "| cache MB |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in record["results"]:
        rates, ratio = row["tokens_per_second"], row.get("of_autoregressive")
        faster = "" if ratio is None else "{median:.2f}x ({minimum:.2f} to {maximum:.2f})".format(**ratio)
        cells = [
            f"`{row['variant']}`",
            row["attention"],
            row["cache"],
            row["batch"],
            f"{float(np.mean(rates)):.1f} ({min(rates):.1f} to {max(rates):.1f})",
            faster,
            f"{row['forwards_per_token']:.2f}",
            f"{row['positions_per_token']:.1f}",
            f"{row['cache_bytes'] / 1e6:.1f}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    where = (
        f"{settings['parameters'] / 1e6:.0f} million random {settings['dtype']} parameters, prompts of "
        f"{settings['prompt']}, {settings['new_tokens']} new tokens, {settings['trials']} rounds with the variants "
        f"taking turns"
    )
    made = f"{record['kind'].capitalize()}: {where}, {settings['cores']} CPU cores, {machine['processor']}."
    return "\n".join([*lines, "", made, *note_lines(record)])


def print_row(row: dict[str, Any]) -> None:
    """Print one line with a result of :func:`measure`."""
    timing: Timing = row["ms"]
    print(
        f"{row['variant']:<14} {row['batch']:>3} rows  {timing.median:10.1f} ms  "
        f"{float(np.median(row['tokens_per_second'])):8.1f} tokens/s  {row['forwards_per_token']:.2f} forwards/token  "
        f"{row['positions_per_token']:7.1f} positions/token",
        flush=True,
    )


def run(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
