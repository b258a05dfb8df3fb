"""Where a checkpoint is written, and the moment from which it is one.

On disk it is made in a folder of another name, which is exchanged with what it replaces when it is whole, so that a
reader finds the one or the other at any moment. Where a system cannot exchange names, two renamings leave a moment
without either. An object store has no renaming: there the manifest, written last, completes the checkpoint, and what it
replaces loses its own manifest first. Either way a file that only an unfinished conversion has marks what may be
cleaned up; on disk a conversion that runs holds a lock on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from checkpoints.errors import CheckpointError
from checkpoints.exchange import exchange
from checkpoints.folder import STAGING_SUFFIX
from checkpoints.manifest import MANIFEST_FILE
from checkpoints.storage import Storage

# Stands in what is being written, with a text that tells one conversion from another.
MARK_FILE = "diffumesh.converting"


@dataclass
class FolderOutput:
    """A folder on disk.

    Attributes:
      path: its name when it is whole.
    """

    path: Path
    _mark: IO[bytes] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def place(self) -> str:
        """Its name, for messages."""
        return str(self.path)

    @property
    def staging(self) -> Path:
        """Where the checkpoint is made. It is never taken for one."""
        return self.path.with_name(self.path.name + STAGING_SUFFIX)

    @property
    def storage(self) -> Storage:
        """What to write into between :meth:`begin` and :meth:`finish`."""
        return Storage.at(self.staging)

    @property
    def _set_aside(self) -> Path:
        """What is being replaced, whole, on systems that cannot exchange names."""
        return self.path.with_name(self.path.name + ".replaced")

    @property
    def _removing(self) -> Path:
        """What was replaced, or what is left of it. It is never brought back."""
        return self.path.with_name(self.path.name + ".removing")

    def prepare(self, overwrite: bool) -> list[str]:
        """Make way: clean up after an interrupted conversion.

        Returns:
          What was done, a sentence each.

        Raises:
          CheckpointError: the output exists and may not be replaced, its parent does not exist or cannot be written
            to, or another conversion to it is running.
        """
        if self.path.name in ("", ".."):
            raise CheckpointError(f"{self.path}: not the name of a folder that can be written; give it one of its own")
        with self._writing():
            if not self.path.parent.is_dir():
                raise CheckpointError(f"{self.path}: there is no folder {self.path.parent} to write into")
            if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
                raise CheckpointError(f"{self.path} is a file or a link, which is not replaced; name another output")
            said = self.clean_up()
            if self.path.exists() and not overwrite:
                raise CheckpointError(f"{self.path} exists; name another output, or say --overwrite to replace it")
        return said

    def clean_up(self) -> list[str]:
        """Remove what an interrupted conversion left, and bring back what it was about to replace.

        Returns:
          What was done, a sentence each.

        Raises:
          CheckpointError: it cannot be removed, or the conversion is running.
        """
        said = []
        with self._writing():
            mark = self.staging / MARK_FILE
            if mark.exists():
                with mark.open("r+b") as file:
                    self._lock(file)
            if self._set_aside.exists() and not self.path.exists():
                self._set_aside.rename(self.path)
                said.append(
                    f"an earlier conversion was interrupted while it replaced {self.path}: the old checkpoint is back"
                )
            for path in (self.staging, self._set_aside, self._removing):
                if path.exists():
                    shutil.rmtree(path)
                    said.append(f"an earlier conversion was interrupted: removed {path}")
        return said

    def begin(self, mark: str) -> None:
        """Make the place to write into, marked with a text. It is this conversion's until :meth:`close`.

        Raises:
          CheckpointError: it cannot be made, or another conversion has made it since :meth:`prepare`.
        """
        with self._writing():
            try:
                self.staging.mkdir()
            except FileExistsError as error:
                raise CheckpointError(f"{self.path}: another conversion to it has begun ({self.staging})") from error
            self._mark = (self.staging / MARK_FILE).open("xb")
            self._lock(self._mark)
            self._mark.write(mark.encode())
            self._mark.flush()
            os.fsync(self._mark.fileno())  # other machines look for it

    def finish(self) -> None:
        """Give the checkpoint its name, replacing the one that has it. Everything has been written, durably.

        Raises:
          CheckpointError: it cannot be renamed; or what it replaced cannot be removed, and it is there itself.
        """
        with self._writing():
            _sync_all(self.staging)
            replaced = self._give_name()
            # Not before: what has no mark and is still called an unfinished one may be removed by anybody.
            (self.path / MARK_FILE).unlink()
            _sync(self.path)
            _sync(self.path.parent)
        if replaced is None:
            return
        try:
            # Under a name from which nothing is brought back: what is removed in part is no checkpoint.
            replaced.rename(self._removing)
            shutil.rmtree(self._removing)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} is written, but what it replaced cannot be removed ({error})"
            ) from error

    def _give_name(self) -> Path | None:
        """Give what was made its name; where what had that name is now, None if nothing had it."""
        if not self.path.exists():
            self.staging.rename(self.path)
            return None
        if exchange(self.staging, self.path):
            return self.staging
        self.path.rename(self._set_aside)
        self.staging.rename(self.path)
        return self._set_aside

    def close(self) -> None:
        """Let go of it, finished or not."""
        if self._mark is not None:
            self._mark.close()
            self._mark = None

    def _lock(self, mark: IO[bytes]) -> None:
        """Hold a mark's file until it is closed; the system lets go of it when the process ends, however it ends."""
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise CheckpointError(
                f"{self.path}: another conversion to it is running; wait for it, or name another output"
            ) from error
        except OSError:
            pass  # a file system without locks

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written ({error})") from error


