"""Run all measurements of a model on this machine, and print an acceptance list.

  python -m benchmarks.suite --budget=480                             the demo checkpoint, about 10 minutes on 2 cores
  python -m benchmarks.suite --checkpoint=apple/DiffuCoder-7B-cpGRPO  on the GPUs or TPUs that are attached
  python -m benchmarks.suite --random=diffucoder-7b                   the 7.6B shape without its weights
  python -m benchmarks.suite --parity=DIR --tolerance=1e-4            only compare the layers of a folder with PyTorch's

Every row has a value or the reason why it was not run: it would take too long by the measured roofline, does not fit,
or does not apply. Calls are warmed up with the shapes that are timed. Compile time is measured separately, in child
processes, with a cold and with a warm persistent cache. MFU is relative to a square matrix product, MBU to a copy, both
measured in the same run. The record is benchmarks/results/suite_<device>.json, or suite_<device>_cut_short.json if the
model does not load or the run is interrupted; a plot of throughput against batch size is beside it. ``python -m
benchmarks.report --readme=benchmarks/README.md`` makes its tables.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from absl import flags

from benchmarks.records import (
    build_record,
    check_one_host,
    define_record_flags,
    integers,
    kind_of_devices,
    load_notes,
    write_record,
)
from benchmarks.roofline import COPY_BYTES, MATMUL_SIZE, Roofline, fits_or_none, measure_roofline
from benchmarks.suite.acceptance import acceptance, check_parity, not_loaded
from benchmarks.suite.generation import measure_autoregressive, measure_batches, measure_cpu, measure_generations
from benchmarks.suite.passes import (
    measure_block_steps,
    measure_grid,
    measure_lengths,
    measure_steps,
    measure_ten_tokens,
    read_shapes,
)
from benchmarks.suite.plots import plot_batches
from benchmarks.suite.sheet import Sheet
from benchmarks.suite.start import load, measure_compilation, measure_files, measure_transfers, note_memory
from benchmarks.suite.subject import Subject, attached_devices, check_subject, define_subject_flags, model_name
from benchmarks.suite.text import measure_tokenizer
from launch.process.profiling import check_profiling, define_profiling_flags
from launch.process.startup import run_launcher, start_devices
from runtime.engine import Engine
from sharding.errors import InputError


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    define_profiling_flags(values)
    define_subject_flags(values)
    flags.DEFINE_list(
        "lengths", ["128", "256", "512", "1024", "2048"], "Numbers of positions of forward passes.", flag_values=values
    )
    flags.DEFINE_list("batches", ["1", "2", "4", "8", "16", "32"], "Numbers of rows.", flag_values=values)
    shapes = ["1x128", "1x512", "1x1024", "4x512", "8x512", "8x1024"]
    flags.DEFINE_list("steps", shapes, "Rows and canvas of denoise steps.", flag_values=values)
    flags.DEFINE_integer("trials", 5, "Timed calls per measurement.", 2, 1000, flag_values=values)
    flags.DEFINE_float(
        "row_seconds",
        60.0,
        "Skip measurements that are expected to take longer than this many seconds.",
        0.1,
        flag_values=values,
    )
    flags.DEFINE_float(
        "budget", None, "Seconds after which no measurement is started. Default: no limit.", 1.0, flag_values=values
    )
    flags.DEFINE_string(
        "parity", None, "Only compare each layer of this Hugging Face folder with PyTorch's.", flag_values=values
    )
    flags.DEFINE_float(
        "tolerance",
        None,
        "Largest difference from PyTorch, relative to an element's size plus the root mean square. Default: by dtype.",
        0.0,
        flag_values=values,
    )
    for name, sizes in (("matmul_size", MATMUL_SIZE), ("copy_bytes", COPY_BYTES)):
        default = ", ".join(f"{size} on {platform}" for platform, size in sizes.items())
        text = f"Size with which peak rates are measured. Default: {default}."
        flags.DEFINE_integer(name, None, text, 64, flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Print a line per measurement, and write the record."""
    lengths, batches = integers("lengths", values.lengths), integers("batches", values.batches)
    shapes = read_shapes(values.steps)
    check_one_host()
    check_profiling(values)
    if values.parity is not None:
        if values.checkpoint is not None or values.random is not None:
            raise InputError("--parity names the model: leave out --checkpoint and --random")
        values.checkpoint = values.parity
    check_subject(values)
    if values.parity is not None:
        start_devices(values)
        check_parity(values, attached_devices(values))
        return
    notes = load_notes()
    sheet = Sheet(values.trials, values.row_seconds, values.budget)
    # Only one process may use the devices, so child processes run before this one uses them.
    measure_compilation(sheet, values)
    start_devices(values)
    devices = attached_devices(values)
    measure_files(sheet, values)
    name = values.record or f"suite_{_short(devices[0])}"
    engine: Engine | None = None
    accepted: list[dict[str, Any]] = []
    try:
        engine = load(sheet, values, devices)
        notes += engine.notes
        subject = Subject(values, sheet, engine, roofline_of(sheet, values, devices[0], str(engine.dtype)))
        devices = subject.devices
        measure(subject, lengths, batches, shapes)
        accepted = acceptance(subject, values.tolerance)
    except BaseException as error:
        # Keep the measurements so far, but do not replace a complete record.
        if engine is None and isinstance(error, Exception):
            accepted = not_loaded(error)
        notes.append(f"cut short by {type(error).__name__}: {str(error)[:200]}")
        print(f"cut short; {name}.json is not replaced")
        name += "_cut_short"
        raise
    finally:
        record = build_record(
            "suite",
            kind=kind_of_devices(devices),
            settings=settings_of(values, engine),
            results={"rows": sheet.records(), "acceptance": accepted},
            devices=devices,
            notes=notes,
        )
        path = write_record(record, values.output_dir, name)
        print(f"written: {path}")
        plot_batches(record, path.with_suffix(".png"))
    if sheet.failures:
        raise RuntimeError(
            f"{sheet.failures} measurements or acceptance items failed; see the record and the errors above"
        )


