"""Files of a user among those of the weights: a folder that has them is not replaced."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import CheckpointError, open_folder
from checkpoints.export import export_checkpoint
from checkpoints.file_list import FILES_FILE
from checkpoints.folder import ARRAY_FOLDERS, MARK_FILE, TREE_FILE, CheckpointFolder
from checkpoints.manifest import MANIFEST_FILE
from checkpoints.output import FolderOutput, ObjectOutput
from checkpoints.storage import Storage
from checkpoints.verification import write_manifest
from tests.checkpoints.small import contents, layout_of, to_canonical
from tests.checkpoints.test_plain_orbax import save


def add(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")


def refused(folder: Path, name: str) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(CheckpointError, match=f"not part of a checkpoint .*: {re.escape(name)}; move them"):
        FolderOutput(folder).prepare(overwrite=True)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("name", ["weights/epoch1.pt", "weights/metadata", "weights/state/d/0", "state/log", "d/0"])
def test_a_hugging_face_folder_has_no_folder_of_weights(name: str, micro: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(micro, folder)
    add(folder, name)
    refused(folder, name)
    write_manifest(open_folder(folder), layout_of(folder))
    refused(folder, name)


@pytest.mark.parametrize(
    "name",
    [
        *("weights/optimizer.pt", "weights/state/log", "weights/logs/d/0", "weights/optimizer/_METADATA"),
        *("weights/state/d/0", "weights/state/ocdbt.process_0/notes", "weights/metadata/notes", "state/d/0"),
    ],
)
def test_files_among_the_weights_are_kept(name: str, canonical: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(canonical, folder)
    add(folder, name)
    refused(folder, name)


def test_files_that_appear_among_the_weights_meanwhile_are_kept(micro: Path, tmp_path: Path) -> None:
    output = FolderOutput(tmp_path / "model")
    shutil.copytree(micro, output.path)
    output.prepare(overwrite=True)
    with pytest.raises(CheckpointError, match=r"weights/epoch1\.pt; .* kept as"):
        export_checkpoint(open_folder(micro), output, progress=lambda *_: add(output.path, "weights/epoch1.pt"))
    assert (output.path / "weights" / "epoch1.pt").read_text() == "mine"
    assert contents(tmp_path / "model.diffumesh-new") == contents(micro)


def save_as(
    source: Path, folder: Path, place: str, version: str, database: bool, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Save a folder's tensors with Orbax alone, with or without a database."""
    import orbax.checkpoint as v0
    from orbax.checkpoint import v1

    context = v1.Context()
    context.array.saving.use_ocdbt = database
    with monkeypatch.context() as patch, context:
        handler = v0.PyTreeCheckpointHandler(use_ocdbt=database)
        patch.setattr(v0, "StandardCheckpointer", lambda: v0.Checkpointer(handler))
        return save(source, folder, place, version, "flat")


