"""Cost, speed and quality of each decoding mode: the demo checkpoint writes functions that are then executed.

  python -m benchmarks.diffusion_modes                       one prompt at a time, as a table and a plot
  python -m benchmarks.diffusion_modes --prompts=20 --modes=exact,fast_dllm,dual_threshold_32

Every mode completes the same held-out tasks, greedily, one at a time, and ends a row at its end token (``_full_canvas``
does not). A task is passed if its one completion passes all tests in a limited child process (pass@1). Two modes count
as equally good if the 95 % interval of the difference on the same tasks lies above -2 points. Also reported: the share
of completions that parse, their agreement with those of the exact algorithm, and a Monte Carlo bound of the nats per
token under the exact model (Sahoo et al., 2024), with the same noise for all modes. Cost is reported as forward passes
and computed positions per token and as tokens per second; speed is measured on the first few prompts, repeatedly, with
the modes taking turns, after a warm-up with the same shapes.

``fast_dllm``, the Fast-dLLM baseline, is the dual cache with the threshold rule as published (Wu et al., 2025), batch
1: a full forward pass at each block's start commits the block's first token, then forward passes over the block alone
commit the tokens that reach the threshold. It checks for an end token after each block, where our modes check after
each step. ``fast_dllm_preset`` is the same rule in our loop.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from benchmarks.demo_quality import read_held_out
from benchmarks.fast_dllm_baseline import FastDLLMBaseline
from benchmarks.mode_plots import draw_modes
from benchmarks.mode_quality import paired_difference, pareto_front, quality, recommended
from benchmarks.records import (
    Timing,
    build_record,
    check_output,
    define_record_flags,
    load_notes,
    note_lines,
    time_alternating,
    use_cores,
    write_record,
)
from launch.process.profiling import check_profiling, define_profiling_flags, profile_again
from launch.process.startup import run_launcher, this_host
from runtime import DiffusionConfig, Engine
from runtime.execution.rows import bucket_length
from runtime.models.kv_cache import cache_bytes_per_device, cache_dtype
from sharding.errors import InputError

TASKS = "held_out_tasks.jsonl"
# The mode with Fast-dLLM's published setting: blocks of 32, the dual cache and a threshold of 0.9.
PUBLISHED = "fast_dllm_preset"


@dataclass(frozen=True)
class Mode:
    """A decoding mode.

    Attributes:
      changes: fields that differ from the exact configuration; None for the Fast-dLLM baseline.
      baseline_block: positions of the baseline's blocks.
      baseline_stops: whether the baseline stops after a block with an end token.
      quantize: quantization of the weights.
      dtype: dtype of weights that are not quantized, and of activations.
      kv_cache: dtype of the cache.
    """

    changes: dict[str, Any] | None
    quantize: str = "none"
    dtype: str = "float32"
    kv_cache: str = "model"
    baseline_block: int = 32
    baseline_stops: bool = True


_THRESHOLD = {"parallel": "threshold", "algorithm": "maskgit_plus"}
_DUAL_8 = {"cache": "dual", "block_length": 8, **_THRESHOLD}
_ONCE = {**_DUAL_8, "refresh_blocks": 0}
_FAST_DLLM = {"block_rule": "fast_dllm", "cache": "dual", **_THRESHOLD}
_FULL = {"early_stop": False}
MODES = {
    "exact_full_canvas": Mode(_FULL),
    "exact": Mode({}),
    "exact_bfloat16": Mode({}, dtype="bfloat16"),
    "exact_int8": Mode({}, "int8"),
    "blocks_32": Mode({"block_length": 32}),
    "dual_32": Mode({"cache": "dual", "block_length": 32}),
    "dual_32_refresh_8": Mode({"cache": "dual", "block_length": 32, "refresh_interval": 8}),
    "dual_8": Mode({"cache": "dual", "block_length": 8}),
    "prefix_32": Mode({"cache": "prefix", "block_length": 32}),
    "threshold_32": Mode({"block_length": 32, **_THRESHOLD}),
    "fast_dllm": Mode(None),
    PUBLISHED: Mode({**_FAST_DLLM, "block_length": 32}),
    "fast_dllm_8": Mode(None, baseline_block=8),
    "fast_dllm_preset_8": Mode({**_FAST_DLLM, "block_length": 8}),
    "fast_dllm_8_full_canvas": Mode(None, baseline_block=8, baseline_stops=False),
    "fast_dllm_preset_8_full_canvas": Mode({**_FAST_DLLM, "block_length": 8, **_FULL}),
    "dual_threshold_32": Mode({"cache": "dual", "block_length": 32, **_THRESHOLD}),
    "dual_threshold_16": Mode({"cache": "dual", "block_length": 16, **_THRESHOLD}),
    "dual_threshold_8": Mode(_DUAL_8),
    "dual_threshold_8_at_0.5": Mode({**_DUAL_8, "threshold": 0.5}),
    "dual_factor_8": Mode({**_DUAL_8, "parallel": "factor"}),
    "dual_frechet_8": Mode({**_DUAL_8, "parallel": "frechet"}),
    "dual_entropy_bound_8": Mode({**_DUAL_8, "parallel": "entropy_bound"}),
    "dual_threshold_8_decay": Mode({**_DUAL_8, "threshold_decay": 0.5}),
    "dual_threshold_8_suffix": Mode({**_DUAL_8, "suffix_window": 16}),
    "dual_threshold_8_refresh_2": Mode({**_DUAL_8, "refresh_blocks": 2}),
    "dual_threshold_8_once": Mode(_ONCE),
    "dual_threshold_8_once_bfloat16": Mode(_ONCE, dtype="bfloat16"),
    "dual_threshold_8_once_int8": Mode(_ONCE, "int8"),
    "dual_threshold_8_once_int8_cache": Mode(_ONCE, "int8", kv_cache="int8"),
}
# Intermediate modes, which run only if --modes names them.
_BETWEEN = ("blocks_32", "dual_threshold_16", "dual_threshold_8_refresh_2")


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    flags.DEFINE_string("checkpoint", "checkpoints/demo", f"Folder with {TASKS} in it.", flag_values=values)
    flags.DEFINE_integer("prompts", 600, "Held-out tasks to complete.", 1, 10000, flag_values=values)
    flags.DEFINE_integer("new_tokens", 64, "Masks appended.", 1, 4096, flag_values=values)
    flags.DEFINE_integer("trials", 3, "Rounds in which every mode is timed.", 1, 1000, flag_values=values)
    flags.DEFINE_integer("timed_prompts", 20, "Prompts per round.", 1, 10000, flag_values=values)
    flags.DEFINE_list("modes", [name for name in MODES if name not in _BETWEEN], "Which modes.", flag_values=values)
    flags.DEFINE_integer("cores", None, "Processor cores to use. Default: all.", 1, flag_values=values)
    flags.DEFINE_string(
        "plot", None, "Where to draw cost against quality. Default: beside the record.", flag_values=values
    )
    define_record_flags(values)
    define_profiling_flags(values)


def completer(engine: Engine, mode: Mode, base: DiffusionConfig) -> Callable[[np.ndarray], tuple[np.ndarray, int, int]]:
    """Return a function that completes a prompt ``[S]``.

    It returns the new tokens, the number of forward passes, and the number of computed positions.
    """
    if mode.changes is None:
        baseline = FastDLLMBaseline(
            engine, base.max_new_tokens, mode.baseline_block, engine.end_token_ids if mode.baseline_stops else ()
        )
        return lambda prompt: baseline(prompt[None])
    config = base.replace(**mode.changes)

    def complete(prompt: np.ndarray) -> tuple[np.ndarray, int, int]:
        made = engine.generate_tokens(prompt[None], None, config)
        return made.sequences[0, len(prompt) :], made.stats.forwards, made.stats.positions

    return complete


def up_to_end(new: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """Return the new tokens up to and including the first end token."""
    return new[: next((place + 1 for place, token in enumerate(new.tolist()) if token in ends), len(new))]


def run_mode(
    engine: Engine, mode: Mode, base: DiffusionConfig, prompts: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Complete every prompt. Return new tokens up to the first end token, and passes and positions per token."""
    made = [completer(engine, mode, base)(prompt) for prompt in prompts]
    completions = [up_to_end(new, engine.end_token_ids) for new, _, _ in made]
    tokens = sum(map(len, completions))
    cost = {
        "tokens": tokens,
        "forwards_per_token": sum(forwards for _, forwards, _ in made) / tokens,
        "positions_per_token": sum(positions for _, _, positions in made) / tokens,
    }
    return completions, cost


