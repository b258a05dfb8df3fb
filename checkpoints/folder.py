"""Model folders on a disk, at a URL, or on the Hugging Face Hub."""

from __future__ import annotations

import atexit
import fnmatch
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from checkpoints.errors import CheckpointError
from checkpoints.local_files import parse_json_object, remove_abandoned, replace_file
from checkpoints.storage import STORAGE_SCHEMES, Storage
from checkpoints.urls import file_versions, read_file

logger = logging.getLogger("diffumesh")

DEMO = Path(__file__).parent / "demo"

# Key of config.json that says how a conversion quantized the weights.
QUANTIZATION_KEY = "diffumesh_quantization"

# Limit for files beside the weights. Larger files are not read.
MAX_SIDE_FILE_BYTES = 64 << 20
_MAX_SIDE_FILES = 256

# The folder that a conversion gives to Orbax.
WEIGHTS_FOLDER = "weights"
# Where Orbax's arrays may be within a folder: the first is where a conversion saves them, the others are where users of
# Orbax may have saved them. Orbax calls a tree that is saved by itself "state".
ARRAY_FOLDERS = (f"{WEIGHTS_FOLDER}/state", WEIGHTS_FOLDER, "state/state", "state", "")
# Orbax's description of a tree of arrays, in the folder of the arrays.
TREE_FILE = "_METADATA"
# Suffix of the folder in which a conversion writes. Such a folder is never taken for a checkpoint.
STAGING_SUFFIX = ".diffumesh-converting"

# Files that belong to a checkpoint beside its weights: configuration, tokenizer, licence. Code and pickles do not.
SIDE_FILES = ("*.json", "*.jinja", "merges.txt", "LICENSE*")
# The only subfolder that transformers reads.
TEMPLATES_FOLDER = "additional_chat_templates"
# Schemes of URLs of folders on this machine.
_LOCAL_SCHEMES = ("file", "local")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_side_file(name: str) -> bool:
    """Whether a file, given its path in the folder, belongs to a checkpoint beside its weights."""
    folder, _, file = name.rpartition("/")
    if folder == TEMPLATES_FOLDER:
        return file.endswith(".jinja")
    return not folder and any(fnmatch.fnmatchcase(file, pattern) for pattern in SIDE_FILES)


def is_safetensors(name: str) -> bool:
    """Whether a file, given its path in the folder, may contain weights of a Hugging Face folder."""
    return "/" not in name and name.endswith(".safetensors")


