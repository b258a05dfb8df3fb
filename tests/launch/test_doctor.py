"""The report of ``diffumesh doctor``, which users paste into bug reports."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpoints import DEMO
from launch import convert, doctor, verify
from launch.flags.model import describe_loaded
from launch.process import collectives, environment, streams
from runtime import Engine, InputError, MeshSpec


def page(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    doctor.run(["doctor", "--megabytes=0.1", *arguments])
    return capsys.readouterr().out


def test_everything_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("HF_TOKEN", "hunter3")
    monkeypatch.setenv("XLA_SETTING", "shown")
    driver = tmp_path / "driver"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    monkeypatch.setattr(environment, "NVIDIA_DRIVER", driver)
    cache = tmp_path / "cache"
    text = page(capsys, "--mesh=data=2,sequence=2,tensor=4", f"--compile_cache={cache}")
    for part in (
        "## versions",
        "driver       NVIDIA 580.65.06",
        "## devices",
        "16 x cpu",
        "## meshes",
        "tensor=4 ",
        "## checkpoint",
        "XLA_SETTING=shown",
    ):
        assert part in text
    for axis in ("data=2", "sequence=2", "tensor=4"):
        assert any(line.startswith(axis) and "correct sums" in line and "GB/s" in line for line in text.splitlines())
    assert f"{cache}: mode 700, " in text
    assert "hunter" not in text


def test_quantized_weights_stay_quantized(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    convert.run(["convert", f"--source={DEMO}", f"--output={tmp_path / 'int8'}", "--quantize=int8"])
    capsys.readouterr()
    sizes = {}
    for place in (DEMO, tmp_path / "int8"):
        text = page(capsys, "--mesh=tensor=2", f"--checkpoint={place}", "--compile_cache=")
        (line,) = [line.split() for line in text.splitlines() if line.startswith("tensor=1 ")]
        sizes[line[4]] = float(line[1])
    assert list(sizes) == ["float32", "int8"]
    assert sizes["int8"] < 0.8 * sizes["float32"]


def test_memory_is_that_of_the_held_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs hold float32. Others hold the stored dtype, as in loading: config.json may name no dtype, or another one."""
    shutil.copy(DEMO / "model.safetensors", tmp_path)
    config = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    arguments = "--mesh=tensor=2", f"--checkpoint={tmp_path}", "--compile_cache="
    text = page(capsys, *arguments)
    engine = Engine.load(tmp_path, "tensor=1")
    assert f"tensor=1    {engine.layout.bytes_per_device('float32') / 1e9:8.3f} GB of float32 weights" in text
    assert "of bfloat16" not in text
    monkeypatch.setattr(doctor, "held_dtype", lambda stored, platform: stored)
    text = page(capsys, *arguments)
    assert "GB of bfloat16 weights" in text
    assert "of float32" not in text
    assert engine.loaded is not None
    assert re.match(r"Loaded \d+ MB of bfloat16 weights \(", describe_loaded(engine, engine.loaded))


def test_a_damaged_checkpoint_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "*.jsonl", "__pycache__"))
    verify.run(["verify", f"--checkpoint={folder}", "--write_manifest"])
    capsys.readouterr()
    assert "bytes intact" in page(capsys, "--mesh=tensor=2", f"--checkpoint={folder}", "--compile_cache=")
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-5] ^= 4
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(SystemExit) as stop:
        page(capsys, "--mesh=tensor=2", f"--checkpoint={folder}", "--compile_cache=")
    assert stop.value.code == 2
    assert "is damaged" in capsys.readouterr().err


