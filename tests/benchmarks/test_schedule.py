from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import schedule
from benchmarks.bundles import read_dump, read_kernel
from benchmarks.kernel_work import bytes_moved, operations
from benchmarks.pass_times import Device, Work, pass_times
from benchmarks.report import fill_tables
from launch.process.startup import run_launcher
from runtime.planner.hlo import read_module
from sharding.topology import parse_topology

# A loop of 10 iterations that overlaps copies with the work on 8 tiles, and an inner loop of 5.
BUNDLES = """
     0   :  { %s1 = inlined_call_operand.vmem [shape: bf16[512], index: 0] }
   0x1   :  {}
   0x2 LB: > { %s2 = sadd.s32 1, %s3 /* iteration index, stage = 1 */  ;;  %s3 = sphi 0 }
   0x3   : > { %7 = dma.done [#allocation1]
bounds: (1, 2) */ }
   0x4   : > { %9 = sbr.rel (%p1) target = $region2 }
   0x5   :  {} /* End region 1 */
   0x6 LB: >> { %v1 = vmatmul.bf16.gmra.mxu0 %v2  ;;  %s4 = sadd.s32 2, %s5 }
   0x7   : >> { %v3 = vmatmul.lmr.bf16.gmra.16.mxu0 %v2  ;;  %v4 = vmatmul.bf16.gmra.mxu1 %v2 }
   0x8   : >> { %p2 = scmp.ge.s32.totalorder (%p3), %s4, 10 /* loop exit test */ }
   0x9   : > { %p4 = scmp.ge.s32.totalorder %s2, 10 /* loop exit test */ }
   0xa   :  { %10 = vsyncpa [#allocation9], 1 }
"""


def test_bundles_are_counted_by_loops_and_by_matrix_units() -> None:
    # The inner loop has 3 bundles, and 16 + 8 rows for one matrix unit. With steps of 2, it has 5 iterations.
    inner, outer, alone = 5 * (16 + 8), 5, 3
    assert read_kernel(BUNDLES).cycles == alone + 8 * (outer + inner)
    assert read_kernel(BUNDLES, tiles=9).cycles == alone + 9 * (outer + inner)
    assert read_kernel(BUNDLES).unknown_loops == 0
    assert read_kernel(BUNDLES.replace(", 10 /* loop exit", ", %s9 /* loop exit")).unknown_loops == 2


def test_what_only_the_last_tile_needs_counts_as_often() -> None:
    rare = BUNDLES.replace("%p1)", "%p9)").replace(
        "%s3 = sphi 0 }", "%s3 = sphi 0  ;;  %p9 = scmp.ne.s32.totalorder %s8, 3 }"
    )
    rare = rare.replace("   0x9   : >", "   0x9 PF: >")
    # One of the outer loop's 5 bundles is after the branch, and runs in one of 4 tiles.
    assert read_kernel(rare).cycles == read_kernel(BUNDLES).cycles - 8


def test_unrolled_loops_run_less_often() -> None:
    text = """
%turn (a: (u32[], f32[8])) -> (u32[], f32[8]) {
  %a = (u32[], f32[8]{0}) parameter(0)
  %count = u32[] get-tuple-element(%a), index=0
  %one = u32[] constant(1)
  %next = u32[] add(%count, %one)
  %after = u32[] add(%next, %one)
  %x = f32[8]{0} get-tuple-element(%a), index=1
  ROOT %both = (u32[], f32[8]{0}) tuple(%after, %x)
}

%within (b: (u32[], f32[8])) -> pred[] {
  %b = (u32[], f32[8]{0}) parameter(0)
  %at = u32[] get-tuple-element(%b), index=0
  %four = u32[] constant(4)
  ROOT %less = pred[] compare(%at, %four), direction=LT
}

ENTRY %main (c: (u32[], f32[8])) -> (u32[], f32[8]) {
  %c = (u32[], f32[8]{0}) parameter(0)
  ROOT %loop = (u32[], f32[8]{0}) while(%c), condition=%within, body=%turn
}
"""
    module = read_module(text)
    assert module.trips(module.computations["main"][-1]) == 2


def test_a_dump_is_read_by_kernel(tmp_path: Path) -> None:
    (tmp_path / "17950-TLP-hlo.txt").write_text("HloModule jit_prefill, is_scheduled=true\n")
    (tmp_path / "17953-fusion.1-66-final_bundles.txt").write_text(BUNDLES)
    (tmp_path / "17953-fusion.1-65-schedule-analysis_final_bundles.txt").write_text("")
    (tmp_path / "17953-fusion.1-64-post-ra.txt").write_text("")
    # A kernel of the next program has the same name.
    (tmp_path / "18001-TLP-hlo.txt").write_text("HloModule jit_decode, is_scheduled=true\n")
    (tmp_path / "18002-fusion.1-66-final_bundles.txt").write_text("")
    assert read_dump(tmp_path, "jit_prefill", {"fusion.1": 9}) == {"fusion.1": read_kernel(BUNDLES, 9)}
    assert read_dump(tmp_path, "jit_decode", {})["fusion.1"].cycles == 0


