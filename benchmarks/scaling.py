"""Scaling over devices: strong (fixed work) and weak (work grows with devices), one record per point.

  python -m benchmarks.scaling                  on the attached devices, each axis over 1, 2, 4, 8 ... devices
  python -m benchmarks.scaling --devices=8      on simulated CPU devices, with a small model
  python -m benchmarks.scaling --estimate=h100  the 7.6B model on 1 to 256 chips, by the analytical model

Passes: a denoise step of exact masked diffusion, a step of a cached block, the prefill and the decode step of an
autoregressive model of the same sizes. Requests are those of the planner, with the published settings. The time of a
pass is that of a whole generation divided by its passes; if passes of another kind (prefill, refreshes) are among them,
a generation with only those takes turns with it and is subtracted. Simulated devices share the cores of one host, so
their times say nothing about speed; they show that tokens stay the same, and the bytes moved and memory of the program.
Weak scaling multiplies rows by devices, or positions on the sequence axis. An estimate is for the mesh on which the
pass is fastest, among those that fit the whole generation. ``python -m benchmarks.report`` makes tables and plots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from absl import flags

from benchmarks.models import CAUSAL, DIFFUSION, SIZES, define_model_flags, model_config, model_sizes
from benchmarks.records import (
    Kind,
    NotRunError,
    build_record,
    check_one_host,
    define_record_flags,
    integers,
    kind_of_devices,
    load_notes,
    write_record,
)
from benchmarks.timed_passes import time_pass, timed_requests
from launch.process.profiling import check_profiling, define_profiling_flags, profile_again
from launch.process.startup import define_device_flags, run_launcher, start_devices
from runtime.engine import Engine
from runtime.models.config import STORED_DTYPES
from runtime.models.families import model_layout
from runtime.models.random_weights import random_weights
from runtime.planner.compiled import CompiledPhase, compile_workload
from runtime.planner.estimate import Estimate, PhaseEstimate, rank
from runtime.planner.presets import preset
from runtime.planner.workload import Workload
from sharding.errors import InputError, MeshError
from sharding.mesh import MeshSpec
from sharding.topology import CHIPS, MAX_HOSTS, Topology, machine_of

PASSES = ("denoise step", "block step", "prefill", "decode")
AXES = ("data", "sequence", "tensor")
MODES = ("strong", "weak")
LARGEST_ESTIMATE = 256
# Rows of the estimated tables: in total (strong), and per chip (weak).
ESTIMATED_ROWS = {"strong": 64, "weak": 8}
# Positions per row. Half of them are generated, except for a prefill.
ESTIMATED_CANVAS = 512
# No machine has more chips, so larger counts are refused before the search for meshes.
_MOST_CHIPS = 8 * MAX_HOSTS
# Flags that do not apply to estimates, whose work is fixed and which use no device.
_OF_MEASUREMENTS = (
    "axes", "batch", "canvas", "steps", "repeats", "random", *SIZES["mid-size"], "devices", "profile_dir", "dump_hlo"
)  # fmt: skip


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    define_device_flags(values)
    values["compile_cache"].value = ""  # measure compilation, not the cache
    define_profiling_flags(values)
    values["output_dir"].value = "benchmarks/results/scaling"
    define_model_flags(values)
    text = "Dtype of weights and activations. Default: float32, and bfloat16 in estimates."
    flags.DEFINE_enum("dtype", None, STORED_DTYPES, text, flag_values=values)
    flags.DEFINE_list("counts", [], "Device counts. Default: powers of two up to all.", flag_values=values)
    flags.DEFINE_list("axes", list(AXES), "Axes to scale over.", flag_values=values)
    flags.DEFINE_list("passes", list(PASSES), f"Passes to measure: {', '.join(PASSES)}.", flag_values=values)
    flags.DEFINE_integer("batch", 8, "Rows: in total, or per device for weak scaling.", 1, flag_values=values)
    text = "Positions per row. Half of them are generated; for a prefill, only the last one."
    flags.DEFINE_integer("canvas", 128, text, 4, flag_values=values)
    text = "Denoise steps per timed generation, or per block."
    flags.DEFINE_integer("steps", 8, text, 2, flag_values=values)
    flags.DEFINE_integer("repeats", 5, "Timed calls per point.", 1, flag_values=values)
    flags.DEFINE_enum("estimate", None, tuple(CHIPS), "Estimate the 7.6B model on these chips.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Measure or estimate every point. Print a line and write a record for each."""
    check_one_host()
    for name, known in (("axes", AXES), ("passes", PASSES)):
        if not values[name].value or set(values[name].value) - set(known):
            raise InputError(f"--{name}={','.join(values[name].value)}: expected some of {', '.join(known)}")
    counts = sorted(set(integers("counts", values.counts))) if values.counts else []
    if values.estimate is not None:
        estimate_points(values, counts)
        return
    check_profiling(values)
    notes = load_notes()
    start_devices(values)
    import jax

    devices = jax.devices()
    counts = counts or _powers_of_two(len(devices))
    if max(counts) > len(devices):
        raise InputError(f"--counts={','.join(values.counts)}: there are {len(devices)} devices")
    for what in values.passes:
        for axis in values.axes:
            for mode in MODES:
                points: list[tuple[int, dict[str, Any]]] = []
                left_out: list[str] = []
                for count in counts:
                    try:
                        point = measure(values, what, axis, mode, count, devices[:count])
                    except (MeshError, NotRunError) as error:
                        left_out.append(f"left out: {axis}={count}, {error}")
                        print(f"{what} {mode} {left_out[-1]}", flush=True)
                        continue
                    points.append((count, point))
                    first = points[0][1]
                    add_rates(point, first)
                    if point["canvas"] == first["canvas"]:
                        # Row by row, all points have the same prompts, so tokens of their common rows are compared.
                        point["same_tokens_as_on_the_first"] = bool(point["tokens"].startswith(first["tokens"]))
                    write_point(values, point, kind_of_devices(devices), devices[:count], notes)
                # Again, so that every record of a table names what was left out of it.
                for count, point in points if left_out else ():
                    write_point(values, point, kind_of_devices(devices), devices[:count], [*notes, *left_out])


