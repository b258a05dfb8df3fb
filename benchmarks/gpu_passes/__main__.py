"""Measure passes of a model on a GPU: beside the times that `benchmarks.schedule` models, and with another checkout.

  python -m benchmarks.gpu_passes                      a denoise step, a block step, and decoding of the 7.6B shape
  python -m benchmarks.gpu_passes --old=../old         another checkout too, taking turns
  python -m benchmarks.gpu_passes --passes='int8 decode,int4 decode' --record=quantized   some of the passes
  python -m benchmarks.gpu_passes --random=demo --canvas=128 --trials=2    a trial of the command itself

Weights are random. A pass's time is that of a generation, without its passes of other kinds, divided by the number of
passes. The conditions are those of benchmarks.schedule: one row, bfloat16, the published sampling, no
log-probabilities; a denoise step has at most a quarter of the canvas masked, a block step a window of 32. A trace of
one more generation shows for how much of this time the GPU ran kernels, and which. Each checkout has a process of its
own. The record is benchmarks/results/gpu_passes.json.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from absl import flags

from benchmarks.checkouts import Checkout, check_checkout, checkouts
from benchmarks.gpu_passes.traces import read_trace, summarize
from benchmarks.models import CAUSAL, DIFFUSION, checkpoint_config, define_model_flags, model_sizes
from benchmarks.records import (
    Timing,
    build_record,
    check_one_host,
    define_record_flags,
    kind_of_devices,
    load_notes,
    note_lines,
    repository_commit,
    write_record,
)
from checkpoints import parse_json_object
from launch.process.profiling import check_profiling, define_profiling_flags
from launch.process.startup import run_launcher, this_host

_CHILD = Path(__file__).with_name("pass_generations.py")
_SCHEDULE = Path(__file__).parents[1] / "results" / "schedule.json"
_BLOCK = 32


@dataclass(frozen=True)
class Pass:
    """A pass to measure.

    Attributes:
      name: its name in the record.
      target: the target of ``benchmarks.schedule`` that models it.
      model: ``diffusion``, ``causal``, ``int8`` or ``int4``.
      share: share of the canvas that is generated.
    """

    name: str
    target: str
    model: str
    share: float

    def generations(self, canvas: int) -> dict[str, dict[str, Any]]:
        """Return the generations to time: ``whole``, and ``others``, which has only its passes of other kinds."""
        new = round(self.share * canvas)
        whole: dict[str, Any] = {"model": self.model, "rows": 1, "prompt": canvas - new, "new_tokens": new}
        whole |= {"steps": new, "block_length": None}
        if self.name == "denoise step":
            return {"whole": whole}
        if self.name == "block step":
            whole["block_length"] = min(_BLOCK, new)
            # With one step per block, every step is a refresh.
            return {"whole": whole, "others": whole | {"steps": -(-new // whole["block_length"])}}
        whole["steps"] = None
        return {"whole": whole, "others": whole | {"new_tokens": 1}}


PASSES = (
    Pass("denoise step", "h200-b1", "diffusion", 0.25),
    Pass("block step", "h200-block", "diffusion", 0.5),
    Pass("decode", "h200-decode", "causal", 0.5),
    Pass("int8 decode", "h200-decode-int8", "int8", 0.5),
    Pass("int4 decode", "h200-decode-int4", "int4", 0.5),
)


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    define_profiling_flags(values)
    define_model_flags(values, "diffucoder-7b")
    flags.DEFINE_string("old", None, "Root of another checkout to compare with.", flag_values=values)
    flags.DEFINE_enum("dtype", "bfloat16", ("bfloat16", "float32"), "Dtype of the weights.", flag_values=values)
    flags.DEFINE_integer("canvas", 512, "Positions of the row.", 64, 1 << 16, flag_values=values)
    flags.DEFINE_integer("trials", 5, "Timed generations of each kind.", 2, 1000, flag_values=values)
    names = [one.name for one in PASSES]
    flags.DEFINE_list("passes", names, f"Which of {', '.join(names)} to measure.", flag_values=values)
    flags.register_validator(
        "passes", lambda chosen: bool(chosen) and set(chosen) <= set(names), f"some of {', '.join(names)}",
        flag_values=values,
    )  # fmt: skip


def models(values: flags.FlagValues) -> dict[str, dict[str, Any]]:
    """Return the random models that the processes make, by name."""
    sizes = model_sizes(values)
    return {
        name: {"config": checkpoint_config(sizes, values.dtype, family), "dtype": values.dtype, "quantize": quantize}
        for name, family, quantize in (
            ("diffusion", DIFFUSION, "none"), ("causal", CAUSAL, "none"), ("int8", CAUSAL, "int8"),
            ("int4", CAUSAL, "int4"),
        )
    }  # fmt: skip


def measure(
    both: Mapping[str, Checkout], one: Pass, canvas: int, trials: int, folder: Path, programs: str | None
) -> dict[str, Any]:
    """Measure a pass in every checkout, and trace it in each.

    Args:
      both: processes by name.
      one: the pass.
      canvas: positions of the row.
      trials: timed generations of each kind.
      folder: where traces are written.
      programs: where the optimized HLO is written, if anywhere.
    """
    generations = one.generations(canvas)
    found: dict[str, dict[str, Any]] = {name: {"compile_seconds": 0.0} for name in both}
    for asked in generations.values():
        # All compile at the same time. The second call is warm.
        for _ in range(2):
            for process in both.values():
                process.tell(json.dumps(asked))
            for name, process in both.items():
                found[name]["compile_seconds"] += process.answer()["compile_seconds"]
            this_host().mark()
    each: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(trials):
        for name, process in both.items():
            runs = {kind: process.ask(json.dumps(asked)) for kind, asked in generations.items()}
            assert not any(run["compiled"] for run in runs.values()), "timed calls compile nothing"
            others = runs.get("others", {"seconds": 0.0, "forwards": 0})
            passes = runs["whole"]["forwards"] - others["forwards"]
            each[name].append((runs["whole"]["seconds"] - others["seconds"]) / passes)
            found[name] |= {"passes": passes, "peak_bytes": runs["whole"]["peak_bytes"]}
        this_host().mark()
    for name, process in both.items():
        traces = {}
        for kind, asked in generations.items():
            place = folder / f"{name}_{one.name.replace(' ', '_')}_{kind}"
            more = {"programs": f"{programs}/{place.name}"} if programs and kind == "whole" else {}
            process.ask(json.dumps(asked | {"trace": str(place)} | more))
            traces[kind] = read_trace(place)
            this_host().mark()
        found[name] |= {"timing": Timing.of(each[name], [0.0])}
        if traces["whole"]:
            found[name]["gpu"] = summarize(traces["whole"], traces.get("others", []), found[name]["passes"])
    return found


def modelled(values: flags.FlagValues) -> dict[str, dict[str, Any]]:
    """Return the results of benchmarks.schedule by target, if they are those of this model and canvas."""
    own = values.random == "diffucoder-7b" and model_sizes(values) == model_sizes(values, values.random)
    if not (own and values.canvas == 512 and values.dtype == "bfloat16" and _SCHEDULE.is_file()):
        return {}
    record = parse_json_object(_SCHEDULE.read_bytes())
    return {
        name: {
            version: {"ms": result[version]["ms"], "kernels": result[version]["kernels"]}
            for version in ("now", "before")
            if version in result
        }
        | {"goal_ms": result["goal_ms"]}
        for name, result in record["results"].items()
    }


def gpu_passes_table(record: Mapping[str, Any]) -> str:
    """Convert a record to a Markdown table with a row for each pass and checkout."""
    lines = [
        "| pass | checkout | measured ms | modelled ms | measured / modelled | goal | GPU runs kernels, ms | kernels "
        "(modelled) | largest kernels, ms |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in record["results"]:
        expected = row["modelled"]
        for name in ("old", "new"):
            if name not in row:
                continue
            one, model = row[name], expected.get("before" if name == "old" else "now")
            timing, gpu = one["timing"], one.get("gpu")
            kernels = f"{gpu['kernels']:.0f}" if gpu else ""
            shown = ", ".join(f"`{group['name']}` {group['ms']:.1f}" for group in gpu["largest"][:4]) if gpu else ""
            cells = [
                row["pass"],
                name,
                f"{timing['median']:.2f} ({timing['minimum']:.2f} to {timing['maximum']:.2f})",
                f"{model['ms']:.2f}" if model else "",
                f"{timing['median'] / model['ms']:.2f}" if model else "",
                f"{expected['goal_ms']:g}" if name == "new" and expected.get("goal_ms") else "",
                f"{gpu['busy_ms']:.2f}" if gpu else "",
                f"{kernels} ({model['kernels']})" if model and gpu else kernels,
                shown,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    settings, machine = record["settings"], record["machine"]
    old = f"; old is commit `{settings['old_commit'][:7]}`" if settings["old_commit"] else ""
    made = (
        f"{record['kind'].capitalize()}: {settings['model']}, {settings['dtype']}, one row of {settings['canvas']} "
        f"positions, {machine['device_kind']}, jax {record['versions']['jax']}, {settings['trials']} trials: median, "
        f"minimum and maximum{old}. The modelled times are those of `benchmarks.schedule` for an H200."
    )
    return "\n".join([*lines, "", made, *note_lines(record)])


def main(values: flags.FlagValues) -> None:
    """Measure every pass, write the record after each, and print the table."""
    check_one_host()
    check_profiling(values)
    # The processes share the device's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    old = check_checkout("old", values.old) if values.old else None
    roots: dict[str, Path | None] = {"new": None} if old is None else {"old": old, "new": None}
    notes, expected = load_notes(), modelled(values)
    settings = {
        "model": values.random,
        "sizes": model_sizes(values),
        "dtype": values.dtype,
        "canvas": values.canvas,
        "trials": values.trials,
        "old_commit": None if old is None else repository_commit(old),
    }
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as temporary,
        checkouts(_CHILD, roots, [json.dumps(models(values))], {}) as both,
    ):
        folder = Path(values.profile_dir or temporary)
        for one in [one for one in PASSES if one.name in values.passes]:
            # Checkouts from before 2026-11-26 have no int4.
            sides = {"new": both["new"]} if one.model == "int4" else both
            found = measure(sides, one, values.canvas, values.trials, folder, values.dump_hlo)
            rows.append({"pass": one.name, "modelled": expected.get(one.target, {})} | found)
            for name in sides:
                timing, gpu = found[name]["timing"], found[name].get("gpu", "")
                print(f"{one.name} {name}: {timing.median:.3f} ms {gpu}", flush=True)
            path = write(values, settings, rows, notes)
    print(gpu_passes_table(parse_json_object(path.read_bytes())))
    print(f"written: {path}")


def write(
    values: flags.FlagValues, settings: Mapping[str, Any], rows: Sequence[dict[str, Any]], notes: Sequence[str]
) -> Path:
    """Write the record and return its path."""
    devices = jax.devices()[:1]
    record = build_record(
        "gpu_passes",
        kind=kind_of_devices(devices),
        settings=settings,
        results=rows,
        devices=devices,
        notes=notes,
    )
    return write_record(record, values.output_dir, values.record)


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
