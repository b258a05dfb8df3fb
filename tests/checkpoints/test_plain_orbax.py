"""Checkpoints that plain Orbax saved: they load onto any mesh, and a manifest adds their digests."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints import CheckpointError, load_weights, open_folder
from checkpoints.errors import CorruptCheckpointError, IncompleteCheckpointError, MismatchedCheckpointError
from checkpoints.file_list import FILES_FILE, list_files
from checkpoints.fingerprint import folder_fingerprint
from checkpoints.folder import MAX_SIDE_FILE_BYTES
from checkpoints.opening import open_tensors, read_manifest
from checkpoints.output import FolderOutput
from checkpoints.storage import Storage
from checkpoints.verification import verify, write_manifest
from launch import inspect as inspect_launcher
from launch import verify as verify_launcher
from runtime import Engine
from runtime.models.families import model_layout, parse_config
from sharding.mesh import MeshSpec
from tests.checkpoints.small import contents, layout_of, to_canonical, to_huggingface, write_source

GPT2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 24, "n_layer": 1, "n_head": 4, "n_positions": 16}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Turn names with dots into a tree of dictionaries."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return tree


def save(source: Path, folder: Path, place: str, version: str, keys: str, rename: Any = str) -> Path:
    """Save a Hugging Face folder's tensors with Orbax alone, beside a copy of its config.json."""
    import orbax.checkpoint as v0
    from orbax.checkpoint import v1

    flat = {rename(name): jnp.asarray(value) for name, value in load_file(source / "model.safetensors").items()}
    tree = flat if keys == "flat" else nested(flat)
    if version == "v1":
        v1.save(folder / place, tree, overwrite=True)
    else:
        with v0.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / place, tree, force=True)
    folder.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", folder)
    return folder


