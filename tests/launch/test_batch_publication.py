"""The end of a batch: hosts that write nothing wait for host 0, all make the same progress, and errors are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.batches import publication
from launch.batches.folder import ERRORS, RUN, SAMPLES, SORTED, BatchFolder
from launch.batches.lines import Batch
from launch.batches.publication import publish
from launch.batches.records import Key
from launch.hosts.host import Host
from sharding.errors import InputError

BATCH = Batch([], [], [], "")


class OneOfTwo(Host):
    """Host 0, or a host whose host 0 finishes at its third report. Notes what it reports, and the files by then."""

    def __init__(self, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.output, self.marks, self.said = output, 0, []  # type: ignore[var-annotated]
        monkeypatch.setattr(publication, "this_host", lambda: self)

    def mark(self) -> None:
        self.marks += 1

    def gather(self, topic: str, value: Any) -> list[Any]:
        assert topic == "published"
        self.said.append((value, {path.name for path in self.output.glob("s*.jsonl")}))
        return [value or len(self.said) == 3, False]


def test_host_0_reports_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "SECONDS_BETWEEN_REPORTS", 0.0)
    order: list[Key] = [("b", 0), ("a", 0)]
    output, host = BatchFolder(tmp_path), OneOfTwo(tmp_path, monkeypatch)
    output.append([{"id": "a", "index": 0, "text": "1"}, {"id": "b", "index": 0, "text": "2"}])
    publish(output, order, BATCH, evalplus=True)
    output.close()
    # Two records are read, sorted and turned into samples.
    assert host.said == [*[(False, set())] * 4, *[(False, {SORTED})] * 2, (True, {SORTED, SAMPLES})]
    assert host.marks == len(host.said)


def test_a_quick_end_is_one_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, host = BatchFolder(tmp_path), OneOfTwo(tmp_path, monkeypatch)
    publish(output, [], BATCH, evalplus=False)
    output.close()
    assert host.said == [(True, {SORTED})]


def test_other_hosts_wait_for_host_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = OneOfTwo(tmp_path, monkeypatch)
    publish(None, [], BATCH, evalplus=True)
    assert host.said == [(False, set())] * 3
    assert host.marks == 3


FAILED = {"id": "a", "line": 1, "index": 0, "error": {"code": "non_finite_logits", "message": ""}}
INVALID = {"id": None, "line": 2, "error": {"code": "invalid_request", "message": ""}}


@pytest.mark.parametrize(
    "record",
    [
        {name: value for name, value in FAILED.items() if name != "id"},
        FAILED | {"id": None},
        FAILED | {"id": ["a"]},
        FAILED | {"index": {}},
        FAILED | {"index": True},
        FAILED | {"error": "text"},
        FAILED | {"error": {"code": []}},
        INVALID | {"id": 5},
        [],
    ],
)
def test_a_line_that_is_no_error_is_refused_before_a_run_and_kept_after_it(record: Any, tmp_path: Path) -> None:
    lines = [json.dumps(one) for one in (INVALID, FAILED, record)]
    (tmp_path / RUN).write_text("{}")
    (tmp_path / ERRORS).write_text("".join(f"{line}\n" for line in lines))
    output = BatchFolder(tmp_path)
    for check in (lambda: output.done(set()), lambda: output.add_errors([])):
        with pytest.raises(InputError, match=r"errors.jsonl:3: not an error that a batch wrote; remove the line"):
            check()
    output.append([{"id": "a", "index": 0}])
    output.sort([("a", 0)])
    output.close()
    assert (tmp_path / ERRORS).read_text().splitlines() == [lines[0], lines[2]]
