"""Outputs that cannot be written, and two conversions to the same output."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import DEMO, CheckpointError, open_folder
from checkpoints import output as output_module
from checkpoints.conversion import convert
from checkpoints.exchange import exchange
from checkpoints.export import export_checkpoint
from checkpoints.folder import MARK_FILE
from checkpoints.opening import open_tensors
from checkpoints.output import FolderOutput, output_at
from checkpoints.source import Index, StoredTensors
from checkpoints.verification import verify, write_manifest
from tests.checkpoints.small import MICRO, contents, layout_of, to_canonical, write_source


@pytest.mark.parametrize("place", [".", "/", "..", "~no-such-user/checkpoint", "x" * 250, "file", "link", "dangling"])
def test_places_that_cannot_be_written(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before anything is converted, and existing files stay."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError):
        output_at(place).prepare(overwrite=True)
    assert sorted(tmp_path.iterdir()) == before


def test_a_url_of_this_machine_is_its_folder(micro: Path, tmp_path: Path) -> None:
    """Written like an object store, the old checkpoint would be missing until the new one is complete."""
    folder = tmp_path / "a folder"
    for url in (f"file://{tmp_path}/a%20folder", f"file://localhost{tmp_path}/a%20folder/"):
        assert output_at(url) == FolderOutput(folder)
    for url in ("file://elsewhere/folder", "file://", f"file://{tmp_path}/a%00b"):
        with pytest.raises(CheckpointError, match="not a folder of this machine"):
            output_at(url)
    to_canonical(micro, folder)
    output = output_at(f"file://{folder}")
    assert output.prepare(overwrite=True) == [], "it is replaced in one step"


def test_an_input_within_the_output_is_kept(micro: Path, tmp_path: Path) -> None:
    """The old output is deleted with all that it contains."""
    source = tmp_path / "model" / "plain"
    shutil.copytree(micro, source)
    output = FolderOutput(tmp_path / "model")
    with pytest.raises(CheckpointError, match="contains the input"):
        convert(open_folder(source), layout_of(source), output)
    with pytest.raises(CheckpointError, match="contains the input"):
        export_checkpoint(open_folder(source), output)
    assert contents(source) == contents(micro)


def test_an_input_whose_manifest_lists_its_files_stays_whole(micro: Path, tmp_path: Path) -> None:
    canonical = to_canonical(micro, tmp_path / "canonical")
    output = FolderOutput(canonical / "int8")
    output.prepare(overwrite=False)
    with pytest.raises(CheckpointError, match=r"is in the input .*, whose manifest lists all of its files"):
        convert(open_folder(canonical), layout_of(canonical), output)
    assert verify(open_folder(canonical))
    plain = tmp_path / "plain"
    shutil.copytree(micro, plain)
    write_manifest(open_folder(plain), layout_of(plain), covers_folder=False)
    assert contents(to_canonical(plain, plain / "canonical")) == contents(plain)
    assert verify(open_folder(plain))


def test_only_checkpoints_are_replaced(micro: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(micro, models / "one")
    (models / "notes.txt").write_text("dear to them")
    with pytest.raises(CheckpointError, match=r"is not a checkpoint \(it has no weights\).* notes.txt, one/.*; name"):
        FolderOutput(models).prepare(overwrite=True)
    assert contents(models / "one") == contents(micro)
    (models / "one" / "tokenizer.json").unlink(missing_ok=True)
    (models / "one" / "README.md").touch()
    FolderOutput(models / "one").prepare(overwrite=True)  # damaged, but a checkpoint
    (models / "one" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"is not a checkpoint \(it has no weights\)"):
        FolderOutput(models / "one").prepare(overwrite=True)


@pytest.mark.parametrize(
    "name",
    ["notes.txt", "modeling_dream.py", "optimizer.pt", "logs/run.json", ".git/HEAD", "NOTES.md", "one/config.json"],
)
@pytest.mark.parametrize("canonical", [False, True], ids=["huggingface", "canonical"])
def test_files_that_no_checkpoint_has_are_kept(micro: Path, tmp_path: Path, canonical: bool, name: str) -> None:
    """They would be deleted with the old checkpoint."""
    folder = tmp_path / "model"
    to_canonical(micro, folder) if canonical else shutil.copytree(micro, folder)
    FolderOutput(folder).prepare(overwrite=True)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    before = sorted(folder.rglob("*"))
    with pytest.raises(CheckpointError, match=f"not part of a checkpoint .*: {re.escape(name)}; move them"):
        FolderOutput(folder).prepare(overwrite=True)
    assert sorted(folder.rglob("*")) == before


def test_the_demo_is_not_replaced() -> None:
    """Its folder is also a package."""
    with pytest.raises(CheckpointError, match="not part of a checkpoint"):
        FolderOutput(DEMO).prepare(overwrite=True)


def test_what_appears_during_a_conversion_is_not_replaced(micro: Path, tmp_path: Path) -> None:
    output = FolderOutput(tmp_path / "checkpoint")
    output.prepare(overwrite=False)
    output.begin("mark")
    output.path.mkdir()
    (output.path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="has been created in the meantime"):
        output.finish()
    output.close()
    assert (output.path / "notes.txt").read_text() == "mine"


def test_files_that_appear_in_the_old_checkpoint_are_kept(micro: Path, tmp_path: Path) -> None:
    """They were not there when the output was checked. The new checkpoint is complete beside the old one."""
    other = write_source(tmp_path / "other", MICRO, seed=1)
    output = FolderOutput(tmp_path / "model")
    shutil.copytree(micro, output.path)
    for name in ("model.diffumesh-new", "model.diffumesh-new-2"):
        output.prepare(overwrite=True)
        with pytest.raises(
            CheckpointError, match=rf"deleted with the old one: notes\.txt, one/log; .* kept as .*/{name}$"
        ):
            export_checkpoint(open_folder(other), output, progress=lambda done, total: write_notes(output.path))
        assert (output.path / "one" / "log").read_text() == "mine"
        assert contents(output.path) == contents(micro)
        assert contents(tmp_path / name) == contents(other)
        (output.path / "notes.txt").unlink()
        shutil.rmtree(output.path / "one")
    output.prepare(overwrite=True)
    export_checkpoint(open_folder(other), output)
    names = ["model", "model.diffumesh-new", "model.diffumesh-new-2", "other"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names, "what was kept stays"


@pytest.mark.parametrize("exchanges", [True, False])
def test_files_that_appear_while_names_are_exchanged_are_kept(
    exchanges: bool, micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the old folder after the check before the exchange. The new checkpoint is in place."""
    other = write_source(tmp_path / "other", MICRO, seed=1)
    output = FolderOutput(to_canonical(micro, tmp_path / "model"))
    before = contents(output.path)

    def late(one: Path, two: Path) -> bool:
        write_notes(two)
        return exchanges and exchange(one, two)

    monkeypatch.setattr(output_module, "exchange", late)
    output.prepare(overwrite=True)
    with pytest.raises(CheckpointError, match=r"model is written, .* kept as .*model\.diffumesh-old \(.*: notes\.txt"):
        convert(open_folder(other), layout_of(other), output)
    old = tmp_path / "model.diffumesh-old"
    assert (old / "one" / "log").read_text() == "mine"
    (old / "notes.txt").unlink()  # its manifest lists all files
    shutil.rmtree(old / "one")
    assert contents(old) == before
    assert contents(output.path) == contents(other)
    assert verify(open_folder(output.path))
    assert FolderOutput(output.path).prepare(overwrite=True) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.diffumesh-old", "other"]


