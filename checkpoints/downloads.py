"""Opens model folders: on this machine, at a URL, or on the Hugging Face Hub, from which they are downloaded."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.folder import (
    ARRAY_FOLDERS,
    MAX_SIDE_FILE_BYTES,
    SIDE_FILES,
    TEMPLATES_FOLDER,
    WEIGHTS_FOLDER,
    CheckpointFolder,
    find_arrays,
    is_safetensors,
    is_side_file,
    local_path,
)
from checkpoints.local_files import remove_abandoned, replace_file
from checkpoints.storage import STORAGE_SCHEMES, Storage
from checkpoints.urls import file_versions, read_file

logger = logging.getLogger("diffumesh")

_MAX_SIDE_FILES = 256
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def open_folder(
    path: str | Path | CheckpointFolder,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    weights: bool = True,
    lora: str | Path | CheckpointFolder | None = None,
) -> CheckpointFolder:
    """Open a model folder, and download it if it is not on this machine.

    Args:
      path: a local folder or its ``file://`` URL, another URL (``gs://bucket/folder``), a name on the Hub
        (``apple/DiffuCoder-7B-cpGRPO``), or a folder that is already open, which is returned. A local folder takes
        precedence over the Hub. For an Orbax checkpoint at a URL, only configuration, tokenizer and licence are
        downloaded; its tensors are read from the URL. Other folders are downloaded with fsspec, which may need a
        library for the scheme.
      revision: branch, tag or commit on the Hub; an error for folders, open or not, and URLs, which have none.
      token: Hub token; default is the one that huggingface_hub finds.
      offline: use only this machine: its folders and the Hub's local cache.
      weights: whether to download the weights; otherwise only configuration, tokenizer and licence are guaranteed.
      lora: the folder, URL or Hub name of a LoRA adapter to merge into the weights. With None, a folder that is already
        open keeps its adapter, and others get none. From the Hub, the adapter's newest revision is used.

    Raises:
      CheckpointError: there is no such folder, it has no revisions, or it cannot be downloaded.
    """
    if isinstance(path, CheckpointFolder):
        if revision is not None:
            raise CheckpointError(f"{path.place}: revision={revision} needs a Hub name; this folder is already open")
        folder = path
    else:
        folder = _open(path, weights, revision, token, offline)
    if lora is None:
        return folder
    return replace(folder, lora=open_folder(lora, token=token, offline=offline, weights=weights))


def _open(path: str | Path, weights: bool, revision: str | None, token: str | None, offline: bool) -> CheckpointFolder:
    text = str(path)
    try:
        local = local_path(path)
        if revision is not None and (local is None or local.exists()):
            raise CheckpointError(f"{text}: revision={revision} needs a Hub name; folders and URLs have no revisions")
        if local is None and offline:
            raise CheckpointError(f"{text}: with offline, a checkpoint is a folder here or in the Hub's local cache")
        if local is None:
            return _open_remote_orbax(text) or CheckpointFolder(_fetch_url(text, weights), text, fetched=True)
        if local.is_dir():
            return CheckpointFolder(local, text)
        if local.exists():
            raise CheckpointError(f"{text} is a file; a checkpoint is a folder with config.json and *.safetensors")
    except (OSError, RuntimeError) as error:  # an invalid name, or an unknown user
        raise CheckpointError(f"{text[:200]}: not a folder ({error})") from error
    name = text.removesuffix("/")  # as a shell completes it, where there was such a folder
    if not _HUB_NAME.fullmatch(name):
        form = "a name on the Hub has the form owner/name, such as openai-community/gpt2"
        raise CheckpointError(f"{text}: no such folder" + ("" if "/" in name else f"; {form}"))
    return CheckpointFolder(_fetch_hub(name, weights, revision, token, offline), name, fetched=True)


def _fetch_hub(name: str, weights: bool, revision: str | None, token: str | None, offline: bool) -> Path:
    import huggingface_hub

    patterns = [*SIDE_FILES, f"{TEMPLATES_FOLDER}/*.jinja", *(["*.safetensors"] if weights else [])]
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                token=token,
                local_files_only=offline,
                allow_patterns=patterns,
                ignore_patterns=["*/*.json", "*/*.safetensors"],  # `*` also matches slashes
            )
        )
    except Exception as error:  # the library raises many exception types
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{name}: no such folder here, and it cannot be downloaded from the Hugging Face Hub ({reason})"
        ) from error


def _open_remote_orbax(url: str) -> CheckpointFolder | None:
    """Open the Orbax checkpoint at a URL; None if there is none."""
    if url.partition("://")[0] not in STORAGE_SCHEMES:
        return None
    storage = Storage.at(url)
    names = storage.names()
    arrays = find_arrays(set(names).__contains__)
    if arrays is None and not any(name.startswith(f"{WEIGHTS_FOLDER}/") for name in names):
        return None
    wanted = [name for name in names if is_side_file(name)]
    if len(wanted) > _MAX_SIDE_FILES:
        raise CheckpointError(f"{url} has {len(wanted)} small files; at most {_MAX_SIDE_FILES} are read")
    files = {name: storage.read(name, MAX_SIDE_FILE_BYTES) or b"" for name in wanted}
    identity = [url, *(f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in files.items())]
    cache = _cache_folder("\n".join(identity))
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, data in files.items():
        (cache / name).parent.mkdir(exist_ok=True)
        replace_file(cache / name, [data])
    return CheckpointFolder(cache, url, storage, ARRAY_FOLDERS[0] if arrays is None else arrays, fetched=True)


def _fetch_url(url: str, weights: bool) -> Path:
    import fsspec
    from fsspec.core import url_to_fs

    try:
        system, root = url_to_fs(url)
        if not system.isdir(root):
            raise CheckpointError(f"{url}: no such folder")
        files = _list_url(system, root)
        wanted = {
            name: files[name] for name in sorted(files) if is_side_file(name) or (weights and is_safetensors(name))
        }
        # A change at the source, even of the same size, leads to another folder here.
        before = file_versions(system, wanted)
        cache, fetched = _cache_folder("\n".join([url, *before])), []
        remove_abandoned(cache)
        for name, info in wanted.items():
            target = cache / name
            if not target.is_file():
                target.parent.mkdir(exist_ok=True)
                replace_file(target, read_file(system, info, MAX_SIDE_FILE_BYTES if is_side_file(name) else None))
                fetched.append(target)
        system.invalidate_cache()
        if fetched and file_versions(system, wanted) != before:
            for target in fetched:
                target.unlink(missing_ok=True)
            raise CheckpointError(f"{url}: files have changed during the download; run the command again")
        return cache
    except CheckpointError:
        raise
    except Exception as error:  # fsspec's file systems raise many exception types
        raise CheckpointError(f"{url}: cannot be read ({error}; fsspec {fsspec.__version__})") from error


def _list_url(system: Any, root: str) -> dict[str, dict[str, Any]]:
    """List the files of a folder and of its chat templates: fsspec's information by path in the folder.

    Raises:
      CheckpointError: one of them is a link, which could lead out of the folder.
    """
    found: dict[str, dict[str, Any]] = {}
    for entry in system.ls(root, detail=True):
        parent, _, name = entry["name"].rstrip("/").rpartition("/")
        if "http" in system.protocol and parent != root.rstrip("/"):
            continue  # a page may also have links to files in subfolders
        entries = {name: entry}
        if name == TEMPLATES_FOLDER and entry["type"] == "directory":
            inner = [] if entry.get("islink") else system.ls(entry["name"], detail=True)
            entries |= {f"{name}/{one['name'].rsplit('/', 1)[-1]}": one for one in inner}
        found |= entries
    links = [name for name, entry in found.items() if entry.get("islink")]
    if links:
        raise CheckpointError(f"{root}: {links[0]:.200} is a link; name the folder by its path, without a URL")
    return {name: entry for name, entry in found.items() if entry["type"] != "directory"}


def _cache_folder(identity: str) -> Path:
    """Make a private folder for downloaded files: in the user's cache, or else a temporary one of this process."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = base / "diffumesh" / "checkpoints" / hashlib.sha256(identity.encode()).hexdigest()[:32]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        why: object = "this user may not write there"
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        why = error
    logger.warning("no cache folder (%s): files of the checkpoint are downloaded again in every run", why)
    temporary = Path(tempfile.mkdtemp(prefix="diffumesh-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary
