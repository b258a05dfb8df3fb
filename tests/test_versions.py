"""Which interpreters ``.ci/versions`` runs the versions of JAX with. In place of CI and of interpreters are scripts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

VERSIONS = Path(__file__).parents[1] / ".ci" / "versions"
OLD, NEW, NONE = 1, 0, 127  # exit codes of an interpreter that is asked whether it is new enough


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def runs(folder: Path, interpreters: dict[str, int], **environment: str) -> list[str]:
    """Return what is run, and the script's own last words."""
    for name, code in interpreters.items():
        write_script(folder / "bin" / name, f"exit {code}")
    for name in ("bash", "dirname"):
        (folder / "bin" / name).symlink_to(shutil.which(name) or name)
    write_script(folder / "a folder" / "run", 'echo "$JAX $PYTHON $CI_VENV"')
    script = shutil.copy(VERSIONS, folder / "a folder" / "versions")
    done = subprocess.run(
        [folder / "bin" / "bash", script],
        env={"PATH": str(folder / "bin"), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("interpreters", "chosen"),
    [
        ({"python3": NEW, "python3.12": NEW}, "python3"),
        ({"python3": OLD, "python3.12": NEW, "python3.13": NEW}, "python3.12"),
        ({"python3": OLD, "python3.12": NONE, "python3.13": NEW}, "python3.13"),
        ({"python3": OLD, "python3.13": NEW}, "python3.13"),
    ],
)
def test_the_first_interpreter_that_is_new_enough(tmp_path: Path, interpreters: dict[str, int], chosen: str) -> None:
    found = runs(tmp_path, interpreters, CI_VENV="/a/venv")
    assert found == ["0.10 python3 /a/venv-jax-0.10", f"0.11 {chosen} /a/venv-jax-0.11"]


def test_none_is_new_enough(tmp_path: Path) -> None:
    found = runs(tmp_path, {"python3": OLD, "python3.12": NONE})
    assert found[0].split() == ["0.10", "python3"]
    assert found[1:] == ["JAX 0.11 is not run: it needs Python 3.12 or newer, which PYTHON=... can name"]


def test_a_named_interpreter_runs_both(tmp_path: Path) -> None:
    mine = str(write_script(tmp_path / "my python", f"exit {NEW}"))
    found = runs(tmp_path, {"python3": OLD, "python3.12": NEW}, PYTHON=mine)
    assert found == [f"0.10 {mine} ", f"0.11 {mine} "]


def test_no_other_is_taken_for_a_named_interpreter(tmp_path: Path) -> None:
    first, second = runs(tmp_path, {"python3": OLD, "python3.12": NEW}, PYTHON="python3")
    assert first == "0.10 python3 "
    assert "JAX 0.11 is not run" in second
