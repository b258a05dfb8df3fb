"""What happens before the first token: configuration, weights, conversion, compilation cold and warm."""

from __future__ import annotations

import gc
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from absl import flags

from benchmarks.suite.cold_start import NEW_TOKENS, STEPS
from benchmarks.suite.sheet import NotRunError, Sheet
from benchmarks.suite.subject import command, open_engine
from checkpoints import open_folder
from checkpoints.conversion import convert
from checkpoints.opening import open_tensors
from checkpoints.output import FolderOutput
from runtime.engine import Engine
from runtime.models.config import ModelConfig
from runtime.models.families import model_layout

SECTION, MEMORY = "start", "memory"
# Less than the 1800 s after which a run without progress is given up.
_CHILD_SECONDS = 1500
# Weights up to this size are loaded several times.
_LOADED_OFTEN = 1 << 30
_LOADS = 3


def measure_compilation(sheet: Sheet, values: flags.FlagValues) -> None:
    """Two processes with one compile cache, empty and then full. No device may be in use yet: they want it alone."""
    names = ("compilation, cold", "compilation, warm cache")
    sections = [(name, "first token after the weights, " + name.split(", ")[1]) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        for name, first in sections:

            def work(name: str = name, first: str = first) -> None:
                found = _start(command("benchmarks.suite.cold_start", values, f"--compile_cache={folder}"))
                what = {"programs": found["programs"], "generation": f"{NEW_TOKENS} tokens, {STEPS} steps"}
                sheet.value(SECTION, name, found["compile_seconds"], "s", what)
                sheet.value(SECTION, first, found["first_token_seconds"], "s")

            sheet.attempt(SECTION, name, work)


def _start(arguments: list[str]) -> dict[str, Any]:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_CHILD_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NotRunError(f"a process of its own took more than {_CHILD_SECONDS} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise NotRunError(f"a process of its own ended with {done.returncode}: {last[:300]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def measure_files(sheet: Sheet, values: flags.FlagValues) -> None:
    """Reading the configuration, and converting the checkpoint."""
    if values.random is not None:
        for name in ("configuration", "conversion to a canonical checkpoint"):
            sheet.leave_out(SECTION, name, "random weights have no files; see benchmarks.full_checkpoint")
        return

    def read() -> None:
        ModelConfig.from_huggingface(open_folder(values.checkpoint).config)

    sheet.measure(SECTION, "configuration", lambda: read)

    def work() -> None:
        folder = open_folder(values.checkpoint)
        if folder.is_canonical:
            raise NotRunError("it is canonical")
        layout = model_layout(ModelConfig.from_huggingface(folder.config))
        size = open_tensors(folder).bytes
        with tempfile.TemporaryDirectory() as place:
            free = shutil.disk_usage(place).free
            if free < 1.2 * size:
                raise NotRunError(f"{place} has {free / 1e9:.1f} GB for {size / 1e9:.1f}")
            output = FolderOutput(Path(place) / "converted")
            output.prepare(overwrite=False)
            start = time.perf_counter()
            convert(folder, layout, output)
            seconds = time.perf_counter() - start
        sheet.value(SECTION, "conversion to a canonical checkpoint", seconds, "s", {"gigabytes": round(size / 1e9, 3)})

    sheet.attempt(SECTION, "conversion to a canonical checkpoint", work)


def load(sheet: Sheet, values: flags.FlagValues, devices: list[Any]) -> Engine:
    """The engine, loaded and timed; small ones several times."""
    note_memory(sheet, "before the weights", devices)
    times: list[float] = []
    while True:
        start = time.perf_counter()
        engine = open_engine(values, devices)
        jax.block_until_ready(engine.weights)
        times.append(time.perf_counter() - start)
        size = engine.layout.bytes_per_device(engine.dtype)
        if len(times) == _LOADS or size > _LOADED_OFTEN:
            break
        del engine
        gc.collect()
    name = "parameters, loaded" if values.random is None else "parameters, made on the devices"
    facts = {
        "parameters": engine.layout.parameter_count,
        "gigabytes_per_device": round(size / 1e9, 3),
        "first": round(times[0], 3),
        "loads": len(times),
    }
    sheet.value(SECTION, name, min(times), "s", facts)
    note_memory(sheet, "with the weights", devices)
    return engine


def note_memory(sheet: Sheet, when: str, devices: list[Any]) -> None:
    """Memory of this process and of the first device, and the most that either has had so far."""
    # Kilobytes on Linux, bytes on macOS.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    facts = {"peak": round(most / 1e9, 3)}
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        sheet.leave_out(MEMORY, f"host, {when}", "this system does not say")
    else:
        sheet.value(MEMORY, f"host, {when}", pages * resource.getpagesize() / 1e9, "GB", facts)
    stats = devices[0].memory_stats()
    if not stats:
        sheet.leave_out(MEMORY, f"device, {when}", f"{devices[0].platform} devices do not say; theirs is the host's")
        return
    peak = {"peak": round(stats["peak_bytes_in_use"] / 1e9, 3)} if "peak_bytes_in_use" in stats else {}
    sheet.value(MEMORY, f"device, {when}", stats["bytes_in_use"] / 1e9, "GB", peak)
