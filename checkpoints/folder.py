"""A model folder, wherever it is: on disk, behind a URL that fsspec reads, or on the Hugging Face Hub."""

from __future__ import annotations

import atexit
import fnmatch
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.storage import STORAGE_SCHEMES, Storage

logger = logging.getLogger("diffumesh")

DEMO = Path(__file__).parent / "demo"

# Where the config.json of a checkpoint that was quantized when it was converted says so.
QUANTIZATION_KEY = "diffumesh_quantization"

# Of a file beside the weights. Nothing larger is read, whatever its name.
MAX_SIDE_FILE_BYTES = 64 << 20

# The folder that a conversion gives to Orbax.
WEIGHTS_FOLDER = "weights"
# Where Orbax's arrays may be within a folder: as a conversion saves them, or as somebody saved them with Orbax. Orbax
# calls a tree that is saved by itself "state".
_ARRAY_FOLDERS = (f"{WEIGHTS_FOLDER}/state", WEIGHTS_FOLDER, "state/state", "state", "")
# Orbax's description of a tree of arrays, in the folder of the arrays.
_TREE_FILE = "_METADATA"
# Ends the name of a folder in which a checkpoint is being made; whatever is in it, it is not one yet.
STAGING_SUFFIX = ".converting"

# What belongs to a checkpoint beside its weights: configuration, tokenizer, licence. Never code, never pickles.
SIDE_FILES = ("*.json", "*.jinja", "merges.txt", "LICENSE*")
# The one folder beside them that transformers reads.
TEMPLATES_FOLDER = "additional_chat_templates"
_FETCHED = (*SIDE_FILES, "*.safetensors")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f'"{next(key for key in keys if keys.count(key) > 1)}" stands twice')
    return found


def is_side_file(name: str) -> bool:
    """Whether a file, by its path within a folder, is one of those that belong to a checkpoint beside its weights."""
    folder, _, file = name.rpartition("/")
    if folder == TEMPLATES_FOLDER:
        return file.endswith(".jinja")
    return not folder and any(fnmatch.fnmatchcase(file, pattern) for pattern in SIDE_FILES)


