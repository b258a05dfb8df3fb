"""Files beside the weights have to be in the folder and not too large."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import CheckpointError, open_folder
from checkpoints.fingerprint import folder_fingerprint
from checkpoints.folder import MAX_SIDE_FILE_BYTES
from checkpoints.verification import write_manifest
from launch.folders.models import print_licence
from runtime.text.tokenizer import TextTokenizer
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
    refused(read, folder, f"{name}: {6 << 30} bytes are too many")


def test_a_large_configuration(folder: Path) -> None:
    with (folder / "config.json").open("ab") as file:
        file.truncate(MAX_SIDE_FILE_BYTES + 1)
    with pytest.raises(CheckpointError, match="are too many for a config"):
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