@dataclass(frozen=True)
class CheckpointFolder:
    """A model folder.

    Attributes:
      path: the folder on this machine.
      name: the name that the user gave, for messages.
      remote: the location of an Orbax checkpoint that is not on this machine; ``path`` then has its small files.
      remote_arrays: the folder of Orbax's arrays within ``remote``.
      lora: the folder of a LoRA adapter that is merged into the weights while they are read; see
        :mod:`checkpoints.lora`.
      fetched: whether ``path`` is a download, which has only the files that a reader uses.
    """

    path: Path
    name: str
    remote: Storage | None = None
    remote_arrays: str = ARRAY_FOLDERS[0]
    lora: CheckpointFolder | None = None
    fetched: bool = False

    @property
    def is_orbax(self) -> bool:
        """Whether Orbax wrote the weights, completely or not; a Hugging Face folder has safetensors instead."""
        return (
            self.remote is not None
            or ((self.path / WEIGHTS_FOLDER).is_dir() and not any(map(is_safetensors, os.listdir(self.path))))
            or _find_arrays(lambda name: (self.path / name).is_file()) is not None
        )

    @property
    def arrays_folder(self) -> str:
        """Relative path of the folder of an Orbax checkpoint's arrays; empty if it is this folder."""
        if self.remote is not None:
            return self.remote_arrays
        found = _find_arrays(lambda name: (self.path / name).is_file())
        return ARRAY_FOLDERS[0] if found is None else found

    @property
    def storage(self) -> Storage:
        """This folder as storage, on this machine or remote."""
        return self.remote or Storage.at(self.path)

    @property
    def arrays(self) -> Storage:
        """The folder with an Orbax checkpoint's arrays, as a :class:`Storage`."""
        return self.storage.child(self.arrays_folder)

    def is_weight_file(self, name: str) -> bool:
        """Whether a file, given its path in the folder, is one of those in which Orbax stored the weights."""
        top = self.arrays_folder.partition("/")[0]
        return self.is_orbax and (name.startswith(f"{top}/") if top else not is_side_file(name))

    def must_have(self, name: str) -> bool:
        """Whether ``path`` must have this file of the folder. A download leaves out some files, such as code."""
        return not self.fetched or is_side_file(name) or (self.remote is None and is_safetensors(name))

    @property
    def place(self) -> str:
        """Path or URL, for messages."""
        return str(self.path) if self.remote is None else self.remote.place

    def names(self) -> list[str]:
        """List all files, also those in subfolders, by sorted relative path with slashes.

        Raises:
          CheckpointError: the folder cannot be listed.
        """
        if self.remote is not None:
            return self.remote.names()
        found = []
        for parent, folders, files in os.walk(self.path, onerror=_cannot_list):
            # A link to a folder is not followed, and counts as one entry.
            links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
            found += [Path(parent, name).relative_to(self.path).as_posix() for name in (*files, *links)]
        return sorted(found)

    def side_files(self) -> list[str]:
        """List the files beside the weights, by name: configuration, tokenizer, chat templates, licence.

        Raises:
          CheckpointError: a file is too large, or a link to a file outside of the folder.
        """
        templates = self.path / TEMPLATES_FOLDER
        paths = [*self.path.iterdir(), *(templates.iterdir() if templates.is_dir() else ())]
        names = sorted(path.relative_to(self.path).as_posix() for path in paths if path.is_file())
        found = [name for name in names if is_side_file(name)]
        for name in found:
            self._check_side_file(name)
        return found

    def read_bytes(self, name: str) -> bytes:
        """Read a file beside the weights.

        Raises:
          CheckpointError: it cannot be read, is too large, or is a link to a file outside of the folder.
        """
        self._check_side_file(name)
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{self.path / name}: cannot be read ({error.strerror or error})") from error

    def check_file(self, name: str) -> int:
        """Check that a file, given its path in the folder, is a regular file of this folder; return its size in bytes.

        Contents may be copied, printed or served, so a link must not reach a file elsewhere. Links in a snapshot of the
        Hub's cache lead to the blobs of that cache. Reading a pipe or a device may never end.

        Raises:
          CheckpointError: it cannot be read, is not a regular file, or is a link to a file outside of the folder.
        """
        path = self.path / name
        try:
            real, root, status = path.resolve(strict=True), self.path.resolve(), path.stat()
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        if not any(real.is_relative_to(allowed) for allowed in (root, *_hub_blobs(root))):
            raise CheckpointError(f"{path}: a link to {real}, which is outside of the folder; expected a copy of it")
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file; expected a file with contents, or a link to one")
        return status.st_size

    def _check_side_file(self, name: str) -> None:
        """Check that a file is in this folder and not too large."""
        size = self.check_file(name)
        if size > MAX_SIDE_FILE_BYTES:
            raise CheckpointError(f"{self.path / name} has {size} bytes; the limit is {MAX_SIDE_FILE_BYTES}")

    def read_json(self, file: str) -> dict[str, Any] | None:
        """Read a JSON object from a file; None if there is no such file.

        Raises:
          CheckpointError: the file cannot be read, is too large, not UTF-8 JSON, not an object, or has a key twice.
        """
        path = self.path / file
        if not path.is_file():
            return None
        try:
            return parse_json_object(self.read_bytes(file))
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{path}: not a readable JSON file ({error!s:.300})") from error

    @property
    def config(self) -> dict[str, Any]:
        """The parsed ``config.json``.

        Raises:
          CheckpointError: the file does not exist or cannot be read.
        """
        config = self.read_json("config.json")
        if config is None:
            raise CheckpointError(f"{self.path}: there is no config.json; a Hugging Face model folder has one")
        return config

    @property
    def model_names(self) -> str:
        """The folder's name and the model's name in ``config.json``, by which published settings are chosen."""
        return f"{self.name} {self.config.get('_name_or_path', '')}"

    @property
    def quantization(self) -> str:
        """Quantization of the stored weights: :data:`QUANTIZATION_KEY` of the configuration, or ``none``.

        Raises:
          CheckpointError: the value is not a string.
        """
        said = self.config.get(QUANTIZATION_KEY, "none")
        if not isinstance(said, str):
            raise CheckpointError(f"{self.place}: {QUANTIZATION_KEY} of config.json is {said!r}; expected a string")
        return said

    @property
    def generation_config(self) -> dict[str, Any]:
        """The parsed ``generation_config.json``; empty if there is none."""
        return self.read_json("generation_config.json") or {}