@pytest.fixture(scope="module")
def plain(micro: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(micro, tmp_path_factory.mktemp("plain") / "model", "weights", "v1", "nested")


@pytest.mark.parametrize("mesh", ["data=1", "tensor=4", "data=2,tensor=8"])
@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("keys", ["flat", "nested"])
@pytest.mark.parametrize("place", ["", "weights", "state"])
def test_loads_onto_any_mesh(
    version: str, keys: str, place: str, mesh: str, micro: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"plain_{version}_{keys}_{place}"
    if not folder.exists():
        save(micro, folder, place, version, keys)
    spec = MeshSpec.parse(mesh)
    layout = model_layout(parse_config(open_folder(folder).config), spec, jax.devices()[: spec.size])
    weights, loaded = load_weights(open_folder(folder), layout, "bfloat16")
    expected, _ = load_weights(open_folder(micro), layout, "bfloat16")
    for one, other in zip(jax.tree.leaves(weights), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint16), np.asarray(other).view(np.uint16))
    assert loaded.bytes_stored == sum(value.nbytes for value in load_file(micro / "model.safetensors").values())


def test_the_engine_loads_it_and_warns_that_there_are_no_digests(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "diffumesh"):
        Engine.load(plain, mesh="tensor=2")
    (warning,) = [record.getMessage() for record in caplog.records if "without digests" in record.getMessage()]
    assert str(plain) in warning
    assert "verify --write_manifest" in warning


@pytest.mark.parametrize(("version", "place"), [("v1", "weights"), ("v1", ""), ("v0", "state"), ("v0", "")])
def test_a_manifest_adds_digests(version: str, place: str, micro: Path, tmp_path: Path) -> None:
    folder = save(micro, tmp_path / "model", place, version, "nested")
    with pytest.raises(IncompleteCheckpointError, match="--write_manifest"):
        verify(open_folder(folder))
    verify_launcher.run(["verify", f"--checkpoint={folder}", "--write_manifest"])
    assert contents(folder) == contents(micro)
    data = sorted(folder.rglob("d/*"), key=lambda path: path.stat().st_size)[-1]
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 8]) + whole[len(whole) // 2 + 1 :])
    with pytest.raises(CorruptCheckpointError, match="tensor"):
        verify(open_folder(folder))
    data.write_bytes(whole)
    (data.parent / "added").write_bytes(b"x")
    with pytest.raises(CorruptCheckpointError, match="added"):
        Engine.load(folder)


def test_other_spellings_of_names(tmp_path: Path) -> None:
    """GPT-2's tensors have names with and without a prefix, in Orbax as in a Hugging Face folder."""
    source = write_source(tmp_path / "source", GPT2)
    folder = save(source, tmp_path / "model", "", "v1", "flat", lambda name: name.removeprefix("transformer."))
    assert contents(folder) == contents(source)
    write_manifest(open_folder(folder), layout_of(folder))
    assert contents(folder) == contents(source)
    assert verify(open_folder(folder)) == sum(map(len, contents(source).values()))


def test_converted_and_exported(plain: Path, micro: Path, tmp_path: Path) -> None:
    canonical = to_canonical(plain, tmp_path / "canonical")
    assert contents(canonical) == contents(micro)
    to_huggingface(plain, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(micro)


def test_without_a_database(micro: Path, tmp_path: Path) -> None:
    """Orbax may also store a folder of files for each array."""
    from orbax.checkpoint import v1

    context = v1.Context()
    context.array.saving.use_ocdbt = False
    with context:
        folder = save(micro, tmp_path / "model", "", "v1", "flat")
    assert not list(folder.rglob("manifest.ocdbt"))
    assert contents(folder) == contents(micro)


def test_relative_paths(plain: Path, micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plain.parent)
    assert contents(Path(plain.name)) == contents(micro)
    monkeypatch.chdir(tmp_path)
    assert contents(to_canonical(micro, Path("canonical"))) == contents(micro)
    assert contents(tmp_path / "canonical") == contents(micro)


def test_another_model(plain: Path, micro: Path, tmp_path: Path) -> None:
    from orbax.checkpoint import v1

    flat = load_file(micro / "model.safetensors")
    del flat["lm_head.weight"]
    v1.save(tmp_path / "model", flat | {"step": 3, "optimizer": {"mu": np.zeros((2, 3), np.float32)}})
    shutil.copy(micro / "config.json", tmp_path / "model")
    with pytest.raises(MismatchedCheckpointError) as raised:
        Engine.load(tmp_path / "model")
    message = str(raised.value)
    assert "missing: lm_head.weight" in message
    assert "unknown: optimizer.mu [2, 3]" in message
    assert "unknown: step" in message


@pytest.mark.parametrize("name", ["train.py", "data/results.csv", "zarr/notes.txt", "ocdbt.txt"])
@pytest.mark.parametrize("version", ["v0", "v1", "no database"])
def test_what_orbax_did_not_write_is_kept(version: str, name: str, micro: Path, tmp_path: Path) -> None:
    """The arrays are at the top of the folder, among the files of its user."""
    import orbax.checkpoint as v0

    folder = tmp_path / "model"
    if version == "no database":
        with v0.Checkpointer(v0.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
            checkpointer.save(folder, {"a": jnp.ones((2, 3)), "b": {"c": jnp.ones(())}})
        shutil.copy(micro / "config.json", folder)
    elif version == "v0":
        save(micro, folder, "", version, "nested")
    else:  # the new interface saves a tree into a folder of its own
        shutil.copytree(save(micro, tmp_path / "saved", "", version, "nested") / "state", folder)
        shutil.copy(micro / "config.json", folder)
    FolderOutput(folder).prepare(overwrite=True)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    with pytest.raises(CheckpointError, match=f"not part of a checkpoint .*: {name}; move them"):
        FolderOutput(folder).prepare(overwrite=True)


def test_an_interrupted_manifest_leaves_the_folder_as_it_was(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(plain, folder)
    (folder / "optimizer.pt").touch()

    def listed(storage: Any, names: Any) -> Any:
        if "optimizer.pt" in names:
            raise KeyboardInterrupt
        return list_files(storage, names)

    monkeypatch.setattr("checkpoints.verification.list_files", listed)
    with pytest.raises(KeyboardInterrupt):
        write_manifest(open_folder(folder), layout_of(folder))
    assert not (folder / FILES_FILE).exists()
    assert contents(folder) == contents(plain)


@pytest.mark.parametrize("gone", ["_METADATA", "manifest.ocdbt"])
def test_a_part_is_missing(gone: str, plain: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(plain, tmp_path / "copy"))
    (copy / "weights" / "state" / gone).unlink()
    with pytest.raises(CheckpointError, match=str(copy)):
        contents(copy)


@pytest.mark.parametrize(
    "name",
    [
        *("weights/state/_METADATA", "weights/state/manifest.ocdbt", "weights/_CHECKPOINT_METADATA"),
        *("weights/state/array_metadatas/process_0", FILES_FILE),
    ],
)
def test_descriptions_too_large_to_be_read(name: str, plain: Path, tmp_path: Path) -> None:
    """A sparse file takes no space on a disk, but as much memory as its size."""
    copy = Path(shutil.copytree(plain, tmp_path / "copy"))
    with (copy / name).open("ab") as file:
        file.truncate(MAX_SIDE_FILE_BYTES + 1)
    with pytest.raises(CheckpointError, match=f"{MAX_SIDE_FILE_BYTES} bytes, the limit for a {Path(name).name}"):
        contents(copy)


def test_inspected(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect_launcher.run(["inspect", f"--checkpoint={plain}"])
    said = capsys.readouterr().out
    assert ": Orbax\n" in said
    assert "digests       none" in said
    assert read_manifest(open_folder(plain)) is None
    assert set(open_tensors(open_folder(plain)).by_name) == set(contents(plain))


def test_the_fingerprint_of_arrays_that_are_not_on_this_machine(micro: Path, tmp_path: Path) -> None:
    """Training writes another checkpoint to the same URL."""
    seen = []
    for _ in range(2):
        save(micro, tmp_path / "model", "weights", "v1", "nested")
        folder = replace(
            open_folder(tmp_path / "model"), remote=Storage.at(tmp_path / "model"), remote_arrays="weights"
        )
        seen += [folder_fingerprint(folder), folder_fingerprint(folder)]
    assert seen[0] == seen[1] != seen[2] == seen[3]