HLO = """
HloModule jit_denoise, is_scheduled=true

%slice (p0: bf16[28,64,32], p1: s32[]) -> bf16[64,32] {
  %p0 = bf16[28,64,32]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %one = bf16[1,64,32]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,64,32}
}

%left (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %short = f32[8]{0} negate(%p), metadata={op_name="step/left"}
}

%right (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %long = f32[8]{0} exponential(%q), metadata={op_name="step/right"}
}

%layer (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%a), index=1
  %start = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add
  %beside = f32[8]{0} tanh(%x), metadata={op_name="step/beside"}
  %done = f32[8]{0} all-reduce-done(%start), metadata={op_name="step/sum"}
  %alone = f32[8]{0} all-reduce(%done), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="step/alone"}
}

%within (b: (s32[], f32[8])) -> pred[] {
  %b = (s32[], f32[8]{0}) parameter(0)
}

%step (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c = (s32[], f32[8]{0}) parameter(0)
  %layers = (s32[], f32[8]{0}) while(%c), condition=%within, body=%layer, backend_config={"known_trip_count":{"n":"3"}}
  %y = f32[8]{0} get-tuple-element(%layers), index=1
  %either = f32[8]{0} conditional(%w, %y, %y), true_computation=%left, false_computation=%right
}

ENTRY %main (d: f32[8], w: bf16[28,64,32], i: s32[]) -> f32[8] {
  %d = f32[8]{0} parameter(0)
  %w = bf16[28,64,32]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %layer_weights = bf16[1,64,32]{2,1,0:S(1)} fusion(%w, %i), kind=kLoop, calls=%slice
  %flat = bf16[64,32]{1,0} bitcast(%layer_weights)
  %left_side = bf16[16,32]{1,0} constant({...})
  %product = f32[16,64]{1,0} dot(%left_side, %flat), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %steps = (s32[], f32[8]{0}) while(%t), condition=%within, body=%step
}
"""


def test_a_pass_is_what_one_turn_of_the_loop_takes() -> None:
    seconds = {"tanh": 2.0, "negate": 1.0, "exponential": 4.0}
    device = Device(lambda module, local, one: Work(seconds.get(one.operation, 100.0)), lambda one: 5.0, 1e30)
    spent = {
        one.name: (one.kind, one.seconds, one.runs) for one in pass_times(read_module(HLO), "denoise step", device, 1)
    }
    # Code before the loop over passes does not count. 2 of the first sum's 5 seconds overlap; of two branches the
    # longer counts.
    assert spent == {
        "beside": ("kernel", 6.0, 3.0),
        "done": ("collective", 9.0, 3.0),
        "alone": ("collective", 15.0, 3.0),
        "long": ("kernel", 4.0, 1.0),
    }


@pytest.mark.parametrize(("launch", "runs"), [(0.0, {"check": 3.0, "body": 3.0}), (1.0, {"body": 3.0})])
def test_gpus_do_not_evaluate_the_condition_of_a_counted_loop(launch: float, runs: dict[str, float]) -> None:
    text = """
HloModule step

%another (o: f32[8]) -> f32[8] {
  %o = f32[8]{0} parameter(0)
}

%below (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %check = f32[8]{0} negate(%p)
}

%again (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %body = f32[8]{0} tanh(%q)
}

%step (c: f32[8]) -> f32[8] {
  %c = f32[8]{0} parameter(0)
  ROOT %loop = f32[8]{0} while(%c), condition=%below, body=%again, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (d: f32[8]) -> f32[8] {
  %d = f32[8]{0} parameter(0)
  ROOT %steps = f32[8]{0} while(%d), condition=%another, body=%step
}
"""
    device = Device(lambda module, local, one: Work(1.0), lambda one: 5.0, 1e30, launch)
    spent = pass_times(read_module(text), "denoise step", device, 1)
    assert {one.name: one.runs for one in spent if one.kind == "kernel"} == runs
    assert sum(one.seconds for one in spent if one.kind == "launch") == launch * runs["body"]


