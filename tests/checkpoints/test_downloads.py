"""Downloaded folders: only what readers use is fetched, within limits, and checked against the manifest."""

from __future__ import annotations

import asyncio
import fnmatch
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem

from checkpoints import CheckpointError, open_folder, urls
from checkpoints.manifest import MANIFEST_FILE
from checkpoints.verification import verify, write_manifest
from runtime.models.families import find_family
from tests.checkpoints.small import contents, layout_of, to_canonical, to_huggingface
from tests.checkpoints.test_changes import write_folder

TEMPLATE = "additional_chat_templates/rag.jinja"
# What the manifest lists, and no reader uses.
UNREAD = ("modeling_dream.py", "tokenizer.model", "original/params.bin")


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder whose manifest lists more files than readers use."""
    folder = write_folder(tmp_path_factory.mktemp("complete") / "model")
    for name in UNREAD:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("raise SystemExit")
    write_manifest(open_folder(folder), layout_of(folder))
    return folder


@pytest.fixture
def source(complete: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(complete, tmp_path / "source"))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Path], str]]:
    """A function that uploads a folder to fsspec's file system in memory, and returns its URL."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    system, root = fsspec.filesystem("memory"), f"/{tmp_path.name}/model"

    def upload(folder: Path) -> str:
        for path in folder.rglob("*"):
            if path.is_file():
                system.pipe_file(f"{root}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return f"memory:/{root}"

    yield upload
    system.rm(root, recursive=True)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], str]:
    """A function that makes a folder the model ``somebody/something`` of the Hub, and returns this name."""

    def upload(folder: Path) -> str:
        def download(name: str, *, allow_patterns: list[str], **options: object) -> str:
            snapshot = tmp_path / "snapshot"
            shutil.rmtree(snapshot, ignore_errors=True)
            for path in folder.rglob("*"):
                name = path.relative_to(folder).as_posix()
                if path.is_file() and any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                    (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, snapshot / name)
            return str(snapshot)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        return "somebody/something"

    return upload


@pytest.fixture(params=["memory", "hub"])
def upload(request: pytest.FixtureRequest) -> Callable[[Path], str]:
    found: Callable[[Path], str] = request.getfixturevalue(request.param)
    return found


def test_a_manifest_may_list_files_that_are_not_fetched(upload: Callable[[Path], str], source: Path) -> None:
    name = upload(source)
    assert contents(name) == contents(source)
    folder = open_folder(name)
    assert verify(folder) == sum(map(len, contents(source).values()))
    assert (folder.path / TEMPLATE).read_bytes() == (source / TEMPLATE).read_bytes()
    assert not [path for path in folder.names() if path in UNREAD]


def test_names_that_are_almost_those_of_the_hub(source: Path, hub: Callable[[Path], str]) -> None:
    name = hub(source)
    assert open_folder(f"{name}/").name == open_folder(name).name == name
    said = "gpt2: no such folder; a name on the Hub has the form owner/name, such as openai-community/gpt2"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        open_folder("gpt2")
    with pytest.raises(CheckpointError, match=r"no such folder$"):
        open_folder("/nowhere/at/all")


@pytest.mark.parametrize("kind", ["folder", "url", "hub"])
def test_revisions_and_offline(kind: str, request: pytest.FixtureRequest, source: Path) -> None:
    """Other weights than those that were asked for are never loaded, and nothing is fetched where that is forbidden."""
    place = str(source) if kind == "folder" else request.getfixturevalue("memory" if kind == "url" else "hub")(source)
    if kind == "hub":
        assert open_folder(place, revision="main", offline=True).fetched
        return
    with pytest.raises(CheckpointError, match="revision=main needs a Hub name"):
        open_folder(place, revision="main")
    with pytest.raises(CheckpointError, match="revision=main needs a Hub name; this folder is already open"):
        open_folder(open_folder(source), revision="main")
    if kind == "folder":
        assert open_folder(place, offline=True).path == source
    else:
        with pytest.raises(CheckpointError, match="with offline, a checkpoint is a folder here"):
            open_folder(place, offline=True)


