"""Files beside the weights have to be in the folder and not too large."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import CheckpointError, open_folder
from checkpoints.file_list import FILES_FILE, StoredFile, dump_files, parse_files
from checkpoints.fingerprint import folder_fingerprint
from checkpoints.folder import MAX_SIDE_FILE_BYTES
from checkpoints.lora import open_adapter
from checkpoints.manifest import MANIFEST_FILE
from checkpoints.opening import open_tensors
from checkpoints.verification import verify, write_manifest
from launch.folders.models import print_licence
from runtime.text.tokenizer import TextTokenizer
from tests.checkpoints.lora_folder import write_adapter
from tests.checkpoints.small import MICRO, layout_of, to_canonical, to_huggingface, write_source

# All functions that read files beside the weights
READERS: dict[str, Callable[[Path, Path], object]] = {
    "convert": lambda folder, output: to_canonical(folder, output),
    "export": lambda folder, output: to_huggingface(folder, output),
    "manifest": lambda folder, output: write_manifest(open_folder(folder), layout_of(folder)),
    "fingerprint": lambda folder, output: folder_fingerprint(open_folder(folder)),
    "licence": lambda folder, output: print_licence(open_folder(folder)),
    "tokenizer": lambda folder, output: TextTokenizer.from_folder(open_folder(folder)),
}
NAMES = ("LICENSE", "added_tokens.json", "additional_chat_templates/x.jinja", "tokenizer_config.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_source(tmp_path / "source", MICRO)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    return folder


def refused(read: Callable[[Path, Path], object], folder: Path, said: str) -> None:
    output = folder.parent / "output"
    with pytest.raises(CheckpointError, match=said):
        read(folder, output)
    assert not output.exists(), "no file was passed on"


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("name", NAMES)
def test_links_that_leave_the_folder(folder: Path, name: str, read: Callable[[Path, Path], object]) -> None:
    """A link called LICENSE to /etc/passwd must not be copied."""
    secret = folder.parent / "secret"
    secret.write_text('{"secret": 1}')
    (folder / name).symlink_to(secret)
    refused(read, folder, f"{name}: a link to .*secret, which is outside of the folder")
    (folder / name).unlink()
    (folder / name).symlink_to(os.path.relpath(secret, (folder / name).parent))
    refused(read, folder, "outside of the folder")


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("name", [*NAMES, "tokenizer.json"])
def test_files_too_large_to_be_read(folder: Path, name: str, read: Callable[[Path, Path], object]) -> None:
    """A sparse file takes no space on a disk, but as much memory as its size."""
    with (folder / name).open("wb") as file:
        file.truncate(6 << 30)
    refused(read, folder, f"{name} has {6 << 30} bytes; the limit is")


def test_a_large_configuration(folder: Path) -> None:
    with (folder / "config.json").open("ab") as file:
        file.truncate(MAX_SIDE_FILE_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"config\.json has [0-9]+ bytes; the limit is"):
        _ = open_folder(folder).config


def test_links_within_the_folder_and_to_the_blobs_of_the_hubs_cache(folder: Path) -> None:
    """Links in a snapshot of the cache may lead to the blobs beside it, and nowhere else."""
    cache = folder.parent / "models--x--y"
    snapshot, blobs = cache / "snapshots" / "0123abc", cache / "blobs"
    for made in (snapshot, blobs, cache / "refs"):
        made.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_file():
            (blobs / path.name).write_bytes(path.read_bytes())
            (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    (snapshot / "LICENSE.txt").symlink_to("config.json")
    assert open_folder(snapshot).side_files() == ["LICENSE.txt", "config.json", "tokenizer.json"]
    output = to_canonical(snapshot, folder.parent / "output")
    assert not any(path.is_symlink() for path in output.rglob("*"))
    # Large files of all repositories are in one store, to which the blobs are links.
    shared = folder.parent / "blobs" / "ab" / "abcd"
    shared.parent.mkdir(parents=True)
    (blobs / "tokenizer.json").rename(shared)
    (blobs / "tokenizer.json").symlink_to("../../blobs/ab/abcd")
    assert open_folder(snapshot).read_json("tokenizer.json") == {}
    (cache / "refs" / "main").write_text("0123abc")
    (snapshot / "LICENSE").symlink_to("../../refs/main")
    with pytest.raises(CheckpointError, match="outside of the folder"):
        open_folder(snapshot).side_files()


def test_a_model_in_a_subfolder_of_a_snapshot(folder: Path) -> None:
    cache = folder.parent / "models--x--y"
    model, blobs = cache / "snapshots" / "0123abc" / "models" / "small", cache / "blobs"
    for made in (model, blobs, cache / "refs"):
        made.mkdir(parents=True)
    (blobs / "1234").write_bytes((folder / "config.json").read_bytes())
    (model / "config.json").symlink_to("../../../../blobs/1234")
    assert open_folder(model).config == open_folder(folder).config
    (cache / "refs" / "main").write_text("0123abc")
    (model / "LICENSE").symlink_to("../../../../refs/main")
    with pytest.raises(CheckpointError, match="outside of the folder"):
        open_folder(model).side_files()


def test_links_of_weights_in_a_snapshot_of_the_hubs_cache(folder: Path) -> None:
    cache = folder.parent / "models--x--y"
    snapshot, blobs = cache / "snapshots" / "0123abc", cache / "blobs"
    for made in (snapshot, blobs):
        made.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_file():
            (blobs / path.name).write_bytes(path.read_bytes())
            (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    write_manifest(open_folder(snapshot), layout_of(snapshot))
    assert verify(open_folder(snapshot))


@pytest.mark.parametrize("kind", ["huggingface", "orbax", "orbax folder", "lora"])
def test_weights_outside_of_the_folder_are_not_loaded(folder: Path, kind: str) -> None:
    """Writing a manifest and ``verify`` refuse them too."""
    opened, name = folder, "model.safetensors"
    if kind.startswith("orbax"):
        opened = to_canonical(folder, folder.parent / "canonical")
        (opened / MANIFEST_FILE).unlink()
        (opened / FILES_FILE).unlink()
        name = "weights" if kind == "orbax folder" else "weights/state/manifest.ocdbt"
    elif kind == "lora":
        opened = write_adapter(folder.parent / "adapter", folder, ["model.layers.0.mlp.up_proj"])
        name = "adapter_model.safetensors"

    def load() -> object:
        if kind == "lora":
            return open_adapter(open_folder(folder, lora=opened), layout_of(folder))
        return open_tensors(open_folder(opened))

    assert load()
    elsewhere = folder.parent / "elsewhere"
    (opened / name).rename(elsewhere)
    (opened / name).symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=f"{name}: a link to .*outside of the folder"):
        load()


@pytest.mark.parametrize("name", ["extra.bin", "model-00002-of-00002.safetensors", "LICENSE", "sub/notes.txt"])
def test_manifests_of_what_is_no_file(folder: Path, name: str) -> None:
    """Reading a pipe or a device for a digest would never end, and a link may reach a file of anyone."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    secret = folder.parent / "secret"
    secret.write_text("of the machine")
    said = []
    for make in (
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(secret),
        lambda: path.symlink_to("nowhere"),
        lambda: path.symlink_to(folder.parent),
    ):
        make()
        with pytest.raises(CheckpointError) as caught:
            write_manifest(open_folder(folder), layout_of(folder))
        said.append(str(caught.value))
        path.unlink()
    assert all(f"{path}: " in message for message in said)
    pipe, device, link, dangling, _ = said
    assert "not a regular file; expected a file" in pipe
    assert "a link to /dev/zero, which is outside of the folder; expected a copy" in device
    assert f"a link to {secret}, which is outside of the folder" in link
    assert "cannot be read" in dangling
    assert not (folder / MANIFEST_FILE).exists()
    write_manifest(open_folder(folder), layout_of(folder))