def test_refreshes_and_windows_have_loops_of_their_own() -> None:
    """The loop of a window runs at most once; a loop over head chunks inside it is a loop."""
    text = "\n".join(
        f"%{name} (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n{body}}}\n"
        for name, body in {
            "true": "",
            "rows": "  ROOT %refreshed = f32[8]{0} tanh(%p)\n",
            "chunk": "  ROOT %head = f32[8]{0} negate(%p)\n",
            "window": "  %layers = f32[8]{0} tanh(%p)\n"
            "  ROOT %chunks = f32[8]{0} while(%layers), condition=%true, body=%chunk, metadata="
            '{op_name="step/block_step/while/body/while"}\n',
            "step": "  %all = f32[8]{0} while(%p), condition=%true, body=%rows, metadata="
            '{op_name="step/refresh/while"}\n  ROOT %once = f32[8]{0} while(%all), condition=%true, body=%window, '
            'metadata={op_name="step/block_step/while"}\n',
        }.items()
    )
    text += (
        "\nENTRY %main (d: f32[8]) -> f32[8] {\n  %d = f32[8]{0} parameter(0)\n"
        "  ROOT %steps = f32[8]{0} while(%d), condition=%true, body=%step\n}\n"
    )
    device = Device(lambda module, local, one: Work(1.0), lambda one: 5.0, 1e30)
    spent = {
        name: {one.name: one.runs for one in pass_times(read_module(text), name, device, 3)}
        for name in ("refresh", "block step")
    }
    assert spent == {"refresh": {"refreshed": 1.0}, "block step": {"layers": 1.0, "head": 3.0}}


def test_windows_of_older_programs_are_in_conditionals() -> None:
    text = "\n".join(
        f"%{name} (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n{body}}}\n"
        for name, body in {
            "true": "",
            "rows": "  ROOT %refreshed = f32[8]{0} tanh(%p)\n",
            "none": "",
            "window": "  ROOT %layers = f32[8]{0} tanh(%p)\n",
            "step": "  %all = f32[8]{0} while(%p), condition=%true, body=%rows, metadata="
            '{op_name="step/block_step/while"}\n  ROOT %once = f32[8]{0} conditional(%w, %all, %all), '
            'true_computation=%none, false_computation=%window, metadata={op_name="step/block_step/cond"}\n',
        }.items()
    )
    text += (
        "\nENTRY %main (d: f32[8]) -> f32[8] {\n  %d = f32[8]{0} parameter(0)\n"
        "  ROOT %steps = f32[8]{0} while(%d), condition=%true, body=%step\n}\n"
    )
    device = Device(lambda module, local, one: Work(1.0), lambda one: 5.0, 1e30)
    spent = {
        name: [one.name for one in pass_times(read_module(text), name, device, 3)] for name in ("refresh", "block step")
    }
    assert spent == {"refresh": ["refreshed"], "block step": ["layers"]}


def test_bytes_are_those_of_the_slice_and_outside_the_chip() -> None:
    module = read_module(HLO)
    local = {one.name: one for one in module.computations["main"]}
    assert bytes_moved(module, local, local["layer_weights"]) == 64 * 32 * 2 + 4
    assert bytes_moved(module, local, local["product"]) == 2 * (64 * 32 + 16 * 32) + 4 * 16 * 64
    assert operations(module, local, local["product"]) == 2 * 16 * 64 * 32


def test_an_array_that_is_read_with_another_tiling_is_not_moved() -> None:
    text = HLO.replace("dynamic-slice(%p0,", "dynamic-slice(%tiled,").replace(
        "  %zero = s32[]",
        "  %tiled = bf16[28,64,32]{2,1,0} fusion(%p0), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, "
        "calls=%tiling\n  %zero = s32[]",
    )
    tiling = "%tiling (r: bf16[28,64,32]) -> bf16[28,64,32] {\n  ROOT %r = bf16[28,64,32]{2,1,0} parameter(0)\n}\n\n"
    module = read_module(text.replace("%slice (p0", f"{tiling}%slice (p0"))
    local = {one.name: one for one in module.computations["main"]}
    assert bytes_moved(module, local, local["layer_weights"]) == 64 * 32 * 2 + 4


def run(*arguments: str) -> None:
    run_launcher(schedule.main, schedule.define_flags, schedule.__doc__ or "", ["schedule", *arguments])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Programs that play a compiler's output; the list receives the ``PYTHONPATH`` of each compilation."""
    found: list[str] = []

    def child(command: list[str], env: dict[str, str], **options: object) -> object:
        assert command[:2] == [sys.executable, "-P"]
        folder, target = Path(command[3]), json.loads(command[4])
        assert (target["model"], target["dtype"]) == ("diffucoder-7b", "bfloat16")
        (folder / "dump" / "1-TLP-hlo.txt").write_text(HLO.lstrip())
        (folder / "dump" / "1-long-1-final_bundles.txt").write_text(BUNDLES)
        (folder / "denoise_step.hlo").write_text(HLO.lstrip())
        passes = {"denoise step": {"chunk": 64, "planned_ms": 1.5}}
        (folder / "phases.json").write_text(json.dumps({"programs": [], "passes": passes}))
        found.append(env["PYTHONPATH"])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(schedule, "subprocess", SimpleNamespace(run=child))
    monkeypatch.setattr(schedule, "missing_compiler", lambda platform: "pip it" if platform == "gpu" else None)
    return found


