"""Cost, speed and quality of each decoding mode: the demo checkpoint writes functions that are then executed.

  python -m benchmarks.diffusion_modes                       one prompt at a time, as a table and a plot
  python -m benchmarks.diffusion_modes --prompts=20 --modes=exact,fast_dllm,dual_8_once

Every mode completes the same held-out tasks, greedily, one at a time, and ends a row at its end token. A task is passed
if its one completion passes all tests in a limited child process (pass@1). Two modes count as equally good if the 95 %
interval of the difference on the same tasks lies above -2 points. Also reported: the share of completions that parse,
their agreement with those of the exact algorithm, and a Monte Carlo bound of the nats per token under the exact model
(Sahoo et al., 2024), with the same noise for all modes. Cost is reported as forward passes and computed positions per
token and as tokens per second; speed is measured on the first few prompts, repeatedly, with the modes taking turns,
after a warm-up with the same shapes. The settings of the modes were chosen on the development tasks.

``fast_dllm`` is Fast-dLLM's rule (Wu et al., 2025) as published, the dual cache, blocks of 32 and a threshold of 0.9,
with the early stop of the other modes. Our loop with this rule is also timed beside the plain loop of
``benchmarks.fast_dllm_baseline``, with early stop and without.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from benchmarks.decoding_modes import FAST_DLLM, MODES, PUBLISHED, complete_all
from benchmarks.demo_quality import SETS, read_held_out
from benchmarks.loop_times import beside_baseline, loop_lines
from benchmarks.mode_comparison import half_the_positions, paired_difference, recommended
from benchmarks.mode_plots import draw_modes
from benchmarks.mode_quality import agreement, quality
from benchmarks.mode_tables import goal_lines
from benchmarks.records import (
    Timing,
    build_record,
    check_output,
    define_record_flags,
    load_notes,
    time_alternating,
    use_cores,
    write_record,
)
from launch.process.profiling import check_profiling, define_profiling_flags, profile_again
from launch.process.startup import run_launcher
from runtime import DiffusionConfig, Engine
from sharding.errors import InputError

TASKS = SETS["held_out_tasks"]


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    flags.DEFINE_string("checkpoint", "checkpoints/demo", f"Folder with {TASKS} in it.", flag_values=values)
    flags.DEFINE_integer("prompts", 600, "Held-out tasks to complete.", 1, 10000, flag_values=values)
    flags.DEFINE_integer("new_tokens", 64, "Masks appended.", 1, 4096, flag_values=values)
    flags.DEFINE_integer("trials", 3, "Rounds in which every mode is timed.", 1, 1000, flag_values=values)
    flags.DEFINE_integer("timed_prompts", 20, "Prompts per round.", 1, 10000, flag_values=values)
    flags.DEFINE_list("modes", list(MODES), "Which modes.", flag_values=values)
    flags.DEFINE_integer("cores", None, "Processor cores to use. Default: all.", 1, flag_values=values)
    flags.DEFINE_string(
        "plot", None, "Where to draw cost against quality. Default: beside the record.", flag_values=values
    )
    define_record_flags(values)
    define_profiling_flags(values)


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
        raise InputError("the plot needs matplotlib: pip install -e '.[bench]' in the checkout")


def print_row(name: str, row: dict[str, Any]) -> None:
    """Print one line with a mode's results."""
    print(
        f"{name:<28} {row['tokens_per_second']:7.1f} ± {row['tokens_per_second_deviation']:4.1f} tok/s "
        f"{row['forwards_per_token']:6.3f} fwd/tok {row['positions_per_token']:7.1f} pos/tok  "
        f"passed {row['passed_rate']:.3f} [{row['passed_rate_95'][0]:.3f}, {row['passed_rate_95'][1]:.3f}]  "
        f"nats {row['nats_per_token']:.3f}",
        flush=True,
    )


