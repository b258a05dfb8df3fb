"""Shared parts of benchmarks: flags, timing, and one JSON record per run."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jax
from absl import flags

from checkpoints.local_files import replace_file
from launch.process.environment import nvidia_driver
from launch.process.startup import this_host
from sharding.errors import InputError

# Where a record's numbers come from. Times of simulated devices say nothing about real devices.
Kind = Literal["measured", "simulated devices", "estimated"]

_REPOSITORY = Path(__file__).parent.parent
# Packages that determine the speed of programs: compilers and their runtimes. Not every machine has all of them.
_COMPILERS = (
    "libtpu",
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cudnn-cu12"),
    *("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13"),
)
CPUINFO = Path("/proc/cpuinfo")
NO_HTTPX = "benchmarks of a server need httpx: pip install -e '.[bench,serve]' in the checkout"
# Timed calls that a limit of time leaves: a median and a spread require several.
LEAST_REPEATS = 3
_PACKAGES = ("diffumesh", "jax", "jaxlib", *_COMPILERS, "flax", "numpy", "torch", "transformers")


class NotRunError(Exception):
    """Something cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Timing:
    """Wall times of repeated calls, in milliseconds; ``cpu`` is the median processor time of all threads."""

    median: float
    mean: float
    minimum: float
    maximum: float
    deviation: float
    cpu: float
    repeats: int
    each: tuple[float, ...]

    @classmethod
    def of(cls, seconds: Sequence[float], cpu_seconds: Sequence[float]) -> Timing:
        """Summarise the wall and processor seconds of calls."""
        wall = [1e3 * one for one in seconds]
        return cls(
            median=round(statistics.median(wall), 3),
            mean=round(statistics.mean(wall), 3),
            minimum=round(min(wall), 3),
            maximum=round(max(wall), 3),
            deviation=round(statistics.stdev(wall), 3) if len(wall) > 1 else 0.0,
            cpu=round(1e3 * statistics.median(cpu_seconds), 3),
            repeats=len(wall),
            each=tuple(round(one, 3) for one in wall),
        )

    def times_as_fast_as(self, other: Timing) -> dict[str, float]:
        """Return the speed-up over the calls of ``other``, which alternated with these, from the ratio of each pair."""
        ratios = [theirs / ours for ours, theirs in zip(self.each, other.each, strict=True)]
        return {
            "median": round(statistics.median(ratios), 3),
            "minimum": round(min(ratios), 3),
            "maximum": round(max(ratios), 3),
            "deviation": round(statistics.stdev(ratios), 3) if len(ratios) > 1 else 0.0,
        }


def time_alternating(
    calls: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 2, seconds: float | None = None
) -> dict[str, Timing]:
    """Time several calls in turn, A B A B ..., so that other load on the machine affects all of them equally.

    Args:
      calls: functions by name. Each returns only when its work is done; returned JAX arrays are waited for.
      repeats: timed calls per function, at least 1; with ``seconds``, the maximum.
      warmup: calls per function before the timed ones, with the same shapes, which compile and fill caches.
      seconds: time for the timed calls of all functions together. No further turn starts after it, but each function
        is called at least ``LEAST_REPEATS`` times if ``repeats`` allows. None for no limit.

    Returns:
      Timings by name.
    """
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    for turn in range(warmup + repeats):
        if turn == warmup:
            begin = time.perf_counter()
        done = turn - warmup
        if seconds is not None and done >= LEAST_REPEATS and time.perf_counter() - begin >= seconds:
            break
        for name, call in calls.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            taken, cpu_taken = time.perf_counter() - start, time.process_time() - cpu_start
            this_host().mark()  # the benchmark is slow, but does not hang
            if turn >= warmup:
                wall[name].append(taken)
                cpu[name].append(cpu_taken)
    return {name: Timing.of(wall[name], cpu[name]) for name in calls}


def kind_of_devices(devices: Sequence[Any]) -> Kind:
    """Return ``simulated devices`` if several CPU devices share one host, otherwise ``measured``."""
    return "simulated devices" if devices[0].platform == "cpu" and len(devices) > 1 else "measured"


def use_cores(count: int | None) -> int:
    """Restrict this process to ``count`` processor cores, in every framework. Call this before a device is used.

    Returns:
      Number of cores that the process may use.

    Raises:
      InputError: there are fewer cores, or the operating system cannot restrict them.
    """
    if not hasattr(os, "sched_setaffinity"):
        if count is not None:
            raise InputError("--cores: this system cannot keep a process to some of its cores")
        return os.cpu_count() or 1
    allowed = sorted(os.sched_getaffinity(0))
    if count is not None:
        if count > len(allowed):
            raise InputError(f"--cores={count}: this process may use {len(allowed)}")
        os.sched_setaffinity(0, allowed[:count])
    return count or len(allowed)


