"""Random changes to a checkpoint's files (flipped bits, added and swapped files): all of them are found."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.attacks import ADDED, CHANGES, change, put_back, refusal
from checkpoints import CheckpointError, CheckpointFolder, open_folder
from checkpoints.errors import CorruptCheckpointError
from checkpoints.file_list import FILES_FILE, dump_files, list_files
from checkpoints.folder import TREE_FILE
from checkpoints.huggingface import INDEX_FILE
from checkpoints.manifest import MANIFEST_FILE, Manifest
from checkpoints.opening import check_files, open_tensors, read_manifest, weight_files
from checkpoints.storage import Storage
from checkpoints.verification import uncovered_files, verify, write_manifest
from launch.folders.models import open_model
from tests.checkpoints.small import MICRO, contents, layout_of, to_canonical, write_source


def write_folder(folder: Path) -> Path:
    """Write a Hugging Face folder with every kind of file beside the weights."""
    write_source(folder, MICRO)
    for name, text in (
        ("generation_config.json", '{"eos_token_id": 3}'),
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer_config.json", '{"model_max_length": 128}'),
        ("special_tokens.json", "{}"),
        ("chat_template.jinja", "{{ messages }}"),
        ("additional_chat_templates/rag.jinja", "{{ documents }}"),
        ("merges.txt", "#version: 0.2\na b\n"),
        ("LICENSE", "Apache License\n"),
        ("README.md", "What it is.\n"),
        (".gitattributes", "*.safetensors lfs\n"),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("huggingface"))
    names = list(open_tensors(open_folder(folder)).by_name)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    write_manifest(open_folder(folder), layout_of(folder))
    return folder


@pytest.fixture(scope="module")
def orbax(huggingface: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_canonical(huggingface, tmp_path_factory.mktemp("orbax") / "checkpoint")


@pytest.mark.parametrize("layout", ["huggingface", "orbax"])
@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_every_change_is_found(request: pytest.FixtureRequest, layout: str, count: int, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(request.getfixturevalue(layout), folder)
    verify(open_folder(folder))
    generator, tried = random.Random(f"{layout} {count}"), Counter[str]()
    while tried.total() < count:
        kind = CHANGES[tried.total() % len(CHANGES)]
        before = change(folder, kind, generator)
        if before is None:
            continue
        tried[kind] += 1
        said = refusal(folder)
        assert said, f"{kind} of {[str(path.relative_to(folder)) for path in before]} was not found"
        assert len(said) < 5000
        for path, data in before.items():
            put_back(path, data)
    verify(open_folder(folder))
    assert set(tried) == set(CHANGES)


@pytest.mark.parametrize("layout", ["huggingface", "orbax"])
def test_loading_refuses_what_was_added(request: pytest.FixtureRequest, layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(request.getfixturevalue(layout), folder)
    for name in ADDED:
        path = folder / name
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        said = f"were added to this checkpoint: {name}"
        if layout == "huggingface" and name == f"weights/{TREE_FILE}":
            said = f"{FILES_FILE}, is missing"  # the folder reads as an Orbax checkpoint, which lists its files
        for level in ("full", "sizes"):
            with pytest.raises(CheckpointError, match=said):
                open_tensors(open_folder(folder), level)
        put_back(path, None)
    for name in ("README.md", ".cache", "picture.PNG"):
        (folder / name).write_text("of no reader")
    assert contents(folder) == contents(request.getfixturevalue(layout))


@pytest.mark.parametrize("layout", ["huggingface", "orbax"])
@pytest.mark.parametrize(
    "name", ["weights/.DS_Store", "weights/state/.nfs000000000009a2", "weights/._d", "runs/.DS_Store", "runs/.git/HEAD"]
)
def test_hidden_files_are_not_covered(request: pytest.FixtureRequest, name: str, layout: str, tmp_path: Path) -> None:
    """A file manager leaves them in the folders that its user looks into."""
    original = request.getfixturevalue(layout)
    folder = tmp_path / "copy"
    shutil.copytree(original, folder)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("of no reader")
    verify(open_folder(folder))
    write_manifest(open_folder(folder), layout_of(folder))
    for file in (MANIFEST_FILE, FILES_FILE):
        if (original / file).exists():
            assert (folder / file).read_bytes() == (original / file).read_bytes()
    (folder / name).unlink()
    assert contents(folder) == contents(original)


def test_a_hidden_file_that_a_list_contains_is_checked(orbax: Path, tmp_path: Path) -> None:
    """Manifests of older versions cover such files."""
    folder = tmp_path / "copy"
    shutil.copytree(orbax, folder)
    path = folder / "weights" / ".DS_Store"
    path.write_text("of no reader")
    listed = weight_files(open_folder(folder)) | list_files(Storage.at(folder), ["weights/.DS_Store"])
    (folder / FILES_FILE).write_text(dump_files(listed))
    verify(open_folder(folder))
    path.write_text("changed")
    with pytest.raises(CorruptCheckpointError, match=r"weights/\.DS_Store"):
        verify(open_folder(folder))
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"weights/\.DS_Store: this file of the checkpoint is missing"):
        verify(open_folder(folder))


def older(folder: Path) -> CheckpointFolder:
    """Turn a folder's manifest into version 1, which covered the files beside the weights, without subfolders."""
    opened = open_folder(folder)
    manifest = read_manifest(opened)
    assert manifest is not None
    files = {name: said for name, said in manifest.files.items() if "/" not in name and name != "model.safetensors"}
    (folder / MANIFEST_FILE).write_text(Manifest(manifest.tensors, files, covers_folder=False).dump())
    (folder / FILES_FILE).unlink(missing_ok=True)
    return opened


