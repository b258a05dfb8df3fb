"""How work scales over devices: strong (the same work on more) and weak (more work on more), a record a point.

  python -m benchmarks.scaling                              on what is attached, each axis over 1, 2, 4, 8 ... devices
  python -m benchmarks.scaling --devices=8                  on simulated CPU devices, with a small model
  python -m benchmarks.scaling --estimate=h100              the 7.6B model on 1 to 256 chips, by the analytical model

Passes: a denoise step of exact masked diffusion, a step of a cached block, the prefill and the decode step of an
autoregressive model of the same sizes; requests are the planner's, with the published settings. A time is that of a
whole generation over its passes; where passes of another kind (the prefill, refreshes) are among them, a generation of
those alone takes turns with it and is subtracted. On simulated devices, which share the cores of one host, times say
nothing about speed: what is measured there is that the tokens stay the same, what moves, and what is compiled. Weak
scaling multiplies rows by devices, and positions on the sequence axis. ``python -m benchmarks.report`` makes tables and
plots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from absl import flags

from benchmarks.models import define_model_flags, model_config, model_sizes
from benchmarks.records import (
    build_record,
    check_one_host,
    define_record_flags,
    integers,
    kind_of_devices,
    time_alternating,
    write_record,
)
from launch.profiling import check_profiling, define_profiling_flags, profile_again
from launch.startup import define_device_flags, run_launcher, start_devices
from runtime.decoding.config import DiffusionConfig, SamplingConfig
from runtime.engine import Engine
from runtime.generation import GenerationResult
from runtime.models.config import STORED_DTYPES
from runtime.models.families import model_layout
from runtime.planner.compiled import CompiledPhase, compile_workload
from runtime.planner.estimate import rank
from runtime.planner.presets import preset
from runtime.planner.workload import Workload
from sharding.errors import InputError, MeshError
from sharding.mesh import MeshSpec
from sharding.topology import CHIPS, Topology, machine_of

PASSES = ("denoise step", "block step", "prefill", "decode")
AXES = ("data", "sequence", "tensor")
MODES = ("strong", "weak")
LARGEST_ESTIMATE = 256
# Rows of the estimated tables: in all, and on each chip.
ESTIMATED_ROWS = {"strong": 64, "weak": 8}


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    define_device_flags(values)
    values["compile_cache"].value = ""  # what is compiled here shall be compiled
    define_profiling_flags(values)
    values["output_dir"].value = "benchmarks/results/scaling"
    define_model_flags(values)
    text = "Of weights and activations. Default: float32, and bfloat16 in estimates."
    flags.DEFINE_enum("dtype", None, STORED_DTYPES, text, flag_values=values)
    flags.DEFINE_list("counts", [], "Device counts. Default: powers of two up to all.", flag_values=values)
    flags.DEFINE_list("axes", list(AXES), "Axes to scale over.", flag_values=values)
    flags.DEFINE_list("passes", list(PASSES), f"Of {', '.join(PASSES)}.", flag_values=values)
    flags.DEFINE_integer("batch", 8, "Rows, in all or (weak) on each device.", 1, flag_values=values)
    text = "Positions of a row, half of them generated, or the last alone where a prefill is timed."
    flags.DEFINE_integer("canvas", 128, text, 4, flag_values=values)
    text = "Denoise steps of a timed generation, or of each of its blocks."
    flags.DEFINE_integer("steps", 8, text, 2, flag_values=values)
    flags.DEFINE_integer("repeats", 5, "Timed calls of each.", 1, flag_values=values)
    flags.DEFINE_enum("estimate", None, tuple(CHIPS), "Estimate the 7.6B model on these chips.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Measure or estimate every point; print a line and write a record for each."""
    check_one_host()
    if values.estimate is not None:
        estimate_points(values)
        return
    for name, known in (("axes", AXES), ("passes", PASSES)):
        if not values[name].value or set(values[name].value) - set(known):
            raise InputError(f"--{name}={','.join(values[name].value)}: expected some of {', '.join(known)}")
    check_profiling(values)
    start_devices(values)
    import jax

    devices = jax.devices()
    counts = integers("counts", values.counts) if values.counts else _powers_of_two(len(devices))
    if max(counts) > len(devices):
        raise InputError(f"--counts={','.join(values.counts)}: there are {len(devices)} devices")
    for what in values.passes:
        for axis in values.axes:
            for mode in MODES:
                first: dict[str, Any] | None = None
                for count in counts:
                    try:
                        point = measure(values, what, axis, mode, count, devices[:count])
                    except MeshError as error:
                        print(f"{what} {axis}={count}: left out, {error}", flush=True)
                        continue
                    first = first or point
                    speed = first["ms"]["median"] * point["work"] / (point["ms"]["median"] * first["work"])
                    point["speedup"] = round(speed, 3)
                    point["efficiency"] = round(speed * first["devices"] / count, 3)
                    if mode == "strong":
                        same = point["tokens"] == first["tokens"]
                        point["same_tokens_as_on_the_first"] = bool(same)
                    write_point(values, point, kind_of_devices(devices), devices[:count])


