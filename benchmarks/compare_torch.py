"""Compare with PyTorch (transformers) at its best: both do the same work on the same device, taking turns.

  python -m benchmarks.compare_torch                     float32, on one core and on all: about an hour on 2 cores
  python -m benchmarks.compare_torch --dtype=bfloat16 --record=compare_torch_bfloat16                another hour
  python -m benchmarks.compare_torch --random=demo --canvas=128,512 --row_seconds=5                  a few minutes
  python -m benchmarks.compare_torch --random=diffucoder-7b --dtype=bfloat16 --batch=1,8 --canvas=512,1024   on a GPU

Parts: ``forward`` is one pass of a bidirectional model, without and with its output head. ``generate`` compares
masked diffusion with the published loop and the published sampling; half of each canvas is prompt.
``autoregressive`` is a causal model of the same sizes with its cache, and ``gpt2`` is GPT-2 124M; both are compared
with greedy generation of transformers.

A process of its own measures each number of cores. In it, both sides have the same prompts and the same weights, which
are made in PyTorch and read here from a checkpoint. For float32 on CPU, PyTorch uses the faster of its libraries for
matrix products. A short probe finds it, with a pass over as many positions (at most 512) or the decoding of a few
tokens, and the row names it. Results are compared before times: logits, and tokens of greedy generations. What is
sampled is judged by PyTorch's distributions, see :mod:`benchmarks.torch_rows`. Calls alternate after a warm-up with the
timed shapes. A goal that is not reached is marked, and its row stays. :mod:`benchmarks.torch_memory` compares memory.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from absl import flags

from benchmarks.models import define_model_flags, model_sizes
from benchmarks.records import (
    build_record,
    define_record_flags,
    kind_of_devices,
    load_notes,
    use_cores,
    write_record,
)
from benchmarks.roofline import fits_or_none
from benchmarks.torch_cases import DTYPES, PARTS, PARTS_OF_A_MODEL, cases, define_case_flags, published
from benchmarks.torch_models import import_torch, torch_device
from benchmarks.torch_rows import TOLERANCE, Sides, compare
from benchmarks.torch_tables import PASSES, add_goals, agreement
from checkpoints import parse_json_object
from launch.process.profiling import check_profiling, define_profiling_flags
from launch.process.startup import run_launcher
from sharding.errors import InputError

_ALL = "all"
MODELS = ("demo", "mid-size")
# Flags that a process for one number of cores gets from this one.
_OWN_FLAGS = ("cores", "output_dir", "record")


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    define_profiling_flags(values)
    define_model_flags(values, MODELS)
    define_case_flags(values)
    flags.DEFINE_list("parts", list(PARTS), f"Which of {', '.join(PARTS)} to run.", flag_values=values)
    flags.DEFINE_enum("dtype", "float32", DTYPES, "Dtype of weights and activations.", flag_values=values)
    text = "Numbers of processor cores, or all; a process for each. Default: 1 and all on CPU, otherwise all."
    flags.DEFINE_list("cores", None, text, flag_values=values)
    flags.DEFINE_integer("repeats", 10, "Maximum number of timed calls per case.", 1, flag_values=values)
    text = "Seconds of timed calls per case. At least 3 calls are timed, even if they take longer."
    flags.DEFINE_float("row_seconds", 20.0, text, 0.0, flag_values=values)
    text = "Measure in this process, with one number of cores."
    flags.DEFINE_bool("one_process", False, text, flag_values=values)


def numbers_of_cores(texts: Sequence[str] | None, platform: str) -> list[int]:
    """Return the numbers of cores to measure with, without duplicates.

    Raises:
      InputError: a number is not positive, or there are fewer cores.
    """
    texts = texts or (["1", _ALL] if platform == "cpu" else [_ALL])
    every = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for text in texts:
        if text != _ALL and not (text.isdecimal() and 0 < int(text) <= every):
            raise InputError(f'--cores={",".join(texts)}: expected numbers from 1 to {every}, or "{_ALL}"')
    return list(dict.fromkeys(every if text == _ALL else int(text) for text in texts))


def check_flags(values: flags.FlagValues) -> None:
    """Check the flags before a device is used.

    Raises:
      InputError: a flag is wrong.
    """
    check_profiling(values)
    check_cases(values)
    numbers_of_cores(values.cores, "cpu")


def check_cases(values: flags.FlagValues) -> None:
    """Check the flags that give the cases.

    Raises:
      InputError: a flag is wrong.
    """
    if not values.parts or set(values.parts) - set(PARTS):
        raise InputError(f"--parts={','.join(values.parts)}: expected some of {', '.join(PARTS)}")
    for part in values.parts:
        for case in cases(part, values, "cpu"):
            if case.config is not None and case.new_tokens == 0:
                raise InputError(f"--canvas={case.canvas}: half of it is generated, so it needs 2 positions")


def subjects(values: flags.FlagValues) -> Iterator[tuple[str, list[str]]]:
    """Yield the models that are held in memory one after another, each with the parts that it runs."""
    for name in values.random:
        for together in (PARTS_OF_A_MODEL[:2], PARTS_OF_A_MODEL[2:]):
            if parts := [part for part in values.parts if part in together]:
                yield name, parts
    if "gpt2" in values.parts:
        yield "gpt2", ["gpt2"]


def sizes_of(name: str, values: flags.FlagValues) -> dict[str, int]:
    """Return a model's sizes; none for GPT-2, whose sizes are fixed."""
    return {} if name == "gpt2" else model_sizes(values, name)


