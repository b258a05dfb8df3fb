"""Files on a disk: replaced in one step, locked by one process, and JSON objects that are read strictly."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints.local_files import (
    JsonObjectError,
    lock,
    parse_json_object,
    parse_json_objects,
    read_json_lines,
    replace_file,
)


def test_a_file_is_replaced_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, [b"old ", b"text"])
    assert path.read_bytes() == b"old text"

    def failing() -> Iterator[bytes]:
        yield b"new"
        assert path.read_bytes() == b"old text", "the new text is in another file until it is complete"
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        replace_file(path, failing())
    assert path.read_bytes() == b"old text"
    assert list(tmp_path.iterdir()) == [path]


def test_the_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "no_folder" / "file"
    with pytest.raises(FileNotFoundError) as found:
        replace_file(path, [b""])
    assert found.value.filename == str(path)


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    replace_file(tmp_path / "replaced", [b""])
    (tmp_path / "written").write_bytes(b"")
    assert (tmp_path / "replaced").stat().st_mode == (tmp_path / "written").stat().st_mode


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "a" + "é" * 120, "x\udcff"])
def test_a_file_with_any_name_that_the_file_system_takes(name: str, tmp_path: Path) -> None:
    replace_file(tmp_path / name, [b"text"])
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_one_holder_of_a_lock(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    assert lock(first)
    assert not lock(second)
    os.close(first)
    assert lock(second)
    os.close(second)


def test_a_json_object() -> None:
    assert parse_json_object('{"a": {"b": [1, "é"]}}'.encode()) == {"a": {"b": [1, "é"]}}
    assert parse_json_object(b'{"a": {"b": 1}}', most_names=1) == {"a": {"b": 1}}
    brackets = {"a": "[{" * 500, "b": [[]] * 500}
    assert parse_json_object(json.dumps(brackets).encode()) == brackets
    deepest = parse_json_object(b'{"a":' + b"[" * 99 + b"]" * 99 + b"}")
    assert json.loads(json.dumps(deepest)) == deepest


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (b'{"a": 1, "a": 1}', JsonObjectError, 'a duplicate key: "a"'),
        (b'{"x": [{"b": 1, "c": 2, "b": 3}]}', JsonObjectError, 'a duplicate key: "b"'),
        (b'{"a": 1, "b": 2, "c": 3, "d": 4}', JsonObjectError, "4 keys; at most 3"),
        (b"[]", JsonObjectError, "expected an object, found list"),
        (b"null", JsonObjectError, "expected an object"),
        (b"{", ValueError, "Expecting"),
        (b"", ValueError, "Expecting"),
        (b'{"a":' * 100_000, ValueError, "nested too deeply"),
        (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", ValueError, "nested too deeply"),
        (b"[" + b'{"a":' * 100 + b"1" + b"}" * 100 + b"]", ValueError, "nested too deeply"),
        (b'{"\xff": 1}', UnicodeDecodeError, "utf-8"),
    ],
)
def test_json_that_is_refused(data: bytes, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as raised:
        parse_json_object(data, most_names=3)
    assert isinstance(raised.value, JsonObjectError) == (error is JsonObjectError)


def test_json_objects_are_parsed_together_as_alone() -> None:
    lines = [b'{"a": 1}', b' {"a": [{"b": "[1, 2]"}]}\r', '{"é": "\\n"}'.encode(), b"{}"]
    assert parse_json_objects(lines) == [parse_json_object(line) for line in lines]
    assert parse_json_objects([]) == []


@pytest.mark.parametrize(
    "lines",
    [
        # Each pair is a list of two objects when it is joined with a comma.
        [b'{"a": [{}', b"{}]}, {}"],
        [b'{"a": 1}, {"a": 2', b"}"],
        [b'{"a": "x', b'y"}, {}'],
        [b'{"a": 1}, {"b": 1}', b""],
        [b'{}], "x": [{}', b"{}"],
        # Alone, each of these is refused too.
        [b"{}", b"{}, 0, {}"],
        [b"{}", b'{"a": 1, "a": 1}'],
        [b"{}", b"[]"],
        [b"{}", b"{} {}"],
        [b"{}", b""],
        [b"{}", b'{"\xc3', b'\xa9": 1}'],
        [b"{}", b"\xef\xbb\xbf{}"],
        [b"{}", b'{"a":' + b"[" * 100 + b"]" * 100 + b"}"],
        [b"{}", b'{"a":' * 100_000],
    ],
)
def test_json_objects_of_which_one_is_refused_alone(lines: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"line|Expecting|Extra|duplicate|nested|decode|delimiter|control"):
        parse_json_objects(lines)


def test_lines_of_json_are_read_like_one_object(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": "é"}\n', encoding="utf-8")
    assert read_json_lines(path) == [{"a": 1}, {"a": "é"}]
    path.write_text('{"a": 1}\n{"a": 1, "a": 2}\n')
    with pytest.raises(ValueError, match="line 2: an object has a duplicate key"):
        read_json_lines(path)