@dataclass(frozen=True)
class ObjectOutput:
    """A folder of an object store, or one on disk that is to be treated as such.

    Attributes:
      storage: what to write into between :meth:`begin` and :meth:`finish`.
    """

    storage: Storage

    @property
    def place(self) -> str:
        """Its URL, for messages."""
        return self.storage.place

    def prepare(self, overwrite: bool) -> list[str]:
        """Make way: clean up after an interrupted conversion.

        Returns:
          What was done or will be, a sentence each.

        Raises:
          CheckpointError: there is something that may not be replaced, or the store cannot be used.
        """
        names = self.storage.names()
        if not names:
            return []
        if MARK_FILE in names and MANIFEST_FILE not in names:
            self._delete(names)
            return [f"an earlier conversion was interrupted: removed what it left in {self.place}"]
        if not overwrite:
            raise CheckpointError(f"{self.place} exists; name another output, or say --overwrite to replace it")
        return [
            f"{self.place} is replaced: nothing can be renamed there, so its manifest is removed first, and until the "
            "new one is written there is no checkpoint"
        ]

    def begin(self, mark: str) -> None:
        """Mark the place with a text and remove what it holds, its manifest first."""
        self.storage.write(MARK_FILE, mark.encode())
        self._delete([name for name in self.storage.names() if name != MARK_FILE])

    def _delete(self, names: list[str]) -> None:
        # The manifest before all else, the mark after all else: at any moment it is a checkpoint or may be removed.
        self.storage.delete([name for name in names if name == MANIFEST_FILE])
        self.storage.delete([name for name in names if name not in (MANIFEST_FILE, MARK_FILE)])
        self.storage.delete([name for name in names if name == MARK_FILE])

    def finish(self) -> None:
        """The manifest has been written: take the mark away."""
        self.storage.delete([MARK_FILE])

    def close(self) -> None:
        """Nothing is held: there are no locks in an object store."""


Output = FolderOutput | ObjectOutput


def output_at(place: str | Path) -> Output:
    """The output that a path or a URL (``gs://bucket/folder``) names.

    Raises:
      CheckpointError: a URL that cannot be written to, or the home of a user that there is not.
    """
    if isinstance(place, str) and "://" in place:
        return ObjectOutput(Storage.at(place))
    try:
        return FolderOutput(Path(place).expanduser())
    except RuntimeError as error:
        raise CheckpointError(f"{place}: cannot be written ({error})") from error


def _sync_all(folder: Path) -> None:
    """Flush every file and folder in a folder to the disk: not all that writes into it does so."""
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