@dataclass(frozen=True)
class CheckpointFolder:
    """A model folder.

    Attributes:
      path: the folder on this machine.
      name: what the user called it, for messages and for telling a checkpoint's kind.
      remote: where an Orbax checkpoint is, if not in ``path``, which then has its small files.
      remote_arrays: the folder of Orbax's arrays within ``remote``.
    """

    path: Path
    name: str
    remote: Storage | None = None
    remote_arrays: str = _ARRAY_FOLDERS[0]

    @property
    def is_orbax(self) -> bool:
        """Whether the weights are Orbax's, finished or not; a Hugging Face folder holds safetensors instead."""
        return (
            self.remote is not None
            or (self.path / WEIGHTS_FOLDER).is_dir()
            or _find_arrays(lambda name: (self.path / name).is_file()) is not None
        )

    @property
    def arrays_folder(self) -> str:
        """The folder of an Orbax checkpoint's arrays, by its path within this folder; empty for this folder."""
        if self.remote is not None:
            return self.remote_arrays
        found = _find_arrays(lambda name: (self.path / name).is_file())
        return _ARRAY_FOLDERS[0] if found is None else found

    @property
    def storage(self) -> Storage:
        """The folder itself, wherever it is."""
        return self.remote or Storage.at(self.path)

    @property
    def arrays(self) -> Storage:
        """The folder of an Orbax checkpoint's arrays."""
        return self.storage.child(self.arrays_folder)

    def is_weight_file(self, name: str) -> bool:
        """Whether a file, by its path within the folder, is one of those that Orbax wrote for the weights."""
        top = self.arrays_folder.partition("/")[0]
        return self.is_orbax and (name.startswith(f"{top}/") if top else not is_side_file(name))

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return str(self.path) if self.remote is None else self.remote.place

    def names(self) -> list[str]:
        """Every file, those of folders within included, by its path with slashes; sorted.

        Raises:
          CheckpointError: the folder cannot be listed.
        """
        if self.remote is not None:
            return self.remote.names()
        found = []
        for parent, folders, files in os.walk(self.path, onerror=_cannot_list):
            # A link to a folder is walked into by nobody here, and counts as what it is: one entry.
            links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
            found += [Path(parent, name).relative_to(self.path).as_posix() for name in (*files, *links)]
        return sorted(found)

    def side_files(self) -> list[str]:
        """The files beside the weights, by name: configuration, tokenizer, chat templates, licence.

        Raises:
          CheckpointError: one is a link that leaves the folder, or is too large.
        """
        templates = self.path / TEMPLATES_FOLDER
        paths = [*self.path.iterdir(), *(templates.iterdir() if templates.is_dir() else ())]
        names = sorted(path.relative_to(self.path).as_posix() for path in paths if path.is_file())
        found = [name for name in names if is_side_file(name)]
        for name in found:
            self._check_side_file(name)
        return found

    def read_bytes(self, name: str) -> bytes:
        """A side file's bytes.

        Raises:
          CheckpointError: it cannot be read, is too large, or is a link that leaves the folder.
        """
        self._check_side_file(name)
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{self.path / name}: cannot be read ({error.strerror or error})") from error

    def _check_side_file(self, name: str) -> None:
        """Check that a file is one of this folder, and of a size that can be read.

        What it says may be copied, printed or served: a link to a file elsewhere would hand that on. A snapshot of the
        Hub's cache consists of links to the blobs beside it.
        """
        path = self.path / name
        try:
            real, root, size = path.resolve(strict=True), self.path.resolve(), path.stat().st_size
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
        if not (real.is_relative_to(root) or real.is_relative_to(blobs)):
            raise CheckpointError(f"{path}: a link to {real}, which is outside of the folder")
        if size > MAX_SIDE_FILE_BYTES:
            raise CheckpointError(f"{path}: {size} bytes are too many for a {Path(name).name}")

    def read_json(self, file: str) -> dict[str, Any] | None:
        """A JSON object from the folder, None where there is no such file.

        Raises:
          CheckpointError: the file cannot be read, is too large, not UTF-8 JSON, not an object, or has a key twice.
        """
        path = self.path / file
        if not path.is_file():
            return None
        try:
            value = json.loads(self.read_bytes(file).decode("utf-8"), object_pairs_hook=_reject_duplicates)
        except CheckpointError:
            raise
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a readable JSON file ({error!s:.300})") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
        return value

    @property
    def config(self) -> dict[str, Any]:
        """The parsed ``config.json``.

        Raises:
          CheckpointError: there is none, or it cannot be read.
        """
        config = self.read_json("config.json")
        if config is None:
            raise CheckpointError(f"{self.path}: there is no config.json; a Hugging Face model folder has one")
        return config

    @property
    def quantization(self) -> str:
        """How the weights are stored: ``none``, or as :data:`QUANTIZATION_KEY` of the config says.

        Raises:
          CheckpointError: it says something that is no text.
        """
        said = self.config.get(QUANTIZATION_KEY, "none")
        if not isinstance(said, str):
            raise CheckpointError(f"{self.place}: {QUANTIZATION_KEY} of config.json is {said!r}; expected a text")
        return said

    @property
    def generation_config(self) -> dict[str, Any]:
        """The parsed ``generation_config.json``, empty where there is none."""
        return self.read_json("generation_config.json") or {}


def _find_arrays(has: Callable[[str], bool]) -> str | None:
    """The folder of Orbax's arrays, by what tells whether a file exists; None where there is none."""
    return next((name for name in _ARRAY_FOLDERS if has(f"{name}/{_TREE_FILE}".lstrip("/"))), None)


def _cannot_list(error: OSError) -> None:
    raise CheckpointError(f"{error.filename}: cannot be listed ({error.strerror or error})") from error