def _powers_of_two(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]


def add_rates(point: dict[str, Any], first: dict[str, Any]) -> None:
    """Add speed-up and efficiency of a point relative to the first one."""
    speed = first["ms"]["median"] * point["work"] / (point["ms"]["median"] * first["work"])
    point["speedup"] = round(speed, 3)
    point["efficiency"] = round(speed * first["devices"] / point["devices"], 3)


def measure(
    values: flags.FlagValues, what: str, axis: str, mode: str, count: int, devices: list[Any]
) -> dict[str, Any]:
    """Measure a point of a table: the time of one pass, and its program's memory, collectives and compile time.

    Raises:
      MeshError: the model does not divide over the axis.
      NotRunError: the machine is too busy.
    """
    spec = replace(MeshSpec(), **{axis: count})
    grown = count if mode == "weak" else 1
    batch = values.batch * (grown if axis != "sequence" else 1)
    canvas = values.canvas * (grown if axis == "sequence" else 1)
    workload = workload_of(values, what, batch, canvas)
    layout = model_layout(workload.config, spec, devices)
    # Weights are larger than usual, so that masked positions differ by much more than rounding and tokens can be
    # compared.
    weights = random_weights(layout, 0, workload.dtype, scale=2 * workload.config.hidden_size**-0.5)
    engine = Engine(layout, weights)
    ids = np.random.default_rng(0).integers(0, workload.config.vocab_size - 2, (batch, workload.prompt))
    requests = timed_requests(workload, what)
    timed = time_pass(engine, ids, requests, values.repeats)
    timing = timed.timing
    label = f"{what} {mode} {axis} {count}"
    profile_again(values, label, lambda: engine.generate_tokens(ids, config=requests["whole"]), engine.program_texts)
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
        "passes": timed.passes,
        "ms": {"median": timing.median, "minimum": timing.minimum, "maximum": timing.maximum},
        "repeats": timing.repeats,
        "collective_bytes_of_a_pass": sum(moved.values()),
        "collectives": [{"kind": kind, "axes": list(axes), "bytes": size} for (kind, axes), size in moved.items()],
        "memory_bytes_per_device": program.memory_bytes,
        "compile_seconds": round(program.seconds, 2),
        "tokens": np.asarray(timed.result.sequences).tobytes().hex(),
    }


def workload_of(values: flags.FlagValues, what: str, batch: int, canvas: int) -> Workload:
    """Return the generation in which a pass is timed: ``batch`` rows of ``canvas`` positions."""
    diffusion = what in ("denoise step", "block step")
    config = model_config(model_sizes(values), dtype_of(values), DIFFUSION if diffusion else CAUSAL)
    new = 1 if what == "prefill" else canvas // 2
    workload = Workload(config, dtype_of(values), batch, canvas - new, new, values.steps)
    if what != "block step":
        return workload
    length = min(32, new)
    return replace(workload, cache="dual", block_length=length, steps=values.steps * math.ceil(new / length))


def dtype_of(values: flags.FlagValues) -> str:
    """Return ``--dtype``, or its default."""
    return values.dtype or ("float32" if values.estimate is None else "bfloat16")


