"""Random changes of any file of a checkpoint, flipped bits, added files, swapped ones: all of them are found."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from checkpoints import CheckpointError, CheckpointFolder, open_folder
from checkpoints.file_list import FILES_FILE
from checkpoints.huggingface import INDEX_FILE
from checkpoints.manifest import MANIFEST_FILE, Manifest
from checkpoints.opening import check_files, covered_files, open_tensors, read_manifest
from checkpoints.verification import uncovered_files, verify, write_manifest
from launch.convert import open_model
from tests.checkpoints.small import MICRO, contents, layout_of, to_canonical, write_source

KINDS = ("flip", "truncate", "zero", "append", "delete", "swap", "add")
# Files that some reader of models would use, were they there.
READ = (
    *("chat_template.jinja", "additional_chat_templates/tools.jinja", "added_tokens.json", "special_tokens_map.json"),
    *(
        "model.safetensors",
        "model-00003-of-00003.safetensors",
        "pytorch_model.bin",
        "adapter_config.json",
        "vocab.json",
    ),
    *(
        "modeling_dream.py",
        "tokenizer.model",
        "weights/state/d/0",
        "weights/_METADATA",
        "weights/.hidden",
        "LICENSE.txt",
    ),
)


def write_folder(folder: Path) -> Path:
    """A Hugging Face folder with all that one may have beside its weights."""
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


def change(folder: Path, kind: str, generator: random.Random) -> dict[Path, bytes | None] | None:
    """Change one file of a folder; what was there before by path, None where nothing was changed."""
    names = [*covered_files(open_folder(folder)), MANIFEST_FILE]
    names += [FILES_FILE] if (folder / FILES_FILE).exists() else []
    path = folder / generator.choice(names)
    data = path.read_bytes()
    at = generator.randrange(len(data) + 1)
    new: bytes | None = data
    match kind:
        case "flip" if at < len(data):
            new = data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :]
        case "truncate":
            new = data[:at]
        case "zero":
            end = min(len(data), at + generator.choice([1, 4, 64, 4096]))
            new = data[:at] + bytes(end - at) + data[end:]
        case "append":
            new = data + generator.choice([b"\n", b" ", b"\0", generator.randbytes(9)])
        case "delete":
            new = None
        case "swap":
            other = folder / generator.choice(names)
            there = other.read_bytes()
            if there == data:
                return None
            path.write_bytes(there)
            other.write_bytes(data)
            return {path: data, other: there}
        case "add":
            path = folder / generator.choice(READ)
            if path.exists():
                return None
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(generator.choice([b"", b"{}", data]))
            return {path: None}
    if new == data:
        return None
    path.unlink()
    if new is not None:
        path.write_bytes(new)
    return {path: data}


def put_back(path: Path, data: bytes | None) -> None:
    """Give a file the bytes that it had; None where it was not there."""
    if data is not None:
        path.write_bytes(data)
        return
    path.unlink()
    while not any(path.parent.iterdir()):
        path = path.parent
        path.rmdir()


def refusal(folder: Path) -> str:
    """What :func:`verify` says is wrong with a folder, empty where it finds nothing."""
    try:
        verify(open_folder(folder))
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", ["huggingface", "orbax"])
@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_every_change_is_found(request: pytest.FixtureRequest, layout: str, count: int, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(request.getfixturevalue(layout), folder)
    verify(open_folder(folder))
    generator, tried = random.Random(f"{layout} {count}"), Counter[str]()
    while tried.total() < count:
        kind = KINDS[tried.total() % len(KINDS)]
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
    assert set(tried) == set(KINDS)


@pytest.mark.parametrize("layout", ["huggingface", "orbax"])
def test_loading_refuses_what_was_added(request: pytest.FixtureRequest, layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(request.getfixturevalue(layout), folder)
    for name in READ:
        path = folder / name
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        # With a folder of that name it is no Hugging Face folder any more.
        said = FILES_FILE if layout == "huggingface" and "weights/" in name else f"were added to it: {name}"
        for level in ("full", "sizes"):
            with pytest.raises(CheckpointError, match=said):
                open_tensors(open_folder(folder), level)
        put_back(path, None)
    for name in ("README.md", ".cache", "picture.PNG"):
        (folder / name).write_text("of no reader")
    assert contents(folder) == contents(request.getfixturevalue(layout))


def older(folder: Path) -> CheckpointFolder:
    """Make a folder's manifest one of version 1, which listed the files beside the weights, without folders."""
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