def _powers_of_two(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]


def measure(
    values: flags.FlagValues, what: str, axis: str, mode: str, count: int, devices: list[Any]
) -> dict[str, Any]:
    """One point: time of one pass, and of its program memory, collectives and compile time.

    Raises:
      MeshError: the model does not divide over the axis.
    """
    spec = replace(MeshSpec(), **{axis: count})
    grown = count if mode == "weak" else 1
    batch = values.batch * (grown if axis != "sequence" else 1)
    canvas = values.canvas * (grown if axis == "sequence" else 1)
    workload = workload_of(values, what, batch, canvas)
    layout = model_layout(workload.config, spec, devices)
    # Larger than usual, so that masked positions differ by much more than rounding and tokens can be compared.
    weights = layout.random_weights(0, workload.dtype, scale=2 * workload.config.hidden_size**-0.5)
    engine = Engine(layout, weights)
    ids = np.random.default_rng(0).integers(0, workload.config.vocab_size - 2, (batch, workload.prompt))
    found: dict[str, GenerationResult] = {}

    def generate(name: str, request: DiffusionConfig | SamplingConfig) -> Callable[[], None]:
        def call() -> None:
            found[name] = engine.generate_tokens(ids, config=request)

        return call

    calls = {name: generate(name, request) for name, request in timed_requests(workload, what).items()}
    timings = time_alternating(calls, values.repeats)
    profile_again(values, f"{what} {mode} {axis} {count}", calls["whole"], engine.program_texts)
    timing, less, passes = timings["whole"], 0.0, found["whole"].stats.forwards
    if "others" in timings:
        less, passes = timings["others"].median, passes - found["others"].stats.forwards
    if timing.minimum <= less:
        raise MeshError(f"the machine is too busy to time it: {timing.minimum} ms in all, {less} ms without {what}")
    programs = compile_workload(workload, spec, devices)
    program: CompiledPhase = next(one for one in programs if what in one.passes)
    phase = next(one for one in workload.phases(engine.layout, engine.platform) if one.name == what)
    moved = program.bytes_by_axis(engine.layout, replace(phase, chunks=1.0))
    return {
        "pass": what,
        "mode": mode,
        "axis": axis,
        "devices": count,
        "mesh": str(spec),
        "batch": batch,
        "canvas": canvas,
        "work": grown,
        "passes": passes,
        "ms": {
            "median": round((timing.median - less) / passes, 4),
            "minimum": round((timing.minimum - less) / passes, 4),
            "maximum": round((timing.maximum - less) / passes, 4),
        },
        "repeats": timing.repeats,
        "collective_bytes_of_a_pass": sum(moved.values()),
        "collectives": [{"kind": kind, "axes": list(axes), "bytes": size} for (kind, axes), size in moved.items()],
        "memory_bytes_per_device": program.memory_bytes,
        "compile_seconds": round(program.seconds, 2),
        "tokens": np.asarray(found["whole"].sequences).tobytes().hex(),
    }


def workload_of(values: flags.FlagValues, what: str, batch: int, canvas: int) -> Workload:
    """The generation of ``batch`` rows of ``canvas`` positions that a pass is timed in."""
    diffusion = what in ("denoise step", "block step")
    config = model_config(model_sizes(values), dtype_of(values), "Dream" if diffusion else "qwen2")
    new = 1 if what == "prefill" else canvas // 2
    workload = Workload(config, dtype_of(values), batch, canvas - new, new, values.steps)
    if what != "block step":
        return workload
    length = min(32, new)
    return replace(workload, cache="dual", block_length=length, steps=values.steps * math.ceil(new / length))


