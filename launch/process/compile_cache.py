"""The folder that keeps compiled programs between runs: who may use it, and what is in it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from launch.hosts.host import Host
from launch.process.streams import tell


def private_folder(path: str, host: Host) -> Path | None:
    """Return the private folder for compiled programs. If it cannot be used, print a warning and return None."""
    # Compiled programs are code: no other user may be able to write them.
    try:
        folder = Path(path).expanduser()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = folder.stat()
        if state.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        if stat.S_IMODE(state.st_mode) & 0o022:
            raise PermissionError(errno.EPERM, "other users can write there; run chmod go-w, or name another folder")
        # JAX writes on host 0 only.
        need, verb = (os.R_OK, "read it") if host.process_index else (os.W_OK, "write there")
        if not os.access(folder, need | os.X_OK):
            raise PermissionError(errno.EACCES, f"this user cannot {verb}")
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        name = f"host {host.process_index}: " if host.process_index else ""
        tell(f"{name}warning: --compile_cache={path}: {why}; programs will be compiled again in every run")
        return None
    return folder


def drop_unusable(folder: Path | None, host: Host) -> None:
    """Compile all programs anew if several hosts would wait for each other forever with programs of the cache.

    All hosts call this, those without a folder too.
    """
    import jax

    platform, setting = jax.default_backend(), "jax_compilation_cache_dir"
    if platform == "cpu":
        # A program that XLA reads from the cache loses the order of its collectives.
        jax.config.update(setting, None)
    elif platform == "gpu" and not _is_shared(folder, host):
        # XLA's autotuning divides the work on a program among the hosts: one that compiles waits for all others, and
        # those that find the program in a cache of their own do not take part. JAX writes the cache on one host only.
        if folder is not None and not host.process_index:
            tell("warning: the hosts have no common --compile_cache; programs will be compiled again in every run")
        jax.config.update(setting, None)


def _is_shared(folder: Path | None, host: Host) -> bool:
    """Whether all hosts have the same folder: host 0 makes a file in it, for which all hosts look."""
    name = host.gather("name of a file in the compile cache", f"shared-{secrets.token_hex(8)}")[0]
    mark = None if folder is None else folder / name
    if mark is not None and not host.process_index:
        with contextlib.suppress(OSError):  # then no host finds it
            mark.touch()
    host.gather("the file is there", True)
    found = all(host.gather("the file is seen", mark is not None and mark.exists()))
    if mark is not None and not host.process_index:
        mark.unlink(missing_ok=True)
    return found


def cache_lines(path: str) -> Iterator[str]:
    """Yield lines with the state of the compile cache."""
    if not path:
        yield "none (--compile_cache names a folder)"
        return
    try:
        folder = Path(path).expanduser()
    except RuntimeError:
        yield f"{path}: the user has no home folder"
        return
    files = [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
    size = sum(file.stat().st_size for file in files)
    if not folder.is_dir():
        yield f"{folder}: does not exist yet"
        return
    yield f"{folder}: mode {folder.stat().st_mode & 0o777:o}, {len(files)} files, {size / 1e6:.1f} MB"
    if files:
        newest = max(file.stat().st_mtime for file in files)
        yield f"newest file from {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(newest))} UTC"
