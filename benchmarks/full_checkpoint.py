"""Make, copy, convert, verify, restore and run a 7.6B checkpoint on one machine; measure time and memory.

  python -m benchmarks.full_checkpoint --folder=/somewhere/with/50GB            15.2 GB of bfloat16, 4 files
  python -m benchmarks.full_checkpoint --folder=/tmp/try --layers=1 --vocab=8192    the same in a minute

Each phase runs in a new process with an empty page cache. The record has its wall time, bytes per second (restoring:
only while it loads) and peak resident memory. For comparison, it also has a plain copy and a plain read of the same
bytes, and the speed of the digest on one core. The goals are: conversion within 2 GiB of memory and twice the time of
the copy; restoring within the size of the weights plus 2 GiB; verification at the speed of the disk or of the digest on
one core, whichever is slower.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from absl import flags
from safetensors.numpy import save_file

from benchmarks.models import SIZES, checkpoint_config
from benchmarks.process_memory import peak_resident_bytes
from benchmarks.records import build_record, define_record_flags, load_notes, write_record
from checkpoints.export import write_index
from checkpoints.local_files import parse_json_object
from checkpoints.manifest import digest
from launch.process.profiling import check_profiling, define_profiling_flags, given_profiling, profile_again
from launch.process.startup import run_launcher
from runtime.models.families import model_layout, parse_config
from sharding.errors import InputError

FILES = 4


def config_of(layers: int, vocab: int) -> dict[str, Any]:
    """Return DiffuCoder-7B's config.json, optionally with fewer layers or a smaller vocabulary."""
    return checkpoint_config(SIZES["diffucoder-7b"] | {"layers": layers, "vocab_size": vocab}, "bfloat16")


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    flags.DEFINE_string("folder", None, "Folder for temporary files, which are removed at the end.", flag_values=values)
    flags.DEFINE_integer("layers", 28, "Layers of the model.", 1, 28, flag_values=values)
    flags.DEFINE_integer("vocab", 152064, "Vocabulary of the model.", 128, 152064, flag_values=values)
    flags.DEFINE_enum("phase", None, ("make", "restore"), "Run one phase in this process.", flag_values=values)
    define_record_flags(values)
    define_profiling_flags(values)


