"""Time XLA attention of whole rows all at once and in blocks of queries, taking turns, at the shapes of one layer.

  python -m benchmarks.attention                    canvas 64 to 2048, batch 1 and 4, demo and mid-size: 5 minutes
  python -m benchmarks.attention --dtype=bfloat16 --record=attention_bfloat16

``runtime.models.xla_attention.query_block`` computes all scores at once if they are few, and one block of queries at a
time otherwise. Here each shape runs both ways, whichever of them the runtime would choose. The goals are those of the
runtime's choice: faster than all at once from canvas 256 on, and nowhere more than 3 % slower. Where it chooses all at
once, the two are the same program. Each timed call repeats the attention until it takes some milliseconds. Outputs are
compared before.

Dimension letters: B batch, S canvas, K kv heads, G query heads per KV head, H head dim.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks.models import define_model_flags, model_config, model_sizes
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
from runtime.models import xla_attention
from runtime.models.attention import dot_product_attention
from runtime.models.config import ModelConfig
from runtime.models.families import model_layout

WAYS = ("at once", "in blocks")
# Bytes of scores up to which they are computed at once, so that every shape is computed in one of the two ways.
_LIMITS = {"at once": 1 << 62, "in blocks": -1}
# A timed call takes about this long, so that the clock and the dispatch do not matter.
_CALL_SECONDS = 0.02
_FASTER_FROM, _LEAST = 256, 0.97
# Largest difference of the outputs, relative to the largest output.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    define_profiling_flags(values)
    define_model_flags(values, ("demo", "mid-size"))
    flags.DEFINE_enum("dtype", "float32", tuple(TOLERANCE), "Dtype of queries, keys and values.", flag_values=values)
    flags.DEFINE_list("batch", ["1", "4"], "Numbers of rows.", flag_values=values)
    canvases = ["64", "128", "256", "512", "1024", "2048"]
    flags.DEFINE_list("canvas", canvases, "Positions per row.", flag_values=values)
    flags.DEFINE_integer("repeats", 50, "Maximum number of timed calls per shape.", 1, flag_values=values)
    text = "Seconds of timed calls per shape. At least 3 calls are timed, even if they take longer."
    flags.DEFINE_float("row_seconds", 5.0, text, 0.0, flag_values=values)
    flags.DEFINE_integer("cores", None, "Processor cores to use. Default: all.", 1, flag_values=values)


@dataclass(frozen=True)
class Attention:
    """Attention of one layer, compiled in both ways.

    Attributes:
      programs: compiled programs by way.
      arguments: queries ``[B, S, K, G, H]``, keys and values ``[B, S, K, H]``, and row lengths int32 ``[B]``.
      block: queries per block that the runtime chooses; None for all at once.
    """

    programs: Mapping[str, jax.stages.Compiled]
    arguments: tuple[jax.Array, ...]
    block: int | None

    @classmethod
    def compile(cls, config: ModelConfig, dtype: str, batch: int, canvas: int) -> Attention:
        """Compile the attention of whole rows of a model in both ways, with random queries, keys and values."""
        platform, generator = jax.default_backend(), np.random.default_rng(0)
        kv_heads, groups = config.num_kv_heads, config.num_heads // config.num_kv_heads
        shapes = [(batch, canvas, kv_heads, groups, config.head_dim), *[(batch, canvas, kv_heads, config.head_dim)] * 2]
        drawn = [jnp.asarray(generator.standard_normal(shape, np.float32), dtype) for shape in shapes]
        arguments = (*drawn, jnp.full(batch, canvas, jnp.int32))
        programs = {}
        for way, limit in _LIMITS.items():
            attend = jax.jit(partial(dot_product_attention, "xla", model_layout(config)))
            with mock.patch.dict(xla_attention.SCORES_AT_ONCE, {platform: limit}):
                programs[way] = attend.lower(*arguments).compile()
        block = xla_attention.query_block(platform, batch, config.num_heads, groups, canvas, canvas)
        return cls(programs, arguments, block)

    def difference(self) -> float:
        """Return the largest difference of the two ways' outputs, relative to the largest output."""
        once, blocks = (np.asarray(self.programs[way](*self.arguments).astype(jnp.float32)) for way in WAYS)
        return float(abs(once - blocks).max() / abs(once).max())

    def caller(self, way: str, count: int) -> Callable[[], jax.Array]:
        """Return a function that computes the attention ``count`` times and waits for it."""

        def call() -> jax.Array:
            for _ in range(count):
                out = self.programs[way](*self.arguments)
            return jax.block_until_ready(out)

        return call


