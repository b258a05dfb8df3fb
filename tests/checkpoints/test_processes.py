"""Several processes convert one checkpoint: the result equals that of one process to the bit, or there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import CheckpointError, open_folder
from checkpoints.file_list import FILES_FILE
from checkpoints.manifest import MANIFEST_FILE
from checkpoints.output import FolderOutput
from checkpoints.processes import Processes
from launch.hosts.local_processes import environment, free_port
from launch.hosts.secret import new_secret
from runtime import Engine
from tests.checkpoints.small import CUT, MICRO, contents, to_canonical, write_source

ROOT = Path(__file__).parents[2]


def run_processes(module: str, count: int, devices: int, *arguments: str) -> list[tuple[int, str]]:
    """Run a command on several hosts with several devices each; return exit code and output of each."""
    port, secret = free_port(), new_secret()
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, "--compile_cache=", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment(index, count, port, devices, secret),
        )
        for index in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


def convert_together(source: Path, output: Path | str, count: int, how: str | None = None) -> list[tuple[int, str]]:
    module, more = ("tests.checkpoints.convert_worker", [f"--last_host={how}"]) if how else ("launch.convert", [])
    return run_processes(module, count, 1, f"--source={source}", f"--output={output}", "--overwrite", *more)


def small_files(checkpoint: Path) -> dict[str, bytes]:
    """Read all files by name, except Orbax's and the list of Orbax's files."""
    return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file() and path.name != FILES_FILE}


@pytest.mark.parametrize(("count", "config"), [(2, CUT), (4, MICRO)], ids=["cut", "micro"])
def test_as_one_process_to_the_bit(count: int, config: dict[str, Any], tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", config)
    alone = to_canonical(source, tmp_path / "alone")
    for code, output in convert_together(source, tmp_path / "together", count):
        assert code == 0, output
    assert contents(tmp_path / "together") == contents(alone) == contents(source)
    assert small_files(tmp_path / "together") == small_files(alone)
    assert MANIFEST_FILE in small_files(alone)
    state = tmp_path / "together" / "weights" / "state"
    for index in range(count):
        # Orbax adds the name of the group to the process index.
        written = [path for path in state.glob(f"ocdbt.process_{index}*/d/*") if path.stat().st_size]
        assert written, f"process {index} has written its share"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "source", "together"]


def test_orbax_reads_what_several_wrote(micro: Path, tmp_path: Path) -> None:
    from orbax.checkpoint import v1
    from safetensors.numpy import load_file

    assert [code for code, _ in convert_together(micro, tmp_path / "together", 2)] == [0, 0]
    expected = load_file(micro / "model.safetensors")
    # Restore onto the host, because the devices of the two processes that saved it do not exist here.
    found = v1.load(tmp_path / "together" / "weights", dict.fromkeys(expected, np.ndarray))
    assert found.keys() == expected.keys()
    assert all(np.asarray(found[name]).tobytes() == value.tobytes() for name, value in expected.items())


@pytest.mark.parametrize("how", ["raise", pytest.param("die", marks=pytest.mark.slow)])
def test_a_process_that_fails_leaves_no_checkpoint(how: str, micro: Path, tmp_path: Path) -> None:
    """The old checkpoint stays, and the next conversion removes the files of the failed one."""
    output = to_canonical(micro, tmp_path / "checkpoint")
    before = contents(output)
    codes, (said, _) = zip(*convert_together(micro, output, 2, how), strict=True)
    assert codes == (42, 42)
    assert re.search(r"^host 0 .* stops with exit code 42.*: host 1 ", said, re.MULTILINE)
    assert ("RuntimeError: the lamp went out" if how == "raise" else "killed by SIGKILL") in said
    assert contents(output) == before
    staging = FolderOutput(output).staging
    assert staging.is_dir(), "the failure came in the middle"
    assert not (staging / MANIFEST_FILE).exists()
    with pytest.raises(CheckpointError):
        Engine.load(staging)
    assert any("interrupted" in line for line in FolderOutput(output).prepare(overwrite=True))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_processes_that_see_different_places_do_not_make_a_checkpoint(micro: Path, tmp_path: Path) -> None:
    """On another machine's disk, the marker of process 0 does not exist."""
    from checkpoints.conversion import convert
    from tests.checkpoints.small import layout_of

    (tmp_path / "elsewhere").mkdir()
    output = FolderOutput(tmp_path / "elsewhere" / "checkpoint")
    second = Processes(1, 2, lambda text: ['{"said": "a mark of process 0"}', text])
    with pytest.raises(CheckpointError, match="does not see what process 0 writes"):
        convert(open_folder(micro), layout_of(micro), output, processes=second)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_shares_are_disjoint_complete_and_balanced(count: int) -> None:
    sizes = {f"tensor {number}": size for number, size in enumerate([1090, 1090, *[136] * 84, *[25] * 56, *[1] * 200])}
    shares = [Processes(index, count).share(sizes) for index in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) <= max(1090, sum(sizes.values()) / count + 136)


@pytest.mark.slow
def test_the_launcher_in_several_processes(micro: Path, tmp_path: Path) -> None:
    """Through ``launch.local``: the output is printed once, and refused by all processes if it exists."""

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "launch.local", "--num_processes=3", "--", sys.executable, "-m"]
        return subprocess.run(
            [*command, "launch.convert", f"--source={micro}", f"--output={tmp_path / 'checkpoint'}"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            timeout=300,
            check=False,
        )

    first = run()
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{tmp_path / 'checkpoint'}\n"
    assert contents(tmp_path / "checkpoint") == contents(micro)
    again = run()
    assert again.returncode == 2
    assert not again.stdout
    assert "--overwrite" in again.stderr
    assert contents(tmp_path / "checkpoint") == contents(micro)
