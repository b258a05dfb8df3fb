from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path

import pytest

from checkpoints import DEMO
from checkpoints.folder import QUANTIZATION_KEY
from launch import plan
from launch.plans import search
from runtime.planner.compiled import CompiledPhase
from runtime.planner.presets import PRESETS
from runtime.planner.workload import Workload
from sharding.errors import OutOfMemoryError
from sharding.mesh import MeshSpec
from tests.unmapped_axes import refuse

README = Path(__file__).parents[2] / "README.md"
CLUSTERS = README.parent / "launch" / "cluster" / "README.md"
HERE = ["plan", "--model=diffucoder-7b", "--compile=0"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    plan.run([*HERE, *arguments])
    return capsys.readouterr().out


def test_a_table_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--topology=v5p:2x2x2", "--prompt=1024", "--new_tokens=1024")
    lines = [line for line in out.splitlines() if "data=1" in line]
    assert "sequence=8,tensor=1" in lines[0]
    assert "estimated" in out
    assert "why: data=1,sequence=8,tensor=1" in out


def test_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--topology=8xh100", "--batch=8", "--json", "--price_per_chip_hour=3")
    found = json.loads(out)
    assert found["kind"] == "estimated"
    best = found["plans"][0]["meshes"][0]
    assert best["fits"]
    per_chip = best["estimated"]["tokens_per_second_per_chip"]
    assert best["estimated"]["cost_per_million_tokens"] == pytest.approx(3 / 3600 / per_chip * 1e6)


def test_all_machines_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "--topology=all", "--json"))
    fastest = [one["meshes"][0]["estimated"]["tokens_per_second_per_chip"] for one in found["plans"] if one["meshes"]]
    assert len(fastest) > 5
    assert fastest == sorted(fastest, reverse=True)
    assert {one["topology"] for one in found["plans"]} == set(plan.MACHINES)


def test_capacity_headroom_and_units_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--topology=1xL4", "--price_per_chip_hour=0.8", "--batch=1")
    title, heads, row = out.splitlines()[0], out.splitlines()[2], out.splitlines()[4]
    assert "at $0.8 per chip-hour" in title
    assert re.split(r"\s{2,}", heads.strip())[1:5] == ["GB/chip", "compiler", "usable", "headroom"]
    assert heads.strip().endswith("$/M tokens")
    _, needs, _, usable, headroom, *_ = row.split()
    assert float(usable) == pytest.approx(22.5 * 2**30 * 0.75 / 1e9, abs=0.01)
    assert float(headroom) == pytest.approx(float(usable) - float(needs), abs=0.02)


@pytest.mark.parametrize(
    ("command", "machine", "workload"),
    [
        ("--mesh=tensor=8 --chat", "v5e-8", ["--prompt=64", "--new_tokens=64"]),
        ("--mesh=sequence=2,tensor=4", "v5e-8", ["--batch=1"]),
        ("--mesh=data=8 --num_return_sequences=4", "8xH100", ["--batch=8", "--prompt=256", "--new_tokens=64"]),
        ("--mesh=sequence=4,tensor=2 --max_new_tokens=1024", "8xH100", ["--new_tokens=1024"]),
    ],
)
def test_the_readme_uses_the_best_mesh(
    capsys: pytest.CaptureFixture[str], command: str, machine: str, workload: list[str]
) -> None:
    assert command in README.read_text(encoding="utf-8")
    found = json.loads(run(capsys, f"--topology={machine}", "--json", *workload))
    best = found["plans"][0]["meshes"][0]["mesh"]
    mesh = re.search(r"--mesh=(\S+)", command)
    assert mesh is not None
    assert MeshSpec.parse(best) == MeshSpec.parse(mesh[1])