def test_a_conversion_keeps_the_name_by_which_settings_are_chosen(source: Path, tmp_path: Path) -> None:
    """DiffuCoder's published temperature depends on the name, and the output has another one."""
    named = tmp_path / "DiffuCoder-7B-cpGRPO"
    shutil.copytree(source, named)
    (named / MANIFEST_FILE).unlink()
    folder = named
    for number in range(2):
        folder = to_canonical(folder, tmp_path / f"output {number}")
        opened = open_folder(folder)
        published = find_family(opened.config).published_settings(opened.model_names)
        assert published["temperature"] == 0.4
        assert opened.config == open_folder(named).config | {"_name_or_path": named.name}
    assert open_folder(to_canonical(source, tmp_path / "plain")).config == open_folder(source).config
    # A folder above the recorded name says nothing, so the folder's own name has to be kept.
    file = named / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"_name_or_path": "/cpgrpo/base"}))
    kept = open_folder(to_canonical(named, tmp_path / "renamed"))
    assert find_family(kept.config).published_settings(kept.model_names)["temperature"] == 0.4
    file.write_bytes((source / "config.json").read_bytes())
    to_huggingface(named, tmp_path / "exported")
    assert open_folder(tmp_path / "exported").config == open_folder(named).config | {"_name_or_path": named.name}


