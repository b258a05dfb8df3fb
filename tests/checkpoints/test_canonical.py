"""Canonical checkpoints: converted once, restored onto any mesh. Missing and damaged files are errors."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints import CheckpointError, open_folder, orbax, writing
from checkpoints.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoints.manifest import MANIFEST_FILE
from checkpoints.opening import open_tensors
from checkpoints.output import FolderOutput
from checkpoints.verification import verify, write_manifest
from runtime import Engine
from tests import golden_cases
from tests.checkpoints.small import CUT, MICRO, contents, layout_of, to_canonical, to_huggingface, write_source


def same_tensors(left: Path, right: Path) -> bool:
    first, second = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and first[name].tobytes() == second[name].tobytes() for name in first
    )


@pytest.mark.parametrize("source", ["micro", "golden"])
def test_round_trip_is_bit_identical(source: str, micro: Path, tmp_path: Path) -> None:
    folder = micro if source == "micro" else golden_cases.FOLDER
    checkpoint = to_canonical(folder, tmp_path / "checkpoint")
    to_huggingface(checkpoint, tmp_path / "back")
    assert same_tensors(folder, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == open_folder(folder).config


def test_exported_folder_is_loaded_by_transformers(micro: Path, canonical: Path, tmp_path: Path) -> None:
    from transformers import Qwen2ForCausalLM

    to_huggingface(canonical, tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    (tmp_path / "back" / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    model = Qwen2ForCausalLM.from_pretrained(tmp_path / "back", dtype="bfloat16")
    expected = load_file(micro / "model.safetensors")
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.float().numpy(), expected[name].astype(np.float32))


@pytest.mark.parametrize(
    "mesh", ["data=1", "tensor=2", "tensor=4", "tensor=8", "tensor=16", "sequence=2", "data=2,tensor=4"]
)
def test_restored_on_any_mesh_as_from_the_source(mesh: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = tmp_path_factory.getbasetemp() / "golden_checkpoint"
    if not checkpoint.exists():
        to_canonical(golden_cases.FOLDER, checkpoint)
    name = "entropy_b3_fewsteps"
    golden = golden_cases.DREAM
    result = Engine.load(checkpoint, mesh=mesh).generate_tokens(*golden.inputs(name), golden.config(name))
    np.testing.assert_array_equal(result.sequences, golden.arrays[f"{name}.sequences"])


def test_orbax_reads_it(micro: Path, canonical: Path) -> None:
    """Both interfaces of Orbax restore it, onto the devices that wrote it and onto the host."""
    import orbax.checkpoint
    from orbax.checkpoint import v1

    expected = load_file(micro / "model.safetensors")
    new = v1.load(canonical / "weights")
    host = v1.load(canonical / "weights", dict.fromkeys(expected, np.ndarray))
    old = orbax.checkpoint.PyTreeCheckpointer().restore(canonical / "weights" / "state")
    for found in (new, host, old):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype
            assert np.asarray(found[name]).tobytes() == value.tobytes()


def test_dtype_changes_only_when_asked(micro: Path, canonical: Path, tmp_path: Path) -> None:
    assert contents(canonical) == {k: v.tobytes() for k, v in load_file(micro / "model.safetensors").items()}
    wide = to_canonical(micro, tmp_path / "wide", dtype="float32")
    assert open_folder(wide).config["torch_dtype"] == "float32"
    expected = {name: value.astype(np.float32) for name, value in load_file(micro / "model.safetensors").items()}
    assert contents(wide) == {name: value.tobytes() for name, value in expected.items()}


@pytest.mark.parametrize("keys", [["dtype"], ["torch_dtype", "dtype"], []])
def test_the_dtype_is_said_where_the_source_says_it(keys: list[str], tmp_path: Path) -> None:
    config = {key: value for key, value in MICRO.items() if key != "torch_dtype"} | dict.fromkeys(keys, "bfloat16")
    wide = to_canonical(write_source(tmp_path / "source", config), tmp_path / "wide", dtype="float32")
    said = open_folder(wide).config
    assert {key: said[key] for key in said if "dtype" in key} == dict.fromkeys(keys or ["torch_dtype"], "float32")


def test_a_host_reads_little_more_than_it_owns(tmp_path: Path) -> None:
    """Shards consist of whole chunks, so an eighth of a matrix can be read alone."""
    checkpoint = to_canonical(write_source(tmp_path / "source", CUT), tmp_path / "checkpoint")
    found = open_tensors(open_folder(checkpoint))
    tensor = found["model.embed_tokens.weight"]
    part = tensor.read((slice(0, 256), slice(0, 448)))
    assert found.bytes_read.total <= 1.01 * tensor.bytes / 8
    np.testing.assert_array_equal(part, tensor.whole()[:256])


def test_no_manifest_no_checkpoint(canonical: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(canonical, tmp_path / "copy"))
    (copy / MANIFEST_FILE).unlink()
    with pytest.raises(IncompleteCheckpointError, match="not finished"):
        Engine.load(copy)


def test_huggingface_folder_with_manifest(micro: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(micro, tmp_path / "copy"))
    with pytest.raises(IncompleteCheckpointError, match="manifest"):
        verify(open_folder(copy))
    write_manifest(open_folder(copy), layout_of(copy))
    assert verify(open_folder(copy)) == sum(value.nbytes for value in load_file(micro / "model.safetensors").values())
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-3] ^= 4
    (copy / "model.safetensors").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"tensor \S+\[.*is damaged"):
        verify(open_folder(copy))
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        Engine.load(copy)
    Engine.load(copy, verify="sizes")  # the caller's choice
    (copy / "generation_config.json").write_text('{"steps": 3}')
    with pytest.raises(CorruptCheckpointError, match=r"added|its digest is wrong"):
        Engine.load(copy, verify="sizes")
    engine = Engine.load(copy, verify="none")
    engine.replace_weights(copy, verify="none")


def damage(data: bytes, generator: random.Random) -> bytes:
    """Flip a bit, truncate, or set a range to zero; the result always differs."""
    kind = generator.choice(["flip", "flip", "flip", "truncate", "zero"])
    at = generator.randrange(len(data))
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ (1 << generator.randrange(8))]) + data[at + 1 :]
    if kind == "truncate":
        return data[:at]
    size = min(generator.randrange(1, 64), len(data) - at)
    return data[:at] + bytes(size) + data[at + size :]


@pytest.mark.parametrize("kind", ["canonical", "huggingface"])
@pytest.mark.parametrize("count", [150, pytest.param(4000, marks=pytest.mark.slow)])
def test_damage_is_detected_or_harmless(kind: str, count: int, micro: Path, canonical: Path, tmp_path: Path) -> None:
    """Damage to any file is an error that names the file or tensor, or changes neither weights nor configuration."""
    copy = Path(shutil.copytree(canonical if kind == "canonical" else micro, tmp_path / "copy"))
    if kind == "huggingface":
        write_manifest(open_folder(copy), layout_of(copy))
    files = sorted(path for path in copy.rglob("*") if path.is_file() and path.stat().st_size)
    expected, config = contents(copy), open_folder(copy).config
    generator = random.Random(7)
    detected, unnamed = 0, False
    for _ in range(count):
        path = generator.choice(files)
        whole = path.read_bytes()
        path.write_bytes(damage(whole, generator))
        try:
            found = contents(copy)
            assert found == expected, f"silently wrong weights after damage to {path.relative_to(copy)}"
            assert open_folder(copy).config == config
        except CheckpointError as error:
            detected += 1
            unnamed = unnamed or not ("tensor " in str(error) or path.name in str(error))
        finally:
            path.write_bytes(whole)
    assert not unnamed, "every message names tensor or file"
    assert detected > count // 4  # some of the damage changes data
    assert contents(copy) == expected


def test_one_group_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of tensors have at most ``GROUP_BYTES``, or one tensor; each is freed before the next one is saved."""
    monkeypatch.setattr(writing, "GROUP_BYTES", 1 << 20)
    save, groups = orbax.save_group, []
    references: list[weakref.ref[jax.Array]] = []

    def watched(place: Path, arrays: dict[str, jax.Array], chunk_bytes: dict[str, int]) -> None:
        assert not any(reference() is not None for reference in references)
        groups.append([array.nbytes for array in arrays.values()])
        references.extend(weakref.ref(array) for array in arrays.values())
        save(place, arrays, chunk_bytes)

    monkeypatch.setattr(orbax, "save_group", watched)
    source = write_source(tmp_path / "source", CUT)
    canonical = to_canonical(source, tmp_path / "checkpoint")
    assert len(groups) > 4
    assert all(sum(group) <= 1 << 20 or len(group) == 1 for group in groups)
    assert contents(canonical) == contents(source)


