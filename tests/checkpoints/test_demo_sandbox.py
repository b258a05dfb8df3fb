"""The sandbox of generated functions: what they may do, and the verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints.demo.sandbox import run_tests

# The usual way around missing builtins
OPEN = (
    "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0].__init__.__globals__['open']"
)
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