def measure(config: ModelConfig, batch: int, canvas: int, values: flags.FlagValues) -> dict[str, Any]:
    """Compare the outputs of both ways at one shape, time them, and return the facts of a row."""
    attention = Attention.compile(config, values.dtype, batch, canvas)
    difference = attention.difference()
    once = attention.caller(WAYS[0], 1)
    once()
    start = time.perf_counter()
    once()
    count = max(1, math.ceil(_CALL_SECONDS / (time.perf_counter() - start)))
    calls = {way: attention.caller(way, count) for way in WAYS}
    timings = time_alternating(calls, values.repeats, warmup=2, seconds=values.row_seconds)
    each = {way: Timing.of([1e-3 * one / count for one in timing.each], [0.0]) for way, timing in timings.items()}
    faster = each["in blocks"].times_as_fast_as(each["at once"])
    profile_again(
        values,
        f"attention batch {batch} canvas {canvas}",
        lambda: [call() for call in calls.values()],
        lambda: {way: program.as_text() or "" for way, program in attention.programs.items()},
    )
    return {
        "batch": batch,
        "canvas": canvas,
        "runs_per_call": count,
        "at_once_ms": each["at once"],
        "in_blocks_ms": each["in blocks"],
        "blocks_times_as_fast": faster,
        "relative_difference": difference,
        "agrees": difference <= TOLERANCE[values.dtype],
        "chosen_block": attention.block,
    } | judge(canvas, attention.block, faster["median"])


def judge(canvas: int, block: int | None, faster: float) -> dict[str, Any]:
    """Return how many times as fast the runtime's choice is as all at once, with its goal and whether it is met.

    Args:
      canvas: S.
      block: queries per block that the runtime chooses; None for all at once.
      faster: how many times as fast blocks are.
    """
    chosen = 1.0 if block is None else faster
    goal, met = (f">= {_LEAST:g}", chosen >= _LEAST) if canvas < _FASTER_FROM else ("> 1", chosen > 1.0)
    return {"choice_times_as_fast": chosen, "goal": goal, "met": met}


def main(values: flags.FlagValues) -> None:
    """Measure every shape, print a line for each, and write the record."""
    check_profiling(values)
    batches, canvases = integers("batch", values.batch), integers("canvas", values.canvas)
    configs = {name: model_config(model_sizes(values, name), values.dtype) for name in values.random}
    cores = use_cores(values.cores)
    notes = load_notes()
    results = []
    for name, config in configs.items():
        for batch in batches:
            for canvas in canvases:
                row = {"model": name} | measure(config, batch, canvas, values)
                results.append(row)
                print(line(row), flush=True)
    heads = {
        name: {"heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        for name, config in configs.items()
    }
    devices = jax.devices()[:1]
    record = build_record(
        "attention",
        kind=kind_of_devices(devices),
        settings={"models": heads, "dtype": values.dtype, "cores": cores, "row_seconds": values.row_seconds},
        results=results,
        devices=devices,
        notes=notes,
    )
    print(f"written: {write_record(record, values.output_dir, values.record)}")


def line(row: Mapping[str, Any]) -> str:
    """Return one line with the result of a shape."""
    return (
        f"{row['model']} batch {row['batch']} canvas {row['canvas']}: at once {row['at_once_ms'].median:.3f} ms, in "
        f"blocks {row['in_blocks_ms'].median:.3f} ms, the runtime chooses {_choice(row)}, "
        f"{row['choice_times_as_fast']:.2f}x ({row['goal']}: {'met' if row['met'] else 'missed'})"
    )


def _choice(row: Mapping[str, Any]) -> str:
    return "all at once" if row["chosen_block"] is None else f"blocks of {row['chosen_block']}"


def attention_table(record: Mapping[str, Any]) -> str:
    """Convert a record to a Markdown table with a row per shape."""
    settings, rows = record["settings"], record["results"]
    lines = [
        "| model | batch | canvas | at once, ms | in blocks, ms | blocks: times as fast (minimum to maximum) "
        "| the runtime chooses | times as fast as at once | goal | met |",
        "|---|---:|---:|---:|---:|---|---|---:|---|---|",
    ]
    for row in rows:
        fast = row["blocks_times_as_fast"]
        cells = [
            row["model"],
            row["batch"],
            row["canvas"],
            f"{row['at_once_ms']['median']:.3f}",
            f"{row['in_blocks_ms']['median']:.3f}",
            f"{fast['median']:.2f} ({fast['minimum']:.2f} to {fast['maximum']:.2f})",
            _choice(row),
            f"{row['choice_times_as_fast']:.2f}",
            row["goal"],
            "yes" if row["met"] else "NO",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    apart = max((row["relative_difference"] for row in rows), default=0.0)
    made = (
        f"{record['kind'].capitalize()}: `{record['command']}`, {settings['dtype']}, {settings['cores']} cores of "
        f"{record['machine']['processor']}, jax {record['versions']['jax']}. {sum(row['met'] for row in rows)} of "
        f"{len(rows)} goals met. Outputs of the two ways are at most {apart:.1e} apart."
    )
    return "\n".join([*lines, "", made, *note_lines(record)])


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
