from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import plan

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
    assert [one["topology"] for one in found["plans"]] != list(plan.MACHINES)  # sorted by what they reach
    assert {one["topology"] for one in found["plans"]} == set(plan.MACHINES)


def test_a_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(capsys, "--topology=v5e:2x4", f"--plot={tmp_path / 'plan.png'}")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_without_the_compiler_the_analytical_part_works_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "missing_compiler", lambda platform: "pip install 'diffumesh[tpu]' (libtpu)")
    plan.run([*HERE[:2], "--topology=v5e:2x4", "--json"])
    captured = capsys.readouterr()
    assert "analytical only" in captured.err
    assert "libtpu" in json.loads(captured.out)["plans"][0]["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--topology=v7:2x2"], 'no chip "v7"'),
        (["--topology=v5e:3x3"], "no such slice"),
        (["--topology=v5e:2x4", "--mesh=tensor=3"], "does not divide by tensor=3"),
        (["--topology=v5e:2x4", "--mesh=tensor=16"], "there are 8"),
        (["--topology=v5e:2x4", "--mesh=kv=2"], 'no axis "kv"'),
        (["--topology=8xh100", "--batch=1000000"], "What would help"),
        (["--topology=8xh100", "--mesh=data=8", "--batch=100000"], "nothing fits"),
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


def test_a_model_is_named_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        plan.run(["plan", "--topology=v5e:2x4"])
    assert caught.value.code == 2
    assert "--checkpoint" in capsys.readouterr().err
