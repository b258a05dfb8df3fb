"""Model folders: their files, their configuration, and where Orbax's arrays are in them."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from checkpoints.errors import CheckpointError
from checkpoints.local_files import parse_json_object
from checkpoints.storage import Storage

DEMO = Path(__file__).parent / "demo"

# Key of config.json that says how a conversion quantized the weights.
QUANTIZATION_KEY = "diffumesh_quantization"

# Limit for files beside the weights. Larger files are not read.
MAX_SIDE_FILE_BYTES = 64 << 20

# The folder that a conversion gives to Orbax.
WEIGHTS_FOLDER = "weights"
# Where Orbax's arrays may be within a folder: the first is where a conversion saves them, the others are where users of
# Orbax may have saved them. Orbax calls a tree that is saved by itself "state".
ARRAY_FOLDERS = (f"{WEIGHTS_FOLDER}/state", WEIGHTS_FOLDER, "state/state", "state", "")
# Orbax's description of a tree of arrays, in the folder of the arrays.
TREE_FILE = "_METADATA"
# Suffix of the folder in which a conversion writes. Such a folder is never taken for a checkpoint.
STAGING_SUFFIX = ".diffumesh-converting"
# Marks an unfinished conversion, and contains a text that identifies it.
MARK_FILE = "diffumesh.converting"

# Files that belong to a checkpoint beside its weights: configuration, tokenizer, licence. Code and pickles do not.
SIDE_FILES = ("*.json", "*.jinja", "merges.txt", "LICENSE*")
# The only subfolder that transformers reads.
TEMPLATES_FOLDER = "additional_chat_templates"
# Beginnings of the names of files that macOS and NFS leave in any folder: nobody's data, and read by no program.
_LEFT_FILES = (".DS_Store", "._", ".nfs")
# Schemes of URLs of folders on this machine.
_LOCAL_SCHEMES = ("file", "local")


def is_side_file(name: str) -> bool:
    """Whether a file, given its path in the folder, belongs to a checkpoint beside its weights."""
    folder, _, file = name.rpartition("/")
    if folder == TEMPLATES_FOLDER:
        return file.endswith(".jinja")
    return not folder and any(fnmatch.fnmatchcase(file, pattern) for pattern in SIDE_FILES)


def is_safetensors(name: str) -> bool:
    """Whether a file, given its path in the folder, may contain weights of a Hugging Face folder."""
    return "/" not in name and name.endswith(".safetensors")


def is_left_by_system(name: str) -> bool:
    """Whether a file, given its path in the folder, is one that an operating system leaves in any folder."""
    return name.rpartition("/")[2].startswith(_LEFT_FILES) and not is_side_file(name)


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
            or find_arrays(lambda name: (self.path / name).is_file()) is not None
        )

    @property
    def arrays_folder(self) -> str:
        """Relative path of the folder of an Orbax checkpoint's arrays; empty if it is this folder."""
        if self.remote is not None:
            return self.remote_arrays
        found = find_arrays(lambda name: (self.path / name).is_file())
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
        """The names by which published settings are chosen, with spaces between them.

        They are the last parts of the folder's path, URL or Hub name, of the path that it is a link to, and of the name
        in ``config.json``. Names of folders above say nothing about the model, except in the Hub's cache.
        """
        typed = Path(os.path.abspath(Path(self.name).expanduser()))
        names = (_model_name(typed), _model_name(typed.resolve()), self.configured_name)
        return " ".join(dict.fromkeys(filter(None, names)))

    @property
    def configured_name(self) -> str:
        """The last part of the model's name in ``config.json``; empty if it has none."""
        stored = self.config.get("_name_or_path")
        return _model_name(Path(stored)) if isinstance(stored, str) else ""

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


def _model_name(path: Path) -> str:
    """Return a path's last part, or the model's name for a snapshot in the Hub's cache."""
    *_, model, snapshots, _ = ("", "", "", *path.parts)
    return model.rpartition("--")[2] if snapshots == "snapshots" and model.startswith("models--") else path.name


def find_arrays(has: Callable[[str], bool]) -> str | None:
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