def test_a_target_is_compiled_in_a_process_of_its_own(tmp_path: Path, compiled: list[str]) -> None:
    run("--only=v5e-t8-b1,h200-b1", f"--output_dir={tmp_path}", f"--before={tmp_path}")
    record = json.loads((tmp_path / "schedule.json").read_text())
    assert record["notes"] == ["h200-b1 was not compiled: pip it"]
    assert compiled == [str(Path(schedule.__file__).resolve().parents[1]), str(tmp_path)]
    found = record["results"]["v5e-t8-b1"]
    # The other checkout is no Git checkout, so its commit is unknown.
    assert found["now"] | {"commit": "unknown"} == found["before"]
    assert {"long", "alone"} <= {one["name"] for one in found["now"]["largest"]}
    table = fill_tables("<!-- table: schedule.json -->\n<!-- end of table -->", tmp_path)
    assert "| v5e:2x4, tensor=8 | denoise step | 1 of 512 |" in table
    assert f"{found['planned_ms'] / found['now']['ms'] - 1:+.0%}, tuned" in table
    assert "pip it" in table


def test_what_is_kept_is_not_compiled_again(tmp_path: Path, compiled: list[str]) -> None:
    arguments = [f"--output_dir={tmp_path}", f"--programs_dir={tmp_path / 'programs'}"]
    run("--only=v5e-t8-b1", *arguments)
    first = json.loads((tmp_path / "schedule.json").read_text())["results"]["v5e-t8-b1"]
    run("--only=v5e-t8-b1,v5e-t8-b16", *arguments)
    results = json.loads((tmp_path / "schedule.json").read_text())["results"]
    assert results["v5e-t8-b1"] == first
    assert len(results) == len(compiled) == 2
    # A run that was stopped leaves a folder without the last file.
    (tmp_path / "programs" / "now" / "v5e-t8-b16" / "commit").unlink()
    run("--only=v5e-t8-b1,v5e-t8-b16", *arguments)
    assert len(compiled) == 3


def test_an_update_keeps_the_other_results(
    tmp_path: Path, compiled: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run("--only=v5e-t8-b1,v5e-t8-b16", f"--output_dir={tmp_path}", f"--before={tmp_path}")
    first = json.loads((tmp_path / "schedule.json").read_text())
    edited = json.loads(json.dumps(first))
    for name in edited["results"]:
        edited["results"][name]["now"]["ms"] = 1e3
    (tmp_path / "schedule.json").write_text(json.dumps(edited))
    run("--only=v5e-t8-b16", "--update", f"--output_dir={tmp_path}")
    record = json.loads((tmp_path / "schedule.json").read_text())
    assert record["results"]["v5e-t8-b1"] == edited["results"]["v5e-t8-b1"]
    assert record["results"]["v5e-t8-b16"] == first["results"]["v5e-t8-b16"]
    assert record["settings"] == first["settings"]
    with pytest.raises(SystemExit):
        run("--only=v5e-t8-b16", "--update", f"--output_dir={tmp_path / 'none'}")
    assert "schedule.json does not exist" in capsys.readouterr().err


def test_only_targets_that_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--only=v9", f"--output_dir={tmp_path}")
    assert "expected some of v5e-t8-b1" in capsys.readouterr().err


RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "schedule.json"
TPU_TARGETS = {
    name: target for name, target in schedule.TARGETS.items() if parse_topology(target.topology).chip.platform == "tpu"
}


def test_the_planner_is_judged_on_programs_that_it_is_not_tuned_on() -> None:
    tuned = {name for name, target in TPU_TARGETS.items() if target.tuned}
    assert len(TPU_TARGETS) >= 16
    assert len(tuned) <= 10
    assert len(TPU_TARGETS) - len(tuned) >= 6
    for names in (tuned, TPU_TARGETS.keys() - tuned):
        assert {TPU_TARGETS[name].phase for name in names} == {"denoise step", "block step", "prefill", "decode"}
        assert {TPU_TARGETS[name].topology.split(":")[0] for name in names} == {"v4", "v5e", "v5p"}


@pytest.mark.parametrize("name", TPU_TARGETS)
def test_the_planner_agrees_with_the_schedules(name: str) -> None:
    target, found = TPU_TARGETS[name], json.loads(RECORD.read_text())["results"][name]
    assert found["tuned"] == target.tuned
    assert target.planned_ms() == pytest.approx(found["now"]["ms"], rel=0.15)