def write_point(
    values: flags.FlagValues, point: dict[str, Any], kind: Kind, devices: list[Any], notes: Sequence[str]
) -> None:
    """Print a point and write its record."""
    point = {key: value for key, value in point.items() if key != "tokens"}
    print(
        f"{point['pass']:<12} {point['mode']:<6} {point['axis']:<8} {point['devices']:>4} devices "
        f"{point['ms']['median']:10.3f} ms  speedup {point['speedup']:8.2f}  efficiency {point['efficiency']:.2f}  "
        f"{point['collective_bytes_of_a_pass'] / 1e6:10.3f} MB moved",
        flush=True,
    )
    name = "_".join([values.record or "scaling", point["pass"].replace(" ", "_"), point["mode"]])
    name += f"_{point['axis']}_{point['devices']:03d}"
    settings = {"dtype": dtype_of(values)} | (model_sizes(values) if values.estimate is None else {"model": "7.6B"})
    record = build_record("scaling", kind=kind, settings=settings, results=point, devices=devices, notes=notes)
    write_record(record, values.output_dir, name)


def estimate_points(values: flags.FlagValues, counts: list[int]) -> None:
    """Estimate the 7.6B model on ``counts`` chips, 1 to 256 by default, on the fastest mesh that fits.

    Raises:
      InputError: a flag applies only to measurements, or no machine has that number of chips.
    """
    given = [f"--{name}" for name in _OF_MEASUREMENTS if values[name].present]
    if given:
        raise InputError(
            f"{', '.join(given)} cannot be combined with --estimate, which supports --passes, --counts and --dtype"
        )
    chip = CHIPS[values.estimate]
    machines = {count: machine_of(chip, count) if count <= _MOST_CHIPS else None for count in counts}
    if missing := [str(count) for count, machine in machines.items() if machine is None]:
        text = f"there is no {chip.name} machine of size {', '.join(missing)}"
        raise InputError(f"--counts={','.join(values.counts)}: {text}")
    machines = machines or {count: machine_of(chip, count) for count in _powers_of_two(LARGEST_ESTIMATE)}
    for what in values.passes:
        for mode in MODES:
            first: dict[str, Any] | None = None
            left_out: list[str] = []
            for count, topology in machines.items():
                if topology is None:
                    left_out.append(f"there is no {chip.name} machine of size {count}")
                    continue
                work = count if mode == "weak" else 1
                workload = estimated_workload(what, dtype_of(values), ESTIMATED_ROWS[mode] * work)
                best = fastest(what, workload, topology)
                if best is None:
                    left_out.append(f"left out: {topology}, which the generation does not fit")
                    print(f"{what} {mode} {left_out[-1]}", flush=True)
                    continue
                point = _estimated_point(what, best) | {"mode": mode, "work": work}
                first = first or point
                add_rates(point, first)
                write_point(values, point, "estimated", [], left_out)


def estimated_workload(what: str, dtype: str, rows: int) -> Workload:
    """Return the workload with which the planner estimates one pass of the 7.6B model; a prefill has one new token."""
    name = "diffucoder-7b" if what in ("denoise step", "block step") else "qwen2.5-7b"
    new = 1 if what == "prefill" else ESTIMATED_CANVAS // 2
    cache = "dual" if what == "block step" else "none"
    return Workload(preset(name), dtype, rows, ESTIMATED_CANVAS - new, new, cache=cache)


def fastest(what: str, workload: Workload, topology: Topology) -> Estimate | None:
    """Return the estimate of the mesh with the fastest pass, among those that fit the generation; None if none fits."""
    fitting, _ = rank(workload, topology)
    return min(fitting, key=lambda one: (phase_of(what, one).seconds, one.spec.tensor, one.spec.sequence), default=None)


def phase_of(what: str, found: Estimate) -> PhaseEstimate:
    """Return the estimate of the phase with this name."""
    return next(one for one in found.phases if one.phase.name == what)


def _estimated_point(what: str, best: Estimate) -> dict[str, Any]:
    phase, workload, topology = phase_of(what, best), best.workload, best.topology
    milliseconds = round(1e3 * phase.seconds, 4)
    return {
        "pass": what,
        "axis": topology.chip.name,
        "devices": topology.num_devices,
        "topology": str(topology),
        "mesh": str(best.spec),
        "batch": workload.batch,
        "canvas": workload.prompt + workload.new_tokens,
        "positions": phase.phase.positions,
        "ms": {"median": milliseconds, "minimum": milliseconds, "maximum": milliseconds},
        "bound": phase.bound,
        "collective_bytes_of_a_pass": phase.collective_bytes,
        "memory_bytes_per_device": best.memory.total,
    }


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