def open_folder(
    path: str | Path | CheckpointFolder,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    weights: bool = True,
) -> CheckpointFolder:
    """Find a model folder and bring it to this machine where it is not here already.

    Args:
      path: a folder that is open already, a local one, a URL (``gs://bucket/folder``), or a Hub name
        (``apple/DiffuCoder-7B-cpGRPO``). A local folder of that name wins over the Hub. Of a canonical checkpoint
        behind a URL only the small files are fetched, its tensors are read where they are; any other folder is fetched
        through fsspec, with the libraries it needs.
      revision: branch, tag or commit on the Hub.
      token: Hub token; default is the one huggingface_hub finds.
      offline: use only what the Hub's local cache already holds.
      weights: whether weights are fetched too; without them only the small files beside them are sure to be there.

    Raises:
      CheckpointError: there is no such folder, or it cannot be fetched.
    """
    if isinstance(path, CheckpointFolder):
        return path
    text, wanted = str(path), _FETCHED if weights else SIDE_FILES
    if "://" in text:
        return _open_remote_orbax(text) or CheckpointFolder(_fetch_url(text, wanted), text)
    try:
        local = Path(path).expanduser()
        if local.is_dir():
            return CheckpointFolder(local, text)
        if local.exists():
            raise CheckpointError(f"{text} is a file; a checkpoint is a folder with config.json and *.safetensors")
    except (OSError, RuntimeError) as error:  # a name that no file can have, or a user that there is not
        raise CheckpointError(f"{text[:200]}: not a folder ({error})") from error
    if not _HUB_NAME.fullmatch(text):
        raise CheckpointError(f"{text}: no such folder")
    return CheckpointFolder(_fetch_hub(text, wanted, revision, token, offline), text)


def _fetch_hub(name: str, patterns: Sequence[str], revision: str | None, token: str | None, offline: bool) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, token=token, local_files_only=offline, allow_patterns=list(patterns)
            )
        )
    except Exception as error:  # the library raises many kinds; each means that the model is not to be had
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{name}: no such folder here, and the Hugging Face Hub did not give it ({reason})"
        ) from error


def _open_remote_orbax(url: str) -> CheckpointFolder | None:
    """Open the Orbax checkpoint behind a URL; None where there is none."""
    if url.partition("://")[0] not in STORAGE_SCHEMES:
        return None
    storage = Storage.at(url)
    names = storage.names()
    arrays = _find_arrays(set(names).__contains__)
    if arrays is None and not any(name.startswith(f"{WEIGHTS_FOLDER}/") for name in names):
        return None
    files = {name: storage.read(name) or b"" for name in names if is_side_file(name)}
    identity = [url, *(f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in files.items())]
    cache = _cache_folder("\n".join(identity))
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, data in files.items():
        partial = cache / f"{name}.{os.getpid()}.partial"
        partial.parent.mkdir(exist_ok=True)
        partial.write_bytes(data)
        partial.replace(cache / name)
    return CheckpointFolder(cache, url, storage, _ARRAY_FOLDERS[0] if arrays is None else arrays)


def _fetch_url(url: str, patterns: Sequence[str]) -> Path:
    import fsspec
    from fsspec.core import url_to_fs

    try:
        system, root = url_to_fs(url)
        if not system.isdir(root):
            raise CheckpointError(f"{url}: no such folder")
        remotes = {remote.rstrip("/").rsplit("/", 1)[-1]: remote for remote in system.ls(root, detail=False)}
        wanted = {
            name: remote
            for name, remote in sorted(remotes.items())
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        }
        # The cache is of these very files: a change at the source, of the same size too, is another folder here.
        cache = _cache_folder("\n".join([url, *(f"{name} {system.ukey(remote)}" for name, remote in wanted.items())]))
        for name, remote in wanted.items():
            target = cache / name
            if not target.is_file():
                if is_side_file(name) and (size := system.size(remote) or 0) > MAX_SIDE_FILE_BYTES:
                    raise CheckpointError(f"{remote}: {size} bytes are too many for a {name}")
                partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
                system.get_file(remote, str(partial))
                partial.replace(target)
        return cache
    except (OSError, ImportError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{url}: cannot be read ({error}; fsspec {fsspec.__version__})") from error


def _cache_folder(identity: str) -> Path:
    """A private folder for copies of small files; a temporary one of this process where the user's cache has none."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = base / "diffumesh" / "checkpoints" / hashlib.sha256(identity.encode()).hexdigest()[:32]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        why: object = "it may not be written"
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        why = error
    logger.warning("no cache folder (%s): small files of the checkpoint are fetched anew in every run", why)
    temporary = Path(tempfile.mkdtemp(prefix="diffumesh-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary
