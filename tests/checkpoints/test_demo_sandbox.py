"""The sandbox of generated functions: what they may do, and the verdicts."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from checkpoints.demo.sandbox import run_tests

# The usual way around missing builtins
GLOBALS = "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0].__init__.__globals__"
OPEN = f"{GLOBALS}['open']"
FUNCTION = "def f(x):\n    return x + 1"


@pytest.mark.parametrize(
    ("code", "tests", "outcome"),
    [
        (FUNCTION, ["assert f(1) == 2", "assert f(2) == 3"], "passed"),
        (FUNCTION, ["assert f(1) == 2", "assert f(2) == 4"], "wrong"),
        ("def f(x):\n    return y", ["assert f(1)"], "error"),
        ("def f(n):\n    return f(n)", ["f(1)"], "error"),
        ("raise SystemExit(0)", [], "error"),
        ("def f(x:", ["f(1)"], "syntax"),
        ("def f(x):\n    return 'a' * 10 ** 10", ["f(1)"], "limit"),
        ("import os", [], "error"),
        ("open('/etc/passwd')", [], "error"),
        (f"{OPEN}('/etc/hosts', 0)", [], "forbidden"),
        (f"{GLOBALS}['_exit'](3)", [], "limit"),  # without a verdict
        ("print('passed')\nassert False", [], "wrong"),
    ],
)
def test_outcomes(code: str, tests: list[str], outcome: str) -> None:
    assert run_tests(code, tests) == outcome


def test_an_endless_loop_ends() -> None:
    assert run_tests("while True:\n    pass", []) == "limit"


def test_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert run_tests(f"{OPEN}({str(path)!r}, 65)", []) == "forbidden"
    assert not path.exists()


def test_a_sandbox_that_fails_is_no_failure_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS, for example, a process may not set some of the limits."""
    refuse = "import resource, sys\ndef refused(*given): raise ValueError('not permitted')\n"
    refuse += "resource.setrlimit = refused\nexec(sys.argv[1])"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S -c {shlex.quote(refuse)} "$4"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RuntimeError, match=r"(?s)before it ran the code \(exit code 1\).*ValueError: not permitted"):
        run_tests(FUNCTION, ["assert f(1) == 2"])