@pytest.mark.parametrize("layout", ["huggingface", "orbax"])
def test_older_manifests_are_read_and_extended(request: pytest.FixtureRequest, layout: str, tmp_path: Path) -> None:
    original = request.getfixturevalue(layout)
    folder = tmp_path / "copy"
    shutil.copytree(original, folder)
    opened = older(folder)
    assert '"version": 1' in (folder / MANIFEST_FILE).read_text()
    assert contents(folder) == contents(original)
    verify(opened)
    uncovered = uncovered_files(opened)
    assert "additional_chat_templates/rag.jinja" in uncovered
    assert any(name.startswith("weights/") for name in uncovered) == (layout == "orbax")
    weights = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "weights" in path.parts}
    write_manifest(*open_model(str(folder), "checkpoint"))
    assert not uncovered_files(opened)
    assert (folder / MANIFEST_FILE).read_bytes() == (original / MANIFEST_FILE).read_bytes()
    assert all(path.read_bytes() == data for path, data in weights.items())
    verify(opened)
    manifest = read_manifest(opened)
    assert manifest is not None
    check_files(opened, manifest)


def flip(folder: Path) -> None:
    """Flip a bit of a weight."""
    path = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("layout", ["huggingface", "orbax"])
def test_damage_gets_no_new_digests(request: pytest.FixtureRequest, layout: str, version: int, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(request.getfixturevalue(layout), folder)
    opened = older(folder) if version == 1 else open_folder(folder)
    before = (folder / MANIFEST_FILE).read_bytes()
    flip(folder)
    with pytest.raises(CorruptCheckpointError, match="damaged") as caught:
        write_manifest(opened, layout_of(folder))
    assert (folder / MANIFEST_FILE).read_bytes() == before
    with pytest.raises(CorruptCheckpointError):
        verify(opened)
    if layout == "huggingface":
        assert f"if the change is intended, delete {MANIFEST_FILE}" in str(caught.value)
        (folder / MANIFEST_FILE).unlink()
        write_manifest(opened, layout_of(folder))
        assert verify(opened)


def test_a_manifest_of_the_model_alone(huggingface: Path, tmp_path: Path) -> None:
    """For a folder with files that change without the model, as the demo's."""
    folder = tmp_path / "copy"
    shutil.copytree(huggingface, folder)
    (folder / MANIFEST_FILE).unlink()
    write_manifest(open_folder(folder), layout_of(folder), covers_folder=False)
    (folder / "train.py").write_text("print()")
    assert verify(open_folder(folder)) == verify(open_folder(huggingface))
    flip(folder)
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        verify(open_folder(folder))