@pytest.mark.parametrize("kind", ["folder", "empty folder", "file", "dangling link"])
def test_a_checkpoint_whose_name_is_taken_meanwhile_is_kept(kind: str, micro: Path, tmp_path: Path) -> None:
    """Under the name of an unfinished conversion, the next one would remove it."""
    output = FolderOutput(tmp_path / "model")

    def take_name(*_: int) -> None:
        if "folder" in kind:
            output.path.mkdir()
            if kind == "folder":
                add(output.path, "notes.txt")
        elif kind == "file":
            add(tmp_path, "model")
        else:
            output.path.symlink_to("nowhere")

    output.prepare(overwrite=False)
    with pytest.raises(
        CheckpointError,
        match=r"model has been created in the meantime, and is not replaced\. .* is kept as .*/model\.diffumesh-new$",
    ):
        export_checkpoint(open_folder(micro), output, progress=take_name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.diffumesh-new"]
    new = tmp_path / "model.diffumesh-new"
    assert contents(new) == contents(micro)
    assert not (new / MARK_FILE).exists()
    FolderOutput(output.path).clean_up()
    assert new.is_dir(), "it stays"


@pytest.mark.parametrize("database", [True, False])
@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("place", ["", "weights", "state"])
def test_every_layout_of_orbax_is_replaced(
    place: str, version: str, database: bool, micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_as(micro, tmp_path / "model", place, version, database, monkeypatch)
    assert contents(folder) == contents(micro)
    FolderOutput(folder).prepare(overwrite=True)
    arrays = open_folder(folder).arrays_folder
    assert arrays in ARRAY_FOLDERS
    foreign = f"{arrays}/optimizer.pt".lstrip("/")
    add(folder, foreign)
    refused(folder, foreign)
    if version == "v0" and place:
        add(folder, "metadata")  # the name of a file of Orbax, but not here
        (folder / foreign).unlink()
        refused(folder, "metadata")
        (folder / "metadata").unlink()
        add(folder, foreign)
    write_manifest(open_folder(folder), layout_of(folder))  # lists the file
    refused(folder, foreign)
    for name in (foreign, FILES_FILE, MANIFEST_FILE):
        (folder / name).unlink()
    write_manifest(open_folder(folder), layout_of(folder))
    to_canonical(folder, folder)
    assert contents(folder) == contents(micro)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", FILES_FILE, MANIFEST_FILE, "weights"]


def without_description(folder: Path) -> None:
    (folder / "weights" / "state" / TREE_FILE).unlink()


def without_list(folder: Path) -> None:
    (folder / FILES_FILE).unlink()


def with_damaged_list(folder: Path) -> None:
    (folder / FILES_FILE).write_bytes(b"\xff")


def unfinished(folder: Path) -> None:
    without_description(folder)
    for name in ("config.json", FILES_FILE, MANIFEST_FILE):
        (folder / name).unlink()
    add(folder, MARK_FILE, "weights/state/manifest.ocdbt.__lock")


def beside_a_killed_save(folder: Path) -> None:
    add(folder, "weights/state.orbax-checkpoint-tmp-7/d/0", "weights/new.partial_save/new.pending_1/state/_METADATA")


@pytest.mark.parametrize(
    "change", [without_description, without_list, with_damaged_list, unfinished, beside_a_killed_save]
)
def test_what_is_left_of_a_checkpoint_is_replaced(
    change: Callable[[Path], None], canonical: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(canonical, folder)
    change(folder)
    FolderOutput(folder).prepare(overwrite=True)
    add(folder, "weights/optimizer.pt")
    refused(folder, "weights/optimizer.pt")


@pytest.mark.parametrize("kind", ["micro", "canonical"])
def test_what_an_operating_system_leaves_is_no_obstacle(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(request.getfixturevalue(kind), folder)
    add(folder, ".DS_Store", "weights/.DS_Store", "weights/._state", "weights/state/.nfs0001")
    FolderOutput(folder).prepare(overwrite=True)
    add(folder, "weights/.hidden")
    refused(folder, "weights/.hidden")


@pytest.mark.parametrize("name", ["results.csv", "other/thesis.pdf", "weights/optimizer.pt"])
def test_files_beside_an_unfinished_conversion_in_an_object_store_are_kept(
    name: str, canonical: Path, tmp_path: Path
) -> None:
    """A conversion was killed, and its user has put other files there since."""
    folder = tmp_path / "model"
    shutil.copytree(canonical, folder)
    unfinished(folder)
    add(folder, name)
    before = sorted(folder.rglob("*"))
    output = ObjectOutput(Storage.at(folder))
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match=f"not part of a checkpoint .*: {re.escape(name)}; move them"):
            output.prepare(overwrite)
    assert sorted(folder.rglob("*")) == before
    (folder / name).unlink()
    (said,) = output.prepare(overwrite=False)
    assert "interrupted: removed what it left" in said
    assert not Storage.at(folder).names()


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_an_old_checkpoint_that_is_deleted_in_part_is_removed(
    version: str, micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a database, only descriptions tell Orbax's files from others. They are deleted in any order."""
    plain = save_as(micro, tmp_path / "plain", "state", version, False, monkeypatch)
    write_manifest(open_folder(plain), layout_of(plain))
    delete, deleted, left = Storage.delete, 0, 0

    def interrupted(storage: Storage, names: list[str]) -> None:
        nonlocal deleted
        for name in names:
            if deleted == left:
                raise KeyboardInterrupt
            deleted += 1
            delete(storage, [name])

    for generator in map(random.Random, range(2)):
        ordered = sorted(CheckpointFolder(plain, "").names())
        for left in generator.sample(range(len(ordered)), 6):
            folder = tmp_path / f"{generator.random()}"
            shutil.copytree(plain, folder)
            output = ObjectOutput(Storage.at(folder))
            output.prepare(overwrite=True)
            deleted = 0
            with monkeypatch.context() as patch:
                patch.setattr(Storage, "delete", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    output.begin("mark")
            output.prepare(overwrite=left == 0)
            assert output.storage.names() == ([] if left else [*ordered, MARK_FILE])