def speeds(timing: Timing, exact: Timing | None, tokens: int, exact_tokens: int) -> dict[str, Any]:
    """Return the tokens per second over all rounds, and the ratio to exact decoding per round.

    Args:
      timing: milliseconds of each round.
      exact: times of the exact algorithm in the same rounds, if it ran.
      tokens: tokens per round.
      exact_tokens: tokens per round of the exact algorithm.
    """
    each = [1e3 * tokens / one for one in timing.each]
    found: dict[str, Any] = {
        "seconds": timing.mean / 1e3,
        "tokens_per_second": statistics.mean(each),
        "tokens_per_second_deviation": statistics.stdev(each) if len(each) > 1 else 0.0,
        "tokens_per_second_minimum": min(each),
        "tokens_per_second_maximum": max(each),
    }
    if exact is not None:
        ratios = [one / (1e3 * exact_tokens / other) for one, other in zip(each, exact.each, strict=True)]
        found["of_exact"] = statistics.median(ratios)
        found["of_exact_minimum"], found["of_exact_maximum"] = min(ratios), max(ratios)
    return found


def cache_bytes(engine: Engine, mode: Mode, length: int) -> int:
    """Return the bytes of one row's cache; 0 if the mode has no cache."""
    if mode.changes is not None and mode.changes.get("cache", "none") == "none":
        return 0
    return cache_bytes_per_device(engine.layout, 1, bucket_length(length), cache_dtype(mode.kv_cache, engine.dtype))