@pytest.mark.parametrize("stored", [None, "Dream-org/Dream-v0-Base-7B", 7])
def test_the_model_is_named_by_its_own_folder(
    stored: object, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the folder is spelled; folders above it have names for other reasons."""
    hub = tmp_path / "instruct-runs" / "models--apple--DiffuCoder-7B-cpGRPO" / "snapshots" / "0123abcd"
    hub.parent.mkdir(parents=True)
    shutil.copytree(source, hub)
    config = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps(config if stored is None else config | {"_name_or_path": stored}))
    plain = tmp_path / "cpgrpo" / "DiffuCoder-7B-cpGRPO"
    plain.parent.mkdir()
    plain.symlink_to(hub)
    (tmp_path / "current").symlink_to(plain)
    monkeypatch.chdir(hub)
    parent = stored.rpartition("/")[2] if isinstance(stored, str) else ""
    for spelling in (str(hub), ".", f"{hub}/", f"{hub}/.", f"{hub.parent}/../snapshots/{hub.name}", str(plain)):
        assert open_folder(spelling, weights=False).model_names == f"DiffuCoder-7B-cpGRPO {parent}".strip()
    names = open_folder(tmp_path / "current", weights=False).model_names
    assert names == f"current DiffuCoder-7B-cpGRPO {parent}".strip()
    base = tmp_path / "instruct" / "DiffuCoder-7B-Base"
    shutil.copytree(source, base)
    assert open_folder(base, weights=False).model_names == "DiffuCoder-7B-Base"


def test_partial_files_of_killed_downloads_are_removed(memory: Callable[[Path], str], source: Path) -> None:
    """Only those that are a day old are removed: another process may be writing a newer one."""
    name = memory(source)
    cache = open_folder(name).path
    (cache / "config.json").unlink()
    old, new = (cache / f".config.json.0123456{number}.partial" for number in (1, 2))
    inner = (cache / TEMPLATE).with_name(".rag.jinja.01234563.partial")
    for path, hours in ((old, 25), (inner, 25), (new, 23)):
        path.write_text("{")
        then = time.time() - 3600 * hours
        os.utime(path, (then, then))
    assert open_folder(name).path == cache
    assert (cache / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert not old.exists()
    assert not inner.exists()
    assert new.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", TEMPLATE, "LICENSE", "model.safetensors"])
@pytest.mark.parametrize("kind", ["changed", "missing"])
def test_fetched_files_are_checked(upload: Callable[[Path], str], source: Path, name: str, kind: str) -> None:
    path = source / name
    if kind == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-2] ^= 1
        path.write_bytes(data)
    tensor = kind == "changed" and name == "model.safetensors"
    with pytest.raises(CheckpointError, match="tensor .* is damaged" if tensor else Path(name).name):
        verify(open_folder(upload(source)))


def test_added_files_that_a_reader_would_use_are_refused(upload: Callable[[Path], str], source: Path) -> None:
    (source / "additional_chat_templates" / "more.jinja").write_text("{{ evil }}")
    with pytest.raises(CheckpointError, match=r"were added.*more.jinja"):
        contents(upload(source))


def test_on_a_disk_every_listed_file_has_to_be_there(source: Path) -> None:
    (source / UNREAD[0]).unlink()
    with pytest.raises(CheckpointError, match=f"{UNREAD[0]}: the manifest lists this file"):
        contents(source)


@pytest.mark.parametrize("told", [True, False], ids=["size told", "size not told"])
@pytest.mark.parametrize("name", ["LICENSE", TEMPLATE])
def test_large_files_are_not_fetched(
    memory: Callable[[Path], str], source: Path, name: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a server that does not tell sizes."""
    limit = (source / MANIFEST_FILE).stat().st_size
    monkeypatch.setattr("checkpoints.downloads.MAX_SIDE_FILE_BYTES", limit)
    monkeypatch.setattr("checkpoints.urls.FETCHED_BYTES", limit // 2)
    system = type(fsspec.filesystem("memory"))
    listing = system.ls

    def without_sizes(*arguments: Any, **options: Any) -> Any:
        return [entry | {"size": None} for entry in listing(*arguments, **options)]

    if not told:
        monkeypatch.setattr(system, "ls", without_sizes)
    assert open_folder(memory(source)).config
    (source / name).write_bytes(b"x" * (5 * limit))
    with pytest.raises(CheckpointError, match=f"{Path(name).name} has at least [0-9]+ bytes; the limit is"):
        open_folder(memory(source))


@pytest.mark.parametrize("scheme", ["file://", "file://localhost", "local://", "simplecache::file://"])
@pytest.mark.parametrize("name", ["LICENSE", TEMPLATE])
def test_links_behind_a_url_of_this_machine(scheme: str, name: str, source: Path, tmp_path: Path) -> None:
    """A link called LICENSE to /etc/passwd must not be copied, whatever names the folder."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (source / name).unlink()
    (source / MANIFEST_FILE).unlink()
    (source / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match="is a link; name the folder" if "::" in scheme else "outside of the"):
        to_canonical(f"{scheme}{source}", tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_urls_of_this_machine(source: Path, tmp_path: Path) -> None:
    spaced = source.rename(tmp_path / "a model")
    assert open_folder(spaced.as_uri()).path == spaced
    assert contents(f"file://localhost{spaced}") == contents(spaced)
    for url in ("file://elsewhere/model", "file://", "file:///no/such/folder", f"file://{spaced}/config.json"):
        with pytest.raises(CheckpointError, match=url):
            open_folder(url)


def test_a_file_that_changed_on_a_web_server_is_fetched_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its size stays and the server tells no ETag, as Python's own server."""
    pytest.importorskip("aiohttp")  # fsspec needs it for web servers
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (source / MANIFEST_FILE).unlink()
    file = source / "LICENSE"
    os.utime(file, (1e9, 1e9))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(source))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        before = open_folder(url).path
        assert open_folder(url).path == before
        file.write_bytes(file.read_bytes()[::-1])
        os.utime(file, (1e9 + 60, 1e9 + 60))
        after = open_folder(url).path
        server.shutdown()
    assert after != before
    assert (after / "LICENSE").read_bytes() == file.read_bytes() != (before / "LICENSE").read_bytes()


class Store(AsyncFileSystem):
    """An object store with the files of a folder, as a file system of fsspec: ``store://folder``.

    Attributes:
      folder: the folder on this disk.
      wait_for: number of reads of weights that must take place at the same time before one ends.
      most: the largest number of reads that took place at the same time.
      lost: number of bytes that the last piece of the weights lacks.
    """

    protocol = "store"
    cachable = False
    folder = Path()
    wait_for = reading = most = lost = 0

    async def _ls(self, path: str, detail: bool = True, **_: object) -> Any:
        assert detail
        names = [found.relative_to(self.folder).as_posix() for found in (self.folder / path).iterdir()]
        return [await self._info(name) for name in names]

    async def _info(self, path: str, **_: object) -> dict[str, Any]:
        found = self.folder / path
        return {"name": path, "size": found.stat().st_size, "type": "directory" if found.is_dir() else "file"}

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        data = (self.folder / path).read_bytes()
        if not path.endswith(".safetensors"):
            return data[start:end]
        Store.reading += 1
        Store.most = max(Store.most, Store.reading)
        for _ in range(2000):
            if Store.most >= self.wait_for:
                break
            await asyncio.sleep(0.01)
        Store.reading -= 1
        return data[start : len(data) - self.lost if end == len(data) else end]


def test_an_object_store_is_read_in_pieces_at_the_same_time(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("store", Store, clobber=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Store, "folder", source.parent)
    monkeypatch.setattr(Store, "wait_for", urls.READERS)
    monkeypatch.setattr(Store, "most", 0)
    size = (source / "model.safetensors").stat().st_size
    monkeypatch.setattr(urls, "FETCHED_BYTES", size // 50)
    assert contents("store://source") == contents(source)
    assert Store.most == urls.READERS == 16

    monkeypatch.setattr(Store, "lost", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another cache"))
    with pytest.raises(CheckpointError, match=f"has {size} bytes, but only {size - 1} could be read"):
        open_folder("store://source")
    assert not list((tmp_path / "another cache").rglob("*.safetensors"))
