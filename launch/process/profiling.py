"""``--profile_dir`` and ``--dump_hlo``: write traces of the devices and the optimized programs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from launch.process.destinations import check_folder
from launch.process.path_flags import define_path
from launch.process.startup import is_main_process
from runtime import replace_file


def define_profiling_flags(values: flags.FlagValues) -> None:
    """Define ``--profile_dir`` and ``--dump_hlo``."""
    define_path("profile_dir", "Write a trace for XProf or TensorBoard into this folder.", values)
    define_path("dump_hlo", "Write the optimized HLO of every compiled program into this folder.", values)


def check_profiling(values: flags.FlagValues) -> None:
    """Create the folders that the flags name, and check them. Commands call this before they use a device.

    Raises:
      InputError: a folder cannot be created or written.
    """
    for name in ("profile_dir", "dump_hlo"):
        # Every host writes its own trace, and host 0 alone writes programs.
        if values[name].value is not None and (name == "profile_dir" or is_main_process()):
            check_folder(name, values[name].value)


def given_profiling(values: flags.FlagValues) -> list[str]:
    """Return those of the two flags that are set, as arguments for a child process."""
    names = ("profile_dir", "dump_hlo")
    return [f"--{name}={values[name].value}" for name in names if values[name].value is not None]


@contextlib.contextmanager
def traced(values: flags.FlagValues, label: str = "") -> Iterator[None]:
    """Trace the devices while the ``with`` block runs, if ``--profile_dir`` is set. Every host writes its own part.

    Args:
      values: the flags.
      label: subfolder of this trace, if a command writes several.
    """
    if values.profile_dir is None:
        yield
        return
    import jax

    with jax.profiler.trace(str(Path(values.profile_dir) / _file_name(label))):
        yield


def write_programs(values: flags.FlagValues, texts: Mapping[str, str], label: str = "") -> None:
    """Write the optimized HLO of each program from host 0, if ``--dump_hlo`` is set.

    Args:
      values: the flags.
      texts: HLO by program name.
      label: subfolder of these programs, if a command writes several groups.
    """
    if values.dump_hlo is None or not is_main_process():
        return
    folder = Path(values.dump_hlo) / _file_name(label)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        replace_file(folder / f"{_file_name(name)}.hlo.txt", [text.encode("utf-8")])


def profile_again(
    values: flags.FlagValues, label: str, call: Callable[[], Any], texts: Callable[[], Mapping[str, str]]
) -> None:
    """Repeat a timed call with tracing and write its programs, if the flags are set.

    Args:
      values: the flags.
      label: subfolder for this call.
      call: the timed call; returns when its work is done.
      texts: returns optimized HLO by program name.
    """
    if values.profile_dir is not None:
        with traced(values, label):
            call()
    if values.dump_hlo is not None:
        write_programs(values, texts(), label)


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.,=-]+", "_", text)
