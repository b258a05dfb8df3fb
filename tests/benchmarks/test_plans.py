from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import plans
from launch.process.startup import run_launcher
from sharding import aot


def run(*arguments: str) -> None:
    run_launcher(plans.main, plans.define_flags, plans.__doc__ or "", ["plans", *arguments])


def test_only_machines_that_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--only=nonsense", f"--output_dir={tmp_path}")
    assert caught.value.code == 2
    assert "expected some of v4:2x2x1, v5e:2x4" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_no_record_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aot, "missing_compiler", lambda platform: "pip install it" if platform == "gpu" else None)
    monkeypatch.setattr(plans, "compile_workload", lambda *_: pytest.fail("compiled before all compilers are found"))
    with pytest.raises(SystemExit) as caught:
        run(f"--output_dir={tmp_path}")
    assert caught.value.code == 2
    assert "compiling for 8xh100 requires a compiler that is not installed: pip install it" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_record_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "compile_workload", lambda *_: [])
    monkeypatch.setattr("os.getloadavg", lambda: (3.2, 3.2, 3.2))
    run("--only=v5p:2x2x2", f"--output_dir={tmp_path}")
    record = json.loads((tmp_path / "v5p_2x2x2.json").read_text())
    assert record["kind"] == "estimated"
    (busy,) = record["notes"]
    assert "load average 3.2" in busy
    compiled = [mesh["mesh"] for mesh in record["results"]["meshes"] if "compiled" in mesh]
    assert compiled == ["data=1,sequence=8,tensor=1", "data=1,sequence=1,tensor=8"]
    assert "all-reduce over tensor" in record["results"]["why"]


def test_every_plan_in_the_repository_was_compiled() -> None:
    made = sorted((Path(plans.__file__).parent / "results" / "plans").glob("*.json"))
    assert len(made) == 7
    for path in made:
        record = json.loads(path.read_text())
        assert any("compiled" in mesh for mesh in record["results"]["meshes"]), path
