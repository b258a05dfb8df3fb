"""Read the lines of a batch's input file, plain or OpenAI batch requests, and check them before anything runs."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from launch.batches.collector import paused_collector
from launch.openai.bodies import (
    Asked,
    Defaults,
    Draft,
    Encoded,
    by_our_names,
    encode_drafts,
    finish,
    known,
    nothing_else,
    read_draft,
)
from launch.openai.idle import without_idle
from launch.openai.objects import parse_object, parse_objects
from runtime import InputError, RowRequest, row_seed

MAX_LINE_BYTES = 16 << 20
PART_BYTES = 256 << 10
# Number of lines, at least, whose prompts are tokenized in one call, on all cores.
LINES_TOGETHER = 1024
_BYTES_TOGETHER = 32 << 20
MAX_ID = 512
Form = Literal["plain", "completion", "chat"]
_URLS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(slots=True)
class Line(Asked):
    """A valid line of the input file: a request.

    Attributes:
      number: line number in the file, from 1.
      id: the request's id, unique in the file.
      form: the format of its results.
    """

    number: int
    id: str
    form: Form

    def sample(self, number: int) -> RowRequest:
        """Return the row of one sample.

        Its seed is a hash of the request's seed, its id and the sample's index: the order of lines does not matter.
        """
        return self.request(row_seed(self.seed, self.id, number))


@dataclass(frozen=True, slots=True)
class BadLine:
    """An invalid line; ``id`` is None if the line has no valid id or repeats that of another line."""

    number: int
    id: str | None
    message: str


@dataclass(frozen=True)
class Batch:
    """The contents of an input file.

    Attributes:
      lines: the valid lines.
      bad: the invalid lines.
      ignored: names of fields of plain lines that were ignored.
      digest: digest of the file's bytes.
    """

    lines: list[Line]
    bad: list[BadLine]
    ignored: list[str]
    digest: str

    def tokens_digest(self) -> str:
        """Return a digest of the valid lines' ids and tokens: for the same file, hosts may read other tokens."""
        state = hashlib.sha256()
        for line in self.lines:
            sizes = len(line.id), len(line.tokens), len(line.suffix)
            state.update(f"{sizes} {line.id}".encode() + np.array([*line.tokens, *line.suffix], np.int32).tobytes())
        return state.hexdigest()[:16]


def read_batch(path: Path, defaults: Defaults) -> Batch:
    """Read and check every line of an input file; blank lines are skipped.

    Raises:
      InputError: the file cannot be read or has no lines, or the chat template times out too often.
    """
    reader = _Reader(defaults)
    try:
        # One thread tokenizes a group of prompts while this one checks the lines of the next group.
        with path.open("rb") as file, ThreadPoolExecutor(1) as thread, paused_collector() as set_aside:
            for lines in _raw_lines(file, reader.digest):
                reader.add(lines)
                if reader.is_full:
                    reader.tokenize(thread)
                    set_aside()
            reader.tokenize(thread)
            reader.finish()
    except OSError as error:
        raise InputError(f"--input={path}: cannot be read ({error.strerror or error})") from error
    if not reader.lines and not reader.bad:
        raise InputError(
            f'--input={path}: the file has no lines; expected lines like {{"id": "1", "prompt": "def f("}}'
        )
    bad = sorted(reader.bad, key=lambda line: line.number)
    return Batch(reader.lines, bad, list(reader.ignored), reader.digest.hexdigest()[:16])


def _raw_lines(file: IO[bytes], digest: hashlib._Hash) -> Iterator[list[bytes | None]]:
    """Yield all lines of a file, many at once, and add all bytes to ``digest``.

    None replaces a line that is too long to keep.
    """
    # Editors on Windows write a byte order mark at the start of UTF-8 files.
    mark = codecs.BOM_UTF8
    # The parts of a line whose end is still to come, and their size.
    rest: list[bytes] = []
    size = 0

    def line() -> bytes | None:
        return b"".join(rest) if size <= MAX_LINE_BYTES else None

    while part := file.read(PART_BYTES):
        digest.update(part)
        end, *lines = part.removeprefix(mark).split(b"\n")
        mark = b""
        size += len(end)
        rest = [*rest, end] if size <= MAX_LINE_BYTES else []
        if lines:
            last = lines.pop()
            yield [line(), *lines]
            rest, size = [last], len(last)
    if size:
        yield [line()]


@dataclass(slots=True)
class _Drafted:
    number: int
    identity: str
    form: Form
    draft: Draft


