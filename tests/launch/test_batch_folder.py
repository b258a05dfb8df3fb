"""The folder of a batch's results: what it accepts, what it leaves alone, and its lock."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from launch.batches import folder as batch_folder
from launch.batches.folder import ERRORS, LOCK, RESULTS, RUN, SAMPLES, SORTED, BatchFolder
from launch.batches.records import Key, as_bits, of_bits
from runtime import lock
from sharding.errors import InputError
from tests.launch.mistakes import refusal
from tests.launch.small_batches import launch


def test_errors_of_results_that_a_later_run_computed_are_removed(tmp_path: Path) -> None:
    output = BatchFolder(tmp_path)
    failed = [
        {"id": "a", "line": 1, "index": 0, "error": {"code": "non_finite_logits", "message": ""}},
        {"id": "a", "line": 1, "index": 1, "error": {"code": "non_finite_logits", "message": ""}},
        {"id": "o", "line": 2, "error": {"code": "non_finite_logits", "message": ""}},
        {"id": "wrong", "line": 3, "error": {"code": "invalid_request", "message": ""}},
        {"id": None, "line": 4, "error": {"code": "invalid_request", "message": ""}},
    ]
    output.add_errors(failed)
    output.append([{"id": "a", "index": 0}, {"id": "batch_req-1", "custom_id": "o"}])
    output.sort([("a", 0), ("o", None)])
    output.close()
    left = [json.loads(line) for line in (tmp_path / ERRORS).read_bytes().splitlines()]
    assert left == [failed[1], failed[3], failed[4]]


def test_results_have_digests_that_the_next_run_checks(tmp_path: Path) -> None:
    output = BatchFolder(tmp_path)
    records = [{"id": "a", "index": 0, "text": "é", "log_probabilities": [-0.1, -1e-05]}, {"id": "b", "index": 0}]
    output.append(records)
    output.close()
    path, known = tmp_path / RESULTS, {("a", 0), ("b", 0)}
    there = path.read_bytes()
    output = BatchFolder(tmp_path)
    assert output.done(known) == known
    output.close()
    changed = {
        "a letter": there.replace("é".encode(), b"e"),
        "a number": there.replace(b"-0.1", b"-0.2"),
        "no digest": json.dumps(records[0]).encode() + b"\n",
        "the digest of another": there.replace(json.loads(there.splitlines()[0])["digest"].encode(), b"0" * 16),
        "a field more": there.replace(b'"index"', b'"x": 1, "index"', 1),
        "white space": there.replace(b", ", b",", 1),
        "an escape": there.replace("é".encode(), b"\\u00e9"),
        "another line ending": there.replace(b"\n", b"\r\n"),
        "half a character": there.replace("é".encode(), b"\\ud800"),
        **{
            f"{depth} levels": there.replace(b'"index"', b'"x": %s, "index"' % (b"[" * depth + b"]" * depth), 1)
            for depth in (*range(500, 1050, 10), 100_000)
        },
    }
    for content in changed.values():
        path.write_bytes(content)
        held = BatchFolder(tmp_path)
        try:
            with pytest.raises(InputError, match=r"results.jsonl:1: changed since it was written"):
                held.done(known)
        finally:
            held.close()


@pytest.mark.parametrize("name", [RESULTS, ERRORS, SORTED, SAMPLES])
def test_files_of_another_program_are_left_as_they_are(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b'{"a": 1}\n{"a": 2}')
    held = BatchFolder(tmp_path)
    with pytest.raises(InputError):
        held.check({})
    held.close()
    assert (tmp_path / name).read_bytes() == b'{"a": 1}\n{"a": 2}'


@pytest.mark.parametrize("name", [RUN, RESULTS, ERRORS, SORTED, SAMPLES, LOCK])
@pytest.mark.parametrize("begun", [False, True])
def test_an_input_that_the_batch_would_write(
    name: str, begun: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, link = tmp_path / "out", tmp_path / "in.jsonl"
    output.mkdir()
    if begun:
        (output / RUN).write_text("{}")
    (output / name).write_bytes(b'{"id": "a", "prompt": "def f("}\n')
    link.symlink_to(output / name)
    for source in (output / name, link):
        before = sorted(output.iterdir())
        said = refusal(capsys, lambda source=source: launch(source, output, ""))
        assert f"--input={source}: this is {name} of --output_dir={output}" in said
        assert sorted(output.iterdir()) == before
        assert (output / name).read_bytes() == b'{"id": "a", "prompt": "def f("}\n'


def test_hosts_share_what_is_done_in_a_short_message() -> None:
    """With ids of 512 characters, the keys of 130,000 results were longer than any message between hosts."""
    order: list[Key] = [(f"{number:0512}", number % 2 or None) for number in range(1001)]
    for done in (set(), set(order), {order[0], order[8], order[1000]}):
        bits = as_bits(done, order)
        assert len(bits) == (2 * 126 if done else 0)
        assert of_bits(bits, order) == done
    assert of_bits(as_bits(set(), []), []) == set()


def test_removing_the_lock_file_does_not_let_two_runs_write(tmp_path: Path) -> None:
    held = BatchFolder(tmp_path / "out")
    (tmp_path / "out" / LOCK).unlink()
    with pytest.raises(InputError, match="another process is writing there"):
        BatchFolder(tmp_path / "out")
    for name in ("results.jsonl", "errors.jsonl"):
        (tmp_path / "out" / name).unlink(missing_ok=True)
    with pytest.raises(InputError, match="another process is writing there"):
        BatchFolder(tmp_path / "out")
    held.close()
    BatchFolder(tmp_path / "out").close()


def test_removing_the_lock_file_where_folders_have_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On network file systems a second run can lock a new file, so the first one stops."""

    def lock_of_files(handle: int) -> bool:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return lock(handle)

    monkeypatch.setattr(batch_folder, "lock", lock_of_files)
    first = BatchFolder(tmp_path / "out")
    first.append([{"id": "1"}])
    (tmp_path / "out" / LOCK).unlink()
    with pytest.raises(InputError, match="the lock was removed"):
        first.append([{"id": "2"}])
    second = BatchFolder(tmp_path / "out")
    with pytest.raises(InputError, match="the lock was removed"):
        first.append([{"id": "2"}])
    with pytest.raises(InputError, match="the lock was removed"):
        first.write("samples.jsonl", [])
    second.append([{"id": "2"}])
    first.close()
    second.close()
    found = [json.loads(one)["id"] for one in (tmp_path / "out" / RESULTS).read_text().splitlines()]
    assert found == ["1", "2"]
