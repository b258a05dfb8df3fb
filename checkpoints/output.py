"""Outputs of conversions: folders that appear complete, in one step.

On a disk, a conversion writes into a folder of another name, which is exchanged with the old checkpoint when it is
complete: a reader finds the old or the new one at any moment. On systems that cannot exchange names, neither
exists for a moment between two renames. If foreign files appear in the old one meanwhile, both are kept. An object
store cannot rename: there the manifest, written last, completes the checkpoint, and the manifest of the old one
is deleted first. A marker file distinguishes an unfinished conversion, which may be cleaned up; on a disk, a running
conversion holds a lock on it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib.parse import unquote

from checkpoints.errors import CheckpointError
from checkpoints.exchange import exchange
from checkpoints.folder import MARK_FILE, MAX_SIDE_FILE_BYTES, STAGING_SUFFIX, TREE_FILE, CheckpointFolder, local_path
from checkpoints.local_files import lock, sync
from checkpoints.manifest import MANIFEST_FILE, Manifest
from checkpoints.orbax import ARRAY_FILES, NEW_INTERFACE_FILE
from checkpoints.replacement import change_of, check_replaced
from checkpoints.storage import Storage

# Names of checkpoints that are kept because files appeared in the old one; no conversion removes them.
_NEW_SUFFIX, _OLD_SUFFIX = ".diffumesh-new", ".diffumesh-old"
# Other names of the schemes of object stores, with which fsspec reads.
_SAME_SCHEMES = {"gcs": "gs", "s3a": "s3"}


@dataclass
class FolderOutput:
    """A folder on a disk, written in one step.

    Attributes:
      path: its path when it is complete.
    """

    path: Path
    _mark: IO[bytes] | None = field(default=None, init=False, repr=False, compare=False)
    _replaces: bool = field(default=False, init=False, repr=False, compare=False)

    @property
    def place(self) -> str:
        """Its path, for messages."""
        return str(self.path)

    @property
    def staging(self) -> Path:
        """The folder to write into until the checkpoint is complete. It is never taken for a checkpoint."""
        return self.path.with_name(self.path.name + STAGING_SUFFIX)

    @property
    def storage(self) -> Storage:
        """The storage to write into between :meth:`begin` and :meth:`finish`."""
        return Storage.at(self.staging)

    @property
    def _set_aside(self) -> Path:
        """Path of the old checkpoint between two renames, on systems that cannot exchange names."""
        return self.path.with_name(self.path.name + ".diffumesh-replaced")

    @property
    def _removing(self) -> Path:
        """Path of the old checkpoint while it is deleted. It is never restored."""
        return self.path.with_name(self.path.name + ".diffumesh-removing")

    def prepare(self, overwrite: bool) -> list[str]:
        """Check that the output can be written, and clean up after an interrupted conversion.

        Returns:
          A sentence per action.

        Raises:
          CheckpointError: the output exists and may not be replaced, its parent does not exist or cannot be written
            to, or another conversion to it is running.
        """
        if self.path.name in ("", ".."):
            raise CheckpointError(f"{self.path}: not a valid output folder; name another folder")
        with self._writing():
            if not self.path.parent.is_dir():
                raise CheckpointError(f"{self.path}: there is no folder {self.path.parent} to write into")
            if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
                raise CheckpointError(f"{self.path} is a file or a link, which is not replaced; name another output")
            if self.path.exists() and not overwrite:
                raise CheckpointError(f"{self.path} exists; name another output, or pass --overwrite to replace it")
            if self.path.exists():
                folder = CheckpointFolder(self.path, self.place)
                check_replaced(self.place, folder.names(), folder.read_bytes)
            said = self.clean_up()
            if said and self.path.exists() and not overwrite:
                raise CheckpointError(f"{said[0]}; it exists: name another output, or pass --overwrite to replace it")
        self._replaces = overwrite
        return said

    def check_inputs(self, inputs: Iterable[CheckpointFolder | Path]) -> None:
        """Check that the output does not contain an input, which would be deleted with the old output.

        Nor is it in a checkpoint whose manifest lists all files, which would no longer load: it had others.

        Raises:
          CheckpointError: it contains one, or is in one.
        """
        place = self.path.resolve()
        for one in inputs:
            path = one if isinstance(one, Path) else one.path
            if place in path.resolve().parents:
                raise CheckpointError(f"{self.path} contains the input {path}; name another output")
            if path.resolve() in place.parents and _lists_all_files(path):
                raise CheckpointError(
                    f"{self.path} is in the input {path}, whose manifest lists all of its files; name another output"
                )

    def clean_up(self) -> list[str]:
        """Remove what an interrupted conversion left, and restore the checkpoint that it was about to replace.

        Returns:
          A sentence per action.

        Raises:
          CheckpointError: something cannot be removed, or the conversion is still running.
        """
        said = []
        with self._writing(), contextlib.ExitStack() as locks:
            # A conversion that has exchanged the names, and has not ended, holds the marker under the other name.
            for mark in (self.staging / MARK_FILE, self.path / MARK_FILE):
                if mark.exists():
                    self._lock(locks.enter_context(mark.open("r+b")))
            if self._set_aside.exists() and not self.path.exists():
                self._set_aside.rename(self.path)
                said.append(
                    f"an earlier conversion was interrupted while it replaced {self.path}: restored the old checkpoint"
                )
            for path in (self.staging, self._removing, self._set_aside):
                # The marker is in what a conversion writes; the others are the old checkpoint.
                is_old = path != self._removing and path.exists() and not (path / MARK_FILE).exists()
                if is_old and change_of(path, self.place) is not None:
                    kept = path.rename(self._free_name(_OLD_SUFFIX))
                    said.append(
                        f"an earlier conversion was interrupted while it replaced {self.path}: the old checkpoint has "
                        f"changed and is kept as {kept}"
                    )
                if path.exists():
                    # Renamed first, so that a partly deleted checkpoint is never restored.
                    shutil.rmtree(path.rename(self._removing) if path == self._set_aside else path)
                    said.append(f"an earlier conversion was interrupted: removed {path}")
        return said

    def begin(self, mark: str) -> None:
        """Create the folder to write into, write ``mark`` into its marker file, and lock it until :meth:`close`.

        Raises:
          CheckpointError: the folder cannot be created, or another conversion has created it since :meth:`prepare`.
        """
        with self._writing():
            try:
                self.staging.mkdir()
            except FileExistsError as error:
                raise CheckpointError(f"{self.path}: another conversion is writing to it ({self.staging})") from error
            self._mark = (self.staging / MARK_FILE).open("xb")
            self._lock(self._mark)
            self._mark.write(mark.encode())
            self._mark.flush()
            os.fsync(self._mark.fileno())  # other machines read it

    def finish(self) -> None:
        """Flush the checkpoint to the disk and give it its name, replacing the old one.

        Raises:
          CheckpointError: it cannot be renamed; it is complete beside the old one, which has files now that no
            checkpoint has, or beside something that has been created since :meth:`prepare`; or it is in place, but the
            old one cannot be deleted, or has such files and is kept. The message says where they are.
        """
        with self._writing():
            _sync_all(self.staging)
            self._check_old()
            replaced = self._give_name()
            sync(self.path.parent)
        changed: CheckpointError | None = None
        kept = self._free_name(_OLD_SUFFIX)
        with self._removing_the_old():
            if replaced is not None:
                changed = change_of(replaced, self.place)
                # Renamed first, so that a partly deleted checkpoint is never restored; and while the marker is
                # locked, so that the name that becomes free is not yet another conversion's.
                replaced.rename(kept if changed else self._removing)
        with self._writing():
            # Only now: under the other name, a folder without a marker may be removed by another conversion.
            (self.path / MARK_FILE).unlink()
            sync(self.path)
            sync(self.path.parent)
        if changed is not None:
            raise CheckpointError(
                f"{self.path} is written, but the old checkpoint has changed and is kept as {kept} ({changed})"
            ) from changed
        with self._removing_the_old():
            if replaced is not None:
                shutil.rmtree(self._removing)

    def _check_old(self) -> None:
        """Check the folder to replace once more: a conversion takes minutes, in which files may appear there.

        Raises:
          CheckpointError: it has files that no checkpoint has. The new checkpoint is complete, under a free name.
        """
        if not self._replaces or self.path.is_symlink() or not self.path.is_dir():
            return
        changed = change_of(self.path, self.place)
        if changed is not None:
            raise self._kept_beside(str(changed)) from changed

    def _kept_beside(self, reason: str) -> CheckpointError:
        """Keep the new checkpoint under a free name; return the error that says so."""
        free = self._free_name(_NEW_SUFFIX)
        self.staging.rename(free)  # under its own name, the next conversion would remove it
        (free / MARK_FILE).unlink()
        sync(free)
        sync(free.parent)
        return CheckpointError(f"{reason}. The new checkpoint is complete and is kept as {free}")

    def _free_name(self, suffix: str) -> Path:
        """Return the first name of this folder and a suffix that nothing has."""
        numbered = (f"{suffix}-{number}" for number in itertools.count(2))
        places = (self.path.with_name(self.path.name + end) for end in itertools.chain([suffix], numbered))
        return next(place for place in places if not os.path.lexists(place))

    @contextlib.contextmanager
    def _removing_the_old(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.path} is written, but the old checkpoint cannot be removed ({error})"
            ) from error

    def _give_name(self) -> Path | None:
        """Give the new checkpoint its name; return where the old one is now, None if there was none."""
        if not os.path.lexists(self.path):
            self.staging.rename(self.path)
            return None
        if not self._replaces or self.path.is_symlink() or not self.path.is_dir():
            raise self._kept_beside(f"{self.path} has been created in the meantime, and is not replaced")
        if exchange(self.staging, self.path):
            return self.staging
        self.path.rename(self._set_aside)
        self.staging.rename(self.path)
        return self._set_aside

    def close(self) -> None:
        """Release the lock, whether finished or not."""
        if self._mark is not None:
            self._mark.close()
            self._mark = None

    def _lock(self, mark: IO[bytes]) -> None:
        """Lock the marker file until it is closed or this process ends."""
        with contextlib.suppress(OSError):  # a file system without locks
            if not lock(mark.fileno()):
                raise CheckpointError(
                    f"{self.path}: another conversion is writing to it; wait for that, or name another output"
                )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written ({error})") from error


@dataclass(frozen=True)
class ObjectOutput:
    """A folder of an object store.

    Attributes:
      storage: the storage to write into between :meth:`begin` and :meth:`finish`.
    """

    storage: Storage

    @property
    def place(self) -> str:
        """Its URL, for messages."""
        return self.storage.place

    def prepare(self, overwrite: bool) -> list[str]:
        """Check that the output can be written, and clean up after an interrupted conversion.

        Returns:
          A sentence per action, done or to come.

        Raises:
          CheckpointError: the output exists and may not be replaced, other files are beside what an interrupted
            conversion left, or the store cannot be used.
        """
        names = self._names()
        if not names:
            return []
        if MARK_FILE in names and MANIFEST_FILE not in names:
            check_replaced(self.place, names, self._read)
            self._delete(names)
            return [f"an earlier conversion was interrupted: removed what it left in {self.place}"]
        if not overwrite:
            raise CheckpointError(f"{self.place} exists; name another output, or pass --overwrite to replace it")
        check_replaced(self.place, names, self._read)
        return [
            f"{self.place} is replaced: nothing can be renamed there, so its manifest is removed first, and until the "
            "new one is written there is no checkpoint"
        ]

    def _names(self) -> list[str]:
        # Consoles and gcsfuse make a folder as an empty object whose name ends with a slash.
        return [name for name in self.storage.names() if not name.endswith("/") and name]

    def _read(self, name: str) -> bytes:
        return self.storage.read(name, MAX_SIDE_FILE_BYTES) or b""

    def check_inputs(self, inputs: Iterable[CheckpointFolder | Path]) -> None:
        """Check that the output does not contain an input: it is read while the output is written in its place.

        Raises:
          CheckpointError: it contains one, or is in one.
        """
        there = _folder_url(self.place)
        for one in inputs:
            # Also one that was downloaded from there, which would be deleted although only a cache still has it.
            if isinstance(one, CheckpointFolder) and "://" in one.name:
                here = _folder_url(one.name)
                if here.startswith(there) or there.startswith(here):
                    raise CheckpointError(
                        f"{self.place} is an input of the conversion, or contains one; name another output"
                    )

    def begin(self, mark: str) -> None:
        """Write ``mark`` into the folder's marker file, and delete its other files, the manifest first.

        Raises:
          CheckpointError: files that no checkpoint has are there since :meth:`prepare`; nothing has changed.
        """
        check_replaced(self.place, self._names(), self._read)
        self.storage.write(MARK_FILE, mark.encode())
        self._delete([name for name in self.storage.names() if name != MARK_FILE])

    def _delete(self, names: list[str]) -> None:
        # The manifest first and the marker last: at any moment this is a checkpoint or a marked conversion. Orbax's
        # files are recognized by its descriptions, which stay until the others are deleted.
        steps = {MANIFEST_FILE: 0} | dict.fromkeys(ARRAY_FILES, 2) | {NEW_INTERFACE_FILE: 3, TREE_FILE: 3, MARK_FILE: 4}
        for step in range(5):
            self.storage.delete([name for name in names if steps.get(name.rpartition("/")[2], 1) == step])

    def finish(self) -> None:
        """Delete the marker. The manifest has been written."""
        self.storage.delete([MARK_FILE])

    def close(self) -> None:
        """Do nothing: an object store has no locks."""


Output = FolderOutput | ObjectOutput


def _lists_all_files(folder: Path) -> bool:
    manifest = folder / MANIFEST_FILE
    return manifest.exists() and Manifest.parse(manifest.read_text("utf-8", "replace"), str(manifest)).covers_folder


def _folder_url(url: str) -> str:
    """Return the URL of a folder in one spelling of all, with a slash at its end."""
    scheme, _, rest = unquote(url).partition("://")
    return f"{_SAME_SCHEMES.get(scheme, scheme)}://{rest.rstrip('/')}/"


def output_at(place: str | Path) -> Output:
    """Return the output at a path or a URL (``gs://bucket/folder``); a ``file://`` URL is the path that it names.

    Raises:
      CheckpointError: the URL cannot be written to, or the path contains an unknown user's home.
    """
    try:
        path = local_path(place)
    except RuntimeError as error:
        raise CheckpointError(f"{place}: cannot be written ({error})") from error
    return ObjectOutput(Storage.at(str(place))) if path is None else FolderOutput(path)


def _sync_all(folder: Path) -> None:
    """Flush all files and subfolders of a folder to the disk. Orbax does not flush its small files."""
    for parent, _, files in os.walk(folder):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))