@pytest.mark.parametrize(
    ("machine", "command", "workload"),
    [
        ("v5e-8", "--chat --prompt='Sort a list.' --prompt='Reverse a string.'", ["--batch=2"]),
        ("v4-32", "--chat --num_return_sequences=8 --prompt='Sort a list.'", ["--batch=8"]),
        ("v4-32", "--max_new_tokens=1024 --prompt='def fft(x):'", ["--prompt=16", "--new_tokens=1024"]),
        ("8xH100", "--num_return_sequences=8 --prompt_file=a.txt", ["--batch=8", "--prompt=256"]),
        ("8xH100", "--max_new_tokens=1024 --prompt='def fft(x):'", ["--prompt=16", "--new_tokens=1024"]),
        ("2x8xH100", "--num_return_sequences=16 --prompt_file=a.txt", ["--batch=16", "--prompt=256"]),
    ],
)
def test_the_guide_to_clusters_uses_the_best_mesh(
    capsys: pytest.CaptureFixture[str], machine: str, command: str, workload: list[str]
) -> None:
    section = re.split(r"^### ", CLUSTERS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (text,) = [one for one in section if one.lower().startswith(machine.replace("x", " x ").lower())]
    found = re.findall(r"--mesh=(\S+) " + re.escape(command), text)
    best = json.loads(run(capsys, f"--topology={machine}", "--json", "--prompt=64", "--new_tokens=64", *workload))
    first = MeshSpec.parse(best["plans"][0]["meshes"][0]["mesh"])
    assert found
    assert {MeshSpec.parse(one) for one in found} == {first}


@pytest.mark.parametrize("name", ["v5e-8", "v5e-16", "v4-32", "v5p-32"])
def test_the_jobs_for_gke_use_the_best_mesh(capsys: pytest.CaptureFixture[str], name: str) -> None:
    (mesh,) = re.findall(r"--mesh=(\S+)", (CLUSTERS.parent / "gke" / name / "kustomization.yaml").read_text())
    found = json.loads(run(capsys, f"--topology={name}", "--json", "--prompt=64", "--new_tokens=256", "--batch=1"))
    assert MeshSpec.parse(found["plans"][0]["meshes"][0]["mesh"]) == MeshSpec.parse(mesh)


def test_without_the_compiler_the_analytical_part_works_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "launch.plans.search.missing_compiler", lambda platform: "pip install -e '.[tpu]' in the checkout (libtpu)"
    )
    plan.run([*HERE[:2], "--topology=v5e:2x4", "--json"])
    captured = capsys.readouterr()
    assert "analytical only" in captured.err
    assert "libtpu" in json.loads(captured.out)["plans"][0]["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--topology=v7:2x2"], 'unknown chip "v7"'),
        (["--topology=v5e:3x3"], "no such slice"),
        (["--topology=v5e:2x4", "--mesh=tensor=3"], "is not divisible by tensor=3"),
        (["--topology=v5e:2x4", "--mesh=tensor=16"], "there are 8"),
        (["--topology=v5e:2x4", "--mesh=kv=2"], 'unknown axis "kv"'),
        (["--topology=8xh100", "--batch=1000000"], "What would help"),
        (["--topology=8xh100", "--mesh=data=8", "--batch=100000"], "8xh100: mesh data=8,sequence=1,tensor=1 needs"),
        (["--topology=v5e:2x4", "--mesh=data=3"], "first 3 of 8 chips do not form a box"),
        (["--topology=v5e:4x4", "--mesh=data=6"], "first 6 of 16 chips do not form a box"),
        (["--topology=2xv5e:2x4", "--mesh=data=6,tensor=2"], "first 12 of 16 chips are not the same box in each slice"),
        (["--topology=all", "--mesh=tensor=3"], "8xh200: "),
        (["--topology=v5e:2x4", "--block_length=4"], "--block_length needs --cache="),
        (["--topology=v5e:2x4", "--draft_axis=data"], "--draft_axis needs --draft_steps"),
        (["--topology=2x8xh100", "--mesh=tensor=4"], "no device of host 1"),
        (["--topology=v5e:2x4", "--plot=plan.pgf"], "must end with one of .png, .svg, .pdf"),
        (["--topology=v5e:2x4", "--plot=plan.picture"], "must end with one of"),
        (["--topology=v5e:2x4", "--dump_hlo=programs"], "give --compile=1"),
        (
            ["--model=qwen2.5-7b", "--topology=v5e:2x4", "--cache=dual", "--steps=8"],
            "--steps, --cache: qwen2.5-7b is autoregressive, and planned with a KV cache",
        ),
        (["--topology=v5e:2x4", "--draft_model=qwen3-0.6b"], "qwen3-0.6b cannot be a draft model: only autoregressive"),
        (
            ["--model=qwen3-8b", "--topology=v5e:2x4", "--draft_model=diffucoder-7b"],
            "diffucoder-7b cannot be a draft model: it is a diffusion model",
        ),
        (
            ["--model=qwen3-8b", "--topology=v5e:2x4", "--draft_model=qwen3-0.6b", "--draft_checkpoint=x"],
            "give either --draft_model or --draft_checkpoint",
        ),
        (["--model=qwen3-8b", "--topology=v5e:2x4", "--draft_checkpoint="], "--draft_checkpoint is empty"),
        (
            ["--model=qwen3-8b", "--topology=v5e:2x4", "--draft_model=qwen3-0.6b", "--compile=1"],
            "--compile does not work with a draft model",
        ),
        (["--topology=v5e:2x4", "--steps=0"], "steps is 0; expected an integer from 1 to 65536"),
        (["--topology=v5e:2x4", "--cache=dual", "--block_length=0"], "block_length is 0; expected an integer from 1"),
        (["--topology=v5e:2x4", "--plot=/nowhere/at/all.png"], "no such folder"),
        (["--topology=v5e:2x4", "--prompt=200000"], "the model allows 131072"),
        ([], "--topology"),
    ],
)
def test_what_is_wrong_is_said_with_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        plan.run([*HERE, *arguments])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""


