"""Conversion to an object store, an emulated Google Cloud Storage, which cannot rename; and loading from it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from checkpoints import CheckpointError, CheckpointFolder, loading, open_folder
from checkpoints.conversion import convert
from checkpoints.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoints.file_list import FILES_FILE
from checkpoints.folder import MARK_FILE
from checkpoints.loading import REMOTE_READERS
from checkpoints.manifest import MANIFEST_FILE, digest
from checkpoints.output import ObjectOutput, output_at
from checkpoints.storage import Storage, storage_context
from checkpoints.verification import verify, write_manifest
from launch import convert as convert_launcher
from runtime import Engine
from runtime.models.families import model_layout, parse_config
from tests.checkpoints.object_store import ObjectStore
from tests.checkpoints.small import MICRO, contents, layout_of, to_canonical, to_huggingface, write_source
from tests.checkpoints.test_processes import convert_together

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    # TensorStore reads the address once per process.
    found = ObjectStore()
    threading.Thread(target=found.serve_forever, daemon=True).start()
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = found.url
    os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "token"
    storage_context.cache_clear()
    yield found
    del os.environ["TENSORSTORE_GCS_HTTP_URL"], os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"]
    found.shutdown()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def url(server: ObjectStore) -> str:
    """URL of an empty folder for a checkpoint."""
    server.objects.clear()
    server.log.clear()
    server.writes_left = 1 << 60
    return "gs://bucket/models/checkpoint"


def to_store(source: Path, url: str, overwrite: bool = False) -> list[str]:
    output = output_at(url)
    assert isinstance(output, ObjectOutput)
    said = output.prepare(overwrite)
    convert(open_folder(source), layout_of(source), output)
    return said


@pytest.mark.parametrize("output", ["gs://bucket/models/checkpoint", "gs://bucket/models"])
def test_a_checkpoint_is_not_converted_onto_itself(output: str, url: str, micro: Path, server: ObjectStore) -> None:
    to_store(micro, url)
    before = dict(server.objects)
    target = output_at(output)
    source = open_folder(url)
    with pytest.raises(CheckpointError, match="is an input of the conversion, or contains one"):
        convert(source, model_layout(parse_config(source.config)), target)
    assert server.objects == before


@pytest.mark.parametrize("url", ["gs://bucket/models/plain", "gs://bucket/models", "gcs://bucket/models/pl%61in/"])
def test_a_downloaded_input_is_not_deleted(url: str, micro: Path, server: ObjectStore) -> None:
    """A Hugging Face folder there is downloaded, so that only a cache would still have it."""
    server.objects.clear()
    storage = Storage.at("gs://bucket/models/plain")
    for path in micro.iterdir():
        storage.write(path.name, path.read_bytes())
    before = dict(server.objects)
    source = CheckpointFolder(micro, url, fetched=True)
    targets = [ObjectOutput(Storage.at(f"gs://bucket/{name}")) for name in ("models", "models/plain")]
    for target in targets:
        with pytest.raises(CheckpointError, match="is an input of the conversion, or contains one"):
            convert(source, layout_of(micro), target)
        with pytest.raises(CheckpointError, match="is an input of the conversion, or contains one"):
            target.check_inputs([open_folder(micro), source])
    assert server.objects == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_objects_that_appear_after_the_check_are_kept(
    overwrite: bool, url: str, micro: Path, server: ObjectStore
) -> None:
    """Between the check and the first byte, the source is opened and measured."""
    if overwrite:
        to_store(micro, url)
    output = output_at(url)
    output.prepare(overwrite)
    Storage.at(url).write("notes.txt", b"mine")
    before = dict(server.objects)
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        convert(open_folder(micro), layout_of(micro), output)
    assert server.objects == before


def test_as_on_disk_to_the_bit(url: str, micro: Path, tmp_path: Path) -> None:
    assert to_store(micro, url) == []
    alone = to_canonical(micro, tmp_path / "alone")
    assert contents(url) == contents(alone)
    assert Storage.at(url).read(MANIFEST_FILE) == (alone / MANIFEST_FILE).read_bytes()
    assert Storage.at(url).read("config.json") == (alone / "config.json").read_bytes()
    assert MARK_FILE not in Storage.at(url).names()
    assert verify(open_folder(url)) == sum(map(len, contents(alone).values()))
    to_huggingface(url, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(micro)


def test_several_processes_write_it(url: str, micro: Path, server: ObjectStore) -> None:
    for code, output in convert_together(micro, url, 2):
        assert code == 0, output
    assert contents(url) == contents(micro)


def test_restored_straight_from_it(url: str, micro: Path, server: ObjectStore, tmp_path: Path) -> None:
    """The result equals loading the source, and weights are not downloaded to the disk."""
    to_store(micro, url)
    expected, found = Engine.load(micro, mesh="tensor=4"), Engine.load(url, mesh="tensor=4")
    for one, other in zip(jax.tree.leaves(expected.weights), jax.tree.leaves(found.weights), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    fetched = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert {path.name for path in fetched} == {"config.json", MANIFEST_FILE, FILES_FILE}


@pytest.mark.parametrize("readers", [1, REMOTE_READERS])
def test_tensors_are_read_at_the_same_time(
    url: str, server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    to_store(write_source(tmp_path / "deep", MICRO | {"num_hidden_layers": 4}), url)
    monkeypatch.setattr(loading, "REMOTE_READERS", readers)
    read_ahead, together = loading.read_ahead, min(16, readers)

    def read_slowly(*arguments: Any) -> Any:
        server.reads_at_a_time, server.wait_for, server.delay = 0, together, 0.01 * readers
        # The chunks. Orbax keeps the index, which is read first and alone, beside the folders of the processes.
        server.wait_in = "/ocdbt.process_"
        return read_ahead(*arguments)

    monkeypatch.setattr(loading, "read_ahead", read_slowly)
    try:
        Engine.load(url, mesh="tensor=1")
    finally:
        server.delay, server.wait_for, server.wait_in = 0.0, 0, ""
    # A tensor of this model is one chunk.
    assert together <= server.reads_at_a_time <= 32
    assert readers > 1 or server.reads_at_a_time <= 2


def test_the_manifest_is_written_last(micro: Path, server: ObjectStore) -> None:
    server.objects.clear()
    server.log.clear()
    to_store(micro, "gs://bucket/models/checkpoint")
    changes = [(method, name.removeprefix("models/checkpoint/")) for method, name in server.log if method != "GET"]
    assert changes[0] == ("POST", MARK_FILE)
    assert changes[-2:] == [("POST", MANIFEST_FILE), ("DELETE", MARK_FILE)]


def test_overwriting_removes_the_old_manifest_first_and_says_so(micro: Path, server: ObjectStore, url: str) -> None:
    to_store(micro, url)
    with pytest.raises(CheckpointError, match="--overwrite"):
        to_store(micro, url)
    assert contents(url) == contents(micro)
    server.log.clear()
    (said,) = to_store(micro, url, overwrite=True)
    assert "manifest is removed first" in said
    assert "nothing can be renamed there" in said
    assert contents(url) == contents(micro)
    changes = [(method, name.rpartition("/")[2]) for method, name in server.log if method != "GET"]
    assert changes[:2] == [("POST", MARK_FILE), ("DELETE", MANIFEST_FILE)]


def test_what_is_no_checkpoint_of_ours_is_not_removed(url: str, micro: Path) -> None:
    storage = Storage.at(url)
    storage.write("somebody's/data", b"dear to them")
    with pytest.raises(CheckpointError, match="exists"):
        to_store(micro, url)
    with pytest.raises(CheckpointError, match=r"is not a checkpoint .* it contains somebody's/data; name another"):
        to_store(micro, url, overwrite=True)
    assert storage.names() == ["somebody's/data"]


def test_an_empty_folder_is_no_obstacle(url: str, micro: Path, server: ObjectStore) -> None:
    """Consoles and gcsfuse make a folder as an empty object whose name ends with a slash."""
    for name in ("", "inner/"):
        server.objects[f"models/checkpoint/{name}"] = (1, b"")
    assert to_store(micro, url) == []
    assert contents(url) == contents(micro)
    assert verify(open_folder(url))


def test_refused_at_any_write(micro: Path, server: ObjectStore) -> None:
    """If the store refuses a write, there is an error and no checkpoint, and the next run cleans up."""
    url = "gs://bucket/models/checkpoint"
    server.objects.clear()
    server.log.clear()
    server.writes_left = 1 << 60
    to_store(micro, url)
    writes = sum(method != "GET" for method, _ in server.log)
    assert writes > 10
    refused = 0
    for allowed in [0, 1, *random.Random(3).sample(range(2, writes - 1), min(8, writes - 3))]:
        server.objects.clear()
        server.writes_left = allowed
        message = said_by(to_store, micro, url)
        server.settle()
        server.writes_left = 1 << 60
        if f"models/checkpoint/{MANIFEST_FILE}" in server.objects:
            # The number of writes depends on how many were in flight; these were enough.
            assert contents(url) == contents(micro)
            continue
        refused += 1
        assert "cannot be" in message
        if server.objects:
            with pytest.raises(CheckpointError):
                Engine.load(url)
        assert bool(ObjectOutput(Storage.at(url)).prepare(overwrite=False)) == (allowed > 0)
        assert not server.objects
    assert refused >= 3


def said_by(attempt: Callable[..., object], *arguments: object) -> str:
    """Return the message of the CheckpointError that a call raises; empty if it raises none."""
    try:
        attempt(*arguments)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kills", [2, pytest.param(25, marks=pytest.mark.slow)])
def test_killed_at_any_point(kills: int, url: str, micro: Path, server: ObjectStore) -> None:
    """A killed conversion leaves a complete checkpoint or none. The next one reports and removes leftovers."""
    program = (
        "import sys; print('ready', flush=True)\n"
        "from launch import convert\n"
        "convert.run(['convert', f'--source={sys.argv[1]}', f'--output={sys.argv[2]}', '--overwrite'])"
    )
    generator = random.Random(5)
    expected = contents(micro)
    duration = None
    for _ in range(kills + 1):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(micro), url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        if duration is None:
            assert process.wait() == 0, process.communicate()[1]
            duration = time.monotonic() - began
            continue
        time.sleep(generator.uniform(duration / 3, duration))  # not while it imports
        process.send_signal(signal.SIGKILL)
        process.communicate()
        names = Storage.at(url).names()
        if MANIFEST_FILE in names:
            assert contents(url) == expected
        elif names:
            with pytest.raises(CheckpointError):
                Engine.load(url)
            assert any("interrupted" in line for line in ObjectOutput(Storage.at(url)).prepare(overwrite=False))
            assert Storage.at(url).names() == []
    to_store(micro, url, overwrite=True)
    assert contents(url) == expected


def test_files_are_digested_piece_by_piece(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may be larger than the memory of the machine that verifies it."""
    server.objects.clear()
    monkeypatch.setattr("checkpoints.storage.FETCHED_BYTES", 10)
    storage = Storage.at("gs://bucket/folder")
    for size in (0, 1, 9, 10, 11, 20, 25):
        data = bytes(range(size))
        storage.write("file", data)
        server.longest_answer = 0
        assert storage.digest("file") == (size, digest(data))
        assert server.longest_answer <= 10
    with pytest.raises(CheckpointError, match="nothing: cannot be read"):
        storage.digest("nothing")


