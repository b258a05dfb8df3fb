"""Make tables and plots from records.

  python -m benchmarks.report --folder=benchmarks/results/scaling            Markdown on standard output
  python -m benchmarks.report --folder=... --plots=DIR --output=FILE.md      and plots, one panel per pass
  python -m benchmarks.report --readme=benchmarks/README.md                  regenerate the tables of a document

Scaling: records of one kind (measured, simulated devices, estimated), pass, mode and axis form a table. Plots show the
speed-up with its spread over the timed runs, beside the ideal line; for simulated devices they show traffic and memory.
In a document a table is written between two comments: ``<!-- table: results/NAME.json -->``, a path relative to the
document, or ``<!-- summary: measured benchmarks/results -->`` (or ``estimated``), and ``<!-- end of table -->``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks.attention import attention_table
from benchmarks.autoregressive import autoregressive_table
from benchmarks.compile_times import compile_times_table
from benchmarks.demo_quality import demo_quality_table
from benchmarks.drafts import drafts_table
from benchmarks.families import families_table
from benchmarks.fault_tables import fault_table
from benchmarks.first_text import first_text_table
from benchmarks.gpu_passes.__main__ import gpu_passes_table
from benchmarks.mode_tables import modes_table
from benchmarks.overload_tables import overload_table
from benchmarks.prompt_lookup import prompt_lookup_table
from benchmarks.records import check_output
from benchmarks.scaling_plots import Group, plot_scaling
from benchmarks.schedule import schedule_table
from benchmarks.serve.tables import serve_tables
from benchmarks.suite.tables import suite_tables
from benchmarks.summary import estimated_table, measured_table
from benchmarks.torch_tables import comparison_table, memory_table
from checkpoints import parse_json_object
from launch.process.startup import run_launcher
from sharding.errors import InputError

_MAX_RECORD_BYTES = 16 << 20

# Benchmarks whose records can be shown as tables in documents, and what such a table does not show
_TABLES: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "attention": (
        attention_table,
        "a GPU or TPU, where blocks only limit memory; a whole layer; windows with a cache; rows of different lengths.",
    ),
    "autoregressive": (
        autoregressive_table,
        "quality, because the weights are random; a GPU or TPU; batches; prompts of other lengths.",
    ),
    "compare_torch": (
        comparison_table,
        "a GPU or TPU; models of billions of parameters; PyTorch with torch.compile, with an inference server, or with "
        "another decoding loop than the published one.",
    ),
    "torch_memory": (
        memory_table,
        "a GPU or TPU; models of billions of parameters; PyTorch with torch.compile; the steady state, without the "
        "memory of compilation.",
    ),
    "compile_times": (
        compile_times_table,
        "programs of several devices, which also divide collectives; a GPU that tries kernels while it compiles.",
    ),
    "demo_quality": (
        demo_quality_table,
        "several completions per task; faster decoding modes; prompts unlike those of the generator.",
    ),
    "diffusion_modes": (
        modes_table,
        "batches; a model of billions of parameters, in which a threshold may commit more tokens per step.",
    ),
    "drafts": (
        drafts_table,
        "a GPU or TPU; several prompts at a time; a model of billions of parameters, which accepts other numbers of "
        "steps.",
    ),
    "families": (
        families_table,
        "quality, because the weights are random; a GPU or TPU; rules that commit several tokens per step.",
    ),
    "faults": (
        fault_table,
        "hosts on machines and networks of their own: these are processes on one machine; nor GPUs and TPUs.",
    ),
    "first_text": (
        first_text_table,
        "a GPU or TPU; a larger model, whose weights take longer to read.",
    ),
    "gpu_passes": (
        gpu_passes_table,
        "other GPUs, models, canvases and numbers of rows; several GPUs; a generation's time on the host.",
    ),
    "overload": (
        overload_table,
        "a load generator on another machine, a GPU or TPU, a larger model, several hosts.",
    ),
    "schedule": (
        schedule_table,
        "measured times: nothing ran. Contention is left out, and loops whose trip count the compiler does not state "
        "count once.",
    ),
    "compare_torch on a GPU": (
        comparison_table,
        "other canvases and numbers of rows; PyTorch with CUDA graphs or torch.compile, which launch kernels faster.",
    ),
    "prompt_lookup": (
        prompt_lookup_table,
        "time; text of a trained autoregressive model; a draft model that is smaller than the model.",
    ),
    "serve": (
        serve_tables,
        "a GPU or TPU; a larger model; several hosts; a load generator on another machine; the first text of a stream "
        "without blocks, which is the default, or with other blocks than those of 1 and 8 positions.",
    ),
    "suite": (
        suite_tables,
        "any other machine or model. MFU and MBU are relative to the rates measured here, not to a data sheet.",
    ),
}
# What tables of scaling do not show, and notes below them
_SCALING_MISSING = {
    "measured": "other machines, models and shapes.",
    "simulated devices": "times on real devices, which have networks and memories of their own.",
    "estimated": "measured times: these come from a roofline model, and memory is not the compiler's.",
}
_SIMULATED = (
    "Simulated devices share the cores of one host, so their times say nothing about speed. "
    "The measured quantities are bytes moved, memory and tokens."
)
_ABOVE_IDEAL = "Efficiency is above 1 where weights are sharded: each device reads only its shard of them for all rows."
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_SUMMARIES: dict[str, tuple[Callable[[Callable[[str], dict[str, Any] | None]], str], str]] = {
    "measured": (
        measured_table,
        "a TPU, or the quality of a 7B model's text. Times of different records cannot be compared: their commits, "
        "machines and loads differ.",
    ),
    "estimated": (
        estimated_table,
        "measured times: those of steps come from a roofline model, and networks between hosts are assumptions.",
    ),
}
_SUMMARY = re.compile(r"(<!-- summary: (\w+) (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def define_flags(values: flags.FlagValues) -> None:
    """Define this command's flags."""
    flags.DEFINE_string("folder", "benchmarks/results/scaling", "Folder of records.", flag_values=values)
    flags.DEFINE_string("output", None, "Markdown file. Default: standard output.", flag_values=values)
    flags.DEFINE_string("readme", None, "Markdown file whose tables to regenerate.", flag_values=values)
    flags.DEFINE_string("plots", None, "Folder for plots; none by default.", flag_values=values)