def test_a_wrong_sum_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    monkeypatch.setattr(jax.lax, "psum", lambda own, axis: 2 * own)
    mesh = collectives.probe_mesh(MeshSpec(tensor=4), jax.devices())
    with pytest.raises(RuntimeError, match="tensor=4 gave a wrong sum"):
        list(collectives.collective_lines(mesh, 0.01))


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_reader_that_goes_away(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host alone ends; one of several computes all lines, because the others wait for it."""
    reader, writer = os.pipe()
    os.close(reader)
    computed = []

    def lines() -> Iterator[str]:
        for number in range(3):
            computed.append(number)
            yield str(number)

    monkeypatch.setattr(doctor, "this_host", lambda: SimpleNamespace(count=hosts))
    with os.fdopen(writer, "w", 1) as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(BrokenPipeError) if hosts == 1 else contextlib.nullcontext():
            doctor.section("sums", lines())
        streams.drop_output()  # the file is flushed when it is closed
    assert len(computed) == (0 if hosts == 1 else 3)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="without libtpu there is nothing to silence")
@pytest.mark.skipif(any(Path("/dev").glob("accel*")) or Path("/dev/vfio").exists(), reason="this machine has a TPU")
@pytest.mark.parametrize(
    ("before", "errors"),
    [
        ("environment.describe_absent_tpu()", False),
        ("", True),
        ("environment.TPU_FILES = ('null',); environment.describe_absent_tpu()", True),
        ("os.environ.pop('TPU_SKIP_MDS_QUERY'); environment.describe_absent_tpu()", True),
        ("jax.config.update('jax_platforms', 'tpu,cpu'); environment.describe_absent_tpu()", True),
    ],
)
def test_libtpu_is_silent_only_where_there_is_no_tpu(before: str, errors: bool) -> None:
    program = f"import os, jax; from launch.process import environment; {before}\n"
    # Metadata of a cloud machine are not asked for here, which would take long.
    program += "os.environ['TPU_SKIP_MDS_QUERY'] = '1'; print(jax.default_backend())"
    own = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_PLATFORMS", "TPU_"))}
    # Another process may have libtpu open, which then ends before it looks for a TPU.
    own["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    done = subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True, timeout=120)
    assert ("TPU_ACCELERATOR_TYPE" in done.stderr) == errors, done.stderr
    if "tpu,cpu" not in before:
        assert done.stdout == "cpu\n", done.stderr


@pytest.mark.parametrize(
    ("named", "installed", "devices", "expected"),
    [
        ("cuda", [], ["null"], "JAX_PLATFORMS=cuda: JAX's CUDA plugin is not installed; pip install -e '.[cuda]'"),
        ("cuda", ["jax_cuda12_plugin"], ["null"], None),
        ("cuda", ["jax_cuda13_plugin"], ["no-such-device", "null"], None),
        ("cuda,cpu", ["jax_cuda13_plugin"], ["no-such-device"], None),
        (
            "cuda",
            ["jax_cuda13_plugin"],
            ["no-such-device", "nor-this"],
            "JAX_PLATFORMS=cuda: this machine has no NVIDIA GPU (none of /dev/no-such-device, /dev/nor-this)",
        ),
        ("tpu,cpu", [], ["null"], "JAX_PLATFORMS=tpu,cpu: libtpu is not installed; pip install -e '.[tpu]'"),
        ("tpu", ["libtpu"], ["no-such-device"], "JAX_PLATFORMS=tpu: this machine has no TPU (no /dev/no-such-device)"),
        ("tpu", ["libtpu"], ["null"], None),
        ("cpu", [], [], None),
        (None, [], [], None),
    ],
)
def test_platforms_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, named: str | None, installed: list[str], devices: list[str], expected: str | None
) -> None:
    import jax

    monkeypatch.setattr(environment, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(environment, "TPU_FILES", tuple(devices))
    monkeypatch.setattr(environment, "NVIDIA_FILES", tuple(f"/dev/{name}" for name in devices))
    monkeypatch.setattr(jax, "config", SimpleNamespace(values={"jax_platforms": named}))
    if expected is None:
        environment.check_platforms()
    else:
        with pytest.raises(InputError) as caught:
            environment.check_platforms()
        assert str(caught.value) == expected


def test_the_files_of_gpus_are_those_that_jax_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import hardware_utils

    asked: list[str] = []
    monkeypatch.setattr(os.path, "exists", asked.append)
    found = hardware_utils.has_visible_nvidia_gpu()
    monkeypatch.undo()
    assert not found
    assert tuple(asked) == environment.NVIDIA_FILES


def test_a_platform_that_jax_does_not_know() -> None:
    own = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    done = subprocess.run(
        [sys.executable, "-m", "launch.doctor", "--compile_cache="],
        env=own,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "no_such_platform" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