def test_files_that_became_links_or_pipes(folder: Path) -> None:
    """The digest of a link's target is right, and an empty file has the size of a pipe."""
    (folder / "notes.txt").write_text("for a reader")
    write_manifest(open_folder(folder), layout_of(folder))
    (folder / "notes.txt").rename(folder.parent / "notes.txt")
    (folder / "notes.txt").symlink_to(folder.parent / "notes.txt")
    with pytest.raises(CheckpointError, match=r"notes\.txt: a link to .*outside of the folder"):
        verify(open_folder(folder))
    (folder / "notes.txt").unlink()
    (folder.parent / "notes.txt").rename(folder / "notes.txt")
    canonical = to_canonical(folder, folder.parent / "output")
    files = parse_files((canonical / FILES_FILE).read_text(), "")
    os.mkfifo(canonical / "weights" / "pipe")
    files["weights/pipe"] = StoredFile(0, "0" * 32)
    (canonical / FILES_FILE).write_text(dump_files(files))
    with pytest.raises(CheckpointError, match=r"weights/pipe: not a regular file"):
        verify(open_folder(canonical))


def test_a_pipe_in_place_of_the_list_of_files(folder: Path) -> None:
    canonical = to_canonical(folder, folder.parent / "output")
    (canonical / MANIFEST_FILE).unlink()
    (canonical / FILES_FILE).unlink()
    os.mkfifo(canonical / FILES_FILE)
    with pytest.raises(CheckpointError, match=f"{FILES_FILE}: not a regular file"):
        write_manifest(open_folder(canonical), layout_of(canonical))
