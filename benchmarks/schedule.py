"""Times of a pass by the compilers' own schedules: no accelerator is needed, and nothing runs.

  python -m benchmarks.schedule                            every target that a compiler here knows
  python -m benchmarks.schedule --only=v5e-t8-b1           some of them
  python -m benchmarks.schedule --before=PATH              and the same of another checkout, in the same record

A TPU kernel takes the bundles that libtpu schedules, or the time of its bytes where that is longer; collectives take
their bytes over the links, less what runs beside them. A GPU kernel is *modelled*: the longer of its operations at 790
TF/s and its bytes at 4.3 TB/s, as measured on an H200, and a launch. Each target is compiled in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks.bundles import dump_options, read_dump
from benchmarks.kernel_work import LAUNCH_SECONDS, TPU_BANDWIDTH_SHARE, gpu_device, link_times, tiles_of, tpu_device
from benchmarks.pass_times import Spent, pass_times
from benchmarks.records import build_record, define_record_flags, note_lines, write_record
from launch.startup import compile_only, run_launcher
from runtime.planner.hlo import read_module
from runtime.planner.presets import preset
from runtime.planner.workload import Workload
from sharding.aot import missing_compiler
from sharding.errors import InputError
from sharding.links import Wiring
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology

_MODEL, _MASKED = "diffucoder-7b", 128
_TIMEOUT = 1800
# Instructions of a record, and parts of a table row.
_LARGEST, _SHOWN = 12, 4


@dataclass(frozen=True)
class Target:
    """A pass on a machine.

    Attributes:
      topology, mesh: as users write them.
      phase: the pass.
      workload: fields of its :class:`Workload` beside those of the others.
      goal: milliseconds; None for none.
    """

    topology: str
    mesh: str
    phase: str
    workload: Mapping[str, Any]
    goal: float | None = None

    @property
    def child(self) -> dict[str, Any]:
        """What :mod:`benchmarks.compile_phases` is told."""
        return {"model": _MODEL, "topology": self.topology, "mesh": self.mesh, "dtype": "bfloat16", **self.workload}


def _canvas(rows: int, positions: int) -> dict[str, Any]:
    half = positions // 2
    return {"batch": rows, "prompt": half, "new_tokens": half, "steps": half}


_STEP, _QWEN = "denoise step", {"model": "qwen2.5-7b"}
_BLOCKS = _canvas(1, 512) | {"cache": "dual"}
TARGETS = {
    "v5e-t8-b1": Target("v5e:2x4", "tensor=8", _STEP, _canvas(1, 512), 8.5),
    "v5e-t8-b16": Target("v5e:2x4", "tensor=8", _STEP, _canvas(16, 512), 110),
    "v5e-d2-t4-b16": Target("v5e:2x4", "data=2,tensor=4", _STEP, _canvas(16, 512), 92),
    "v5e-t8-b1-8192": Target("v5e:2x4", "tensor=8", _STEP, _canvas(1, 8192), 150),
    "v5p-b1": Target("v5p:2x2x1", "data=1", _STEP, _canvas(1, 512), 20),
    "v5p-b1-2048": Target("v5p:2x2x1", "data=1", _STEP, _canvas(1, 2048), 75),
    "v4-d8-t2-b16": Target("v4:2x2x4", "data=8,tensor=2", _STEP, _canvas(16, 512), 40),
    "h200-b1": Target("1xh200", "data=1", _STEP, _canvas(1, 512), 12.5),
    "h200-block": Target("1xh200", "data=1", "block step", _BLOCKS, 4.5),
    "h200-decode": Target("1xh200", "data=1", "decode", _canvas(1, 512) | _QWEN, 4),
    "h200-decode-int8": Target("1xh200", "data=1", "decode", _canvas(1, 512) | _QWEN | {"quantization": "int8"}, 2.2),
}


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    flags.DEFINE_list("only", [], f"Of {', '.join(TARGETS)}. Default: all.", flag_values=values)
    flags.DEFINE_string("before", None, "Another checkout, whose programs stand beside these.", flag_values=values)


def measure(target: Target, checkout: Path) -> dict[str, Any]:
    """Compile a target in a child process and add up what its pass takes.

    Args:
      target: which.
      checkout: of the project, whose programs they are.

    Raises:
      InputError: the compiler refuses.
    """
    topology = parse_topology(target.topology)
    on_tpu = topology.chip.platform == "tpu"
    child = target.child
    with tempfile.TemporaryDirectory(prefix="schedule-") as name:
        folder, dump = Path(name), Path(name) / "dump"
        dump.mkdir()
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        environment |= {"LIBTPU_INIT_ARGS": dump_options(dump)} if on_tpu else {}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # what comes from a cache is not compiled, and not dumped
        script = Path(__file__).with_name("compile_phases.py")
        done = subprocess.run(
            [sys.executable, "-P", str(script), name, json.dumps(child)],
            env=environment, cwd=name, timeout=_TIMEOUT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise InputError(f"{target.topology} {target.mesh}: {done.stderr.strip()[-2000:]}")
        described = json.loads((folder / "phases.json").read_text(encoding="utf-8"))
        program = "blocks" if target.phase in ("block step", "refresh") else target.phase
        module = read_module((folder / f"{program.replace(' ', '_')}.hlo").read_text(encoding="utf-8"))
        fields = {name: value for name, value in child.items() if name not in ("model", "topology", "mesh")}
        workload = Workload(preset(child["model"]), **fields)
        layout = workload.layout(MeshSpec.parse(target.mesh).resolve(topology.num_devices))
        links = link_times(Wiring(topology, layout.spec, layout.heads), layout.mesh_axis_sizes)
        missing: set[str] = set()
        if on_tpu:
            kernels = read_dump(dump, tiles_of(module))
            device = tpu_device(topology.chip, kernels, module, links, missing)
        else:
            device = gpu_device(links)
    chunk = described["passes"][target.phase]["chunk"]
    spent = pass_times(module, target.phase, device, -(-_MASKED // chunk))
    return _summary(spent, described, target, missing)


def _summary(spent: Sequence[Spent], described: Mapping[str, Any], target: Target, missing: set[str]) -> dict[str, Any]:
    """One result: the time, where it goes, and the instructions that take most of it."""
    parts: dict[str, float] = defaultdict(float)
    for one in spent:
        parts[one.kind if one.kind != "kernel" else _part(one.scope)] += 1e3 * one.seconds
    largest = sorted(spent, key=lambda one: -one.seconds)[:_LARGEST]
    return {
        "ms": round(sum(parts.values()), 3),
        "planned_ms": described["passes"][target.phase]["planned_ms"],
        "parts": {name: round(value, 3) for name, value in sorted(parts.items(), key=lambda part: -part[1])},
        "largest": [
            {
                "name": one.name,
                "kind": one.kind,
                "scope": "/".join(one.scope.split("/")[-3:]),
                "ms": round(1e3 * one.seconds, 3),
                "runs": round(one.runs, 2),
            }
            for one in largest
        ],
        "kernels": round(sum(one.runs for one in spent if one.kind == "kernel")),
        "without_bundles": sorted(missing),
        "programs": described["programs"],
    }


def _part(scope: str) -> str:
    """The part of a step that a kernel belongs to, from the scopes that it was written in."""
    names = scope.split("/")
    for name in ("qkv", "o_proj", "mlp", "attention", "embed", "lm_head", "choose_tokens", "final_norm", "layer"):
        if name in names:
            return name
    return "rest"


def schedule_table(record: Mapping[str, Any]) -> str:
    """Markdown of a record: a row for each target, milliseconds."""
    lines = [
        "| machine, mesh | pass | rows of positions | before | now | goal | planned | where the time goes now |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in record["results"].values():
        now, before = result["now"], result.get("before")
        modelled = ", *modelled*" if parse_topology(result["topology"]).chip.platform == "gpu" else ""
        weights = ", int8" if result.get("quantization") == "int8" else ""
        parts = [f"{part} {value:.1f}" for part, value in now["parts"].items()][:_SHOWN]
        cells = [
            f"{result['topology']}, {result['mesh']}{modelled}",
            result["pass"] + weights,
            f"{result['batch']} of {result['prompt'] + result['new_tokens']}",
            f"{before['ms']:.1f}" if before else "",
            f"{now['ms']:.1f}",
            f"{result['goal_ms']:g}" if result["goal_ms"] else "",
            f"{now['planned_ms']:.1f}",
            ", ".join(parts),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    settings = record["settings"]
    lines += [
        "",
        f"By the compilers' schedules, milliseconds a pass; nothing ran. TPU: bundles, bytes at "
        f"{settings['tpu_bandwidth_share']:.0%} of the published bandwidth, collectives that nothing hides. GPU, "
        f"modelled: operations at 790 TF/s or bytes at 4.3 TB/s, "
        f"and {settings['gpu_launch_microseconds']:g} µs a kernel. "
        f"{settings['masked_positions']} masked positions a row, published sampling.",
    ]
    return "\n".join([*lines, *note_lines(record)])


def main(values: flags.FlagValues) -> None:
    """Measure every target, print a line each, write the record."""
    compile_only()
    unknown = set(values.only) - set(TARGETS)
    if unknown:
        raise InputError(f"--only={','.join(values.only)}: expected some of {', '.join(TARGETS)}")
    here = Path(__file__).resolve().parent.parent
    checkouts = {"now": here} | ({"before": Path(values.before).resolve()} if values.before else {})
    results: dict[str, Any] = {}
    missing: list[str] = []
    for name in values.only or TARGETS:
        target = TARGETS[name]
        install = missing_compiler(parse_topology(target.topology).chip.platform)
        if install is not None:
            missing.append(f"{name} was not compiled: {install}")
            print(missing[-1], flush=True)
            continue
        result: dict[str, Any] = {**target.child, "pass": target.phase, "goal_ms": target.goal}
        for version, checkout in checkouts.items():
            result[version] = measure(target, checkout)
            print(f"{name} {version}: {result[version]['ms']:.2f} ms {result[version]['parts']}", flush=True)
        results[name] = result
    record = build_record(
        "schedule",
        kind="estimated",
        settings={
            "masked_positions": _MASKED,
            "tpu_bandwidth_share": TPU_BANDWIDTH_SHARE,
            "gpu_launch_microseconds": 1e6 * LAUNCH_SECONDS,
            "before": values.before and Path(os.path.relpath(values.before, here)).as_posix(),
        },
        results=results,
        notes=missing,
    )
    print(f"written: {write_record(record, values.output_dir, values.record)}", flush=True)


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