def _find_arrays(has: Callable[[str], bool]) -> str | None:
    """Find the folder of Orbax's arrays; None if there is none. ``has`` tells whether a file exists."""
    return next((name for name in ARRAY_FOLDERS if has(f"{name}/{TREE_FILE}".lstrip("/"))), None)


def _hub_blobs(folder: Path) -> Iterator[Path]:
    """Yield the folders of blobs that a folder's links may lead to, if it is in a snapshot of the Hub's cache."""
    for parent in folder.parents:
        if parent.name == "snapshots":
            repository = parent.parent
            yield repository / "blobs"
            if repository.name.startswith("models--"):
                yield repository.parent / "blobs"  # the library's store of large files that repositories share


def _cannot_list(error: OSError) -> None:
    raise CheckpointError(f"{error.filename}: cannot be listed ({error.strerror or error})") from error


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
      revision: branch, tag or commit on the Hub.
      token: Hub token; default is the one that huggingface_hub finds.
      offline: use only the Hub's local cache.
      weights: whether to download the weights; otherwise only configuration, tokenizer and licence are guaranteed.
      lora: the folder, URL or Hub name of a LoRA adapter to merge into the weights. With None, a folder that is already
        open keeps its adapter, and others get none. From the Hub, the adapter's newest revision is used.

    Raises:
      CheckpointError: there is no such folder, or it cannot be downloaded.
    """
    folder = path if isinstance(path, CheckpointFolder) else _open(path, weights, revision, token, offline)
    if lora is None:
        return folder
    return replace(folder, lora=open_folder(lora, token=token, offline=offline, weights=weights))


def _open(path: str | Path, weights: bool, revision: str | None, token: str | None, offline: bool) -> CheckpointFolder:
    text = str(path)
    try:
        local = local_path(path)
        if local is None:
            return _open_remote_orbax(text) or CheckpointFolder(_fetch_url(text, weights), text, fetched=True)
        if local.is_dir():
            return CheckpointFolder(local, text)
        if local.exists():
            raise CheckpointError(f"{text} is a file; a checkpoint is a folder with config.json and *.safetensors")
    except (OSError, RuntimeError) as error:  # an invalid name, or an unknown user
        raise CheckpointError(f"{text[:200]}: not a folder ({error})") from error
    if not _HUB_NAME.fullmatch(text):
        raise CheckpointError(f"{text}: no such folder")
    return CheckpointFolder(_fetch_hub(text, weights, revision, token, offline), text, fetched=True)


def local_path(place: str | Path) -> Path | None:
    """Return the path on this machine that a path or a ``file://`` URL names; None for other URLs.

    Raises:
      CheckpointError: the URL names a path of another machine, or none.
      RuntimeError: the path contains an unknown user's home.
    """
    scheme, is_url, rest = str(place).partition("://")
    if not is_url:
        return Path(place).expanduser()
    if scheme not in _LOCAL_SCHEMES:
        return None
    path = Path(unquote(rest.removeprefix("localhost")))
    if not path.is_absolute() or "\0" in str(path):
        raise CheckpointError(f"{place}: not a folder of this machine; expected for example file:///data/model")
    return path


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
    arrays = _find_arrays(set(names).__contains__)
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