def test_files_in_the_old_checkpoint_of_a_killed_conversion_are_kept(micro: Path, tmp_path: Path) -> None:
    """The process was killed after the exchange of the names, before its last check."""
    output = FolderOutput(tmp_path / "model")
    shutil.copytree(micro, output.path)
    (output.path / MARK_FILE).write_text("mark")
    shutil.copytree(micro, output.staging)
    write_notes(output.staging)
    said = output.prepare(overwrite=True)
    old = tmp_path / "model.diffumesh-old"
    assert f"has changed and is kept as {old}" in " ".join(said)
    assert (old / "one" / "log").read_text() == "mine"
    assert contents(old) == contents(micro)


def write_notes(folder: Path) -> None:
    (folder / "one").mkdir()
    (folder / "one" / "log").write_text("mine")
    (folder / "notes.txt").write_text("mine")


def test_a_place_that_goes_away(micro: Path, tmp_path: Path) -> None:
    """The other conversion begins after this one was prepared."""
    output = FolderOutput(tmp_path / "parent" / "checkpoint")
    output.path.parent.mkdir()
    output.prepare(overwrite=False)
    output.path.parent.rmdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(open_folder(micro), layout_of(micro), output)


def test_a_conversion_that_runs_is_left_alone(micro: Path, tmp_path: Path) -> None:
    first, second = (FolderOutput(tmp_path / "checkpoint") for _ in range(2))
    second.prepare(overwrite=True)
    first.prepare(overwrite=True)
    first.begin("first")
    for attempt in (lambda: second.prepare(overwrite=True), lambda: second.begin("second")):
        with pytest.raises(CheckpointError, match="another conversion is writing to it"):
            attempt()
    assert first.storage.read("diffumesh.converting") == b"first"
    first.close()
    (said,) = second.prepare(overwrite=True)
    assert "interrupted: removed" in said


