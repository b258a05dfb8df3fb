"""Functions for files on a disk: replace a file in one step, lock it, and parse JSON objects strictly."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_ABANDONED_SECONDS = 24 * 3600.0
_LONGEST_START = 200  # bytes; file systems take names of 255


def replace_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file, replacing an old one in one step: a reader finds the whole old file or the whole new one.

    The bytes are on the disk when this returns. The file has the permissions of any new file.

    Args:
      path: the file, in a folder that exists.
      parts: its bytes, in order.

    Raises:
      OSError: it cannot be written; the old file is as it was. The error names ``path``.
    """
    # In the same folder, because a file is renamed in one step only within a file system; opened as new, so that two
    # writers cannot share it.
    # Its name must not be too long where that of the file is not.
    start = path.name.encode(errors="ignore")[:_LONGEST_START].decode(errors="ignore")
    partial = path.with_name(f".{start}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        # Show the name that the user knows, not that of the partial file. An error of writing has no file name, and
        # Python shows one only if the error has a number.
        if error.filename == str(partial) or (error.filename is None and error.errno is not None):
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def remove_abandoned(folder: Path) -> None:
    """Remove what :func:`replace_file` left in a folder and its subfolders when its process was killed.

    Only partial files that nobody has written to for a day are removed: another process may be writing a newer one.
    """
    for partial in folder.rglob(".*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > _ABANDONED_SECONDS:
                partial.unlink()


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk.

    Raises:
      OSError: it cannot be flushed.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(handle: int) -> bool:
    """Lock an open file or folder for this process, until it is closed or the process ends, however it ends.

    Returns:
      Whether the lock was taken; False if another process holds it.

    Raises:
      OSError: the file system has no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


# Far below the depth at which writing or printing a value that was read exceeds Python's recursion limit.
_MAX_DEPTH = 100
_WHITE_SPACE = " \t\r\n"


class JsonObjectError(ValueError):
    """The JSON is not an object, or it contains an object with duplicate keys or too many keys."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise JsonObjectError(f'an object has a duplicate key: "{twice:.100}"')
    return found


def _few_and_unique(pairs: list[tuple[str, Any]], most: int) -> dict[str, Any]:
    if len(pairs) > most:
        raise JsonObjectError(f"an object has {len(pairs)} keys; at most {most} are allowed")
    return _unique(pairs)


@functools.cache
def _decoder(most_names: int | None) -> json.JSONDecoder:
    limited = _unique if most_names is None else functools.partial(_few_and_unique, most=most_names)
    return json.JSONDecoder(object_pairs_hook=limited)


def _is_deeper(value: Any, most: int) -> bool:
    """Whether a JSON value has more than ``most`` levels of objects and lists, one inside the other."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(most):
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level = [child for part in parts for child in part if isinstance(child, (dict, list))]
        if not level:
            return False
    return True


def parse_json_object(data: bytes, most_names: int | None = None) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
      data: JSON in UTF-8.
      most_names: the maximum number of names of any object in it; None for no limit.

    Raises:
      UnicodeDecodeError: the bytes are not UTF-8.
      JsonObjectError: the JSON is not an object, or an object in it has a name twice or too many names.
      ValueError: the text is not JSON, or has more than 100 levels of objects and lists.
    """
    text, decoder = data.decode("utf-8"), _decoder(most_names)
    try:
        # A file may have millions of lines. decode() takes twice as long as raw_decode(), because it searches for white
        # space around the value. decode() handles leading white space, and raises the error for trailing text.
        value, end = decoder.raw_decode(text) if text.startswith("{") else (None, 0)
        if not end or text[end:].strip(_WHITE_SPACE):
            value = decoder.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    # Most texts have few brackets, so the count saves the walk.
    if data.count(b"[") + data.count(b"{") > _MAX_DEPTH and _is_deeper(value, _MAX_DEPTH):
        raise ValueError("nested too deeply")
    if not isinstance(value, dict):
        raise JsonObjectError(f"expected an object, found {type(value).__name__}")
    return value


def parse_json_objects(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Parse JSON objects all at once. For short objects, this takes half the time of :func:`parse_json_object`.

    Args:
      lines: JSON objects in UTF-8.

    Raises:
      ValueError: at least one line may not be accepted by :func:`parse_json_object`; the error does not say which.
    """
    # The objects become one list. They alternate with a random number, which no line can contain except by guessing it.
    # If every second element is this number, each line held exactly one value.
    mark = secrets.randbits(128)
    text = b"[%b]" % (b",\n%d,\n" % mark).join(lines)
    try:
        values = _decoder(None).decode(text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    found = values[::2]
    if len(found) != len(lines) or values[1::2] != [mark] * (len(lines) - 1):
        raise ValueError("a line is not one value")
    if not all(isinstance(value, dict) for value in found):
        raise ValueError("a line is not an object")
    if any(line.count(b"[") + line.count(b"{") > _MAX_DEPTH for line in lines):
        raise ValueError("a line may be nested too deeply")
    return found


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file whose lines are objects, in UTF-8.

    Raises:
      OSError: the file cannot be read.
      ValueError: a line is not a JSON object as :func:`parse_json_object` requires; the message names the line.
    """
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(parse_json_object(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return found
