"""Compare continuous batching by the offline scheduler with one call per batch on the same prompts.

  python -m benchmarks.offline_scheduler         the demo checkpoint's held-out prompts, some minutes on 2 cores
  python -m benchmarks.offline_scheduler --mesh=data=8 --slots=64 --checkpoint=... --prompts=...  anywhere else

Rows end at their end token, so their lengths differ. Each call of `generate_tokens` gets as many rows as there are
slots, in the order of the input, and the next one follows when its last row is done. Both sides must yield the same
tokens. The record is benchmarks/results/offline_scheduler.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from benchmarks.records import (
    build_record,
    define_record_flags,
    kind_of_devices,
    load_notes,
    time_alternating,
    use_cores,
    write_record,
)
from checkpoints import DEMO
from checkpoints.local_files import read_json_lines
from launch.process.profiling import check_profiling, define_profiling_flags, profile_again
from launch.process.startup import run_launcher
from runtime import DiffusionConfig, Engine, InputError, RowRequest, SamplingConfig, row_seed


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    define_profiling_flags(values)
    flags.DEFINE_string("checkpoint", str(DEMO), "Model folder.", flag_values=values)
    flags.DEFINE_string(
        "prompts", str(DEMO / "held_out.jsonl"), "JSONL file with a prompt per line.", flag_values=values
    )
    flags.DEFINE_string("mesh", None, "Mesh, as for diffumesh generate.", flag_values=values)
    flags.DEFINE_integer("rows", 32, "Number of prompts.", 1, flag_values=values)
    flags.DEFINE_integer("slots", 8, "Number of rows on the devices at a time.", 1, flag_values=values)
    flags.DEFINE_integer("max_new_tokens", 64, "Maximum number of new tokens per row.", 1, flag_values=values)
    flags.DEFINE_integer("repeats", 5, "Timed runs per side.", 1, flag_values=values)
    flags.DEFINE_integer("cores", None, "Processor cores to use. Default: all.", 1, flag_values=values)


def read_prompts(path: str, count: int) -> list[str]:
    """Read the first ``count`` prompts of a file.

    Raises:
      InputError: the file has fewer prompts.
    """
    lines = read_json_lines(Path(path))[:count]
    if len(lines) < count:
        raise InputError(f"--prompts={path}: {len(lines)} lines; --rows={count} needs more")
    return [line["prompt"] for line in lines]


def measure(
    engine: Engine,
    name: str,
    requests: list[RowRequest],
    config: DiffusionConfig | SamplingConfig,
    values: flags.FlagValues,
) -> dict[str, Any]:
    """Run the scheduler, and a call per batch, on the same rows; return times, and the scheduler's busy share."""
    found: dict[str, Any] = {}
    slots = values.slots

    def scheduled() -> None:
        scheduler = engine.scheduler(requests, slots)
        results = {result.number: result for results in scheduler.run() for result in results}
        found["scheduled"] = [results[number].sequence for number in range(len(requests))], scheduler.stats

    def fixed() -> None:
        rows = []
        for start in range(0, len(requests), slots):
            part = requests[start : start + slots]
            width = max(len(request.tokens) for request in part)
            padding = [width - len(request.tokens) for request in part]
            ids = [[0] * pad + list(request.tokens) for pad, request in zip(padding, part, strict=True)]
            mask = [[0] * pad + [1] * (width - pad) for pad in padding]
            result = engine.generate_tokens(ids, mask, config.replace(seed=[request.seed for request in part]))
            rows += [row[pad:] for pad, row in zip(padding, result.sequences, strict=True)]
        found["fixed"] = rows

    times = time_alternating({"scheduled": scheduled, "fixed": fixed}, values.repeats, warmup=1)
    profile_again(values, name, scheduled, engine.program_texts)
    (rows, stats), expected = found["scheduled"], found["fixed"]
    ratios = [fixed / own for fixed, own in zip(times["fixed"].each, times["scheduled"].each, strict=True)]
    differing = sum(not np.array_equal(*pair) for pair in zip(rows, expected, strict=True))
    return {
        "tokens": stats.tokens,
        "rows_that_differ": differing,
        "scheduled": {
            "milliseconds": times["scheduled"],
            "forwards": stats.forwards,
            "utilisation": round(stats.utilisation, 3),
        },
        "fixed": {"milliseconds": times["fixed"]},
        "throughput_ratio": round(times["fixed"].median / times["scheduled"].median, 3),
        "throughput_ratios": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def main(values: flags.FlagValues) -> None:
    """Measure every mode, print a line for each, and write the record."""
    check_profiling(values)
    use_cores(values.cores)
    notes = load_notes()
    engine = Engine.load(values.checkpoint, values.mesh, max_batch=values.slots)
    new = values.max_new_tokens
    modes: dict[str, DiffusionConfig | SamplingConfig]
    if engine.config.objective == "autoregressive":
        modes = {"autoregressive": SamplingConfig(max_new_tokens=new, stop_token_ids=engine.end_token_ids)}
    else:
        blocks = DiffusionConfig.published(new, stop_token_ids=engine.end_token_ids, block_length=16)
        modes = {"blocks": blocks, "dual, threshold": blocks.replace(cache="dual", parallel="threshold")}
    prompts = read_prompts(values.prompts, values.rows)
    results = {}
    for name, config in modes.items():
        requests = [
            RowRequest(engine.tokenizer.encode(prompt), config, row_seed(0, row)) for row, prompt in enumerate(prompts)
        ]
        results[name] = found = measure(engine, name, requests, config, values)
        least, most = found["throughput_ratios"]
        print(
            f"{name}: {found['throughput_ratio']:.2f} x the throughput of a call per batch "
            f"({least:.2f} to {most:.2f}), slots {found['scheduled']['utilisation']:.0%} busy, "
            f"{found['rows_that_differ']} rows differ"
        )
    devices = jax.devices()
    record = build_record(
        "offline_scheduler",
        kind=kind_of_devices(devices),
        settings={name: values[name].value for name in ("rows", "slots", "max_new_tokens", "repeats")}
        | {"mesh": str(engine.layout.spec), "checkpoint": Path(values.checkpoint).name},
        results=results,
        devices=devices,
        notes=notes,
    )
    print(write_record(record, values.output_dir, values.record))


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