def test_one_that_failed_holds_nothing(micro: Path, tmp_path: Path) -> None:
    """The lock is released even if the error is kept, as in an interactive Python."""
    found = open_tensors(open_folder(micro))
    name, copies = next(iter(found.by_name.items()))

    def read(index: Index) -> np.ndarray:
        raise OSError("the lamp went out")

    failing = StoredTensors(found.by_name | {name: [replace(copies[0], read=read)]})
    output = FolderOutput(tmp_path / "checkpoint")
    output.prepare(overwrite=False)
    with pytest.raises(OSError, match="lamp") as kept:
        convert(open_folder(micro), layout_of(micro), output, tensors=failing)
    assert output.staging.is_dir()
    to_canonical(micro, output.path)
    assert kept.value
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_what_was_replaced_and_cannot_be_removed(micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = FolderOutput(to_canonical(micro, tmp_path / "checkpoint"))
    output.prepare(overwrite=True)

    remove: Callable[..., object] = shutil.rmtree

    def refuse(path: Path) -> None:
        if not str(path).endswith(".diffumesh-removing"):  # Orbax removes folders of its own
            remove(path)
            return
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(
        CheckpointError, match=r"is written, but the old checkpoint cannot be removed .*checkpoint\.diffumesh-removing"
    ):
        convert(open_folder(micro), layout_of(micro), output)
    assert contents(output.path) == contents(micro)
    monkeypatch.setattr(shutil, "rmtree", remove)
    assert output.prepare(overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_replacing_a_checkpoint(exchanges: bool, micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If names can be exchanged, a reader finds the old or the new checkpoint after every step."""
    output = FolderOutput(to_canonical(micro, tmp_path / "checkpoint"))
    if not exchanges:
        monkeypatch.setattr(output_module, "exchange", lambda one, other: False)
    elif not exchange(output.path, output.path):
        pytest.skip("this file system cannot exchange names")
    seen: list[bool] = []

    def watched(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **more: Any) -> Any:
            done = step(*arguments, **more)
            seen.append((output.path / "config.json").exists())
            return done

        return run

    for owner, name in ((Path, "rename"), (Path, "unlink"), (shutil, "rmtree"), (output_module, "exchange")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    before = (output.path / "config.json").stat().st_ino
    output.prepare(overwrite=True)
    convert(open_folder(micro), layout_of(micro), output)
    assert (output.path / "config.json").stat().st_ino != before
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert len(seen) > 3
    assert all(seen) == exchanges


@pytest.mark.parametrize("exchanges", [True, False])
def test_one_that_takes_its_name_is_left_alone(
    exchanges: bool, micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another conversion starts after every rename of the first one, and is refused each time."""
    output = FolderOutput(to_canonical(micro, tmp_path / "checkpoint"))
    if not exchanges:
        monkeypatch.setattr(output_module, "exchange", lambda one, other: False)
    output.prepare(overwrite=True)
    refused = []
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        done = rename(path, target)
        if path.parent == tmp_path:  # Orbax renames within its folder
            with pytest.raises(CheckpointError, match="another conversion is writing to it"):
                FolderOutput(output.path).prepare(overwrite=True)
            refused.append(target.name)
        return done

    monkeypatch.setattr(Path, "rename", renamed)
    convert(open_folder(micro), layout_of(micro), output)
    assert refused[-1] == "checkpoint.diffumesh-removing"
    assert contents(output.path) == contents(micro)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_what_is_removed_in_part_is_never_brought_back(
    exchanges: bool, micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversion is killed while it deletes the old checkpoint; then the new one is moved away."""
    output = FolderOutput(to_canonical(micro, tmp_path / "checkpoint"))
    if not exchanges:
        monkeypatch.setattr(output_module, "exchange", lambda one, other: False)

    remove: Callable[..., object] = shutil.rmtree

    def killed(path: Path) -> None:
        if not str(path).endswith(".diffumesh-removing"):  # Orbax removes folders of its own
            remove(path)
            return
        (path / "config.json").unlink()
        raise KeyboardInterrupt

    output.prepare(overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            convert(open_folder(micro), layout_of(micro), output)
    assert contents(output.path) == contents(micro)
    output.path.rename(tmp_path / "moved")
    (said,) = FolderOutput(output.path).prepare(overwrite=False)
    assert "removed" in said
    assert not output.path.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_what_a_clean_up_removes_in_part_is_never_brought_back(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion is killed after it replaced a checkpoint, and the next one while it deletes the old one."""
    output = FolderOutput(to_canonical(micro, tmp_path / "checkpoint"))
    shutil.copytree(output.path, tmp_path / "checkpoint.diffumesh-replaced")

    def killed(path: Path) -> None:
        (path / "config.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            output.prepare(overwrite=True)
    output.path.rename(tmp_path / "moved")
    (said,) = FolderOutput(output.path).prepare(overwrite=False)
    assert "removed" in said
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_a_whole_one_that_was_set_aside_is_brought_back(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = FolderOutput(to_canonical(micro, tmp_path / "checkpoint"))
    monkeypatch.setattr(output_module, "exchange", lambda one, other: False)
    rename, renamed = Path.rename, 0

    def killed(path: Path, target: Path) -> Path:
        nonlocal renamed
        renamed += 1
        if renamed == 2:
            raise KeyboardInterrupt
        return rename(path, target)

    output.prepare(overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            convert(open_folder(micro), layout_of(micro), output)
    assert not output.path.exists()
    said = FolderOutput(output.path).prepare(overwrite=True)
    assert "restored the old checkpoint" in said[0]
    assert contents(output.path) == contents(micro)


def test_folders_with_similar_names_are_left_alone(tmp_path: Path) -> None:
    kept = [tmp_path / f"checkpoint.{name}" for name in ("replaced", "removing", "converting")]
    for folder in kept:
        folder.mkdir()
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(CheckpointError, match="exists; name another output"):
        FolderOutput(tmp_path / "checkpoint").prepare(overwrite=False)
    FolderOutput(tmp_path / "checkpoint").prepare(overwrite=True)
    assert all(folder.is_dir() for folder in kept)


@pytest.mark.parametrize("name", ["runs[1]", "a*", "wh?t"])
def test_a_path_that_looks_like_a_pattern(name: str, micro: Path, tmp_path: Path) -> None:
    """Orbax looks for its unfinished parts with a pattern that begins with the path."""
    (tmp_path / name).mkdir()
    for _ in range(2):
        output = to_canonical(micro, tmp_path / name / "model")
        verify(open_folder(output))
        assert contents(output) == contents(micro)


def test_an_unfinished_orbax_checkpoint_replaces_nothing(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = to_canonical(micro, tmp_path / "model")
    before = contents(output)
    monkeypatch.setattr("checkpoints.orbax.finalize", lambda place: None)
    with pytest.raises(CheckpointError, match="Orbax did not complete the checkpoint"):
        to_canonical(micro, output)
    assert contents(output) == before