def make_source(folder: Path, layers: int, vocab: int) -> None:
    """Write a Hugging Face folder of random bfloat16 weights in four files."""
    folder.mkdir(parents=True)
    config = config_of(layers, vocab)
    (folder / "config.json").write_text(json.dumps(config))
    layout = model_layout(parse_config(config))
    shapes = {source: leaf.source_shape for leaf in layout.leaves for source in leaf.sources}
    generator = np.random.default_rng(0)
    claims, names = {}, list(shapes)
    per_file = -(-len(names) // FILES)
    for number in range(FILES):
        file = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
        part = names[number * per_file : (number + 1) * per_file]
        tensors = {
            name: (0.02 * generator.standard_normal(shapes[name], np.float32)).astype(ml_dtypes.bfloat16)
            for name in part
        }
        save_file(tensors, folder / file)
        claims.update(dict.fromkeys(part, file))
    write_index(folder, claims, 2 * layout.parameter_count)


def restore(values: flags.FlagValues, checkpoint: Path) -> None:
    """Load the checkpoint onto 8 simulated devices, run a short generation, and print seconds and memory as JSON."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from runtime import DiffusionConfig, Engine, GenerationResult

    start = time.perf_counter()
    engine = Engine.load(checkpoint, mesh="tensor=8", dtype="bfloat16")
    jax.block_until_ready(engine.runner.weights)
    loaded = time.perf_counter() - start
    peak = peak_resident_bytes()
    assert engine.loaded is not None

    def denoise() -> GenerationResult:
        return engine.generate_tokens(np.arange(1, 9)[None], config=DiffusionConfig(max_new_tokens=8, steps=1))

    result = denoise()
    print(
        json.dumps(
            {
                "load_seconds": loaded,
                "load_peak_resident_bytes": peak,
                "bytes_read": engine.loaded.bytes_read,
                "weight_bytes": engine.loaded.bytes_held,
                "denoise_seconds": result.stats.seconds,
                "tokens": result.stats.tokens,
            }
        )
    )
    profile_again(values, "denoise", denoise, engine.program_texts)


def run_phase(name: str, command: Sequence[str]) -> dict[str, Any]:
    """Run a process. Return seconds, peak resident bytes, and the JSON that it printed, if any."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise InputError(f"the phase {name} ended with exit code {process.returncode}")
    lines = [line for line in output.splitlines() if line.startswith("{")]
    said = parse_json_object(lines[-1].encode()) if lines else {}
    return {"seconds": seconds, "peak_resident_bytes": usage.ru_maxrss * 1024} | said


def copy_bytes(source: Path, target: Path) -> float:
    """Copy a folder's files and sync them to disk. Return the seconds."""
    start = time.perf_counter()
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - start


def forget(folder: Path) -> None:
    """Sync a folder's files to disk and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes(folder: Path) -> float:
    """Read a folder's files and discard the data. Return the seconds."""
    start = time.perf_counter()
    buffer = bytearray(32 << 20)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    return time.perf_counter() - start


def digest_speed() -> float:
    """Return the digest's bytes per second on one core, for chunks as large as those of a 7.6B model."""
    size, count = 2 << 20, 256
    data = memoryview(np.random.default_rng(0).bytes(size * count))  # more than the processor's caches hold
    start = time.perf_counter()
    for number in range(count):
        digest(data[number * size : (number + 1) * size])
    return len(data) / (time.perf_counter() - start)


def run_phases(values: flags.FlagValues, folder: Path) -> tuple[dict[str, Any], int]:
    """Make, copy, convert, read, verify and restore a model. Return results by phase, and the size of the model."""
    source, copied, checkpoint = folder / "source", folder / "copy", folder / "checkpoint"
    again = [
        "-m",
        "benchmarks.full_checkpoint",
        f"--folder={folder}",
        f"--layers={values.layers}",
        f"--vocab={values.vocab}",
    ]
    results: dict[str, Any] = {"make": run_phase("make", [*again, "--phase=make"])}
    size = sum(path.stat().st_size for path in source.iterdir())
    forget(source)
    print("copy ...", file=sys.stderr, flush=True)
    results["copy"] = {"seconds": copy_bytes(source, copied)}
    shutil.rmtree(copied)
    forget(source)
    paths = [f"--source={source}", f"--output={checkpoint}"]
    results["convert"] = run_phase("convert", ["-m", "launch.convert", *paths])
    shutil.rmtree(source)
    forget(checkpoint)
    print("read ...", file=sys.stderr, flush=True)
    results["read"] = {"seconds": read_bytes(checkpoint)}
    forget(checkpoint)
    results["verify"] = run_phase("verify", ["-m", "launch.verify", f"--checkpoint={checkpoint}"])
    forget(checkpoint)
    results["restore"] = {"kind": "simulated devices"} | run_phase("restore", [*again, "--phase=restore"])
    if more := given_profiling(values):
        # Trace a second run, so that the timed one is not slowed down. If it fails, the record is still written.
        with contextlib.suppress(InputError):
            run_phase("profile", [*again, *more, "--phase=restore"])
    for phase in results.values():
        phase["bytes_per_second"] = size / _own_seconds(phase)
    return results, size


def _own_seconds(phase: dict[str, Any]) -> float:
    """Return the seconds of a phase: of loading alone if its process also did something else."""
    seconds: float = phase.get("load_seconds", phase["seconds"])
    return seconds


def goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the results with the goals: what was found, and the most that is allowed."""
    convert, restored, gib = results["convert"], results["restore"], 2**30
    beyond = restored["load_peak_resident_bytes"] - restored["weight_bytes"]
    slower = min(results["read"]["bytes_per_second"], results["digest"]["bytes_per_second"])
    rows = [
        ("conversion: peak memory, GiB", convert["peak_resident_bytes"] / gib, 2.0),
        ("conversion: times as long as a copy", convert["seconds"] / results["copy"]["seconds"], 2.0),
        ("restoring: peak memory beyond the weights, GiB", beyond / gib, 2.0),
        (
            "verification: times as long as reading from disk or digesting on one core, whichever is slower",
            slower / results["verify"]["bytes_per_second"],
            1.0,
        ),
    ]
    return [{"goal": name, "found": round(found, 3), "most": most, "met": found <= most} for name, found, most in rows]


def print_phases(results: dict[str, Any]) -> None:
    """Print a line for each phase and for each goal."""
    for name, phase in results.items():
        peak = f", peak {phase['peak_resident_bytes'] / 2**30:.2f} GiB" if "peak_resident_bytes" in phase else ""
        print(f"{name:<8} {_own_seconds(phase):8.1f} s  {phase['bytes_per_second'] / 1e9:6.2f} GB/s{peak}")
    for row in goals(results):
        print(f"{row['goal']}: {row['found']:.2f}, goal at most {row['most']:g}: {'met' if row['met'] else 'NOT MET'}")


def main(values: flags.FlagValues) -> None:
    """Run the benchmark, or one phase of it."""
    if not values.folder:
        raise InputError("--folder is missing: name a folder to work in, with 50 GB free for the whole model")
    check_profiling(values)
    folder, notes = Path(values.folder), load_notes()
    if values.phase == "make":
        make_source(folder / "source", values.layers, values.vocab)
        return
    if values.phase == "restore":
        restore(values, folder / "checkpoint")
        return
    if folder.exists():
        raise InputError(f"--folder={folder} exists; name one that does not")
    try:
        results, size = run_phases(values, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    speed = digest_speed()
    results["digest"] = {"seconds": size / speed, "bytes_per_second": speed}
    print_phases(results)
    record = build_record(
        "full_checkpoint",
        kind="measured",
        settings={"layers": values.layers, "vocab": values.vocab, "bytes": size},
        results=results | {"goals": goals(results)},
        notes=[
            *notes,
            "resident memory counts mapped file pages; restore runs on 8 simulated devices that share one memory",
        ],
    )
    print(write_record(record, values.output_dir, values.record))


def run(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    run_launcher(main, define_flags, __doc__ or "", argv)


if __name__ == "__main__":
    run()
