"""Time before the first token: configuration, weights, conversion, cold and warm compilation."""

from __future__ import annotations

import gc
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from benchmarks.process_memory import peak_resident_bytes
from benchmarks.records import NotRunError, Timing
from benchmarks.suite.cold_start import NEW_TOKENS, STEPS
from benchmarks.suite.sheet import Sheet
from benchmarks.suite.subject import command, open_engine
from checkpoints import open_folder, parse_json_object
from checkpoints.conversion import convert
from checkpoints.opening import open_tensors
from checkpoints.output import FolderOutput
from runtime.engine import Engine
from runtime.models.families import model_layout, parse_config

SECTION, MEMORY, TRANSFER = "start", "memory", "transfer"
_TRANSFERRED = 1 << 26  # bytes
# Less than the 1800 s after which a run without progress is ended.
_CHILD_SECONDS = 1500
# With weights up to this size, a start is cheap, and is repeated several times.
_SMALL = 1 << 30
_TRIALS = 3


def measure_compilation(sheet: Sheet, values: flags.FlagValues) -> None:
    """Time the start of pairs of processes that share a compile cache: it is empty for the first, full for the second.

    A small model is started several times, with a new cache for each pair. This process must not use a device yet.
    """
    found: dict[str, list[dict[str, Any]]] = {"cold": [], "warm cache": []}

    def work() -> None:
        for _ in range(_TRIALS):
            with tempfile.TemporaryDirectory() as folder:
                for starts in found.values():
                    starts.append(
                        start_process(command("benchmarks.suite.cold_start", values, f"--compile_cache={folder}"))
                    )
            if starts[-1]["weight_bytes"] > _SMALL:
                break

    failed = sheet.tried(work)
    for kind, starts in found.items():
        names = (f"compilation, {kind}", f"first token after the weights, {kind}")
        for name, key in zip(names, ("compile_seconds", "first_token_seconds"), strict=True):
            if not starts:
                sheet.leave_out(SECTION, name, str(failed))
                continue
            facts = {"programs": starts[0]["programs"], "generation": f"{NEW_TOKENS} tokens, {STEPS} steps"}
            one = one_trial(starts[0]["weight_bytes"], failed) if len(starts) == 1 else {}
            sheet.values(SECTION, name, [start[key] for start in starts], "s", facts | one)


def one_trial(size: int, failed: str | None = None) -> dict[str, str]:
    """Return a fact that says why there is only one trial: an error, or the size of the weights."""
    return {"one_trial": failed or f"weights of {size / 1e9:.1f} GB are large"}


def start_process(arguments: list[str]) -> dict[str, Any]:
    """Run a process and read the JSON object in its last line.

    Raises:
      NotRunError: it failed, or took too long.
    """
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_CHILD_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NotRunError(f"a child process took more than {_CHILD_SECONDS} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise NotRunError(f"a child process ended with {done.returncode}: {last[:300]}")
    return parse_json_object(done.stdout.strip().splitlines()[-1].encode())


def measure_files(sheet: Sheet, values: flags.FlagValues) -> None:
    """Measure reading the configuration and converting the checkpoint."""
    if values.random is not None:
        for name in ("configuration", "conversion to a canonical checkpoint"):
            sheet.leave_out(SECTION, name, "random weights have no files; see benchmarks.full_checkpoint")
        return

    def read() -> None:
        parse_config(open_folder(values.checkpoint).config)

    sheet.measure(SECTION, "configuration", lambda: read)

    def work() -> None:
        folder = open_folder(values.checkpoint)
        if folder.is_orbax:
            raise NotRunError("the checkpoint is canonical already")
        layout = model_layout(parse_config(folder.config))
        size = open_tensors(folder).bytes
        seconds: list[float] = []
        while len(seconds) < (_TRIALS if size <= _SMALL else 1):
            with tempfile.TemporaryDirectory() as place:
                free = shutil.disk_usage(place).free
                if free < 1.2 * size:
                    raise NotRunError(f"{place} has {free / 1e9:.1f} GB free; {1.2 * size / 1e9:.1f} GB are needed")
                output = FolderOutput(Path(place) / "converted")
                output.prepare(overwrite=False)
                start = time.perf_counter()
                convert(folder, layout, output)
                seconds.append(time.perf_counter() - start)
        facts = {"gigabytes": round(size / 1e9, 3)} | (one_trial(size) if len(seconds) == 1 else {})
        sheet.values(SECTION, "conversion to a canonical checkpoint", seconds, "s", facts)

    sheet.attempt(SECTION, "conversion to a canonical checkpoint", work)


def load(sheet: Sheet, values: flags.FlagValues, devices: list[Any]) -> Engine:
    """Load the engine and measure the time; small models are loaded several times."""
    note_memory(sheet, "before the weights", devices)
    times: list[float] = []
    while True:
        start = time.perf_counter()
        engine = open_engine(values, devices)
        jax.block_until_ready(engine.weights)
        times.append(time.perf_counter() - start)
        size = engine.layout.bytes_per_device(engine.dtype)
        if len(times) == _TRIALS or size > _SMALL:
            break
        del engine
        gc.collect()
    name = "parameters, loaded" if values.random is None else "parameters, made on the devices"
    facts = {
        "parameters": engine.layout.parameter_count,
        "gigabytes_per_device": round(size / 1e9, 3),
        "first": round(times[0], 3),
    }
    sheet.values(SECTION, name, times, "s", facts | (one_trial(size) if len(times) == 1 else {}))
    note_memory(sheet, "with the weights", devices)
    return engine


def note_memory(sheet: Sheet, when: str, devices: list[Any]) -> None:
    """Add measurements of the memory of this process and of the first device, current and peak."""
    facts = {"peak": round(peak_resident_bytes() / 1e9, 3)}
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        sheet.leave_out(MEMORY, f"host, {when}", "not reported by this system")
    else:
        sheet.value(MEMORY, f"host, {when}", pages * resource.getpagesize() / 1e9, "GB", facts)
    stats = devices[0].memory_stats()
    if not stats:
        sheet.leave_out(
            MEMORY, f"device, {when}", f"{devices[0].platform.upper()} devices report no memory; see the host's"
        )
        return
    peak = {"peak": round(stats["peak_bytes_in_use"] / 1e9, 3)} if "peak_bytes_in_use" in stats else {}
    sheet.value(MEMORY, f"device, {when}", stats["bytes_in_use"] / 1e9, "GB", peak)


def measure_transfers(sheet: Sheet, device: Any, platform: str) -> None:
    """Measure copies between the host's pageable memory and a device, in both directions."""
    names = ("host to device", "device to host")
    if platform == "cpu":
        for name in names:
            sheet.leave_out(TRANSFER, name, "CPU devices use the host's memory")
        return
    array = np.ones(_TRANSFERRED // 4, np.float32)

    def facts(timing: Timing) -> dict[str, Any]:
        return {"megabytes": _TRANSFERRED >> 20, "gigabytes_per_second": round(_TRANSFERRED / timing.mean / 1e6, 2)}

    def there() -> Callable[[], Any]:
        return lambda: jax.device_put(array, device)

    def back() -> Callable[[], Any]:
        # An array keeps its copy on the host, so each call takes a new one.
        arrays = [jax.block_until_ready(jax.device_put(array, device)) for _ in range(sheet.trials(0.0) + 1)]
        return lambda: np.asarray(arrays.pop())

    for name, prepare in zip(names, (there, back), strict=True):
        sheet.measure(TRANSFER, name, prepare, facts)