class Comparison:
    """Runs the modes one after another, then times them in turn and compares them.

    Attributes:
      results: figures by mode.
    """

    def __init__(self, values: flags.FlagValues, tasks: Sequence[dict[str, Any]]) -> None:
        """Load the exact model.

        Args:
          values: flags.
          tasks: rows with a ``prompt`` and ``tests``.
        """
        self.results: dict[str, dict[str, Any]] = {}
        self._values, self._tasks = values, tasks
        self._base = DiffusionConfig(
            max_new_tokens=values.new_tokens, steps=values.new_tokens, algorithm="entropy", early_stop=True
        )
        self._load = functools.cache(functools.partial(Engine.load, values.checkpoint, "tensor=1"))
        self._scorer = self._engine("exact")
        self._prompts = [np.array(self._scorer.tokenizer.encode(row["prompt"]), np.int32) for row in tasks]
        self._completions: dict[str, list[np.ndarray]] = {}

    def _engine(self, name: str) -> Engine:
        mode = MODES[name]
        return self._load(mode.dtype, quantize=mode.quantize, kv_cache=mode.kv_cache)

    def _complete(self, name: str, prompts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], dict[str, Any]]:
        engine = self._engine(name)
        return complete_all(MODES[name].completer(engine, self._base), prompts, engine.end_token_ids)

    def run(self, name: str) -> None:
        """Complete and execute all tasks in one mode."""
        engine, mode = self._engine(name), MODES[name]
        made, cost = self._complete(name, self._prompts)
        again = functools.partial(self._complete, name, self._prompts[:2])
        profile_again(self._values, name, again, engine.program_texts)
        self._completions[name] = made
        self.results[name] = {
            **cost,
            **quality(self._scorer, self._tasks, self._prompts, made, self._base.max_new_tokens),
            "weight_bytes": engine.layout.bytes_per_device(mode.dtype),
            "cache_bytes": mode.cache_bytes(engine, max(map(len, self._prompts)) + self._base.max_new_tokens),
        }

    def time_modes(self, trials: int, count: int) -> None:
        """Time all modes in turn on the first ``count`` prompts, ``trials`` times."""
        calls = {name: functools.partial(self._complete, name, self._prompts[:count]) for name in self.results}
        timings = time_alternating(calls, trials, warmup=1)
        tokens = {name: sum(map(len, self._completions[name][:count])) for name in self.results}
        for name, row in self.results.items():
            row |= speeds(timings[name], timings.get("exact"), tokens[name], tokens.get("exact", 0))

    def compare(self) -> None:
        """Compare the modes with the exact one and with the published setting, where these ran."""
        exact = self._completions.get("exact")
        for name, row in self.results.items():
            for key, other in (("to_exact", "exact"), ("to_published", PUBLISHED)):
                if other in self.results:
                    row[key] = paired_difference(row["passes"], self.results[other]["passes"])
            if exact is not None:
                row["exact_agreement"] = agreement(exact, self._completions[name])

    def time_loops(self, trials: int, count: int) -> None:
        """Time the modes with Fast-dLLM's rule beside the baseline's loop, with early stop and without."""
        for name in self.results:
            if name in FAST_DLLM:
                self.results[name]["beside_baseline"] = {
                    words: beside_baseline(
                        self._engine(name),
                        MODES[name],
                        self._base.replace(early_stop=stop),
                        self._prompts[:count],
                        trials,
                    )
                    for words, stop in (("early stop", True), ("full canvas", False))
                }


def measure(values: flags.FlagValues, tasks: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Run every mode on the held-out tasks, then time the modes in turn. Return the results by mode."""
    comparison, start = Comparison(values, tasks), time.perf_counter()
    for number, name in enumerate(values.modes, start=1):
        comparison.run(name)
        row, minutes = comparison.results[name], (time.perf_counter() - start) / 60
        print(
            f"{name}: {row['passed']} of {len(tasks)} tasks passed, {row['positions_per_token']:.1f} positions per "
            f"token; {number} of {len(values.modes)} modes in {minutes:.1f} min",
            flush=True,
        )
    comparison.time_modes(values.trials, values.timed_prompts)
    comparison.compare()
    comparison.time_loops(values.trials, values.timed_prompts)
    for name, row in comparison.results.items():
        print_row(name, row)
    return comparison.results


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
    goals = recommended(results)
    record["recommended"] = {
        goal: {"mode": name, "flags": MODES[name].flags(values.new_tokens)} for goal, name in goals.items()
    }
    record["half_the_positions"] = half_the_positions(results, PUBLISHED)
    print("\n".join([*goal_lines(record), *loop_lines(results)]))
    path = write_record(record, values.output_dir, values.record)
    print(path)
    plot = Path(values.plot) if values.plot else path.with_suffix(".png")
    draw_modes(results, goals, PUBLISHED, plot)
    print(plot)


def run(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