class _Reader:
    """Checks lines one by one and tokenizes their prompts in groups.

    Attributes:
      lines, bad, ignored: as in :class:`Batch`, for the lines so far; ``bad`` is not sorted.
      digest: digest of the file so far.
    """

    def __init__(self, defaults: Defaults) -> None:
        self._defaults = defaults
        self._seen: dict[str, int] = {}
        self._drafts: list[_Drafted] = []
        self._bytes = 0
        self._number = 0
        self._timeouts: list[InputError] = []
        self._tokenizing: tuple[list[_Drafted], Future[list[Encoded | InputError]]] | None = None
        self.lines: list[Line] = []
        self.bad: list[BadLine] = []
        self.ignored: dict[str, None] = {}
        self.digest = hashlib.sha256()

    def add(self, lines: Sequence[bytes | None]) -> None:
        """Check the next lines. None stands for a line that is too long."""
        for raw, record in zip(lines, parse_objects(lines), strict=True):
            self._number += 1
            self._add(self._number, raw, record)

    def _add(self, number: int, raw: bytes | None, record: dict[str, Any] | None) -> None:
        """Check a line, of which ``record`` is the JSON object if that is known."""
        identity = None
        try:
            if raw is None:
                raise InputError(f"the line is longer than {MAX_LINE_BYTES} bytes")
            if record is None:
                if not raw.strip():
                    return
                record = parse_object(raw)
            identity = _identity(record)
            if identity in self._seen:
                first, again, identity = self._seen[identity], identity, None
                raise InputError(f"duplicate id {again!r:.80} (first used on line {first})")
            self._seen[identity] = number
            form, fields = _fields(record, self.ignored, self._defaults.samples)
            self._drafts.append(_Drafted(number, identity, form, read_draft(fields, self._defaults)))
        except InputError as error:
            self.bad.append(BadLine(number, identity, str(error)))
            return
        self._bytes += len(raw)

    @property
    def is_full(self) -> bool:
        """Whether enough prompts wait for :meth:`tokenize`."""
        return len(self._drafts) >= LINES_TOGETHER or self._bytes > _BYTES_TOGETHER

    def tokenize(self, thread: Executor) -> None:
        """Start to tokenize the prompts of the lines checked since the last call, and finish those before them."""
        drafts, self._drafts, self._bytes = self._drafts, [], 0
        encoded = thread.submit(encode_drafts, [one.draft for one in drafts], self._defaults, self._timeouts)
        self.finish()
        self._tokenizing = drafts, encoded

    def finish(self) -> None:
        """Wait for the prompts that are being tokenized, and add their lines to ``lines`` or ``bad``."""
        if self._tokenizing is None:
            return
        (drafts, encoded), self._tokenizing = self._tokenizing, None
        for one, found in zip(drafts, encoded.result(), strict=True):
            try:
                fields = finish(one.draft, found, self._defaults)
                self.lines.append(Line(*fields, one.number, one.identity, one.form))
            except InputError as error:
                self.bad.append(BadLine(one.number, one.identity, str(error)))


def _identity(record: Mapping[str, Any]) -> str:
    name = "custom_id" if "body" in record or "custom_id" in record else "id" if "id" in record else "task_id"
    value = record.get(name)
    if not isinstance(value, str):
        is_number = isinstance(value, int) and not isinstance(value, bool)
        value = str(value) if is_number else ""
    if not 0 < len(value) <= MAX_ID:
        raise InputError(
            f'id: expected a string of 1 to {MAX_ID} characters in "id", or in "custom_id" of a line with a "body"'
        )
    if not value.isprintable():
        raise InputError("id: contains characters that cannot be printed")
    return value


def _check_call(record: Mapping[str, Any], form: Form) -> None:
    """Check that an OpenAI batch request asks for what its body is for.

    Raises:
      InputError: it has another method or URL, or unknown fields.
    """
    nothing_else({name: value for name, value in record.items() if name not in ("custom_id", "body")}, "method url")
    for name, expected in (("method", "POST"), ("url", _URLS[form])):
        if record.get(name) not in (None, expected):
            raise InputError(f"{name}: {record[name]!r:.100}; for this body expected {expected}", field=name)


def _fields(record: dict[str, Any], ignored: dict[str, None], samples: int) -> tuple[Form, dict[str, Any]]:
    """Return the format of a line's results and the fields of its request, under the names of our parameters.

    The format is ``completion`` or ``chat`` for an OpenAI batch request (with a ``custom_id``), otherwise ``plain``.

    Args:
      record: the JSON object of the line.
      ignored: names of unknown fields of ``plain`` lines are added to it, as keys.
      samples: number of samples of a line that does not set it.

    Raises:
      InputError: a parameter is given twice, or an OpenAI batch request has no body or asks for something unsupported.
    """
    form: Form = "plain"
    if "custom_id" in record:
        body = record.get("body")
        if not isinstance(body, dict):
            raise InputError("body: expected an object with a prompt or messages")
        form = "chat" if "messages" in body else "completion"
        _check_call(record, form)
    else:
        body = dict(record)
        body.pop("id", None)
        body.pop("task_id", None)
    changes = by_our_names(body)
    fields = known(changes)
    if len(fields) == len(changes):
        return form, fields
    rest = {name: value for name, value in changes.items() if name not in fields}
    if form == "plain":
        # Datasets have further fields, which are ignored.
        ignored.update(dict.fromkeys(rest))
    else:
        nothing_else(without_idle(rest, fields.get("num_return_sequences", samples), chat=form == "chat"))
    return form, fields