def measure(values: flags.FlagValues, torch: Any, device: str, cores: int) -> dict[str, list[dict[str, Any]]]:
    """Run every case in this process, print a line for each, and return the rows by part."""
    results: dict[str, list[dict[str, Any]]] = {part: [] for part in values.parts}
    judged = (cores, values.dtype, device) == (1, "float32", "cpu")
    for name, parts in subjects(values):
        for part, row in rows_of_model(name, parts, values, torch, device):
            row = {"model": name, "cores": cores} | row
            if judged and "out_of_memory" not in row:
                add_goals(part, row)
            results[part].append(row)
            print(line(part, row), flush=True)
        jax.clear_caches()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return results


def rows_of_model(
    name: str, parts: list[str], values: flags.FlagValues, torch: Any, device: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield part and row of every case of a model. The model can be freed afterwards."""
    sides = Sides.make(name, parts[0], sizes_of(name, values), values.dtype, torch, device)
    for part in parts:
        for case in cases(part, values, sides.engine.platform):
            found = fits_or_none(partial(compare, sides, case, values))
            yield part, case.sizes | ({"out_of_memory": found} if isinstance(found, str) else found)


def line(part: str, row: dict[str, Any]) -> str:
    """Return a line of text for each time in a row."""
    sizes = ("model", "cores", "batch", "canvas", "prompt", "new_tokens", "steps")
    shape = " ".join(f"{name}={row[name]}" for name in sizes if name in row)
    if "out_of_memory" in row:
        return f"{part} {shape}: out of memory"
    texts = []
    for name in PASSES if part == "forward" else ("",):
        found = row[name] if name else row
        fast = found["times_as_fast"]
        texts.append(
            f"{part} {shape} {name}: jax {found['jax_ms'].median:.1f} ms, torch {found['torch_ms'].median:.1f} ms "
            f"({row['torch_backend']}), {fast['median']:.2f}x as fast ({fast['minimum']:.2f} to {fast['maximum']:.2f})"
            + (f", goal {found['goal']:g}: {found['verdict']}" if "goal" in found else "")
        )
    return "\n".join([*texts[:-1], f"{texts[-1]}, {agreement(row)}"])


def run_process(module: str, arguments: Sequence[str], read: bool = False) -> str:
    """Run a module of this package in a new process, and return its standard output if ``read`` is set.

    Raises:
      InputError: it fails. Its own message is on standard error.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE if read else None, text=True, check=False)
    if done.returncode:
        raise InputError(f"benchmarks.{module} ended with exit code {done.returncode}; see above")
    return done.stdout or ""


def given_flags(values: flags.FlagValues) -> list[str]:
    """Return the flags that this command was given, for a process that measures one number of cores."""
    return [values[name].serialize() for name in values if values[name].present and name not in _OWN_FLAGS]


def measure_in_processes(values: flags.FlagValues, cores: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    """Run every case in one process per number of cores, and return the rows of all of them by part."""
    results: dict[str, list[dict[str, Any]]] = {part: [] for part in values.parts}
    with tempfile.TemporaryDirectory() as folder:
        for count in cores:
            own = ["--one_process", f"--cores={count}", f"--output_dir={folder}", "--record=rows"]
            run_process("compare_torch", [*given_flags(values), *own])
            record = parse_json_object((Path(folder) / "rows.json").read_bytes())
            for part in values.parts:
                results[part] += record["results"][part]
    return results


def main(values: flags.FlagValues) -> None:
    """Run the comparisons, print a line for each case, and write the record."""
    # Both frameworks share the device's memory, so allocate only what is needed.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    check_flags(values)
    if values.one_process:
        cores = numbers_of_cores(values.cores or [_ALL], "cpu")
        if len(cores) > 1:
            raise InputError(f"--cores={','.join(values.cores)}: --one_process takes one number of cores")
        if values.cores not in (None, [_ALL]):
            use_cores(cores[0])
    notes, torch = load_notes(torch_cores=max(numbers_of_cores(values.cores, "cpu"))), import_torch()
    devices = jax.devices()[:1]
    device = torch_device(torch, devices[0].platform)
    if values.one_process:
        torch.set_num_threads(cores[0])
        results = measure(values, torch, device, cores[0])
    else:
        cores = numbers_of_cores(values.cores, devices[0].platform)
        results = measure_in_processes(values, cores)
    write(values, cores, device, results, devices, notes)


def write(
    values: flags.FlagValues,
    cores: Sequence[int],
    device: str,
    results: dict[str, list[dict[str, Any]]],
    devices: Sequence[jax.Device],
    notes: Sequence[str],
) -> None:
    """Write the record of these results, and print where it is."""
    sampling = published(values, 1)
    record = build_record(
        "compare_torch",
        kind=kind_of_devices(devices),
        settings={
            "models": {name: sizes_of(name, values) for name, _ in subjects(values)},
            "dtype": values.dtype,
            "cores": cores,
            "algorithm": sampling.algorithm,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "row_seconds": values.row_seconds,
            "torch_device": device,
            "torch_attention": "sdpa",
            "tolerance_of_logits": TOLERANCE[values.dtype],
        },
        results=results,
        devices=devices,
        notes=notes,
    )
    print(f"written: {write_record(record, values.output_dir, values.record)}")


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