def _points(found: dict[str, Any] | None) -> str:
    """Format the result of :func:`benchmarks.mode_quality.paired_difference` in percentage points."""
    if found is None:
        return ""
    low, high = found["interval"]
    return f"{100 * found['difference']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def modes_table(record: dict[str, Any]) -> str:
    """Convert a record to a Markdown table with a row per mode."""
    results, settings, machine = record["results"], record["settings"], record["machine"]
    exact = results.get("exact")
    front = pareto_front(results)
    lines = [
        "| mode | passes (95 %) | points more than exact (95 %) | points more than Fast-dLLM (95 %) | tokens/s "
        "| speed vs exact | forwards/token | positions/token | positions vs exact | parses | similarity to exact "
        "| nats/token | weights MB | cache MB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in results.items():
        faster = ""
        if "of_exact" in row:
            faster = f"{row['of_exact']:.1f}x ({row['of_exact_minimum']:.1f} to {row['of_exact_maximum']:.1f})"
        fewer = "" if exact is None else f"1/{exact['positions_per_token'] / row['positions_per_token']:.1f}"
        low, high = row["passed_rate_95"]
        cells = [
            f"**`{name}`**" if name in front else f"`{name}`",
            f"{row['passed_rate']:.1%} ({low:.1%} to {high:.1%})",
            _points(row.get("to_exact")),
            _points(row.get("to_published")),
            f"{row['tokens_per_second']:.0f} ± {row['tokens_per_second_deviation']:.0f}",
            faster,
            f"{row['forwards_per_token']:.2f}",
            f"{row['positions_per_token']:.1f}",
            fewer,
            f"{row['parsed_rate']:.1%}",
            "" if row["exact_agreement"] is None else f"{row['exact_agreement']:.2f}",
            f"{row['nats_per_token']:.2f}",
            f"{row['weight_bytes'] / 1e6:.1f}",
            f"{row['cache_bytes'] / 1e6:.1f}" if "cache_bytes" in row else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    goals = "; ".join(f"{goal}: `{name}`" for goal, name in recommended(results).items())
    lines += ["", f"In bold: no other mode passes more tasks with fewer computed positions. Per goal: {goals}."]
    where = (
        f"{settings['prompts']} tasks, {settings['new_tokens']} masks each, one at a time, {settings['cores']} CPU "
        f"cores; speed over {settings['trials']} rounds of {settings['timed_prompts']} prompts, modes taking turns "
        "(mean ± deviation; speed vs exact: median, minimum, maximum of the rounds)"
    )
    lines += ["", f"Measured: {where}, jax {record['versions']['jax']}, {machine['processor']}."]
    return "\n".join([*lines, *note_lines(record)])


def check_flags(values: flags.FlagValues) -> None:
    """Check the flags before anything is loaded.

    Raises:
      InputError: a mode, a number of tokens or the plot's path is wrong, or matplotlib is missing.
    """
    check_profiling(values)
    unknown = [name for name in values.modes if name not in MODES]
    if unknown:
        raise InputError(f"--modes: {', '.join(unknown)} is not one of {', '.join(MODES)}")
    if values.new_tokens % 32:
        raise InputError(
            f"--new_tokens={values.new_tokens}: the Fast-dLLM baseline requires a multiple of its blocks of 32"
        )
    if values.plot is not None:
        check_output("plot", Path(values.plot), is_file=True)
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("the plot needs matplotlib: pip install 'diffumesh[bench]'")


def print_row(name: str, row: dict[str, Any]) -> None:
    """Print one line with a mode's results."""
    print(
        f"{name:<28} {row['tokens_per_second']:7.1f} ± {row['tokens_per_second_deviation']:4.1f} tok/s "
        f"{row['forwards_per_token']:6.3f} fwd/tok {row['positions_per_token']:7.1f} pos/tok  "
        f"passed {row['passed_rate']:.3f} [{row['passed_rate_95'][0]:.3f}, {row['passed_rate_95'][1]:.3f}]  "
        f"nats {row['nats_per_token']:.3f}",
        flush=True,
    )


def measure(values: flags.FlagValues, tasks: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Run every mode on the held-out tasks, then time the modes in turn. Return the results by mode."""
    base = DiffusionConfig(
        max_new_tokens=values.new_tokens, steps=values.new_tokens, algorithm="entropy", early_stop=True
    )

    @functools.cache
    def engine_of(dtype: str, quantize: str, kv_cache: str) -> Engine:
        return Engine.load(values.checkpoint, "tensor=1", dtype, quantize=quantize, kv_cache=kv_cache)

    scorer = engine_of("float32", "none", "model")
    prompts = [np.array(scorer.tokenizer.encode(row["prompt"]), np.int32) for row in tasks]
    timed = prompts[: values.timed_prompts]
    results: dict[str, dict[str, Any]] = {}
    rounds: dict[str, Callable[[], Any]] = {}
    tokens: dict[str, int] = {}
    exact: list[np.ndarray] | None = None
    for name in values.modes:
        mode = MODES[name]
        engine = engine_of(mode.dtype, mode.quantize, mode.kv_cache)
        made, cost = run_mode(engine, mode, base, prompts)
        rounds[name] = functools.partial(run_mode, engine, mode, base, timed)
        tokens[name] = sum(map(len, made[: len(timed)]))
        again = functools.partial(run_mode, engine, mode, base, prompts[:2])
        profile_again(values, name, again, engine.program_texts)
        exact = made if name == "exact" else exact
        results[name] = {
            **cost,
            **quality(scorer, tasks, prompts, made, exact, base.max_new_tokens),
            "weight_bytes": engine.layout.bytes_per_device(mode.dtype),
            "cache_bytes": cache_bytes(engine, mode, max(map(len, prompts)) + base.max_new_tokens),
        }
        this_host().mark()
        print(f"{name}: {results[name]['passed']} of {len(prompts)} tasks passed", flush=True)
    timings = time_alternating(rounds, values.trials, warmup=1)
    for name, row in results.items():
        for key, other in (("to_exact", "exact"), ("to_published", PUBLISHED)):
            if other in results:
                row[key] = paired_difference(row["passes"], results[other]["passes"])
        row |= speeds(timings[name], timings.get("exact"), tokens[name], tokens.get("exact", 0))
        print_row(name, row)
    return results


def main(values: flags.FlagValues) -> None:
    """Run every mode and write the record, the table and the plot."""
    check_flags(values)
    cores = use_cores(values.cores)
    notes = load_notes()
    tasks = read_held_out(Path(values.checkpoint), TASKS)[: values.prompts]
    results = measure(values, tasks)
    record = build_record(
        "diffusion_modes",
        kind="measured",
        settings={
            "prompts": len(tasks),
            "new_tokens": values.new_tokens,
            "modes": values.modes,
            "trials": values.trials,
            "timed_prompts": min(len(tasks), values.timed_prompts),
            "cores": cores,
        },
        results=results,
        devices=jax.devices(),
        notes=notes,
    )
    path = write_record(record, values.output_dir, values.record)
    print(path)
    plot = Path(values.plot) if values.plot else path.with_suffix(".png")
    draw_modes(results, plot)
    print(plot)


def run(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
