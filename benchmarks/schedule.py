"""Times of a pass from the schedules of compiled programs. Nothing runs, so no accelerator is needed.

  python -m benchmarks.schedule                            every target for which a compiler is installed
  python -m benchmarks.schedule --only=v5e-t8-b1           some of them
  python -m benchmarks.schedule --before=PATH              compare with another checkout, in the same record
  python -m benchmarks.schedule --update --only=v5e-t8-b1  replace some results of a record; each names its commit
  python -m benchmarks.schedule --programs_dir=PATH        keep what is compiled, and go on from there after a break

The time of a TPU kernel is that of the bundles that libtpu schedules or of its bytes, whichever is longer; collectives
take the time of their bytes on the links, minus the overlap with kernels. The time of a GPU kernel is *modelled*: its
operations at 790 TFLOP/s or its bytes at 4.3 TB/s, assumed for an H200, whichever is longer, plus a launch. Each
target is compiled in its own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks.bundles import dump_options, read_dump
from benchmarks.kernel_work import TPU_BANDWIDTH_SHARE, gpu_device, link_times, tiles_of, tpu_device
from benchmarks.pass_times import Spent, pass_times
from benchmarks.records import build_record, define_record_flags, note_lines, repository_commit, write_record
from checkpoints import parse_json_object
from launch.process.startup import compile_only, run_launcher
from runtime.planner.estimate import Estimate, estimate_workload
from runtime.planner.hlo import module_name, read_module
from runtime.planner.kernels import LAUNCH_SECONDS
from runtime.planner.presets import preset
from runtime.planner.workload import Workload
from sharding.aot import missing_compiler
from sharding.errors import InputError
from sharding.links import Wiring
from sharding.mesh import MeshSpec
from sharding.topology import parse_topology

_MODEL, _MASKED = "diffucoder-7b", 128
_STEP, _QWEN = "denoise step", {"model": "qwen2.5-7b"}
_TIMEOUT = 5400
# Numbers of instructions in a record, of parts in a table row, and of instructions that explain a missed goal.
_LARGEST, _SHOWN, _SLOWEST = 12, 4, 6


@dataclass(frozen=True)
class Target:
    """A pass whose time is computed, on a machine and a mesh.

    Attributes:
      topology, mesh: as in flags.
      phase: the pass.
      workload: fields of its :class:`Workload` that differ from the defaults.
      goal: time to reach, in milliseconds; None for no goal.
      tuned: whether the planner's constants are fitted to this target. The others judge them.
    """

    topology: str
    mesh: str
    phase: str
    workload: Mapping[str, Any]
    goal: float | None = None
    tuned: bool = False

    @property
    def child(self) -> dict[str, Any]:
        """Return the arguments of :mod:`benchmarks.compile_phases`."""
        return {"model": _MODEL, "topology": self.topology, "mesh": self.mesh, "dtype": "bfloat16", **self.workload}

    @property
    def estimate(self) -> Estimate:
        """Return the estimate of this checkout's planner."""
        fields = {name: value for name, value in self.child.items() if name not in ("model", "topology", "mesh")}
        workload = Workload(preset(self.child["model"]), **fields)
        return estimate_workload(workload, parse_topology(self.topology), MeshSpec.parse(self.mesh))

    def chunks(self, chunk: int) -> float:
        """Return how many times the head runs in a pass, with chunks of this many positions."""
        return -(-_MASKED // chunk) if self.phase == _STEP else 1

    def planned_ms(self) -> float:
        """Return the planner's estimate of the pass, in milliseconds."""
        found = self.estimate
        phase = next(one.phase for one in found.phases if one.phase.name == self.phase)
        return round(1e3 * found.estimate_phase(replace(phase, chunks=self.chunks(phase.chunk))).seconds, 3)

    def described(self) -> dict[str, Any]:
        """Return what a record says of the target besides the times of its compiled programs."""
        return {
            **self.child,
            "pass": self.phase,
            "goal_ms": self.goal,
            "tuned": self.tuned,
            "planned_ms": self.planned_ms(),
        }


def _canvas(rows: int, positions: int) -> dict[str, Any]:
    half = positions // 2
    return {"batch": rows, "prompt": half, "new_tokens": half, "steps": half}


_INT8, _INT4 = {"quantization": "int8"}, {"quantization": "int4"}
_BLOCKS = {"cache": "dual"}
TARGETS = {
    "v5e-t8-b1": Target("v5e:2x4", "tensor=8", _STEP, _canvas(1, 512), 8.5, tuned=True),
    "v5e-t8-b16": Target("v5e:2x4", "tensor=8", _STEP, _canvas(16, 512), 110, tuned=True),
    "v5e-d2-t4-b16": Target("v5e:2x4", "data=2,tensor=4", _STEP, _canvas(16, 512), 92),
    "v5e-t8-b1-8192": Target("v5e:2x4", "tensor=8", _STEP, _canvas(1, 8192), 150, tuned=True),
    "v5p-b1": Target("v5p:2x2x1", "data=1", _STEP, _canvas(1, 512), 20, tuned=True),
    "v5p-b1-2048": Target("v5p:2x2x1", "data=1", _STEP, _canvas(1, 2048), 75),
    "v4-d8-t2-b16": Target("v4:2x2x4", "data=8,tensor=2", _STEP, _canvas(16, 512), 40, tuned=True),
    "v5p-s8-b1-2048": Target("v5p:2x2x2", "sequence=8", _STEP, _canvas(1, 2048)),
    "v5e-t8-block": Target("v5e:2x4", "tensor=8", "block step", _canvas(8, 512) | _BLOCKS, tuned=True),
    "v5p-block": Target("v5p:2x2x1", "data=1", "block step", _canvas(1, 512) | _BLOCKS),
    "v4-t4-block": Target("v4:2x2x1", "tensor=4", "block step", _canvas(8, 512) | _BLOCKS),
    "v5e-t8-prefill": Target("v5e:2x4", "tensor=8", "prefill", _canvas(8, 512) | _QWEN, tuned=True),
    "v5e-t8-decode": Target("v5e:2x4", "tensor=8", "decode", _canvas(8, 512) | _QWEN, tuned=True),
    "v5p-prefill": Target("v5p:2x2x1", "data=1", "prefill", _canvas(4, 1024) | _QWEN, tuned=True),
    "v5p-decode": Target("v5p:2x2x1", "data=1", "decode", _canvas(4, 1024) | _QWEN),
    "v4-t4-prefill": Target("v4:2x2x1", "tensor=4", "prefill", _canvas(16, 1024) | _QWEN),
    "v4-t4-decode": Target("v4:2x2x1", "tensor=4", "decode", _canvas(16, 1024) | _QWEN, tuned=True),
    "v5e-s2-t4-b4-2048": Target("v5e:2x4", "sequence=2,tensor=4", _STEP, _canvas(4, 2048)),
    "v5p-t4-block": Target("v5p:2x2x1", "tensor=4", "block step", _canvas(16, 1024) | _BLOCKS),
    "v5p-t4-prefill": Target("v5p:2x2x1", "tensor=4", "prefill", _canvas(32, 1024) | _QWEN),
    "v5p-t4-decode": Target("v5p:2x2x1", "tensor=4", "decode", _canvas(32, 1024) | _QWEN),
    "v5e-decode-int8": Target("v5e:1x1", "data=1", "decode", _canvas(1, 512) | _QWEN | _INT8),
    "v5e-decode-int4": Target("v5e:1x1", "data=1", "decode", _canvas(1, 512) | _QWEN | _INT4),
    "h200-b1": Target("1xh200", "data=1", _STEP, _canvas(1, 512), 12.5),
    "h200-block": Target("1xh200", "data=1", "block step", _canvas(1, 512) | _BLOCKS, 4.5),
    "h200-decode": Target("1xh200", "data=1", "decode", _canvas(1, 512) | _QWEN, 4),
    "h200-decode-int8": Target("1xh200", "data=1", "decode", _canvas(1, 512) | _QWEN | _INT8, 2.2),
    "h200-decode-int4": Target("1xh200", "data=1", "decode", _canvas(1, 512) | _QWEN | _INT4),
    "h200-decode-b8-int8": Target("1xh200", "data=1", "decode", _canvas(8, 512) | _QWEN | _INT8),
    "h200-decode-b8-int4": Target("1xh200", "data=1", "decode", _canvas(8, 512) | _QWEN | _INT4),
}


def define_flags(values: flags.FlagValues) -> None:
    """Define this benchmark's flags."""
    define_record_flags(values)
    flags.DEFINE_list("only", [], f"Which of {', '.join(TARGETS)} to compile. Default: all.", flag_values=values)
    flags.DEFINE_string("before", None, "Root of another checkout to compare with.", flag_values=values)
    flags.DEFINE_bool(
        "update",
        False,
        "Keep what the record in --output_dir holds of other targets, and the other checkout's times without --before.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "programs_dir",
        None,
        "Folder that keeps the compiled programs and their bundles, several GB. What it already holds is not compiled "
        "again, only read. Default: a temporary folder for each workload.",
        flag_values=values,
    )


def compile_target(target: Target, checkout: Path, folder: Path) -> None:
    """Compile a target's programs in a child process; their HLO and, on TPU, their bundles go into an empty folder.

    The last file that appears in the folder is ``commit``, with the commit of the checkout.

    Raises:
      InputError: the compilation fails.
    """
    (folder / "dump").mkdir()
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    if parse_topology(target.topology).chip.platform == "tpu":
        environment["LIBTPU_INIT_ARGS"] = dump_options(folder / "dump")
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # programs from a cache are not compiled, and thus not dumped
    script = Path(__file__).with_name("compile_phases.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(folder), json.dumps(target.child)],
        env=environment, cwd=folder, timeout=_TIMEOUT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise InputError(f"{target.topology} {target.mesh}: {done.stderr.strip()[-2000:]}")
    (folder / "commit").write_text(repository_commit(checkout) or "unknown", encoding="utf-8")


@contextlib.contextmanager
def _compiled(name: str, target: Target, version: str, checkout: Path, programs: Path | None) -> Iterator[Path]:
    """Yield a folder with the output of :func:`compile_target`, from an earlier run if ``programs`` has it."""
    if programs is None:
        with tempfile.TemporaryDirectory(prefix="schedule-") as folder:
            compile_target(target, checkout, Path(folder))
            yield Path(folder)
        return
    kept = programs / version / name
    if not (kept / "commit").is_file():
        shutil.rmtree(kept, ignore_errors=True)  # what a run left that was stopped
        kept.mkdir(parents=True)
        compile_target(target, checkout, kept)
    yield kept


def measure(target: Target, folder: Path) -> dict[str, Any]:
    """Add up the time of a target's pass.

    Args:
      target: the target.
      folder: the folder with the output of :func:`compile_target`.
    """
    compiled = parse_json_object((folder / "phases.json").read_bytes())
    compiled["commit"] = (folder / "commit").read_text(encoding="utf-8")
    program = "blocks" if target.phase in ("block step", "refresh") else target.phase
    text = (folder / f"{program.replace(' ', '_')}.hlo").read_text(encoding="utf-8")
    module = read_module(text)
    topology, layout = parse_topology(target.topology), target.estimate.layout
    links = link_times(Wiring(topology, layout.spec, layout.heads), layout.mesh_axis_sizes)
    missing: set[str] = set()
    if topology.chip.platform == "tpu":
        kernels = read_dump(folder / "dump", module_name(text), tiles_of(module))
        device = tpu_device(topology.chip, kernels, module, links, missing)
    else:
        device = gpu_device(links)
    spent = pass_times(module, target.phase, device, target.chunks(compiled["passes"][target.phase]["chunk"]))
    return _summary(spent, compiled, target, missing)


def _summary(spent: Sequence[Spent], compiled: Mapping[str, Any], target: Target, missing: set[str]) -> dict[str, Any]:
    """Return one result: the time, its parts, and the slowest instructions, those of one kind and scope together."""
    parts: dict[str, float] = defaultdict(float)
    for one in spent:
        parts[one.kind if one.kind != "kernel" else _part(one.scope)] += 1e3 * one.seconds
    alike: dict[tuple[str, str], list[Spent]] = defaultdict(list)
    for one in spent:  # layers that are not scanned have an instruction each
        alike[one.kind, one.scope or one.name.partition(".")[0]].append(one)
    largest = sorted(alike.values(), key=lambda group: -sum(one.seconds for one in group))[:_LARGEST]
    return {
        "ms": round(sum(parts.values()), 3),
        "commit": compiled["commit"],
        "planned_ms": compiled["passes"][target.phase]["planned_ms"],
        "parts": {name: round(value, 3) for name, value in sorted(parts.items(), key=lambda part: -part[1])},
        "largest": [
            {
                "name": group[0].name,
                "kind": group[0].kind,
                "scope": "/".join(group[0].scope.split("/")[-3:]),
                "ms": round(1e3 * sum(one.seconds for one in group), 3),
                "instructions": len(group),
                "runs": round(sum(one.runs for one in group), 2),
            }
            for group in largest
        ],
        "kernels": round(sum(one.runs for one in spent if one.kind == "kernel")),
        "without_bundles": sorted(missing),
        "programs": compiled["programs"],
    }


def _part(scope: str) -> str:
    """Return the part of a step that a kernel belongs to, from its named scopes."""
    names = scope.split("/")
    for name in ("qkv", "o_proj", "mlp", "attention", "embed", "lm_head", "choose_tokens", "final_norm", "layer"):
        if name in names:
            return name
    return "rest"


def schedule_table(record: Mapping[str, Any]) -> str:
    """Convert a record to a Markdown table with a row per target, in milliseconds."""
    lines = [
        "| machine, mesh | pass | rows of positions | before | now | goal | planned | error | where the time goes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in record["results"].values():
        now, before = result["now"], result.get("before")
        modelled = ", *modelled*" if parse_topology(result["topology"]).chip.platform == "gpu" else ""
        parts = [f"{part} {value:.1f}" for part, value in now["parts"].items()][:_SHOWN]
        role = "not fitted to it" if modelled else "tuned" if result["tuned"] else "judged"
        cells = [
            f"{result['topology']}, {result['mesh']}{modelled}",
            _pass_name(result),
            f"{result['batch']} of {result['prompt'] + result['new_tokens']}",
            f"{before['ms']:.1f} (planned {before['planned_ms']:.1f})" if before else "",
            f"{now['ms']:.2f}" if result["goal_ms"] else f"{now['ms']:.1f}",
            f"{result['goal_ms']:g}" if result["goal_ms"] else "",
            f"{result['planned_ms']:.1f}",
            f"{result['planned_ms'] / now['ms'] - 1:+.0%}, {role}",
            ", ".join(parts),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    settings = record["settings"]
    lines += [
        "",
        f"By the compilers' schedules, milliseconds per pass; nothing ran. TPU: bundles, bytes at "
        f"{settings['tpu_bandwidth_share']:.0%} of the published bandwidth, collectives that nothing hides. GPU, "
        f"modelled: operations at 790 TF/s or bytes at 4.3 TB/s, "
        f"and {settings['gpu_launch_microseconds']:g} µs per kernel. "
        f"{settings['masked_positions']} masked positions per row, published sampling.",
        "",
        "*planned* is the planner's estimate, *error* its difference from *now*. The planner's constants are fitted to "
        "the programs that are marked *tuned*, and judged by the others. For GPUs they are fitted to measured passes "
        "instead, which take longer than the model says: its rates are those of the largest products and copies.",
    ]
    commits = {result["now"]["commit"][:7]: None for result in record["results"].values()}
    if len(commits) > 1:
        lines += ["", f"The programs were compiled at commits {', '.join(f'`{commit}`' for commit in commits)}."]
    lines += ["", "Goals that are missed, with the instructions that take the time, in milliseconds:", ""]
    for result in record["results"].values():
        if result["goal_ms"] and result["now"]["ms"] > result["goal_ms"]:
            slowest = ", ".join(_instruction(one) for one in result["now"]["largest"][:_SLOWEST])
            shape = f"{result['batch']} of {result['prompt'] + result['new_tokens']}"
            lines.append(
                f"- {result['topology']}, {result['mesh']}, {_pass_name(result)}, {shape}: "
                f"{result['now']['ms']:.2f} of {result['goal_ms']:g}. {slowest}."
            )
    return "\n".join([*lines, *note_lines(record)])


def _pass_name(result: Mapping[str, Any]) -> str:
    """Return the name of a result's pass, with the quantization of the weights if there is one."""
    quantization = result.get("quantization", "none")
    return str(result["pass"]) + ("" if quantization == "none" else f", {quantization}")


def _instruction(one: Mapping[str, Any]) -> str:
    """Return an instruction of a record, or several with the same scope, with their time."""
    where = f" ({'/'.join(one['scope'].split('/')[-2:])})" if one["scope"] else ""
    others = f" and {one['instructions'] - 1} more" if one["instructions"] > 1 else ""
    wait = ", not overlapped" if one["kind"] == "collective" else ""
    name = "launches" if one["kind"] == "launch" else f"`{one['name']}`{others}"
    return f"{name}{where}{wait} {one['ms']:.1f}"


def _groups(wanted: Mapping[str, Target]) -> list[dict[str, Target]]:
    """Divide targets into those of one workload, whose passes are compiled together."""
    groups: dict[str, dict[str, Target]] = defaultdict(dict)
    for name, target in wanted.items():
        groups[json.dumps(target.child)][name] = target
    return list(groups.values())


def _former(values: flags.FlagValues) -> dict[str, Any]:
    """Return results and the other checkout of the record that is updated; none without ``--update``.

    Raises:
      InputError: there is no such record, or another checkout is given.
    """
    if not values.update:
        return {"results": {}, "before": None}
    path = Path(values.output_dir, f"{values.record or 'schedule'}.json")
    if not path.is_file():
        raise InputError(f"--update: {path} does not exist", field="update")
    if values.before:
        raise InputError("--update keeps the other checkout of the record: leave --before out", field="before")
    record = parse_json_object(path.read_bytes())
    return {"results": record["results"], "before": record["settings"]["before"]}


def main(values: flags.FlagValues) -> None:
    """Measure every target, print a line for each, and write the record after each workload."""
    compile_only()
    unknown = set(values.only) - set(TARGETS)
    if unknown:
        raise InputError(f"--only={','.join(values.only)}: expected some of {', '.join(TARGETS)}")
    here = Path(__file__).resolve().parent.parent
    checkouts = {"now": here} | ({"before": Path(values.before).resolve()} if values.before else {})
    programs = Path(values.programs_dir).resolve() if values.programs_dir else None
    former = _former(values)
    results: dict[str, Any] = former["results"]
    missing: list[str] = []
    wanted: dict[str, Target] = {}
    for name in values.only or TARGETS:
        install = missing_compiler(parse_topology(TARGETS[name].topology).chip.platform)
        if install is None:
            wanted[name] = TARGETS[name]
        else:
            missing.append(f"{name} was not compiled: {install}")
            print(missing[-1], flush=True)
    settings = {
        "masked_positions": _MASKED,
        "tpu_bandwidth_share": TPU_BANDWIDTH_SHARE,
        "gpu_launch_microseconds": 1e6 * LAUNCH_SECONDS,
        "before": Path(os.path.relpath(values.before, here)).as_posix() if values.before else former["before"],
    }

    def write() -> Path:
        ordered = {name: results[name] for name in TARGETS if name in results}
        record = build_record("schedule", kind="estimated", settings=settings, results=ordered, notes=missing)
        return write_record(record, values.output_dir, values.record)

    for version, checkout in checkouts.items():
        for group in _groups(wanted):
            first = next(iter(group))
            with _compiled(first, group[first], version, checkout, programs) as folder:
                for name, target in group.items():
                    found = measure(target, folder)
                    results[name] = results.get(name, {}) | target.described() | {version: found}
                    print(f"{name} {version}: {found['ms']:.2f} ms {found['parts']}", flush=True)
            write()
    print(f"written: {write()}", flush=True)


if __name__ == "__main__":
    run_launcher(main, define_flags, __doc__ or "")