def timed_requests(workload: Workload, what: str) -> Mapping[str, DiffusionConfig | SamplingConfig]:
    """The workload's own request, ``whole``, and one that makes its passes of ``others`` kinds alone, if it has any."""
    if workload.config.is_autoregressive:
        sampling = workload.sampling()
        return {"whole": sampling} | ({"others": sampling.replace(max_new_tokens=1)} if what == "decode" else {})
    decoding = workload.decoding()
    if what == "denoise step":
        return {"whole": decoding}
    # With a step a block, every step enters a block, by a refresh.
    return {"whole": decoding, "others": decoding.replace(steps=math.ceil(workload.new_tokens / workload.block_length))}


def dtype_of(values: flags.FlagValues) -> str:
    """``--dtype``, or what it is by default."""
    return values.dtype or ("float32" if values.estimate is None else "bfloat16")


def write_point(values: flags.FlagValues, point: dict[str, Any], kind: Any, devices: list[Any]) -> None:
    """Print a point and write its record."""
    point = {key: value for key, value in point.items() if key != "tokens"}
    print(
        f"{point['pass']:<12} {point['mode']:<6} {point.get('axis', 'best'):<8} {point['devices']:>4} devices "
        f"{point['ms']['median']:10.3f} ms  speedup {point['speedup']:8.2f}  efficiency {point['efficiency']:.2f}  "
        f"{point['collective_bytes_of_a_pass'] / 1e6:10.3f} MB moved",
        flush=True,
    )
    name = "_".join([values.record or "scaling", point["pass"].replace(" ", "_"), point["mode"]])
    name += f"_{point.get('axis', values.estimate)}_{point['devices']:03d}"
    settings = {"dtype": dtype_of(values)} | (model_sizes(values) if values.estimate is None else {"model": "7.6B"})
    record = build_record("scaling", kind=kind, settings=settings, results=point, devices=devices)
    write_record(record, values.output_dir, name)


def estimate_points(values: flags.FlagValues) -> None:
    """The 7.6B model on 1 to 256 chips: on each machine the fastest mesh that fits."""
    for what, name, cache in (
        ("denoise step", "diffucoder-7b", "none"),
        ("block step", "diffucoder-7b", "dual"),
        ("prefill", "qwen2.5-7b", "none"),
        ("decode", "qwen2.5-7b", "none"),
    ):
        for mode in MODES:
            first: dict[str, Any] | None = None
            for count in _powers_of_two(LARGEST_ESTIMATE):
                topology = machine_of(CHIPS[values.estimate], count)
                if topology is None:
                    continue
                rows = ESTIMATED_ROWS[mode] * (count if mode == "weak" else 1)
                point = _estimated_point(what, Workload(preset(name), dtype_of(values), rows, cache=cache), topology)
                if point is None:
                    print(f"{what} on {topology}: does not fit", flush=True)
                    continue
                first = first or point | {"work": rows}
                speed = first["ms"]["median"] * rows / (point["ms"]["median"] * first["work"])
                point |= {
                    "mode": mode,
                    "work": rows,
                    "speedup": round(speed, 3),
                    "efficiency": round(speed * first["devices"] / count, 3),
                }
                write_point(values, point, "estimated", [])


def _estimated_point(what: str, workload: Workload, topology: Topology) -> dict[str, Any] | None:
    fitting, _ = rank(workload, topology)
    if not fitting:
        return None
    best = fitting[0]
    phase = next(one for one in best.phases if one.phase.name == what)
    milliseconds = round(1e3 * phase.seconds, 4)
    return {
        "pass": what,
        "axis": topology.chip.name,
        "devices": topology.num_devices,
        "topology": str(topology),
        "mesh": str(best.spec),
        "batch": workload.batch,
        "canvas": workload.prompt + workload.new_tokens,
        "ms": {"median": milliseconds, "minimum": milliseconds, "maximum": milliseconds},
        "bound": phase.bound,
        "collective_bytes_of_a_pass": phase.collective_bytes,
        "memory_bytes_per_device": best.memory.total,
        "tokens_per_second": round(best.tokens_per_second, 2),
    }


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
