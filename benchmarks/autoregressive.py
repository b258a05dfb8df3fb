"""Measure GPT-2 124M with random weights, with and without a cache: tokens per second and memory.

  python -m benchmarks.autoregressive                         15 and 128 new tokens, float32, bfloat16 and int8
  python -m benchmarks.autoregressive --variants=float32,int8 --new_tokens=15 --trials=3

Each variant is warmed up with the shapes that are timed. Its cached and uncached runs take turns, and must yield the
same tokens. Means and deviations are over the trials. ``int8`` quantizes the weights (``int8_cache`` also the cache);
activations are float32. ``python -m benchmarks.compare_torch --parts=gpt2`` compares with transformers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from absl import flags

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
from runtime import Engine, SamplingConfig
from runtime.models.kv_cache import cache_bytes_per_device
from runtime.planner.presets import preset
from sharding.errors import InputError

# name -> dtype of the weights, quantization, dtype of the cache.
VARIANTS = {
    "float32": ("float32", "none", "model"),
    "bfloat16": ("bfloat16", "none", "model"),
    "int8": ("float32", "int8", "model"),
    "int8_cache": ("float32", "int8", "int8"),
}


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    flags.DEFINE_list("variants", list(VARIANTS), "Variants: dtypes of weights and cache.", flag_values=values)
    flags.DEFINE_list("new_tokens", ["15", "128"], "Tokens to generate.", flag_values=values)
    flags.DEFINE_integer("prompt", 16, "Tokens in the prompt.", 1, 512, flag_values=values)
    flags.DEFINE_integer("batch", 1, "Rows.", 1, 64, flag_values=values)
    flags.DEFINE_integer("trials", 5, "Timed runs per variant.", 2, flag_values=values)
    flags.DEFINE_integer("cores", None, "Processor cores to use. Default: all.", 1, flag_values=values)
    define_record_flags(values)
    define_profiling_flags(values)


def rates(timing: Timing, tokens: int) -> dict[str, float]:
    """Return the tokens per second of the timed calls: mean, deviation, minimum and maximum."""
    found = [1e3 * tokens / milliseconds for milliseconds in timing.each]
    return {
        "mean": round(statistics.mean(found), 2),
        "deviation": round(statistics.stdev(found), 2),
        "minimum": round(min(found), 2),
        "maximum": round(max(found), 2),
    }


def measure(values: flags.FlagValues, name: str, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Time one variant with and without a cache at every length. Return one result per combination."""
    config = preset("gpt2")
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, (values.batch, values.prompt)).astype(np.int32)
    dtype, quantize, kv_cache = VARIANTS[name]
    engine = Engine.random(config, "data=1", dtype, quantize=quantize, kv_cache=kv_cache)
    rows: list[dict[str, Any]] = []
    for new in lengths:
        # Without a cache, the dtype of the cache makes no difference, so one variant without a cache is enough.
        calls = {
            str(cached): partial(
                engine.generate_tokens, prompt, None, SamplingConfig(max_new_tokens=new, use_cache=cached)
            )
            for cached in ((True, False) if kv_cache == "model" else (True,))
        }
        made = {name: call() for name, call in calls.items()}
        timings = time_alternating(calls, values.trials, warmup=1)
        for said, call in calls.items():
            cached, width = said == "True", values.prompt + new
            row = {
                "variant": name,
                "cached": cached,
                "new_tokens": new,
                "tokens_per_second": rates(timings[said], values.batch * new),
                "programs_compiled_when_timed": call().stats.compiled_programs,
                "weight_bytes": engine.layout.bytes_per_device(dtype),
                "cache_bytes": cache_bytes_per_device(
                    engine.layout, values.batch, engine.runner.bucket(width), engine.runner.cache_dtype
                )
                if cached
                else 0,
            }
            rows.append(row)
            print_row(row)
            label = f"{name} {new} {'cached' if cached else 'uncached'}"
            profile_again(values, label, call, engine.program_texts)
        # An int8 cache changes the model; any other cache must not change tokens.
        if kv_cache == "model" and dtype == "float32":
            rows[-1]["same_tokens_as_cached"] = bool(np.array_equal(made["True"].sequences, made["False"].sequences))
    return rows


def main(values: flags.FlagValues) -> None:
    """Measure every variant, print a line for each, and write the record."""
    check_profiling(values)
    unknown = [name for name in values.variants if name not in VARIANTS]
    if unknown:
        raise InputError(f"--variants: {', '.join(unknown)} is not one of {', '.join(VARIANTS)}")
    lengths = integers("new_tokens", values.new_tokens)
    cores = use_cores(values.cores)
    notes = load_notes()
    results = [row for name in values.variants for row in measure(values, name, lengths)]
    record = build_record(
        "autoregressive",
        kind=kind_of_devices(jax.devices()),
        settings={
            "model": "gpt2",
            "prompt": values.prompt,
            "batch": values.batch,
            "trials": values.trials,
            "cores": cores,
        },
        results=results,
        devices=jax.devices(),
        notes=notes,
    )
    print(write_record(record, values.output_dir, values.record))
    # Last, so that near-ties in one case do not lose the times of all.
    assert all(row.get("same_tokens_as_cached", True) for row in results), "cached and uncached tokens differ"


def autoregressive_table(record: dict[str, Any]) -> str:
    """Convert a record to a Markdown table with a row per variant and length."""
    settings, machine = record["settings"], record["machine"]
    lines = [
        "| weights | new tokens | cached, tokens/s | uncached, tokens/s | cached / uncached | weights MB | cache MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    rows: dict[tuple[str, int], dict[bool, dict[str, Any]]] = {}
    for row in record["results"]:
        rows.setdefault((row["variant"], row["new_tokens"]), {})[row["cached"]] = row

    def rate(row: dict[str, Any] | None) -> str:
        return "" if row is None else "{mean:.1f} ± {deviation:.1f}".format(**row["tokens_per_second"])

    for (variant, new), pair in rows.items():
        memory = [f"{pair[True][name] / 1e6:.1f}" for name in ("weight_bytes", "cache_bytes")]
        means = [pair[cached]["tokens_per_second"]["mean"] for cached in (True, False) if cached in pair]
        ratio = f"{means[0] / means[1]:.1f}x" if len(means) == 2 else ""
        cells = (variant, new, rate(pair[True]), rate(pair.get(False)), ratio, *memory)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    where = f"prompt of {settings['prompt']}, batch {settings['batch']}, {settings['trials']} trials"
    made = f"{record['kind'].capitalize()}: {where}, {settings['cores']} CPU cores, {machine['processor']}."
    return "\n".join([*lines, "", made, *note_lines(record)])


def print_row(row: dict[str, Any]) -> None:
    """Print one line with a result of :func:`measure`."""
    rate = row["tokens_per_second"]
    memory = f"  weights {row['weight_bytes'] / 1e6:.0f} MB, cache {row['cache_bytes'] / 1e6:.1f} MB"
    print(
        f"{row['variant']:<11} {'cached' if row['cached'] else 'uncached':<9} "
        f"{row['new_tokens']:>4} new  {rate['mean']:8.2f} ± {rate['deviation']:.2f} tokens/s{memory}",
        flush=True,
    )


def run(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