def load_notes(torch_cores: int = 0) -> list[str]:
    """Return a note if the machine was busy before the run; otherwise nothing.

    Args:
      torch_cores: number of cores that PyTorch's threads share; 0 if it does not run.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load < 0.5:
        return []
    note = f"other processes kept the machine busy before this run (load average {load:.1f})"
    if torch_cores > 1:
        note += (
            "; PyTorch's threads wait for one another by spinning and lose far more by that than XLA's, so that "
            "times on several cores flatter JAX: compare with --cores=1"
        )
    return [note]


def note_lines(record: Mapping[str, Any]) -> list[str]:
    """Return the notes of a record as lines below its table."""
    return ["", f"Note: {'; '.join(record['notes'])}."] if record["notes"] else []


def package_version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str, root: Path = _REPOSITORY) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def repository_commit(root: Path = _REPOSITORY) -> str | None:
    """Return the commit of a checkout, by default this one; None if it is not known.

    A copy on another machine, without this repository's Git history, names its commit in a file ``.commit``.
    """
    named = root / ".commit"
    return named.read_text(encoding="utf-8").strip() if named.is_file() else _git("rev-parse", "HEAD", root=root)


def _processor() -> dict[str, str | None]:
    """Return the processor's name, and its generation, which virtual machines leave out of the name."""
    try:
        lines = CPUINFO.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    found = {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}
    generation = [f"{key} {found[key]}" for key in ("cpu family", "model") if key in found]
    return {
        "processor": found.get("model name") or platform.processor() or platform.machine(),
        "processor_generation": ", ".join(generation) or None,
    }


def build_record(
    benchmark: str,
    *,
    kind: Kind,
    settings: Mapping[str, Any],
    results: Any,
    devices: Sequence[Any] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Build the JSON record of a run: command, machine, versions, settings and results.

    Args:
      benchmark: name of the benchmark's module.
      kind: ``measured``, ``simulated devices`` or ``estimated``.
      settings: flags and sizes that matter.
      results: the numbers; each :class:`Timing` becomes an object.
      devices: JAX devices that were used.
      notes: sentences that a reader of the numbers needs.
    """
    # Changes of the code; records that the same run has written do not count.
    code = ("--", ":/", ":(top,exclude)benchmarks/results")
    is_copy = (_REPOSITORY / ".commit").is_file()
    changes = None if is_copy else _git("status", "--porcelain", "--untracked-files=no", *code)
    return {
        "benchmark": benchmark,
        "kind": kind,
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": repository_commit(),
        "uncommitted_changes": None if changes is None else bool(changes),
        "versions": {"python": platform.python_version()}
        | {package: version for package in _PACKAGES if (version := package_version(package))},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            **_processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
            "platform": devices[0].platform if devices else None,
            "device_kind": devices[0].device_kind if devices else None,
            "device_count": len(devices),
            "driver": nvidia_driver(),
            # The runtime below JAX: versions of CUDA or of libtpu
            "runtime": devices[0].client.platform_version if devices else None,
        },
        "settings": dict(settings),
        "results": results,
        "notes": list(notes),
    }


def write_record(record: Mapping[str, Any], output_dir: str, name: str | None = None) -> Path:
    """Write a record as ``output_dir/name.json``. The default name is that of the benchmark."""
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name or record['benchmark']}.json"
    text = json.dumps(record, indent=2, allow_nan=False, default=_plain) + "\n"
    replace_file(path, [text.encode()])
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, Timing):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} does not belong in a record")


def define_record_flags(values: flags.FlagValues) -> None:
    """Define the flags that all benchmarks have. A folder that cannot be written to is an error at the start."""
    flags.DEFINE_string("output_dir", "benchmarks/results", "Folder for the JSON record.", flag_values=values)
    flags.DEFINE_string("record", None, "Name of the record. Default: the benchmark's.", flag_values=values)

    def can_be_written(folder: str) -> bool:
        check_output("output_dir", Path(folder))
        return True

    flags.register_validator("output_dir", can_be_written, flag_values=values)
    flags.register_validator("record", lambda name: "/" not in (name or ""), "a name, no path", flag_values=values)


def check_output(name: str, path: Path, *, is_file: bool = False) -> None:
    """Check before the work that results can be written. Missing folders will be created later.

    Args:
      name: name of the flag.
      path: a folder, or with ``is_file`` a file.

    Raises:
      InputError: the path cannot be written to.
    """
    if is_file and path.is_dir():
        raise InputError(f"--{name}={path} is a folder; name a file")
    folder = path.absolute().parent if is_file else path.absolute()
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    if not there.is_dir():
        raise InputError(f"--{name}={path}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--{name}={path}: permission denied: this user cannot write in {there}")


def check_one_host() -> None:
    """Check that the run has one host.

    Raises:
      InputError: it has several hosts.
    """
    if (count := this_host().count) > 1:
        raise InputError(
            f"{count} hosts were started together; this measures one (--num_processes=1), because hosts would run "
            "different numbers of timed calls"
        )


def integers(name: str, texts: Sequence[str]) -> list[int]:
    """Return the positive integers of a list flag.

    Raises:
      InputError: a value is not a positive integer.
    """
    if not texts or not all(text.isdecimal() and int(text) > 0 for text in texts):
        raise InputError(f"--{name}={','.join(texts)}: expected positive integers separated by commas")
    return [int(text) for text in texts]