def test_an_empty_checkpoint_is_not_this_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(DEMO)
    with pytest.raises(SystemExit) as caught:
        plan.run(["plan", "--topology=v5e-8", "--checkpoint="])
    assert caught.value.code == 2
    assert "--checkpoint is empty" in capsys.readouterr().err


def test_a_model_is_named_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        plan.run(["plan", "--topology=v5e:2x4"])
    assert caught.value.code == 2
    assert "--checkpoint" in capsys.readouterr().err


SMALL_LAYERS = 3
SMALL = {
    "model_type": "Dream",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": SMALL_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "mask_token_id": 4,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}


def write_config(folder: Path, **changes: object) -> Path:
    """Write a model folder that contains only config.json."""
    (folder / "config.json").write_text(json.dumps(SMALL | changes))
    return folder


def test_what_the_compiler_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Collectives in loops (the scan over layers, the search for thresholds) are counted once per iteration."""
    write_config(tmp_path)
    what = ["--topology=v5e:2x2", "--mesh=tensor=2", "--prompt=64", "--new_tokens=64"]
    how = ["--compile=1", "--json", f"--dump_hlo={tmp_path / 'programs'}"]
    plan.run(["plan", f"--checkpoint={tmp_path}", *what, *how])
    (mesh,) = json.loads(capsys.readouterr().out)["plans"][0]["meshes"]
    assert mesh["idle_chips"] == 2
    (compiled,) = mesh["compiled"]
    assert compiled["pass"] == "denoise step"
    assert compiled["collective_bytes_equal_the_estimate"]
    assert compiled["memory_bytes_per_device"] > 0
    (file,) = (tmp_path / "programs").iterdir()
    text = file.read_text()
    assert text.startswith("HloModule")
    written = text.count(" all-reduce(") + text.count(" all-reduce-start(")
    # Two per layer, and one per iteration of the threshold search, which has 11.
    assert compiled["collectives_of_a_pass"]["all-reduce"] >= written + 2 * (SMALL_LAYERS - 1) + 10


def test_only_the_configuration_of_a_checkpoint_is_fetched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetched: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str], **options: object) -> str:
        fetched.append(allow_patterns)
        return str(write_config(tmp_path))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    arguments = ["plan", "--topology=v5e:2x2", "--compile=0", "--prompt=64", "--new_tokens=64", "--json"]
    plan.run([*arguments, "--checkpoint=somebody/something"])
    assert json.loads(capsys.readouterr().out)["model"] == "somebody/something"
    assert fetched
    assert not any(fnmatch.fnmatch("model-00001-of-00004.safetensors", pattern) for pattern in fetched[0])


def test_a_checkpoint_is_planned_as_it_is_stored(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def memory() -> int:
        plan.run(["plan", f"--checkpoint={tmp_path}", "--topology=v5e:2x2", "--compile=0", "--mesh=data=1", "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["workload"]["quantization"] == stored
        size: int = found["plans"][0]["meshes"][0]["estimated"]["memory"]["weights"]
        return size

    sizes = []
    for stored in ("none", "int8", "int4"):
        write_config(tmp_path, **({} if stored == "none" else {QUANTIZATION_KEY: stored}))
        sizes.append(memory())
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[2] < 0.7 * sizes[1]


def test_a_draft_model_takes_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By name or from its folder; nothing is compiled, because the compiler would leave it out."""
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["qwen3-0.6b"]))
    found = []
    for more in ([], ["--draft_model=qwen3-0.6b"], [f"--draft_checkpoint={tmp_path}"]):
        arguments = ["plan", "--model=qwen3-8b", "--topology=v5e:2x2", "--mesh=tensor=4", "--json"]
        plan.run([*arguments, *(more or ["--compile=0"])])
        found.append(json.loads(capsys.readouterr().out))
    alone, named, opened = (one["plans"][0]["meshes"][0]["estimated"] for one in found)
    assert named == opened
    assert named["memory"]["weights (draft model)"] > 0
    assert named["memory"]["cache of keys and values (draft model)"] > 0
    assert named["memory"]["weights"] == alone["memory"]["weights"]
    assert named["tokens_per_second"] == alone["tokens_per_second"]
    assert found[1]["model"] == "qwen3-8b with the draft model qwen3-0.6b"


