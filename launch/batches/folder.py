"""The output folder of a batch. Results survive interruptions, and no prompt is completed twice.

results.jsonl and errors.jsonl grow by whole lines, one write per line, synced to disk. run.json describes the run, and
a different run is refused. At the end sorted.jsonl holds the results in the order of the input.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.batches.records import Key, as_line, is_error, is_sealed, key_of, key_of_error, sealed
from runtime import InputError, lock, parse_json_object, replace_file

RUN, RESULTS, ERRORS, SORTED, LOCK = "run.json", "results.jsonl", "errors.jsonl", "sorted.jsonl", ".lock"
SAMPLES = "samples.jsonl"  # for EvalPlus
_OWN = (RUN, RESULTS, ERRORS, SORTED, SAMPLES, LOCK)
_MAX_RUN_BYTES = 1 << 20


class BatchFolder:
    """The output folder of a batch, locked by this process until it ends or calls :meth:`close`.

    Attributes:
      path: the folder.
      repaired: repairs made when the folder was opened, one sentence each.
    """

    def __init__(self, path: Path) -> None:
        """Create the folder if needed, lock it, and repair what a killed process left behind.

        Raises:
          InputError: the folder cannot be written, or another process holds it.
        """
        self.path = path
        self.repaired: list[str] = []
        self._errors: set[bytes] | None = None
        self._files: dict[str, int] = {}
        self._locks: list[int] = []
        self._folder_is_locked = False
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._locks.append(os.open(path, os.O_RDONLY))
            self._locks.append(os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644))
        except OSError as error:
            self.close()
            raise InputError(f"--output_dir={path}: cannot be written to ({error.strerror or error})") from error
        try:
            self._lock()
            # A run writes run.json before its first record. Other files are refused later, and left as they are.
            own = (path / RUN).is_file()
            for left in path.glob(".*.partial") if own else ():
                left.unlink(missing_ok=True)
            for name in (RESULTS, ERRORS):
                self._open(name, repair=own)
        except InputError:
            self.close()
            raise

    def close(self) -> None:
        """Close the files and release the locks."""
        for handle in (*self._files.values(), *self._locks):
            os.close(handle)
        self._files, self._locks = {}, []

    def _lock(self) -> None:
        """Lock the folder itself and a file in it.

        Network file systems can lock only files, and a user may delete the file, so neither lock alone is enough. The
        operating system releases both locks when the process ends, however it ends.
        """
        folder, file = self._locks
        for handle in (folder, file):
            try:
                if not lock(handle):
                    raise InputError(
                        f"--output_dir={self.path}: another process is writing there; wait for it, or name another "
                        "folder"
                    )
                self._folder_is_locked |= handle == folder
            except OSError as error:
                if handle == file:
                    raise InputError(
                        f"--output_dir={self.path}: cannot be locked ({error.strerror or error})"
                    ) from error

    def _check_lock(self) -> None:
        """Check that the lock still keeps other processes out: if only the file could be locked, it must still exist.

        Raises:
          InputError: the file was removed or replaced, so another process may write too.
        """
        if self._folder_is_locked:
            return
        path = self.path / LOCK
        try:
            there = os.open(path, os.O_RDONLY)  # network file systems ask their server when a file is opened
            same = os.path.samestat(os.fstat(self._locks[-1]), os.fstat(there))
            os.close(there)
        except OSError:
            same = False
        if not same:
            raise InputError(
                f"{path}: the lock was removed, so another process may write there. Results so far are intact: when "
                "none does, run the same command again"
            )

    def _open(self, name: str, repair: bool) -> None:
        path = self.path / name
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._files[name] = handle
            size, whole = os.fstat(handle).st_size, 0
            if size and repair:
                whole = _end_of_last_line(handle, size)
            if repair and whole < size:
                os.ftruncate(handle, whole)
                os.fsync(handle)
                self.repaired.append(f"{path}: removed an incomplete last line; it is computed again")
        except OSError as error:
            raise InputError(f"{path}: cannot be written to ({error.strerror or error})") from error

    # ---- what identifies the run -----------------------------------------------------------------------------

    def check(self, facts: Mapping[str, Any]) -> None:
        """Check that existing results belong to this run.

        Args:
          facts: what identifies the run (checkpoint, input, parameters, code).

        Raises:
          InputError: they belong to another run; the message names the differences.
        """
        path = self.path / RUN
        try:
            if not path.exists():
                if any(os.fstat(handle).st_size for handle in self._files.values()):
                    raise InputError(f"{self.path}: there are results but no {RUN}; name another --output_dir")
                for name in (SORTED, SAMPLES):
                    if os.path.lexists(self.path / name):
                        raise InputError(
                            f"{self.path / name}: no batch wrote this file, because there is no {RUN}, and this one "
                            "would replace it; name another --output_dir"
                        )
                return
            if path.stat().st_size > _MAX_RUN_BYTES:
                raise ValueError("too large")
            said = parse_json_object(path.read_bytes())
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path}: cannot be read ({error}); name another --output_dir") from error
        different = [
            f"{name}: was {_short(before)}, now {_short(now)}" for name, before, now in _differences(said, facts)
        ]
        if different:
            raise InputError(
                f"{self.path} holds the results of another run: {'; '.join(different)}. Name another --output_dir, or "
                "run the earlier command to continue"
            )

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Write what identifies the run, unless it is there already.

        Raises:
          InputError: the file cannot be written.
        """
        if not (self.path / RUN).exists():
            self._replace(RUN, [json.dumps(facts, indent=2, ensure_ascii=False).encode() + b"\n"])

    # ---- results ----------------------------------------------------------------------------------------------

    def _records(self, name: str) -> Iterator[tuple[bytes, dict[str, Any]]]:
        path = self.path / name
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    record = parse_json_object(line)
                except (json.JSONDecodeError, UnicodeDecodeError) as error:
                    raise InputError(
                        f"{path}:{number}: not JSON, so not written by this run; move the file away"
                    ) from error
                except ValueError:  # not an object, or nested too deeply: not written by a run
                    record = {}
                yield line, record

    def done(self, known: Collection[Key]) -> set[Key]:
        """Read the keys of the results that exist, and check the errors.

        Args:
          known: the keys of all results that the input asks for.

        Raises:
          InputError: a result was changed since it was written, belongs to no line of the input, or exists twice, or a
            line of errors.jsonl is no error.
        """
        found: set[Key] = set()
        for number, (line, record) in enumerate(self._records(RESULTS), 1):
            if not is_sealed(line, record):
                raise InputError(
                    f"{self.path / RESULTS}:{number}: changed since it was written; remove the line, and it is "
                    "computed again"
                )
            key = key_of(record)
            if key is None or key not in known or key in found:
                why = "appears twice" if key in found else "belongs to no line of the input"
                raise InputError(f"{self.path / RESULTS}:{number}: a result that {why}; move the file away")
            found.add(key)
        self._errors = self._read_errors()
        return found

    def _read_errors(self) -> set[bytes]:
        lines = set()
        for number, (line, record) in enumerate(self._records(ERRORS), 1):
            if not is_error(record):
                raise InputError(
                    f"{self.path / ERRORS}:{number}: not an error that a batch wrote; remove the line: errors "
                    "that still apply are written again"
                )
            lines.add(line)
        return lines

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append results. When this returns, they are on disk.

        Raises:
          InputError: the disk is full or not available, or the lock was removed. Earlier results are intact.
        """
        self._append(RESULTS, map(sealed, records))

    def add_errors(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append the errors that errors.jsonl does not contain yet.

        Raises:
          InputError: as :meth:`append`, or a line of errors.jsonl is no error.
        """
        if self._errors is None:
            self._errors = self._read_errors()
        new = {as_line(record): record for record in records}
        added = [record for line, record in new.items() if line not in self._errors]
        self._append(ERRORS, added)
        self._errors |= new.keys()

    def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        self._check_lock()
        handle = self._files[name]
        try:
            for record in records:
                line = as_line(record)
                size = os.fstat(handle).st_size
                if os.write(handle, line) < len(line):
                    os.ftruncate(handle, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(handle)
        except OSError as error:
            raise InputError(
                f"{self.path / name}: cannot be written ({error.strerror or error}). Results so far are intact: fix "
                "the cause and run the same command again"
            ) from error

    def sort(self, order: Sequence[Key], tick: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
        """Write the results in this order to :data:`SORTED`, and return them.

        Their errors of earlier runs, in which they could not be computed, are removed.

        Args:
          order: the keys of all results.
          tick: called for each record that is read or written.

        Raises:
          InputError: a file cannot be read or written.
        """
        lines: dict[Key | None, tuple[bytes, dict[str, Any]]] = {}
        for line, record in self._records(RESULTS):
            tick()
            lines[key_of(record)] = line, record
        errors = list(self._records(ERRORS))
        if len(kept := [line for line, record in errors if key_of_error(record) not in lines]) < len(errors):
            self._replace(ERRORS, kept)

        def in_order() -> Iterator[bytes]:
            for key in order:
                tick()
                yield lines[key][0]

        self._replace(SORTED, in_order())
        return [lines[key][1] for key in order]

    def write(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Write a file of records atomically, in addition to the results."""
        self._replace(name, map(as_line, records))

    def _replace(self, name: str, lines: Iterable[bytes]) -> None:
        self._check_lock()
        path = self.path / name
        try:
            replace_file(path, lines)
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror or error})") from error


def own_file(folder: Path, path: Path) -> str | None:
    """Return the name of the file of a batch's output folder that ``path`` leads to; None if it leads elsewhere."""
    for name in _OWN:
        with contextlib.suppress(OSError):  # one of the two does not exist
            if (folder / name).samefile(path):
                return name
    return None


def _end_of_last_line(handle: int, size: int) -> int:
    """Return the number of bytes up to and including the last line feed."""
    end = size
    while end > 0:
        start = max(0, end - (1 << 16))
        at = os.pread(handle, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the old value and the new value of each fact that differs, also in nested objects."""
    for name, value in now.items():
        other = before.get(name)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _differences(other, value)
        elif other != value:
            yield name, other, value


def _short(value: Any) -> str:
    return f"{json.dumps(value, ensure_ascii=False):.200}"