def test_a_leftover_is_no_checkpoint(url: str, micro: Path) -> None:
    to_store(micro, url)
    Storage.at(url).delete([MANIFEST_FILE])
    with pytest.raises(IncompleteCheckpointError, match="not finished"):
        Engine.load(url)


def test_damage_is_named(url: str, micro: Path) -> None:
    to_store(micro, url)
    storage = Storage.at(url)
    largest = max((name for name in storage.names() if "/d/" in name), key=lambda name: len(storage.read(name) or b""))
    data = bytearray(storage.read(largest) or b"")
    data[len(data) // 2] ^= 16
    storage.write(largest, bytes(data))
    with pytest.raises(CorruptCheckpointError, match="tensor"):
        verify(open_folder(url))


def test_large_files_are_not_read(micro: Path, server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    server.objects.clear()
    url = "gs://bucket/models/checkpoint"
    to_store(micro, url)
    monkeypatch.setattr("checkpoints.downloads.MAX_SIDE_FILE_BYTES", 1 << 20)
    assert open_folder(url).config
    Storage.at(url).write("LICENSE", b"x" * ((1 << 20) + 1))
    before = server.bytes_sent
    with pytest.raises(CheckpointError, match=f"{url}/LICENSE: larger than 1048576 bytes, the limit for a LICENSE"):
        open_folder(url)
    assert server.bytes_sent - before < 1 << 20


def test_a_manifest_may_list_code_which_is_not_read(micro: Path, server: ObjectStore, tmp_path: Path) -> None:
    server.objects.clear()
    folder = to_canonical(micro, tmp_path / "checkpoint")
    (folder / FILES_FILE).unlink()
    (folder / MANIFEST_FILE).unlink()
    (folder / "modeling_dream.py").write_text("raise SystemExit")
    write_manifest(open_folder(folder), layout_of(folder))
    storage = Storage.at("gs://bucket/models/checkpoint")
    for path in folder.rglob("*"):
        if path.is_file():
            storage.write(path.relative_to(folder).as_posix(), path.read_bytes())
    assert contents(storage.place) == contents(micro)
    verify(open_folder(storage.place))
    storage.write("modeling_dream.py", b"changed")
    with pytest.raises(CorruptCheckpointError, match=r"modeling_dream.py: changed"):
        verify(open_folder(storage.place))


def test_the_launcher(url: str, micro: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", f"--source={micro}", f"--output={url}", "--compile_cache="]
    convert_launcher.run(arguments)
    assert capsys.readouterr().out == f"{url}\n"
    with pytest.raises(SystemExit) as ended:
        convert_launcher.run(arguments)
    assert ended.value.code == 2
    assert "--overwrite" in capsys.readouterr().err
    convert_launcher.run([*arguments, "--overwrite"])
    assert "its manifest is removed first" in capsys.readouterr().err
    assert contents(url) == contents(micro)


@pytest.mark.parametrize(
    "place", ["gs://", "gs://bucket", "gs://bucket/", "ftp://host/folder", "memory://x", "file:///", "gs://a b/c"]
)
def test_places_that_cannot_be_written(place: str) -> None:
    with pytest.raises(CheckpointError):
        output_at(place).prepare(overwrite=False)