def roofline_of(sheet: Sheet, values: flags.FlagValues, device: Any, dtype: str) -> Roofline:
    """Measure the peak rates of a device, and add them to the sheet.

    Raises:
      InputError: its memory is too small beside the weights.
    """
    matmul_size = values.matmul_size or MATMUL_SIZE[device.platform]
    copied = values.copy_bytes or COPY_BYTES[device.platform]
    found = fits_or_none(lambda: measure_roofline(device, dtype, values.trials, matmul_size, copied))
    if isinstance(found, str):
        raise InputError(
            f"not enough memory beside the weights for --matmul_size={matmul_size} and --copy_bytes={copied}; give "
            f"smaller ones: the peak rates measured with them are needed to plan all other measurements ({found})"
        )
    sheet.value("ceilings", "matrix product, one device", found.flops / 1e12, "TFLOP/s")
    sheet.value("ceilings", "copy, one device", found.bandwidth / 1e9, "GB/s")
    measure_transfers(sheet, device, device.platform)
    return found


def measure(subject: Subject, lengths: list[int], batches: list[int], shapes: Sequence[tuple[int, int]]) -> None:
    """Make the measurements that need the model, the most important first, within the time budget."""
    measure_ten_tokens(subject)
    measure_generations(subject)
    measure_lengths(subject, lengths)
    measure_tokenizer(subject)
    measure_batches(subject, batches)
    measure_steps(subject, shapes)
    measure_block_steps(subject)
    measure_autoregressive(subject)
    note_memory(subject.sheet, "during the runs", subject.devices)
    measure_cpu(subject)
    measure_grid(subject, lengths, batches)
    note_memory(subject.sheet, "after the runs", subject.devices)


def settings_of(values: flags.FlagValues, engine: Engine | None) -> dict[str, Any]:
    """Return the settings for a record. Size, dtype and mesh are missing if the model did not load."""
    places = ("checkpoint", "output_dir", "record", "profile_dir", "dump_hlo", "compile_cache")
    settings = {name: values[name].value for name in values if name not in places}
    return {
        "model": model_name(values),
        "parameters": None if engine is None else engine.layout.parameter_count,
        "dtype": None if engine is None else str(engine.dtype),
        "mesh": None if engine is None else str(engine.layout.spec),
        "flags": {name: value for name, value in settings.items() if value is not None},
        "environment": {name: os.environ[name] for name in ("XLA_FLAGS", "JAX_PLATFORMS") if name in os.environ},
    }


def _short(device: object) -> str:
    """Return a device's kind in a form for file names."""
    kind = str(getattr(device, "device_kind", "device")).lower().removeprefix("nvidia").strip()
    return "_".join("".join(letter if letter.isalnum() else " " for letter in kind).split())


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
