"""Measure how long `diffumesh generate` takes from the shell to its text, with a cold and a warm compile cache.

The console command that pip installed is timed, with the code of this checkout.

  python -m benchmarks.first_text                           the README's first command, 7 runs of each kind
  python -m benchmarks.first_text --prompt='def add(a, b):' --trials=3

Each run is a new process with default flags. A cold run has an empty compile cache, a warm one the cache that an
earlier run of the same command filled. Cold and warm runs take turns. Times are from the start of the process to its
first byte on standard output, and to its end. The record is benchmarks/results/first_text.json.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from absl import flags

from benchmarks.records import build_record, check_one_host, define_record_flags, load_notes, note_lines, write_record
from launch.process.startup import run_launcher, this_host
from sharding.errors import InputError

# Goals in seconds for the text, on two cores of a server
GOALS = {"cold": 3.0, "warm": 2.2}
_LIMIT = 600.0
_ROOT = Path(__file__).parents[1]


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    flags.DEFINE_string("prompt", "def is_even(number):", "Prompt for the demo.", flag_values=values)
    flags.DEFINE_integer("trials", 7, "Timed runs with each cache.", 1, flag_values=values)


@dataclass(frozen=True)
class Run:
    """One run of the command: seconds until its text and until its end, and the text."""

    text_seconds: float
    end_seconds: float
    text: str


def console_command() -> str:
    """Return the path of the installed command ``diffumesh``.

    Raises:
      InputError: it is not installed for this interpreter.
    """
    path = shutil.which("diffumesh", path=sysconfig.get_path("scripts"))
    if path is None:
        raise InputError("the command diffumesh is not installed: pip install -e . in the checkout")
    return path


def run(command: Sequence[str]) -> Run:
    """Run a command with this checkout's code, and time its first byte on standard output and its end.

    Raises:
      InputError: it failed; the message has its standard error.
    """
    # An installed command would otherwise run the code of the checkout that it was installed from.
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    start = time.perf_counter()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        first = process.stdout.read(1)
        text_seconds = time.perf_counter() - start
        rest = process.stdout.read()
        status = process.wait(_LIMIT)
        end_seconds = time.perf_counter() - start
        if status or not first:
            errors.seek(0)
            raise InputError(f"{' '.join(command)}: exit code {status}: {errors.read().decode(errors='replace')}")
    return Run(text_seconds, end_seconds, (first + rest).decode())


def _seconds(each: Sequence[float]) -> dict[str, Any]:
    rounded = [round(one, 3) for one in each]
    return {"median": statistics.median(rounded), "minimum": min(rounded), "maximum": max(rounded), "each": rounded}


def measure(prompt: str, trials: int) -> dict[str, Any]:
    """Run the command with an empty and with a filled cache, in turn, after one run that fills it.

    Returns:
      For ``cold`` and ``warm``: seconds until text and end, the goal, and whether the median meets it; and whether all
      runs printed the same text.
    """
    diffumesh = console_command()
    runs: dict[str, list[Run]] = {kind: [] for kind in GOALS}
    with tempfile.TemporaryDirectory() as folder:

        def generate(cache: Path) -> Run:
            made = run([diffumesh, "generate", f"--prompt={prompt}", f"--compile_cache={cache}"])
            this_host().mark()
            return made

        expected = generate(Path(folder, "warm"))
        for trial in range(trials):
            runs["cold"].append(generate(Path(folder, f"cold{trial}")))
            runs["warm"].append(generate(Path(folder, "warm")))
    found: dict[str, Any] = {"same_text": all(one.text == expected.text for kind in runs.values() for one in kind)}
    for kind, own in runs.items():
        text, end = _seconds([one.text_seconds for one in own]), _seconds([one.end_seconds for one in own])
        met = text["median"] <= GOALS[kind]
        found[kind] = {"text": text, "end": end, "goal_seconds": GOALS[kind], "met": met}
    return found


def first_text_table(record: dict[str, Any]) -> str:
    """Convert a record to a Markdown table with a row for each kind of cache."""
    results, settings, machine = record["results"], record["settings"], record["machine"]
    lines = ["| compile cache | text after, s | end after, s | goal, s | met |", "|---|---:|---:|---:|---|"]
    for kind in GOALS:
        one = results[kind]
        text, end = (
            f"{part['median']:.2f} ({part['minimum']:.2f} to {part['maximum']:.2f})"
            for part in (one["text"], one["end"])
        )
        lines.append(f"| {kind} | {text} | {end} | {one['goal_seconds']:g} | {'yes' if one['met'] else 'NO'} |")
    made = (
        f"{record['kind'].capitalize()}: `{record['command']}`, {settings['trials']} runs of `{settings['timed']}` "
        f"each, {machine['cores']} cores of {machine['processor']}; medians, with minimum and maximum."
        f" {'All runs printed the same text.' if results['same_text'] else 'TEXTS DIFFER.'}"
    )
    return "\n".join([*lines, "", made, *note_lines(record)])


def main(values: flags.FlagValues) -> None:
    """Time the command, print the table, and write the record."""
    check_one_host()
    notes = load_notes()
    results = measure(values.prompt, values.trials)
    settings = {"prompt": values.prompt, "trials": values.trials, "timed": "diffumesh generate"}
    record = build_record(
        "first_text", kind="measured", settings=settings, results=results, devices=jax.devices(), notes=notes
    )
    print(first_text_table(record))
    print(write_record(record, values.output_dir, values.record))


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
