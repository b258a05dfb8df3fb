"""Lines of prompts: plain ones and OpenAI batch requests, checked before anything runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launch.openai.bodies import Asked, Defaults, by_our_names, known, nothing_else, parse_object, read_asked
from runtime import InputError, RowRequest, row_seed

MAX_LINE_BYTES = 16 << 20
MAX_ID = 512
Form = Literal["plain", "completion", "chat"]


@dataclass(frozen=True)
class Line(Asked):
    """A line that can be run: what it asks for, and where it stands.

    Attributes:
      number: in the file, from 1.
      id: unique in the file.
      form: how its results are written.
    """

    number: int
    id: str
    form: Form

    def requests(self) -> list[RowRequest]:
        """A row for each sample. Its seed is a hash of seed, id and sample, so that it is the same in any order."""
        return [
            RowRequest(self.tokens, self.config, row_seed(self.seed, self.id, sample)) for sample in range(self.samples)
        ]


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be run; ``id`` is None where it has none of its own."""

    number: int
    id: str | None
    message: str


@dataclass(frozen=True)
class Batch:
    """A whole file.

    Attributes:
      lines: what can be run.
      bad: what cannot.
      ignored: names of fields of plain lines that say nothing to the decoder.
      digest: of the file's bytes.
    """

    lines: list[Line]
    bad: list[BadLine]
    ignored: list[str]
    digest: str


def read_batch(path: Path, defaults: Defaults) -> Batch:
    """Read and check every line; blank ones are passed over.

    Raises:
      InputError: the file cannot be read, or has no line.
    """
    digest = hashlib.sha256()
    lines: list[Line] = []
    bad: list[BadLine] = []
    seen: dict[str, int] = {}
    ignored: dict[str, None] = {}
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                digest.update(raw)
                if len(raw) > MAX_LINE_BYTES:
                    raise InputError(f"{path}:{number}: a line of more than {MAX_LINE_BYTES} bytes")
                if not raw.strip():
                    continue
                identity = None
                try:
                    record = parse_object(raw)
                    identity = _identity(record)
                    if identity in seen:
                        first, again, identity = seen[identity], identity, None
                        raise InputError(f"the id {again!r:.80} stands in line {first} too")
                    seen[identity] = number
                    lines.append(_read(number, identity, record, defaults, ignored))
                except InputError as error:
                    bad.append(BadLine(number, identity, str(error)))
    except OSError as error:
        raise InputError(f"--input={path}: cannot be read ({error.strerror or error})") from error
    if not lines and not bad:
        raise InputError(f'--input={path}: no line in it; expected lines like {{"id": "1", "prompt": "def f("}}')
    return Batch(lines, bad, list(ignored), digest.hexdigest()[:16])


def _identity(record: Mapping[str, Any]) -> str:
    name = "custom_id" if "body" in record or "custom_id" in record else "id" if "id" in record else "task_id"
    value = record.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID:
        raise InputError(f'id: expected a text of 1 to {MAX_ID} characters in "id", or "custom_id" beside a body')
    if not value.isprintable():
        raise InputError("id: it has characters that cannot be printed")
    return value


def _read(number: int, identity: str, record: dict[str, Any], defaults: Defaults, ignored: dict[str, None]) -> Line:
    form: Form = "plain"
    if "custom_id" in record:
        body = record.get("body")
        if not isinstance(body, dict):
            raise InputError("body: expected an object with a prompt or messages")
        nothing_else({name: value for name, value in record.items() if name not in ("custom_id", "body")}, "method url")
        form = "chat" if "messages" in body else "completion"
    else:
        body = {name: value for name, value in record.items() if name not in ("id", "task_id")}
    changes = by_our_names(body)
    fields = known(changes)
    rest = {name: value for name, value in changes.items() if name not in fields}
    if form == "plain":
        # Datasets have fields of their own.
        ignored.update(dict.fromkeys(rest))
    else:
        nothing_else(rest)
    return Line(**vars(read_asked(fields, defaults)), number=number, id=identity, form=form)