def test_the_demo_is_planned_from_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    plan.run(["plan", f"--checkpoint={DEMO}", "--topology=v5e:2x2", "--compile=0", "--mesh=data=1"])
    # The table wraps lines with long paths.
    out = " ".join(capsys.readouterr().out.split())
    assert "3 chips idle" in out
    assert "all but the compiler's column is estimated" in out


def compiled_with(bytes_: int) -> CompiledPhase:
    return CompiledPhase("denoise step", "xla", bytes_, 0, 0, 0, (), 1.0, "")


@pytest.mark.parametrize("refused", [True, False])
def test_what_the_compiler_finds_too_large_makes_room_for_the_next(
    refused: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[MeshSpec] = []

    def compile_(workload: Workload, spec: MeshSpec, devices: object) -> list[CompiledPhase]:
        tried.append(spec)
        if len(tried) == 1 and refused:
            raise OutOfMemoryError("the compiler refuses: Ran out of memory in memory space hbm.\nmuch more")
        return [compiled_with(1 << 40 if len(tried) == 1 else 1 << 30)]

    monkeypatch.setattr(search, "compile_workload", compile_)
    monkeypatch.setattr(search, "aot_devices", lambda topology: [])
    monkeypatch.setattr(search, "missing_compiler", lambda platform: None)
    arguments = ["plan", "--model=diffucoder-7b", "--topology=v5e:2x4", "--batch=16"]
    plan.run([*arguments, "--json"])
    (found,) = json.loads(capsys.readouterr().out)["plans"]
    assert len(tried) == 2
    meshes = {one["mesh"]: one for one in found["meshes"]}
    assert found["meshes"][0]["mesh"] == str(tried[1])
    assert "compiled" in found["meshes"][0]
    left_out = meshes[str(tried[0])]
    assert not left_out["fits"]
    assert "by the compiler" in left_out["does_not_fit"]
    assert "What would help" in left_out["does_not_fit"]
    assert "much more" not in left_out["does_not_fit"]
    assert str(tried[0]) in found["notes"][0]
    # A mesh that the user names has no alternative.
    tried.clear()
    with pytest.raises(SystemExit) as caught:
        plan.run([*arguments, "--mesh=tensor=8"])
    assert caught.value.code == 2
    assert "What would help" in capsys.readouterr().err


def test_meshes_that_do_not_fit_say_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--topology=v5e:2x4", "--batch=512")
    assert "does not fit: data=8,sequence=1,tensor=1 needs" in out
    (found,) = json.loads(run(capsys, "--topology=v5e:2x4", "--batch=512", "--json"))["plans"]
    too_large = [one for one in found["meshes"] if not one["fits"]]
    assert too_large
    assert all("a larger tensor axis" in one["does_not_fit"] for one in too_large)


def test_what_would_help_one_chip(capsys: pytest.CaptureFixture[str]) -> None:
    """It has no axis that could be larger. Nothing is named twice."""
    with pytest.raises(SystemExit):
        run(capsys, "--topology=l4", "--prompt=1500", "--new_tokens=500", "--batch=64")
    assert capsys.readouterr().err.endswith("What would help: int8, fewer rows, more or larger chips\n")


def test_machines_that_a_mesh_cannot_be_laid_over_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "--topology=all", "--mesh=data=2,tensor=4", "--json"))
    verdicts = {one["topology"]: one["verdict"] for one in found["plans"]}
    assert "needs 8 devices, and there are 4" in verdicts["v5e:2x2"]
    assert "needs 8 devices" not in verdicts["8xh100"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mesh=tensor=8"], "its axes cannot be mapped onto 2x4 chips; a mesh that fits: data=8"),
        ([], "model and batch cannot be divided over any mesh of all 8 devices that can be laid out on v5e:2x4"),
    ],
)
def test_a_slice_that_meshes_cannot_be_laid_over(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, lambda shape: shape[0] == 1)
    assert "data=8,sequence=1,tensor=1" in run(capsys, "--topology=v5e:2x4", "--batch=8")
    with pytest.raises(SystemExit) as caught:
        run(capsys, "--topology=v5e:2x4", "--batch=1", *arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "path", "says"),
    [
        ("dump_hlo", "file", "that is a file; name a folder"),
        ("dump_hlo", "no/folder", "there is no such folder"),
        ("dump_hlo", "locked/folder", "this user cannot write there"),
        ("plot", "no/plan.png", "there is no such folder"),
        ("plot", "folder.png", "that is a folder; name a file"),
        ("plot", "locked/plan.png", "this user cannot write there"),
        ("plot", "locked.png", "this user cannot write there"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is_compiled(
    flag: str, path: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("locked", "folder.png"):
        (tmp_path / folder).mkdir()
    for file in ("file", "locked.png"):
        (tmp_path / file).touch()
    # The error for a user who is not root.
    monkeypatch.setattr("os.access", lambda where, mode: not Path(where).name.startswith("locked"))
    with pytest.raises(SystemExit) as caught:
        plan.run([*HERE[:2], "--topology=v5e:2x4", f"--{flag}={tmp_path / path}"])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert "compiling" not in captured.err


def test_machines_that_do_not_fit_say_what_is_short_and_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--topology=all", "--batch=1024")
    (line,) = [line for line in out.splitlines() if line.startswith("does not fit: no mesh of v5e:2x2 fits.")]
    assert "GB per device, but only 16.91 GB are usable" in line
    assert "What would help" in line
    out = run(capsys, "--topology=all", "--mesh=data=2,tensor=4")
    (line,) = [line for line in out.splitlines() if line.startswith("no such mesh: v5e:2x2")]
    assert "needs 8 devices, and there are 4; a mesh that fits: data=4" in line
    assert "--devices" not in line, "plan simulates nothing"


def test_all_machines_show_what_the_compiler_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MACHINES", ("v5e:2x4", "v4:2x2x1"))
    monkeypatch.setattr(search, "compile_workload", lambda *arguments: [compiled_with(1 << 30)])
    monkeypatch.setattr(search, "aot_devices", lambda topology: [])
    monkeypatch.setattr(search, "missing_compiler", lambda platform: None)
    out = run(capsys, "--topology=all", "--batch=16", "--compile=2")
    lines = [line for line in out.splitlines() if line.startswith("compiled: ")]
    assert [line.split(",")[0] for line in lines] == ["compiled: v4:2x2x1"] * 2 + ["compiled: v5e:2x4"] * 2
    assert all("no collectives per pass, 1.0 s to compile" in line for line in lines)
