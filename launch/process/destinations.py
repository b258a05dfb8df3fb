"""Checks of the files and folders that a command writes at its end, made before anything is computed."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from runtime import InputError


def check_writable(flag: str, path: str) -> None:
    """Check that a file can be written, or replaced in one step.

    Args:
      flag: name of the flag.
      path: the file.

    Raises:
      InputError: the path is a folder or another file that is not a regular one, its folder does not exist, or this
        user cannot write there.
    """
    file = Path(path)
    try:
        mode = _mode(file)
        if mode is not None and not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
            raise InputError(f"--{flag}={path}: that is {what}; name a file")
        if mode is not None and not os.access(file, os.W_OK):
            raise PermissionError
        # A file is replaced by a new one, so its folder must be writable too.
        _try_to_write(file.parent)
    except OSError as error:
        raise InputError(f"--{flag}={path}: {_reason(error)}") from error


def check_folder(flag: str, path: str) -> None:
    """Create a folder if needed, and check that files can be written into it.

    Args:
      flag: name of the flag.
      path: the folder.

    Raises:
      InputError: the folder cannot be used.
    """
    if not path:
        raise InputError(f"--{flag} is empty; name a folder")
    folder = Path(path)
    try:
        mode = _mode(folder)
        if mode is not None and not stat.S_ISDIR(mode):
            raise InputError(f"--{flag}={path}: that is a file; name a folder")
        if mode is None:
            _try_to_write(folder.parent)
            folder.mkdir(exist_ok=True)
        _try_to_write(folder)
    except OSError as error:
        raise InputError(f"--{flag}={path}: {_reason(error)}") from error


def _mode(path: Path) -> int | None:
    """Return the type and permissions of a file, or of the file that a link leads to; None if there is none."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _try_to_write(folder: Path) -> None:
    """Write a file into a folder. Permissions alone do not show that a file system takes files, such as /proc."""
    if not folder.is_dir():
        raise NotADirectoryError
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError
    with tempfile.TemporaryFile(dir=folder):
        pass


def _reason(error: OSError) -> str:
    if isinstance(error, NotADirectoryError):
        return "there is no such folder"
    if isinstance(error, PermissionError):
        return "permission denied: this user cannot write there"
    return f"cannot be written to ({error.strerror or error})"
