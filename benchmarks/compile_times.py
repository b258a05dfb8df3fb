"""Measure how long compilers take for a denoise step of the 7.6B model, with its layers unrolled and scanned.

  python -m benchmarks.compile_times                        needs libtpu and JAX's CUDA plugin, and no accelerator
  python -m benchmarks.compile_times --targets=cpu --trials=1

Programs are compiled for one device, from the shapes of weights in bfloat16, for one row of 512 positions with the
published sampling. JAX's persistent cache is off. TPU and GPU programs are compiled on this machine's CPU, without the
device; a GPU's compiler then cannot try kernels, which it does where there is a GPU (benchmarks.suite measures that).
The runtime unrolls the layers on CPU and GPU, and scans them on TPU. The record is
benchmarks/results/compile_times.json.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from benchmarks.records import Timing, build_record, define_record_flags, load_notes, note_lines, write_record
from launch.process.startup import compile_only, run_launcher, this_host
from runtime import DiffusionConfig, model_layout
from runtime.execution.programs import abstract_denoise, compiler_options, lower_denoise
from runtime.execution.specialization import denoise_program
from runtime.models.attention import choose_attention
from runtime.models.forward import Forward
from runtime.planner.presets import preset
from sharding.aot import aot_devices
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology

_MODEL, _DTYPE, _CANVAS, _CHUNK = "diffucoder-7b", jnp.dtype(jnp.bfloat16), 512, 128
_CACHE = "jax_enable_compilation_cache"
TARGETS = {"cpu": None, "v5e": "v5e:1x1", "v5p": "v5p:2x2x1", "h200": "1xh200"}


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    flags.DEFINE_list("targets", list(TARGETS), f"Which of {', '.join(TARGETS)}.", flag_values=values)
    flags.DEFINE_integer("trials", 3, "Compilations of each program.", 1, 100, flag_values=values)
    flags.register_validator(
        "targets", lambda chosen: bool(chosen) and set(chosen) <= set(TARGETS), f"some of {', '.join(TARGETS)}",
        flag_values=values,
    )  # fmt: skip


def compile_once(devices: list[Any], scan: bool) -> float:
    """Compile the program for the first device, and return the seconds that this takes without tracing.

    Args:
      devices: devices of this machine, or of an AOT topology.
      scan: stack the layers and scan them; otherwise unroll them.
    """
    platform = devices[0].platform
    layout = model_layout(preset(_MODEL), MeshSpec(), devices[:1], "none", scan)
    # Without a GPU, XLA cannot compile cuDNN's attention.
    attention = "xla" if platform == "gpu" else choose_attention("auto", platform, layout, _CANVAS, _DTYPE)
    config = DiffusionConfig.published(_CANVAS // 2, steps=_CANVAS // 2)
    program = denoise_program(config, layout.config, str(_DTYPE), chunk=_CHUNK, width=_CANVAS, span=config.steps)
    arguments = abstract_denoise(layout, 1, _CANVAS, config.steps, None)
    lowered = lower_denoise(Forward(layout, attention), program, layout.abstract_weights(_DTYPE), *arguments)
    options, cached = compiler_options(layout, _DTYPE), getattr(jax.config, _CACHE)
    jax.config.update(_CACHE, False)
    try:
        start = time.perf_counter()
        lowered.compile(compiler_options=options)
        return time.perf_counter() - start
    finally:
        jax.config.update(_CACHE, cached)


def compile_times_table(record: dict[str, Any]) -> str:
    """Convert a record to a Markdown table with a row for each target."""
    lines = ["| compiler | layers unrolled, s | layers scanned, s |", "|---|---:|---:|"]
    for target, found in record["results"].items():
        cells = [
            f"{one['median'] / 1e3:.1f} ({one['minimum'] / 1e3:.1f} to {one['maximum'] / 1e3:.1f})"
            for one in (found["unrolled"], found["scanned"])
        ]
        lines.append(f"| {target} | {' | '.join(cells)} |")
    settings, machine, versions = record["settings"], record["machine"], record["versions"]
    made = (
        f"Measured: a denoise step of {settings['model']}, {settings['layers']} layers, {settings['dtype']}, one row "
        f"of {settings['canvas']} positions on one device, jax {versions['jax']}, {machine['processor']}, "
        f"{settings['trials']} trials: median, minimum and maximum."
    )
    return "\n".join([*lines, "", made, *note_lines(record)])


def main(values: flags.FlagValues) -> None:
    """Compile every program in turn, print a line for each target, and write the record.

    Raises:
      MeshError: a target's compiler is not installed. A record without that target would replace a whole one.
    """
    compile_only()
    notes, results = load_notes(), {}
    targets = {
        target: aot_devices(parse_topology(name)) if (name := TARGETS[target]) else jax.devices("cpu")
        for target in values.targets
    }
    for target, devices in targets.items():
        seconds: dict[str, list[float]] = {"unrolled": [], "scanned": []}
        for _ in range(values.trials):
            for kind, each in seconds.items():
                each.append(compile_once(devices, scan=kind == "scanned"))
                this_host().mark()
        results[target] = {kind: Timing.of(each, [0.0]) for kind, each in seconds.items()}
        print(f"{target}: " + ", ".join(f"{kind} {one.median / 1e3:.1f} s" for kind, one in results[target].items()))
    record = build_record(
        "compile_times",
        kind="measured",
        settings={
            "model": _MODEL,
            "layers": preset(_MODEL).num_layers,
            "dtype": str(_DTYPE),
            "canvas": _CANVAS,
            "trials": values.trials,
        },
        results=results,
        notes=notes,
    )
    print(write_record(record, values.output_dir, values.record))


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