def read_record(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
      InputError: the file is larger than any record.
      ValueError: the file is not a JSON object in UTF-8.
    """
    if path.stat().st_size > _MAX_RECORD_BYTES:
        raise InputError(f"{path}: larger than {_MAX_RECORD_BYTES} bytes")
    return parse_json_object(path.read_bytes())


def fill_tables(text: str, folder: Path) -> str:
    """Regenerate every table and summary in a Markdown text. A table without a record becomes ``(no record yet)``.

    Args:
      text: contents of a Markdown file.
      folder: the folder to which the records' paths are relative.

    Raises:
      InputError: a record does not belong to a benchmark with tables.
    """

    def fill(found: re.Match[str]) -> str:
        path = folder / found[2]
        if not path.is_file():
            return f"{found[1]}(no record yet)\n{found[3]}"
        try:
            record = read_record(path)
            on_gpu = f"{record['benchmark']} on a GPU"
            is_gpu = record["machine"]["platform"] == "gpu" and on_gpu in _TABLES
            make, missing = _TABLES[on_gpu if is_gpu else record["benchmark"]]
            made = make(record)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: not a record that can be shown as a table ({error!r})") from error
        return f"{found[1]}{made}\n\nRecord of commit `{record['commit'][:7]}`. {_not_shown(missing)}\n{found[3]}"

    def summarize(found: re.Match[str]) -> str:
        def read(name: str) -> dict[str, Any] | None:
            path = folder / found[3] / f"{name}.json"
            return read_record(path) if path.is_file() else None

        make, missing = _SUMMARIES[found[2]]
        return f"{found[1]}{make(read)}\n\n{_not_shown(missing)}\n{found[4]}"

    return _SUMMARY.sub(summarize, _TABLE.sub(fill, text))


def _not_shown(what: str) -> str:
    return f"Not shown: {what}"


def read_groups(folder: Path) -> dict[Group, list[dict[str, Any]]]:
    """Read the scaling records in a folder and its subfolders, grouped by table and sorted by number of devices.

    Raises:
      InputError: the folder does not exist or has no scaling record, or a file is not a record.
    """
    if not folder.is_dir():
        raise InputError(f"--folder={folder}: there is no such folder")
    groups: dict[Group, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(folder.rglob("*.json")):
        try:
            record = read_record(path)
            if record["benchmark"] != "scaling":
                continue
            made = {"command": record["command"], "device": record["machine"]["device_kind"], "notes": record["notes"]}
            point = record["results"] | made
            groups[record["kind"], point["pass"], point["mode"], point["axis"]].append(point)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: not a record of this project ({error!r})") from error
    if not groups:
        raise InputError(f"--folder={folder}: no record of benchmarks.scaling in it")
    return {key: sorted(points, key=lambda point: point["devices"]) for key, points in sorted(groups.items())}


def table(group: Group, points: list[dict[str, Any]]) -> str:
    """Return the Markdown table of a group."""
    kind, what, mode, axis = group
    simulated = kind == "simulated devices"
    faster = "" if simulated else " speed-up | efficiency |"
    lines = [
        f"### {what}, {mode} scaling, {axis} ({kind})",
        "",
        f"| devices | mesh | rows | canvas | ms | minimum to maximum |{faster} moved MB | GB/device "
        "| compile s | same tokens |",
        f"|---:|---|---:|---:|---:|---:|{'' if simulated else '---:|---:|'}---:|---:|---:|---|",
    ]
    for point in points:
        times, same = point["ms"], point.get("same_tokens_as_on_the_first")
        cells = [
            point["devices"],
            point["mesh"],
            point["batch"],
            point["canvas"],
            f"{times['median']:.3f}",
            f"{times['minimum']:.3f} to {times['maximum']:.3f}",
            *([] if simulated else [f"{point['speedup']:.2f}", f"{point['efficiency']:.2f}"]),
            f"{point['collective_bytes_of_a_pass'] / 1e6:.3f}",
            f"{point['memory_bytes_per_device'] / 1e9:.3f}",
            point.get("compile_seconds", ""),
            "" if same is None else "yes" if same else "no",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    remarks = [f"{note}." for note in dict.fromkeys(note for point in points for note in point["notes"])]
    if points[0]["devices"] > 1 and not simulated:
        remarks.append(f"Speed-up and efficiency are relative to {points[0]['devices']} devices, the first row.")
    if simulated:
        remarks.append(_SIMULATED)
    elif any(point["efficiency"] > 1.005 and not point["mesh"].endswith("tensor=1") for point in points):
        remarks.append(_ABOVE_IDEAL)
    below = ["", " ".join(one[:1].upper() + one[1:] for one in remarks)] if remarks else []
    return "\n".join([*lines, "", f"`{points[-1]['command']}`", *below, "", _not_shown(_SCALING_MISSING[kind]), ""])


def main(values: flags.FlagValues) -> None:
    """Make the tables, and the plots if the flag is set."""
    if values.readme is not None:
        path = Path(values.readme)
        try:
            path.write_text(fill_tables(path.read_text(encoding="utf-8"), path.parent), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--readme={path}: {error.strerror or error}") from error
        return
    if values.plots is not None:
        check_output("plots", Path(values.plots))
    if values.output is not None:
        check_output("output", Path(values.output), is_file=True)
    groups = read_groups(Path(values.folder))
    text = "\n".join(table(group, points) for group, points in groups.items())
    if values.plots is not None:
        plot_scaling(groups, Path(values.plots))
    if values.output is None:
        print(text)
        return
    try:
        Path(values.output).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--output={values.output}: {error.strerror or error}") from error


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