CONVERTER = """
import sys, time
from pathlib import Path
from orbax.checkpoint import v1  # before the time is taken
from checkpoints import open_folder
from checkpoints.conversion import convert
from checkpoints.output import FolderOutput
from runtime.models.declarations import ModelLayout
from runtime.models.families import model_layout, parse_config
source, output = open_folder(sys.argv[1]), FolderOutput(Path(sys.argv[2]))
layout = model_layout(parse_config(source.config))
print("ready", flush=True)
for line in output.prepare(overwrite=True):
    print(line, flush=True)
convert(source, layout, output)
print("done", flush=True)
"""


def start_converter(source: Path, output: Path) -> subprocess.Popen[str]:
    """Start a process that converts over ``output``, and wait until it has imported what it needs."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONVERTER, str(source), str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_any_point(kills: int, micro: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A conversion over another checkpoint, killed at any moment, leaves the whole old one or the whole new one."""
    sources = [micro, write_source(tmp_path_factory.mktemp("other"), MICRO, seed=1)]
    canonical = [contents(to_canonical(one, tmp_path_factory.mktemp("canonical") / "one")) for one in sources]
    assert canonical[0] != canonical[1]
    output = to_canonical(micro, tmp_path / "checkpoint")
    here = 0
    generator = random.Random(11)

    process = start_converter(micro, output)
    began = time.monotonic()
    process.communicate()
    duration = time.monotonic() - began
    for _ in range(kills):
        process = start_converter(sources[1 - here], output)
        time.sleep(generator.uniform(0, duration))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if not output.exists():  # killed between the two renames: the old one is set aside, whole
            FolderOutput(output).clean_up()
        found = contents(output)
        assert found in canonical
        here = canonical.index(found)
        if FolderOutput(output).staging.exists():
            with pytest.raises(CheckpointError):
                Engine.load(FolderOutput(output).staging)
    process = start_converter(sources[1 - here], output)
    process.communicate()
    assert process.returncode == 0
    assert contents(output) == canonical[1 - here]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for about one and a half canonical checkpoints of ``micro``, below a long path."""
    folder = tmp_path / ("disk" * 50)
    folder.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=240k", "tmpfs", str(folder)], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_file_system_without_room(micro: Path, small_disk: Path) -> None:
    """Where a second checkpoint does not fit (ENOSPC), the old one stays, and the next run cleans up."""
    output = to_canonical(micro, small_disk / "checkpoint")
    expected = contents(output)
    process = start_converter(micro, output)
    last = process.communicate()[1].strip().splitlines()[-1]
    assert process.returncode != 0
    assert last.startswith("checkpoints.errors.CheckpointError: ")
    assert str(output) in last
    assert "No space left on device" in last
    assert contents(output) == expected
    FolderOutput(output).prepare(overwrite=True)
    assert [path.name for path in small_disk.iterdir()] == ["checkpoint"]


def test_a_full_disk(micro: Path, tmp_path: Path) -> None:
    """The error names the output, the old checkpoint stays, and the next run cleans up."""
    output = to_canonical(micro, tmp_path / "checkpoint")
    expected = contents(output)
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n" + CONVERTER
    process = subprocess.run(
        [sys.executable, "-c", limited, str(micro), str(output)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert process.returncode != 0
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("checkpoints.errors.CheckpointError: ")
    assert str(output) in last
    assert "cannot be written" in last
    assert contents(output) == expected
    assert not (FolderOutput(output).staging / MANIFEST_FILE).exists()
    assert FolderOutput(output).prepare(overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_output_is_not_overwritten_unless_told(canonical: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--overwrite"):
        FolderOutput(canonical).prepare(overwrite=False)
    with pytest.raises(CheckpointError, match="no folder"):
        FolderOutput(tmp_path / "absent" / "checkpoint").prepare(overwrite=False)
