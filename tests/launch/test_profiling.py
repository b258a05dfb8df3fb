from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch import batch, generate, serve


def assert_scopes(trace: Path) -> None:
    """Assert that the trace has the model's named scopes and its operations."""
    (profile,) = trace.rglob("*.xplane.pb")
    found = profile.read_bytes()
    for scope in (b"denoise_step", b"/layer/", b"/mlp/", b"lm_head"):
        assert scope in found, f"{scope!r} is not in the trace"


def test_a_trace_and_the_programs_of_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "1", "prompt": "def f(x):"}\n', encoding="utf-8")
    trace, programs = tmp_path / "trace", tmp_path / "programs"
    batch.run(
        [
            "batch",
            f"--input={tmp_path / 'in.jsonl'}",
            f"--output_dir={tmp_path / 'out'}",
            "--max_new_tokens=2",
            "--slots=1",
            "--mesh=data=1",
            "--compile_cache=",
            f"--profile_dir={trace}",
            f"--dump_hlo={programs}",
        ]
    )
    assert list(trace.rglob("*.xplane.pb"))
    assert any("/layer/" in path.read_text() for path in programs.glob("*.hlo.txt"))


def test_a_trace_and_the_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, programs = tmp_path / "trace", tmp_path / "programs"
    generate.run(
        [
            "generate",
            "--prompt=def f(x):",
            "--max_new_tokens=2",
            "--mesh=data=1",
            "--compile_cache=",
            f"--profile_dir={trace}",
            f"--dump_hlo={programs}",
        ]
    )
    assert_scopes(trace)
    (text,) = [path.read_text() for path in programs.glob("*.hlo.txt")]
    # Readers of a profile need the model's named scopes.
    assert "denoise_step" in text
    assert "/layer/" in text


@pytest.mark.parametrize("flag", ["profile_dir", "dump_hlo"])
@pytest.mark.parametrize("launcher", [generate, batch, serve])
def test_a_folder_that_cannot_be(launcher: Any, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {generate: ["--prompt=x"], batch: ["--input=x", "--output_dir=y"], serve: []}[launcher]
    file = tmp_path / "file"
    file.touch()
    for path, says in (("/nowhere/at/all", "there is no such folder"), (file, "that is a file")):
        with pytest.raises(SystemExit) as caught:
            launcher.run(["launcher", *arguments, f"--{flag}={path}"])
        assert caught.value.code == 2
        assert says in capsys.readouterr().err
